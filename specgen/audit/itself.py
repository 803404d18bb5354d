"""Check `run`: the run's check of itself, pooled over prompts and seeds."""

from __future__ import annotations

from specgen.audit.subject import Subject, Work
from specgen.decoding.self_check import CheckResult, SelfCheck, drift_bound, edge_fraction
from specgen.rounds.record import Round

RUN_LEVEL = 1e-3  # of the run's check of itself: seven z statistics, each 6e-5 where it is nearly normal


def check(subject: Subject) -> Work:
    pair = subject.pair
    pooled = SelfCheck(drift_bound(pair.dtype, subject.sampling.temperature), subject.mode, edge_fraction(pair.dtype))
    texts = left_out = 0
    groups = subject.groups(subject.prompts_and_seeds())
    for i, group in enumerate(groups):
        if i and not (yield):
            left_out = len(groups) - i
            break
        rounds: list[list[Round]] = [[] for _ in group]
        for watched in subject.generate(group):
            rounds[watched.number].append(watched.round)
        for (prompt, _), own in zip(group, rounds, strict=True):
            pooled.add(pair.target, subject.drafter, subject.processors, prompt, own)
        texts += len(group)
    result = pooled.result()
    notes = [f"{r.name}: {r.value:.3g} (bound {r.bound:g}): {r.note}" for r in result.rows if r.passed is False]
    measured = f"{worst_row(result)} over {texts} texts"
    bound = f"|z| 4; drift {pooled.tolerance:g}; impossible events 0"
    return subject.finding("run", result.passed, measured, bound, None, result.positions, notes, left_out=left_out)


def worst_row(result: CheckResult) -> str:
    drift = next(r.value or 0.0 for r in result.rows if r.name == "drift")
    events = next(r.value or 0.0 for r in result.rows if r.name == "impossible events")
    z = [abs(r.value) for r in result.rows if " z" in r.name and r.value is not None]
    largest = f"largest |z| {max(z):.2f} of {len(z)}" if z else "not enough variation for a z"
    return f"{largest}, drift {drift:.2g}, {events:.0f} impossible events"
