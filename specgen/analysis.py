"""A bench's result → speedups, costs, predictions, warnings and the verdict. Pure functions of a `Bench`: no torch.

A measurement's decoding time is the sum of its steps' total_s, its seconds per token that over its committed tokens.
A group of prompts (one prompt where the batch is 1) has for each arm the median over runs of its seconds per token;
its ratio is the baseline's over the arm's; the speedup is the median of the groups' ratios. The prefill is in none
of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specgen.results import Arm, Bench, Costs, Measurement, Row
from specgen.rounds import Committed, Mode, Origin, Round
from specgen.statistics import Interval, Statistics, median_interval, ratio, summarise
from specgen.theory import ExpectedRounds, constant_alpha_tau, expected_rounds, pooled, predicted_speedup

LEAST_STEPS = 5  # of one width, for their median to be a price
TOLERANCE = 0.10  # of a prediction, of an interval's half width, of runs of one prompt
FIRST_RUN = 0.20
DRIFT = 0.05
BUSY = 0.5  # load average a core, beyond the bench's own threads
FEW = 6  # groups below which the interval covers less than 95 %


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm. Times in seconds: draft_s the median per drafting step, verify_s and other_s per round, first_s the
    median time to the first token. tokens_per_second: 1 / seconds_per_token, of all rows of a batch together.
    predicted: predicted speedup; ratio: speedup / predicted. groups: each group's prompts and ratio."""

    name: str
    kind: str
    profile: str
    k: int
    engine: str
    batch: int
    alpha: float | None
    predicted_alpha: float | None
    tau: float | None
    draft_s: float | None
    verify_s: float | None
    other_s: float | None
    tokens_per_second: float | None
    first_s: float | None
    prefill_s: float | None
    speedup: Interval | None
    predicted: float | None
    ratio: float | None
    draft_share: float | None
    verify_share: float | None
    other_share: float | None
    seconds_per_token: float | None
    mean_bias: float | None
    groups: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PositionRow:
    """A position of an arm's rounds, 1 the first drafted. rate: accepted / tested. cumulative: accepted / drafted, of
    the rounds that drafted at least so many. overlap: mean over the times tested."""

    arm: str
    position: int
    drafted: int
    tested: int
    accepted: int
    rate: float | None
    cumulative: float | None
    overlap: float | None


@dataclass(frozen=True, slots=True)
class CostRow:
    """An arm's costs. widths: {tokens in a target call: seconds}, probed; relative: the same over that of 1 token.
    priced: {tokens: seconds} as the prediction prices this arm's calls. c: a draft step / a single-token call.
    bytes_per_token: of weights and cache read by target and draft per committed token; bandwidth: the same a second.
    """

    profile: str
    engine: str
    arm: str
    widths: dict[int, float]
    relative: dict[int, float]
    c: float | None
    draft_share: float | None
    verify_share: float | None
    other_share: float | None
    bytes_per_token: float | None
    bandwidth: float | None
    bandwidth_share: float | None
    priced: dict[int, float]


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """An arm on one category's prompts. speedup: None where no group is of this category alone."""

    category: str
    arm: str
    prompts: int
    alpha: float | None
    tau: float | None
    speedup: Interval | None


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the baseline's texts and the measured costs predict for one k, measured or not."""

    profile: str
    engine: str
    batch: int
    k: int
    tau: float
    alpha: float | None
    speedup: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """pays: whether the whole interval of the best arm lies above 1 (True) or below it (False); None where it holds
    1, or where there is no interval. reasons: why it does not pay and what would have to change, weightiest first."""

    text: str
    pays: bool | None
    best: str | None
    speedup: Interval | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything the tables show. identical: {arm: (texts equal to the baseline's, texts compared)}, for the modes
    that promise the same text."""

    arms: tuple[ArmRow, ...]
    positions: tuple[PositionRow, ...]
    costs: tuple[CostRow, ...]
    categories: tuple[CategoryRow, ...]
    predictions: tuple[Predicted, ...]
    verdict: Verdict
    warnings: tuple[str, ...]
    identical: dict[str, tuple[int, int]]


def analyse(bench: Bench) -> Analysis:
    view = _View(bench)
    arms = tuple(_arm_row(view, arm) for arm in bench.arms)
    costs = tuple(_cost_row(view, row) for row in arms)
    return Analysis(
        arms=arms,
        positions=tuple(p for arm in bench.arms for p in _positions(view.timed[arm.name])),
        costs=costs,
        categories=tuple(_categories(view)),
        predictions=tuple(_predictions(view)),
        verdict=_verdict(arms, costs),
        warnings=tuple(_warnings(view, arms)),
        identical=_identical(view),
    )


# --------------------------------------------------------------------------------------------- what was measured


def rounds_of(row: Row) -> tuple[Round, ...]:
    """A stored row's rounds with their counts, overlaps and biases; times are the whole group's and stay there."""
    rounds, at = [], 0
    for index, (drafted, tested, accepted, committed) in enumerate(
        zip(row.drafted, row.tested, row.accepted, row.committed, strict=True)
    ):
        part = slice(at, at := at + tested)
        overlaps, expected, biases = (tuple(v[part]) for v in (row.overlaps, row.expected, row.biases))
        tokens = (_TOKEN,) * committed
        rounds.append(Round(index, drafted, tested, accepted, tokens, overlaps, expected, biases))
    return tuple(rounds)


_TOKEN = Committed(0, Origin.PLAIN, 0.0, 0.0, 0, None)  # which tokens they are makes no rate


def decode_seconds(measurement: Measurement) -> float:
    return sum(measurement.steps.total_s)


def committed_tokens(measurement: Measurement) -> int:
    return sum(sum(row.committed) for row in measurement.rows)


def seconds_per_token(measurement: Measurement) -> float:
    return decode_seconds(measurement) / committed_tokens(measurement)


def _depths(measurement: Measurement) -> list[int]:
    """Drafting steps of each round: what the row that drafted most drafted. Every row decodes from the first step
    on until it is finished."""
    drafted = [row.drafted for row in measurement.rows]
    return [max((d[i] for d in drafted if i < len(d)), default=0) for i in range(len(measurement.steps.width))]


class _Timed:
    """An arm's timed steps as columns over all its measurements, in seconds."""

    def __init__(self, bench: Bench, arm: Arm) -> None:
        self.arm = arm
        self.measurements = bench.timed(arm.name)
        steps = [m.steps for m in self.measurements]
        self.draft = np.array([s for x in steps for s in x.draft_s], dtype=float)
        self.verify = np.array([s for x in steps for s in x.verify_s], dtype=float)
        self.total = np.array([s for x in steps for s in x.total_s], dtype=float)
        self.other = self.total - self.draft - self.verify
        self.width = np.array([w for x in steps for w in x.width], dtype=int)
        self.depth = np.array([d for m in self.measurements for d in _depths(m)], dtype=int)

    @cached_property
    def statistics(self) -> Statistics:
        return self.counted()

    @cached_property
    def rounds(self) -> list[tuple[int, tuple[Round, ...]]]:
        """(prompt, rounds) of every row."""
        return [(row.prompt, rounds_of(row)) for m in self.measurements for row in m.rows]

    def counted(self, prompts: set[int] | None = None) -> Statistics:
        """Counts and rates, of these prompts' rows or of all."""
        chosen = (rounds for prompt, rounds in self.rounds if prompts is None or prompt in prompts)
        return summarise([r for rounds in chosen for r in rounds], drafting=self.arm.k > 0)

    @cached_property
    def by_group(self) -> dict[int, list[Measurement]]:
        groups: dict[int, list[Measurement]] = {}
        for m in sorted(self.measurements, key=lambda m: (m.group, m.run)):
            groups.setdefault(m.group, []).append(m)
        return groups

    @cached_property
    def group_seconds(self) -> dict[int, float]:
        """{group: median over runs of the seconds per token}."""
        return {g: float(np.median([seconds_per_token(m) for m in ms])) for g, ms in self.by_group.items()}

    @property
    def draft_step(self) -> float | None:
        """Median seconds of a drafting step."""
        return _median(self.draft[self.depth > 0] / self.depth[self.depth > 0])

    @property
    def texts(self) -> dict[tuple[int, int, int], list[int]]:
        """{(prompt, run, seed): tokens}: a batch may hold a prompt twice, under two seeds."""
        return {(row.prompt, m.run, row.seed): row.tokens for m in self.measurements for row in m.rows}

    @property
    def per_row_token(self) -> float:
        """Decoding seconds per token of a row, all measurements together."""
        return self.total.sum() / self.row_tokens

    @property
    def row_tokens(self) -> int:
        return sum(max(sum(row.committed) for row in m.rows) for m in self.measurements)


class _View:
    """A bench with what several tables need, computed once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.timed = {arm.name: _Timed(bench, arm) for arm in bench.arms}
        self._prices: dict[tuple[str, str, int], _Prices] = {}
        self._expected: dict[tuple[str, int, int], _Expected | None] = {}

    def prices(self, profile: str, engine: str, batch: int) -> _Prices:
        key = (profile, engine, batch)
        if key not in self._prices:
            self._prices[key] = _Prices(self, *key)
        return self._prices[key]

    def expected(self, profile: str, batch: int, k: int) -> _Expected | None:
        key = (profile, batch, k)
        if key not in self._expected:
            self._expected[key] = _expected(self, *key)
        return self._expected[key]


def _median(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _label(bench: Bench, rows: Sequence[Row]) -> str:
    return " + ".join(bench.prompts[row.prompt].name for row in rows)


def paired_ratios(baseline: _Timed, arm: _Timed) -> dict[int, float]:
    """{group: the baseline's time / the arm's}, of the groups that both measured."""
    return {g: baseline.group_seconds[g] / s for g, s in arm.group_seconds.items() if g in baseline.group_seconds}


def _interval(ratios: Iterable[float]) -> Interval | None:
    values = list(ratios)
    return median_interval(values) if values else None


def _arm_row(view: _View, arm: Arm) -> ArmRow:
    own = view.timed[arm.name]
    s, total = own.statistics, float(own.total.sum())
    ratios = {} if arm.kind == "plain" else paired_ratios(view.timed[arm.baseline], own)
    speedup = _interval(ratios.values())
    predicted = None
    if arm.kind != "plain" and (found := _predict(view, arm.profile, arm.engine, arm.batch, arm.k)):
        predicted = found.speedup
    seconds = _median(list(own.group_seconds.values()))
    return ArmRow(
        name=arm.name, kind=arm.kind, profile=arm.profile, k=arm.k, engine=arm.engine, batch=arm.batch,
        alpha=s.alpha, predicted_alpha=s.predicted_alpha, tau=s.tau,
        draft_s=own.draft_step, verify_s=_median(own.verify), other_s=_median(own.other),
        tokens_per_second=None if seconds is None else ratio(1, seconds),
        first_s=_median([m.first_s for m in own.measurements]),
        prefill_s=_median([m.prefill_s for m in own.measurements]),
        speedup=speedup, predicted=predicted,
        ratio=speedup.estimate / predicted if speedup and predicted else None,
        draft_share=ratio(float(own.draft.sum()), total), verify_share=ratio(float(own.verify.sum()), total),
        other_share=ratio(float(own.other.sum()), total),
        seconds_per_token=seconds, mean_bias=s.mean_bias,
        groups=tuple((_label(view.bench, own.by_group[g][0].rows), r) for g, r in ratios.items()),
    )  # fmt: skip


def _positions(own: _Timed) -> list[PositionRow]:
    return [
        PositionRow(own.arm.name, p.position, p.drafted, p.tested, p.accepted, p.rate, ratio(p.accepted, p.drafted),
                    p.overlap)
        for p in own.statistics.positions
    ]  # fmt: skip


def _categories(view: _View) -> Iterable[CategoryRow]:
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


def _identical(view: _View) -> dict[str, tuple[int, int]]:
    result = {}
    for arm in view.bench.arms:
        if arm.kind == "plain" or arm.mode not in (Mode.GREEDY, Mode.COUPLED):
            continue
        plain, texts = view.timed[arm.baseline].texts, view.timed[arm.name].texts
        both = [key for key in texts if key in plain]
        result[arm.name] = (sum(texts[key] == plain[key] for key in both), len(both))
    return result


# ------------------------------------------------------------------------------------------------ costs and prices


def _costs(bench: Bench, profile: str, engine: str) -> Costs | None:
    """The probe of this profile and engine; for a plain arm without one of its own, any of that engine."""
    same = [c for c in bench.costs if c.engine == engine]
    return next((c for c in same if c.profile == profile), same[0] if same else None)


class _Prices:
    """What calls of one profile under one engine and batch cost in this bench, in seconds: medians of its own
    timed steps where there are enough, the probe elsewhere."""

    def __init__(self, view: _View, profile: str, engine: str, batch: int) -> None:
        mine = [a for a in view.bench.arms if (a.engine, a.batch) == (engine, batch)]
        self.drafted = {a.k: view.timed[a.name] for a in mine if a.kind == "speculative" and a.profile == profile}
        plain = [a for a in mine if a.kind == "plain"]
        own = [a for a in plain if any(t.arm.baseline == a.name for t in self.drafted.values())]
        self.plain = view.timed[(own or plain)[0].name] if plain else None
        self.costs = _costs(view.bench, profile, engine)
        self.measured: dict[int, float] = {}
        self._measure()

    def _measure(self) -> None:
        if self.plain is not None and (self.plain.width == 1).sum() >= LEAST_STEPS:
            self.measured[1] = float(np.median(self.plain.verify[self.plain.width == 1]))
        by_width: dict[int, list[float]] = {}
        for own in self.drafted.values():
            for width, seconds in zip(own.width.tolist(), own.verify.tolist(), strict=True):
                by_width.setdefault(width, []).append(seconds)
        for width, times in by_width.items():
            if width > 1 and len(times) >= LEAST_STEPS:
                self.measured[width] = float(np.median(times))

    def call(self, width: int) -> float | None:
        """A target call on so many tokens a row. The probed curve, where it stands in, is scaled to the T(1) of the
        bench itself. None where neither knows."""
        if width in self.measured:
            return self.measured[width]
        probed = self._probed(width)
        first = self._probed(1)
        if probed is None or first is None:
            return None
        return probed * self.measured.get(1, first) / first

    def _probed(self, width: int) -> float | None:
        curve = sorted(self.costs.target_s.items()) if self.costs else []
        if not curve:
            return None
        (narrow, least), (wide, most) = curve[0], curve[-1]
        if width > wide > narrow:  # beyond the probe: on along the line from end to end, since neighbours may jump
            return most + (width - wide) * (most - least) / (wide - narrow)
        return float(np.interp(width, [w for w, _ in curve], [s for _, s in curve]))

    def nearest(self, k: int) -> _Timed | None:
        return self.drafted[min(self.drafted, key=lambda j: (abs(j - k), j))] if self.drafted else None

    def draft(self, k: int) -> float:
        """A drafting step: the arm's own, the probe's, the nearest arm's; 0 where nobody knows."""
        own = self.drafted[k].draft_step if k in self.drafted else None
        if own is None and self.costs is not None:
            own = self.costs.draft_s
        nearest = self.nearest(k)
        if own is None and nearest is not None:
            own = nearest.draft_step
        return own or 0.0

    def other(self, k: int) -> float:
        nearest = self.nearest(k)
        return (_median(nearest.other) if nearest else None) or 0.0

    @property
    def plain_other(self) -> float:
        return (_median(self.plain.other) if self.plain else None) or 0.0

    @property
    def plain_step(self) -> float | None:
        first = self.call(1)
        return None if first is None else first + self.plain_other


def _bytes_read(bench: Bench, m: Measurement, costs: Costs) -> float:
    """Bytes of weights and of cached keys and values that a measurement's calls had to read, target and draft."""
    depths = _depths(m)
    read = len(depths) * costs.target_bytes + sum(depths) * costs.draft_bytes
    for row in m.rows:
        cached = len(bench.prompts[row.prompt].tokens) - 1
        for drafted, committed in zip(row.drafted, row.committed, strict=True):
            read += cached * costs.target_bytes_a_token
            read += (drafted * cached + drafted * (drafted - 1) // 2) * costs.draft_bytes_a_token
            cached += committed
    return read


def _cost_row(view: _View, row: ArmRow) -> CostRow:
    own, prices = view.timed[row.name], view.prices(row.profile, row.engine, row.batch)
    costs = prices.costs
    widths = dict(sorted(costs.target_s.items())) if costs else {}
    read = sum(_bytes_read(view.bench, m, costs) for m in own.measurements) if costs else None
    tokens, seconds = sum(committed_tokens(m) for m in own.measurements), float(own.total.sum())
    bandwidth = None if read is None else ratio(read, seconds)
    first = prices.call(1)
    priced = ((w, prices.call(w)) for w in range(1, row.k + 2))
    return CostRow(
        row.profile, row.engine, row.name, widths,
        {w: s / widths[1] for w, s in widths.items()} if 1 in widths else {},
        None if row.kind == "plain" or first is None else ratio(prices.draft(row.k), first),
        row.draft_share, row.verify_share, row.other_share,
        None if read is None else ratio(read, tokens), bandwidth,
        None if bandwidth is None or costs is None else ratio(bandwidth, costs.copy_bandwidth),
        {w: s for w, s in priced if s is not None},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ prediction


@dataclass(frozen=True, slots=True)
class _Expected:
    """Expected rounds by the baseline's texts: of all rows together; of each group's slowest row, which is what a
    group's calls number; of those together."""

    rows: ExpectedRounds
    groups: tuple[ExpectedRounds, ...]

    @property
    def together(self) -> ExpectedRounds:
        return pooled(self.groups)


def _expected(view: _View, profile: str, batch: int, k: int) -> _Expected | None:
    """None without scores."""
    scores = {(s.prompt, s.run): s.ratios for s in view.bench.scores if s.profile == profile and s.ratios}
    limit, known = view.bench.design.max_new_tokens, {}
    for ratios in {tuple(ratios) for ratios in scores.values()}:  # greedy runs repeat their text
        known[ratios] = _rounds_expected(ratios, k, limit)
    texts = {key: known[tuple(ratios)] for key, ratios in scores.items()}
    if not texts:
        return None
    groups = []
    for prompts in _groups(view, batch):
        slowest = []
        for run in sorted({run for _, run in texts}):
            rows = [texts[p, run] for p in prompts if (p, run) in texts]
            if len(rows) == len(prompts):
                slowest.append(max(rows, key=lambda t: t.rounds))
        groups += [pooled(slowest)] if slowest else []
    return _Expected(pooled(list(texts.values())), tuple(groups or texts.values()))


def _rounds_expected(ratios: Sequence[float | None], k: int, limit: int) -> ExpectedRounds:
    proposes = [r is not None for r in ratios]
    return expected_rounds([r or 0.0 for r in ratios], k, limit=max(limit, len(ratios)),
                           proposes=None if all(proposes) else proposes)  # fmt: skip


def _groups(view: _View, batch: int) -> list[list[int]]:
    """The prompts of each group of that batch; every prompt alone where nothing of it was measured."""
    groups = {
        g: [row.prompt for row in ms[0].rows]
        for arm in view.bench.arms if arm.batch == batch
        for g, ms in view.timed[arm.name].by_group.items()
    }  # fmt: skip
    return list(groups.values()) or [[i] for i in range(len(view.bench.prompts))]


def _predict(view: _View, profile: str, engine: str, batch: int, k: int) -> Predicted | None:
    if Mode(view.bench.sampling["mode"]).approximate:
        return None  # the texts of the baseline are not those that this mode writes
    expected = view.expected(profile, batch, k)
    prices = view.prices(profile, engine, batch)
    calls = [prices.call(w) for w in range(1, k + 2)]
    first, plain = prices.call(1), prices.plain_step
    if expected is None or not first or plain is None:
        return None
    relative = [
        predicted_speedup(
            group,
            draft_cost=prices.draft(k) / first,
            verify_cost=[(s or 0.0) / first for s in calls],
            other_cost=prices.other(k) / first,
        )
        for group in expected.groups
    ]
    speedup = float(np.median(relative)) * plain / first  # as the measured one: the median over groups
    return Predicted(profile, engine, batch, k, expected.rows.tau, expected.rows.alpha, speedup)


def predict(bench: Bench, profile: str, engine: str, batch: int) -> list[Predicted]:
    """The predicted speedup at every candidate k, and at every k measured; from the baseline's texts and what calls
    cost, so that a plain arm, its scores and the probe are enough."""
    return _predict_all(_View(bench), profile, engine, batch)


def _predict_all(view: _View, profile: str, engine: str, batch: int) -> list[Predicted]:
    own = {a.k for a in view.bench.arms if (a.profile, a.engine, a.batch) == (profile, engine, batch)}
    ks = sorted((own | set(view.bench.design.candidates)) - {0})
    found = (_predict(view, profile, engine, batch, k) for k in ks)
    return [p for p in found if p is not None]


def _predictions(view: _View) -> Iterable[Predicted]:
    for key in dict.fromkeys((a.profile, a.engine, a.batch) for a in view.bench.arms if a.kind == "speculative"):
        yield from _predict_all(view, *key)


# --------------------------------------------------------------------------------------------------------- verdict


def interval_text(interval: Interval | None) -> str:
    """1.32 [1.25, 1.41]; the estimate alone where there were too few groups for an interval."""
    if interval is None:
        return "-"
    if interval.low is None:
        return f"{interval.estimate:.2f}"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def pays(speedup: Interval) -> bool | None:
    """Whether the whole interval lies above 1, or below it; None where it holds 1 or where there is none."""
    if speedup.low is None or speedup.high is None or speedup.low <= 1 <= speedup.high:
        return None
    return speedup.low > 1


def _verdict(arms: Sequence[ArmRow], costs: Sequence[CostRow]) -> Verdict:
    found = [(row, cost, row.speedup) for row, cost in zip(arms, costs, strict=True) if row.speedup is not None]
    if not found:
        return Verdict("Nothing to judge: no speculative arm was measured beside its baseline.", None, None, None, ())
    row, cost, speedup = max(found, key=lambda x: (x[2].estimate, -x[0].k))
    rows = [r for r, _, _ in found]
    reasons = () if pays(speedup) else tuple(_reasons(row, cost, speedup))
    among = f", the best of {len(rows)}," if len(rows) > 1 else ""
    text = f"{_subject(row, rows)}{among} {_state(speedup, row.batch)}"
    if reasons:
        text += ": " + ", or ".join(reasons[:2])
    sentences = [text + ".", *_by_batch(found), *_fastest(arms)]
    return Verdict(" ".join(sentences), pays(speedup), row.name, speedup, reasons)


def _state(speedup: Interval, batch: int) -> str:
    shown, several = interval_text(speedup), _several(speedup.n, batch)
    if speedup.low is None:
        return f"measured a speedup of {shown}, with {several} too few for an interval"
    interval = f"({speedup.coverage:.1%} interval over {several})"
    if pays(speedup) is None:
        return f"makes no measurable difference: speedup {shown} {interval}"
    return f"{'pays' if pays(speedup) else 'does not pay here'}: speedup {shown} {interval}"


def _several(n: int, batch: int) -> str:
    plural = "" if n == 1 else "s"
    return f"{n} prompt{plural}" if batch == 1 else f"{n} group{plural} of prompts"


def _subject(row: ArmRow, rows: Sequence[ArmRow]) -> str:
    """k = 4, with whatever else tells this arm from the others."""
    text = f"k = {row.k}"
    if len({r.profile for r in rows}) > 1:
        text += f" of {row.profile}"
    if len({r.engine for r in rows}) > 1:
        text += f" in {row.engine}"
    if len({r.batch for r in rows}) > 1:
        text += f" at B = {row.batch}"
    return text


def _by_batch(found: Sequence[tuple[ArmRow, CostRow, Interval]]) -> Iterable[str]:
    batches = sorted({row.batch for row, _, _ in found})
    for batch in batches if len(batches) > 1 else []:
        here = [(row, speedup) for row, _, speedup in found if row.batch == batch]
        row, speedup = max(here, key=lambda x: (x[1].estimate, -x[0].k))
        yield f"At B = {batch} {_subject(row, [r for r, _ in here])} {_state(speedup, batch)}."


def _fastest(arms: Sequence[ArmRow]) -> Iterable[str]:
    """A speedup is against the plain decoding of its own engine: of several engines, say which is fastest."""
    if len({row.engine for row in arms}) > 1:
        for batch in sorted({row.batch for row in arms}):
            here = [r for r in arms if r.batch == batch and r.tokens_per_second is not None]
            if here:
                row = max(here, key=lambda r: r.tokens_per_second or 0.0)
                yield f"Fastest at B = {batch}: {row.name} with {row.tokens_per_second:.1f} tokens/s."


def needed_alpha(alpha: float, k: int, gain: float) -> float | None:
    """The constant acceptance rate at which a round commits `gain` times what it does at `alpha`; None where even
    α = 1 does not. By bisection: τ grows with α."""
    wanted = gain * constant_alpha_tau(alpha, k)
    if constant_alpha_tau(1.0, k) < wanted:
        return None
    low, high = alpha, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if constant_alpha_tau(middle, k) < wanted else (low, middle)
    return high


def _reasons(row: ArmRow, cost: CostRow, speedup: Interval) -> Iterable[str]:
    """What alone, at its ideal, would bring the whole interval above 1, and the value that would be enough."""
    needed = 1 / (speedup.low if speedup.low is not None else speedup.estimate)
    if needed < 1:
        return
    factors = sorted(_factors(row, cost, needed), key=lambda f: -f[0])
    enough = [text for gain, text, _ in factors if gain > needed]
    if enough:
        yield from enough
    elif factors:
        tried = " nor ".join(ideal for _, _, ideal in factors)
        yield f"no single change would make it pay, neither {tried}: {_where(row)}"
    else:
        yield f"nothing was accepted or drafted that could save time: {_where(row)}"


def _where(row: ArmRow) -> str:
    return (
        f"draft {row.draft_share or 0:.0%}, verification {row.verify_share or 0:.0%}, other "
        f"{row.other_share or 0:.0%} of the time, for τ = {row.tau or 0:.2f}"
    )


def _factors(row: ArmRow, cost: CostRow, needed: float) -> Iterable[tuple[float, str, str]]:
    """(gain in speedup at the ideal, sentence, the ideal in words), of the factors that cost anything.

    Of a share s of the time, 1 − (1 − 1/needed)/s of its present cost may stay.
    """

    def allowed(share: float) -> float:
        return 1 - (1 - 1 / needed) / share

    if row.alpha is not None and row.alpha < 1:
        gain = (row.k + 1) / constant_alpha_tau(row.alpha, row.k)
        alpha = needed_alpha(row.alpha, row.k, needed)
        yield (
            gain,
            (
                f"the acceptance is too low (α = {row.alpha:.2f}; at these costs it would pay with α above "
                f"{1.0 if alpha is None else alpha:.2f})"
            ),
            "α = 1",
        )
    if row.draft_share and cost.c and row.draft_share < 1:
        yield (
            1 / (1 - row.draft_share),
            (
                f"the draft is too dear (a draft step costs c = {cost.c:.2f} of a target step, drafting "
                f"{row.draft_share:.0%} of the time; it would pay with c below "
                f"{cost.c * allowed(row.draft_share):.2f})"
            ),
            "a free draft",
        )
    relative = cost.priced[row.k + 1] / cost.priced[1] if {1, row.k + 1} <= set(cost.priced) else 1.0
    if relative > 1 and row.verify_share:
        yield (
            1 / (1 - row.verify_share * (1 - 1 / relative)),
            (
                f"verification is not free (T({row.k + 1})/T(1) = {relative:.2f}; it would pay with a ratio below "
                f"{relative * allowed(row.verify_share):.2f})"
            ),
            "a flat call cost",
        )
    if row.other_share and row.other_s and 0 < row.other_share < 1:
        yield (
            1 / (1 - row.other_share),
            (
                f"the overhead is too large ({row.other_share:.0%} of the time is neither drafting nor a target "
                f"call; it would pay with less than {_ms(row.other_s * allowed(row.other_share))} of it a round, now "
                f"{_ms(row.other_s)})"
            ),
            "a round without overhead",
        )


# -------------------------------------------------------------------------------------------------------- warnings


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _warnings(view: _View, arms: Sequence[ArmRow]) -> Iterable[str]:
    yield from _load_warnings(view.bench)
    yield from _few_warnings(view.bench, arms)
    yield from _spread_warnings(view, arms)
    yield from _first_run_warnings(view)
    yield from _drift_warnings(view)
    yield from _prediction_warnings(view, arms)


def _load_warnings(bench: Bench) -> Iterable[str]:
    threads, cores = bench.environment.get("threads") or 1, bench.environment.get("cpu_count") or 1
    seen = {"before it": (_load(bench.environment), 0), "after it": (_load(bench.environment_after), threads)}
    loads = [m.load for m in bench.measurements if m.load is not None]
    seen["while it ran"] = (max(loads, default=None), threads)
    busy = {when: load for when, (load, own) in seen.items() if load is not None and (load - own) / cores > BUSY}
    if busy:
        listed = ", ".join(f"{load:.1f} {when}" for when, load in busy.items())
        yield (
            f"The machine was busy: load average {listed}, on {cores} cores of which the bench used {threads}: "
            "measure again on an idle machine."
        )
    if threads > cores:
        yield f"More threads than cores: {threads} on {cores}; set OMP_NUM_THREADS to at most {cores}."
    elif busy and threads > 1:
        yield (
            f"{threads} threads on a busy machine wait for each other, which can slow small calls a hundredfold: "
            "OMP_NUM_THREADS=1 shows whether they did."
        )


def _load(environment: dict) -> float | None:
    average = environment.get("load_average")
    return float(average[0]) if average else None


def _few_warnings(bench: Bench, arms: Sequence[ArmRow]) -> Iterable[str]:
    sizes = {row.speedup.n: row.speedup for row in arms if row.speedup is not None}
    for n, speedup in sorted(sizes.items()):
        if speedup.coverage is None:
            yield f"Too few prompts for an interval: {n} (5 give one of 94 %, 6 or more of 95 %)."
        elif n < FEW:
            yield f"Few prompts: the interval of {n} covers {speedup.coverage:.1%}; {FEW} or more cover 95 %."
    design = bench.design
    if design.cut is not None or design.runs_done < design.runs:
        cut = f": {design.cut}" if design.cut else ""
        yield f"The time budget cut the bench short: {design.runs_done} of {design.runs} runs done{cut}."


def _spread_warnings(view: _View, arms: Sequence[ArmRow]) -> Iterable[str]:
    every = {name: _run_spread(own) for name, own in view.timed.items()}
    spreads = {name: spread for name, spread in every.items() if spread is not None and spread > TOLERANCE}
    if spreads:
        worst = max(spreads, key=lambda name: spreads[name])
        yield (
            f"Runs of one prompt differ: in {len(spreads)} of {len(every)} arms their interquartile range is above "
            f"{TOLERANCE:.0%} of their median (median over prompts; worst {worst}: {spreads[worst]:.0%})."
        )
    for row in arms:
        s = row.speedup
        if s is None or s.low is None or s.high is None:
            continue
        half = (s.high - s.low) / 2 / s.estimate
        if half > TOLERANCE:
            yield (
                f"{row.name}: the interval of its speedup, {interval_text(s)}, is wider than ±{TOLERANCE:.0%} "
                f"(±{half:.0%}): more prompts would narrow it."
            )


def _run_spread(own: _Timed) -> float | None:
    """Median over groups of the interquartile range of the runs over their median; of at least 3 runs."""
    spreads = []
    for ms in own.by_group.values():
        seconds = [seconds_per_token(m) for m in ms]
        if len(seconds) >= 3:
            low, middle, high = np.percentile(seconds, [25, 50, 75])
            spreads.append((high - low) / middle)
    return _median(spreads)


def _first_run_warnings(view: _View) -> Iterable[str]:
    """Run 0 against the later ones; a slow warm-up is what a warm-up is for."""
    slow = {}
    for name, own in view.timed.items():
        excess = _median([
            seconds_per_token(ms[0]) / float(np.median([seconds_per_token(m) for m in ms[1:]])) - 1
            for ms in own.by_group.values() if len(ms) > 1 and ms[0].run == 0
        ])  # fmt: skip
        if excess is not None and excess > FIRST_RUN:
            slow[name] = excess
    if slow:
        worst = max(slow, key=lambda name: slow[name])
        yield (
            f"The first run was slow: in {len(slow)} of {len(view.timed)} arms it took over {FIRST_RUN:.0%} longer "
            f"than the later ones (worst {worst}: {slow[worst]:.0%} longer): give a larger --warmup."
        )


def _drift_warnings(view: _View) -> Iterable[str]:
    from scipy.stats import spearmanr

    for name, own in view.timed.items():
        points = [
            (m.order, seconds_per_token(m) / own.group_seconds[g])
            for g, ms in own.by_group.items() if len(ms) > 1
            for m in ms
        ] if own.arm.kind == "plain" else []  # fmt: skip
        order, seconds = (np.array([p[i] for p in points], dtype=float) for i in (0, 1))
        if len(points) < LEAST_STEPS or np.ptp(seconds) == 0 or np.ptp(order) == 0:
            continue
        correlation, p = spearmanr(order, seconds)
        change = float(np.polyfit(order, seconds, 1)[0] * np.ptp(order))
        if p < 0.05 and abs(change) > DRIFT:
            yield (
                f"The clock drifted: {name} became {abs(change):.0%} {'slower' if change > 0 else 'faster'} from the "
                f"bench's beginning to its end (Spearman ρ = {correlation:.2f}); arms are interleaved, so that it "
                "hits all alike, but the interval is wider for it."
            )


def _prediction_warnings(view: _View, arms: Sequence[ArmRow]) -> Iterable[str]:
    for row in arms:
        if row.ratio is not None and row.speedup is not None and abs(row.ratio - 1) > TOLERANCE:
            yield (
                f"{row.name}: the measured speedup {row.speedup.estimate:.2f} is {row.ratio:.2f} of the predicted "
                f"{row.predicted:.2f}: {why_not_as_predicted(view, row)}."
            )


def why_not_as_predicted(view: _View, row: ArmRow) -> str:
    """What pulls the measured speedup furthest from the predicted one, with its two numbers.

    measured / predicted = (median over groups / all groups together, measured over predicted)
                           · (plain as measured / as priced)
                           / (1 + what counts, calls, drafting and the rest add to the predicted time).
    """
    own, prices = view.timed[row.name], view.prices(row.profile, row.engine, row.batch)
    expected = view.expected(row.profile, row.batch, row.k)
    if expected is None or prices.plain is None or not prices.plain_step or not row.speedup or not row.ratio:
        return "for want of scores the data do not show why"
    counts, tokens, rounds, steps = expected.together, own.row_tokens, len(own.width), int(own.depth.sum())
    draft, other = prices.draft(row.k), prices.other(row.k)
    calls = {w: prices.call(w) or 0.0 for w in {*range(1, row.k + 2), *own.width.tolist()}}
    priced = np.array([calls[w] for w in own.width.tolist()])
    predicted_calls = sum(n * calls[m + 1] for m, n in enumerate(counts.lengths))
    predicted = (predicted_calls + counts.rounds * other + counts.drafted * draft) / counts.tokens
    plain, together = prices.plain.per_row_token, prices.plain.per_row_token / own.per_row_token
    as_predicted = prices.plain_step / predicted

    def added(seconds: float) -> float:
        """Seconds beyond the prices, of all measurements → what they do to measured / predicted, as a logarithm."""
        return -seconds / tokens / predicted

    def took(what: str, mean: float, price: float) -> str:
        return f"{what} took {_ms(mean)} on average and was priced at {_ms(price)}"

    pulls = [
        (math.log(row.speedup.estimate / together) - math.log((row.predicted or 1.0) / as_predicted),
         f"the prompts differ: all together they give {together:.2f} of {as_predicted:.2f} predicted, and their "
         f"medians are {row.speedup.estimate:.2f} and {row.predicted:.2f}"),
        (math.log(plain / prices.plain_step), took("a token of plain decoding", plain, prices.plain_step)),
        (added(float(priced.sum()) + rounds * other + steps * draft - predicted * tokens),
         f"acceptance is not what the baseline's texts say: {tokens / rounds:.2f} tokens a round measured, "
         f"{counts.tokens / counts.rounds:.2f} expected"),
        (added(float(own.draft.sum()) - steps * draft),
         took("a draft step", float(own.draft.sum()) / max(steps, 1), draft)),
        (added(float(own.other.sum()) - rounds * other),
         took("the rest of a round", float(own.other.mean()), other)),
    ]  # fmt: skip
    for width in sorted(set(own.width.tolist())):
        mine = own.verify[own.width == width]
        pulls.append((added(float((mine - calls[width]).sum())),
                      took(f"a call on {width} token{'s' if width > 1 else ''}", float(mine.mean()), calls[width]))
        )  # fmt: skip
    direction = math.log(row.ratio)
    return max(pulls, key=lambda pull: pull[0] * direction)[1]
