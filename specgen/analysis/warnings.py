"""What about a bench should make its reader doubt it, computed from the stored result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specgen.analysis.columns import Timed, median, seconds_per_token
from specgen.analysis.intervals import interval_text
from specgen.analysis.prediction import LEAST_STEPS, View
from specgen.analysis.tables import ArmRow
from specgen.analysis.unpredicted import why_not_as_predicted
from specgen.analysis.verdict import TOLERANCE
from specgen.results.bench import Bench

FIRST_RUN = 0.20


DRIFT = 0.05


BUSY = 0.5  # load average a core, beyond the bench's own threads


FEW = 6  # groups below which the interval covers less than 95 %


def warnings_of(view: View, arms: Sequence[ArmRow]) -> Iterable[str]:
    yield from _load_warnings(view.bench)
    yield from _few_warnings(view.bench, arms)
    yield from _spread_warnings(view, arms)
    yield from _first_run_warnings(view)
    yield from _drift_warnings(view)
    yield from _prediction_warnings(view, arms)


def _load_warnings(bench: Bench) -> Iterable[str]:
    known, cores = _known(bench.environment.get("threads")), _known(bench.environment.get("cpu_count"))
    if not cores:
        return
    threads = known or 1.0
    loads = [load for m in bench.measurements if (load := _known(m.load)) is not None]
    seen = {
        "before it": (_load(bench.environment), 0.0),
        "after it": (_load(bench.environment_after), threads),
        "while it ran": (max(loads, default=None), threads),
    }
    busy = {when: load for when, (load, own) in seen.items() if load is not None and (load - own) / cores > BUSY}
    if busy:
        listed = ", ".join(f"{load:.1f} {when}" for when, load in busy.items())
        used = f" of which the bench used {known:g}" if known else ", the bench's own threads unknown"
        yield (
            f"The machine was busy: load average {listed}, on {cores:g} cores{used}: measure again on an idle "
            "machine."
        )
    if threads > cores:
        yield f"More threads than cores: {threads:g} on {cores:g}; set OMP_NUM_THREADS to at most {cores:g}."
    elif busy and threads > 1:
        yield (
            f"{threads:g} threads on a busy machine wait for each other, which can slow small calls a hundredfold: "
            "OMP_NUM_THREADS=1 shows whether they did."
        )


def _known(value: Any) -> float | None:
    """A count or a load of an environment; None for what is no such number: files are edited."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value >= 0 else None


def _load(environment: Mapping[str, Any]) -> float | None:
    average = environment.get("load_average")
    return _known(average[0]) if isinstance(average, list) and average else None


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


def _spread_warnings(view: View, arms: Sequence[ArmRow]) -> Iterable[str]:
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


def _run_spread(own: Timed) -> float | None:
    """Median over groups of the interquartile range of the runs over their median; of at least 3 runs."""
    spreads = []
    for ms in own.by_group.values():
        seconds = [seconds_per_token(m) for m in ms]
        if len(seconds) >= 3:
            low, middle, high = np.percentile(seconds, [25, 50, 75])
            spreads.append((high - low) / middle)
    return median(spreads)


def _first_run_warnings(view: View) -> Iterable[str]:
    """Run 0 against the later ones; a slow warm-up is what a warm-up is for."""
    slow = {}
    for name, own in view.timed.items():
        excess = median(
            [
                seconds_per_token(ms[0]) / float(np.median([seconds_per_token(m) for m in ms[1:]])) - 1
                for ms in own.by_group.values()
                if len(ms) > 1 and ms[0].run == 0
            ]
        )
        if excess is not None and excess > FIRST_RUN:
            slow[name] = excess
    if slow:
        worst = max(slow, key=lambda name: slow[name])
        yield (
            f"The first run was slow: in {len(slow)} of {len(view.timed)} arms it took over {FIRST_RUN:.0%} longer "
            f"than the later ones (worst {worst}: {slow[worst]:.0%} longer): give a larger --warmup."
        )


def _drift_warnings(view: View) -> Iterable[str]:
    from scipy.stats import spearmanr

    for name, own in view.timed.items():
        points = (
            [
                (m.order, seconds_per_token(m) / own.group_seconds[g])
                for g, ms in own.by_group.items()
                if len(ms) > 1
                for m in ms
            ]
            if own.arm.kind == "plain"
            else []
        )
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


def _prediction_warnings(view: View, arms: Sequence[ArmRow]) -> Iterable[str]:
    for row in arms:
        if row.ratio is not None and row.speedup is not None and abs(row.ratio - 1) > TOLERANCE:
            yield (
                f"{row.name}: the measured speedup {row.speedup.estimate:.2f} is {row.ratio:.2f} of the predicted "
                f"{row.predicted:.2f}: {why_not_as_predicted(view, row)}."
            )
