"""The measuring schedule: takes callables and a clock, knows no torch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WARM_UP = -1  # the run that warm-ups are of


Progress = Callable[[float, float], None]  # told the fraction done, and the seconds left


@dataclass(frozen=True, slots=True)
class Job:
    """One generation of one group of prompts by one arm. run: −1 for a warm-up. order: its place in the schedule.

    members: (prompt, cycle) of each row; a cycle above 0 is a prompt once more, which takes another seed.
    """

    arm: str
    group: int
    run: int
    order: int
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a schedule. prompts: those measured, in order. runs: whole ones; what is measured of a later
    one is to be dropped. cut: what the budget left out, in words."""

    prompts: tuple[int, ...]
    runs: int
    cut: str | None
    interrupted: bool


_Members = tuple[tuple[int, int], ...]


_Planned = tuple[str, int, _Members]  # arm, group, members


def grouped(prompts: Sequence[int], batch: int) -> list[_Members]:
    """The prompts in groups of `batch` after one another, the last filled up from the beginning."""
    n = len(prompts)
    flat = [(prompts[i % n], i // n) for i in range(math.ceil(n / batch) * batch)]
    return [tuple(flat[i : i + batch]) for i in range(0, len(flat), batch)]


def turns(categories: Sequence[str | None]) -> list[int]:
    """The prompts with the categories taking turns: the first of each, then the second of each, …"""
    seen: dict[str | None, int] = {}
    places = []
    for index, category in enumerate(categories):
        places.append((seen.setdefault(category, 0), index))
        seen[category] += 1
    return [index for _, index in sorted(places)]


def spread(categories: Sequence[str | None], keep: int) -> list[int]:
    """`keep` of the prompts, evenly by category, in order."""
    return sorted(turns(categories)[:keep])


@dataclass
class _Times:
    """Seconds of each arm's groups, from what was measured so far; before that from its warm-ups, `scale` of which
    make one timed generation; before that what is known of the other arms."""

    scale: float
    warm: dict[str, float] = field(default_factory=dict)
    timed: dict[str, list[float]] = field(default_factory=dict)

    def add(self, job: Job, seconds: float) -> None:
        if job.run == WARM_UP:
            # The fastest: the first call of all may have to fetch and build what no other call does.
            self.warm[job.arm] = min(seconds * self.scale, self.warm.get(job.arm, math.inf))
        else:
            self.timed.setdefault(job.arm, []).append(seconds)

    def of(self, arm: str) -> float:
        if arm in self.timed:
            return statistics.fmean(self.timed[arm])
        if arm in self.warm:
            return self.warm[arm]
        known = {**self.warm, **{name: statistics.fmean(seconds) for name, seconds in self.timed.items()}}
        return statistics.fmean(known.values()) if known else 0.0


def schedule(
    arms: Mapping[str, int],
    categories: Sequence[str | None],
    measure: Callable[[Job], object],
    *,
    runs: int,
    warmup: int,
    order: random.Random,
    clock: Callable[[], float],
    budget: float | None = None,
    began: float | None = None,
    scale: float = 1.0,
    progress: Progress = lambda done, left: None,
) -> Outcome:
    """Warm-ups, then `runs` times every arm on every group of prompts, each run in a random order of its own.

    arms: prompts at once, by name. categories: one a prompt. measure: does one job. scale: how much longer a timed
    job takes than a warm-up. budget: seconds for all of it, from `began` on (now, where it is not given). If not even
    one run fits in what the warm-ups leave of it (one is made then in any case), prompts are left out, never arms;
    afterwards no run is begun for which the time that runs took so far does not suffice. Ctrl-C ends it:
    `Outcome.interrupted`.
    """
    began, times, number = clock() if began is None else began, _Times(scale), 0
    prompts = list(range(len(categories)))
    total_runs, whole, cut = runs, 0, None

    def do(jobs: list[_Planned], run: int, later: int) -> None:
        """later: whole runs behind these jobs."""
        nonlocal number
        order.shuffle(jobs)
        for at, (arm, group, members) in enumerate(jobs):
            start = clock()
            measure(Job(arm, group, run, number, members))
            number += 1
            now = clock()
            times.add(Job(arm, group, run, number, members), now - start)
            left = later * run_seconds() + math.fsum(times.of(name) for name, *_ in jobs[at + 1 :])
            if budget is not None:
                left = min(left, max(0.0, began + budget - now))
            progress((now - began) / (now - began + left) if now > began else 0.0, left)

    def run_jobs() -> list[_Planned]:
        groups = {batch: grouped(prompts, batch) for batch in set(arms.values())}
        return [(arm, g, members) for arm, batch in arms.items() for g, members in enumerate(groups[batch])]

    def run_seconds() -> float:
        return math.fsum(times.of(arm) for arm, *_ in run_jobs())

    try:
        for w in range(max(warmup, 1) if budget is not None else warmup):
            first = {batch: grouped(prompts, batch) for batch in set(arms.values())}
            do([(arm, w % len(first[b]), first[b][w % len(first[b])]) for arm, b in arms.items()], WARM_UP, runs)
        if budget is not None:
            left = budget - (clock() - began)
            while len(prompts) > 1 and run_seconds() > left:
                prompts = spread(categories, len(prompts) - 1)
            if len(prompts) < len(categories):
                cut = f"{len(categories) - len(prompts)} of {len(categories)} prompts"
        for run in range(runs):
            if budget is not None and run > 0:
                fit = int((budget - (clock() - began)) / run_seconds()) if run_seconds() > 0 else runs
                total_runs = min(runs, run + fit)
            if run >= total_runs:
                break
            do(run_jobs(), run, total_runs - run - 1)
            whole += 1
    except KeyboardInterrupt:
        return Outcome(tuple(prompts), whole, cut, True)
    if whole < runs:
        cut = f"{cut + ' and ' if cut else ''}{runs - whole} of {runs} runs"
    if cut is not None:
        cut = f"the budget of {budget:g} s left out {cut}"
    if budget is not None and clock() - began > budget * 1.2:
        over = f"took {clock() - began:.0f} s, more than the budget of {budget:g} s"
        cut = f"{cut}; what remained still {over}" if cut else f"one run of everything {over}"
    return Outcome(tuple(prompts), whole, cut, False)


def promising(predicted: Mapping[int, float], *, near: float = 0.05) -> list[int]:
    """The k with the best predicted speedup, the smallest of equals, and those of its two neighbours that are
    predicted to come within `near` of it."""
    best = min(predicted, key=lambda k: (-predicted[k], k))
    around = (best - 1, best, best + 1)
    return [k for k in around if k in predicted and predicted[k] >= predicted[best] * (1 - near)]
