"""A bench's result → speedups, costs, predictions, warnings and the verdict. Pure functions of a `Bench`: no torch.

A measurement's decoding time is the sum of its steps' total_s, its seconds per token that over its committed tokens,
both up to the end of its text, where that has one before its last token (`columns`).
A group of prompts (one prompt where the batch is 1) has for each arm the median over runs of its seconds per token;
its ratio is the baseline's over the arm's; the speedup is the median of the groups' ratios. The prefill is in none
of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specgen.analysis.columns import (
    Timed,
    committed_tokens,
    depths_of,
    median,
    paired_ratios,
    steps_to_end,
    texts_and_ends,
)
from specgen.analysis.intervals import Interval, median_interval
from specgen.analysis.prediction import View, predicted_at, predictions_of
from specgen.analysis.tables import Analysis, ArmRow, CategoryRow, CostRow, PositionRow
from specgen.analysis.verdict import verdict_of
from specgen.analysis.warnings import warnings_of
from specgen.results.bench import Arm, Bench, Costs, Measurement, Row
from specgen.rounds.statistics import ratio
from specgen.settings import Mode


def analyse(bench: Bench) -> Analysis:
    view = View(bench)
    arms = tuple(_arm_row(view, arm) for arm in bench.arms)
    costs = tuple(_cost_row(view, row) for row in arms)
    return Analysis(
        arms=arms,
        positions=tuple(p for arm in bench.arms for p in _positions(view.timed[arm.name])),
        costs=costs,
        categories=tuple(_categories(view)),
        predictions=tuple(predictions_of(view)),
        verdict=verdict_of(view, arms),
        warnings=tuple(warnings_of(view, arms)),
        identical=_identical(view),
        passed_end=texts_and_ends(bench),
    )


def _label(bench: Bench, rows: Sequence[Row]) -> str:
    return " + ".join(bench.prompts[row.prompt].name for row in rows)


def _interval(ratios: Iterable[float]) -> Interval | None:
    values = list(ratios)
    return median_interval(values) if values else None


def _arm_row(view: View, arm: Arm) -> ArmRow:
    own = view.timed[arm.name]
    s, total = own.statistics, float(own.total.sum())
    ratios = {} if arm.kind == "plain" else paired_ratios(view.timed[arm.baseline], own)
    speedup = _interval(ratios.values())
    predicted = None
    if arm.kind != "plain" and (found := predicted_at(view, arm.profile, arm.engine, arm.batch, arm.k)):
        predicted = found.speedup
    seconds = median(list(own.group_seconds.values()))
    return ArmRow(
        name=arm.name,
        kind=arm.kind,
        profile=arm.profile,
        k=arm.k,
        engine=arm.engine,
        batch=arm.batch,
        alpha=s.alpha,
        predicted_alpha=s.predicted_alpha,
        tau=s.tau,
        draft_s=own.draft_step,
        verify_s=median(own.verify),
        other_s=median(own.other),
        tokens_per_second=None if seconds is None else ratio(1, seconds),
        first_s=median([m.first_s for m in own.measurements]),
        prefill_s=median([m.prefill_s for m in own.measurements]),
        speedup=speedup,
        predicted=predicted,
        ratio=speedup.estimate / predicted if speedup and predicted else None,
        draft_share=ratio(float(own.draft.sum()), total),
        verify_share=ratio(float(own.verify.sum()), total),
        other_share=ratio(float(own.other.sum()), total),
        seconds_per_token=seconds,
        mean_bias=s.mean_bias,
        groups=tuple((_label(view.bench, own.by_group[g][0].rows), r) for g, r in ratios.items()),
    )


def _positions(own: Timed) -> list[PositionRow]:
    positions = own.statistics.positions
    return [
        PositionRow(
            own.arm.name,
            p.position,
            p.drafted,
            p.tested,
            p.accepted,
            p.rate,
            ratio(p.accepted, positions[0].drafted),
            p.overlap,
        )
        for p in positions
    ]


def _categories(view: View) -> Iterable[CategoryRow]:
    for category in dict.fromkeys(p.category for p in view.bench.prompts if p.category is not None):
        prompts = {i for i, p in enumerate(view.bench.prompts) if p.category == category}
        for arm in view.bench.arms:
            own = view.timed[arm.name]
            seen = {row.prompt for m in own.measurements for row in m.rows} & prompts
            if arm.kind == "plain" or not seen:
                continue
            s = own.counted(prompts)
            ratios = paired_ratios(view.timed[arm.baseline], own)
            pure = (r for g, r in ratios.items() if {row.prompt for row in own.by_group[g][0].rows} <= prompts)
            yield CategoryRow(category, arm.name, len(seen), s.alpha, s.tau, _interval(pure))


def _identical(view: View) -> dict[str, tuple[int, int]]:
    result = {}
    for arm in view.bench.arms:
        if arm.kind == "plain" or arm.mode not in (Mode.GREEDY, Mode.COUPLED):
            continue
        plain, texts = view.timed[arm.baseline].texts, view.timed[arm.name].texts
        both = [key for key in texts if key in plain]
        result[arm.name] = (sum(texts[key] == plain[key] for key in both), len(both))
    return result


def _bytes_read(bench: Bench, m: Measurement, costs: Costs) -> float:
    """Bytes of weights and of cached keys and values that a measurement's calls had to read, target and draft, until
    the last row's end."""
    n = steps_to_end(m)
    depths = depths_of(m)[:n]
    read = len(depths) * costs.target_bytes + sum(depths) * costs.draft_bytes
    for row in m.rows:
        cached = len(bench.prompts[row.prompt].tokens) - 1
        for drafted, committed in zip(row.drafted[:n], row.committed[:n], strict=True):
            read += cached * costs.target_bytes_a_token
            read += (drafted * cached + drafted * (drafted - 1) // 2) * costs.draft_bytes_a_token
            cached += committed
    return read


def _cost_row(view: View, row: ArmRow) -> CostRow:
    own, prices = view.timed[row.name], view.prices(row.profile, row.engine, row.batch)
    costs = prices.costs
    widths = dict(sorted(costs.target_s.items())) if costs else {}
    read = sum(_bytes_read(view.bench, m, costs) for m in own.measurements) if costs else None
    tokens, seconds = sum(committed_tokens(m) for m in own.measurements), float(own.total.sum())
    bandwidth = None if read is None else ratio(read, seconds)
    first = prices.call(1)
    priced = ((w, prices.call(w)) for w in range(1, row.k + 2))
    return CostRow(
        row.profile,
        row.engine,
        row.name,
        widths,
        {w: s / widths[1] for w, s in widths.items()} if 1 in widths else {},
        None if row.kind == "plain" or first is None else ratio(prices.draft(row.k), first),
        row.draft_share,
        row.verify_share,
        row.other_share,
        None if read is None else ratio(read, tokens),
        bandwidth,
        None if bandwidth is None or costs is None else ratio(bandwidth, costs.copy_bandwidth),
        {w: s for w, s in priced if s is not None},
    )
