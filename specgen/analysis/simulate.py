"""A stored result's texts under other costs: τ, α and predicted speedup for every k. No torch, and no model.

What is needed of a result is the ratio at each committed token (`theory.expected_rounds`). A run has it from its
check of itself, a bench from the baseline's texts teacher-forced, an overlap by its nature.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specgen.analysis.prediction import predict
from specgen.analysis.stored import BARE, FREE, OWN, OWN_COSTS, Draft, Stored, UnitCosts, chosen, costs_of
from specgen.errors import UsageError
from specgen.results.bench import Bench
from specgen.rounds.costs import CallCosts, break_even_draft, plain_time, predicted_speedup, speculative_time
from specgen.rounds.expected import ExpectedRounds, best_k, expected_rounds, pooled

MAX_K = 8


SINGLE = "costs of single-token calls only: give --verify-cost 1,A,B,…"


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one k would give. alpha: accepted / tested, None where nothing would be tested.

    break_even_c: the c at which this k decodes as fast as plain decoding, under the same other costs; below 0 where
    no draft is cheap enough. None where nothing would be drafted, and of a bench's own prediction.
    """

    k: int
    tau: float
    alpha: float | None
    rounds: float
    drafted: float
    tested: tuple[float, ...]
    accepted: tuple[float, ...]
    predicted_speedup: float
    break_even_c: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """One draft's texts under one set of costs, k = 1, 2, …"""

    profile: str
    texts: int
    tokens: int
    proposed: int
    limit: int | None
    costs: UnitCosts
    predictions: tuple[Predicted, ...]

    @property
    def best(self) -> Predicted:
        k = best_k({p.k: p.predicted_speedup for p in self.predictions})
        return next(p for p in self.predictions if p.k == k)

    @property
    def pays(self) -> bool:
        return self.best.predicted_speedup > 1

    @property
    def verdict(self) -> str:
        """One line: whether it pays, and otherwise what the draft would have to cost."""
        best = self.best
        if self.pays:
            return f"pays: the best k is {best.k}, predicted speedup {best.predicted_speedup:.3f}"
        known = [p for p in self.predictions if p.break_even_c is not None]
        dearest = max(known, key=lambda p: (p.break_even_c or 0.0, -p.k), default=None)
        short = f"does not pay: the best k, {best.k}, has predicted speedup {best.predicted_speedup:.3f}"
        if self.costs.c is None:
            return f"{short}; --c and --verify-cost say what other costs would do"
        if dearest is None or dearest.break_even_c is None:
            return f"{short}; the draft proposes nothing in these texts"
        if dearest.break_even_c <= 0:
            return f"{short}; not even a free draft would: verification and the rest cost more than they save"
        return f"{short}; it would with c below {dearest.break_even_c:.4f} (at k = {dearest.k})"


def simulate(draft: Draft, costs: UnitCosts, max_k: int) -> Simulation:
    """k = 1 … max_k over all texts together; of a bench the predicted speedup is the median over its prompts.
    costs.c: not None; costs.verify: None for flat calls."""
    assert costs.c is not None
    calls, predictions = costs.calls, []
    for k in range(1, max_k + 1):
        texts = _expected(draft, k)
        groups = [pooled([texts[i] for i in group]) for group in draft.groups] or [pooled(texts)]
        speedup = statistics.median(predicted_speedup(e, calls) for e in groups)
        predictions.append(_counted(k, pooled(texts), speedup, _break_even(groups, calls)))
    return _simulation(draft, costs, predictions)


def own_predictions(
    bench: Bench, draft: Draft, *, name: str, max_k: int | None, engine: str | None
) -> list[Simulation]:
    """The bench's own predictions of one profile, to the digit, one an engine, of its smallest batch. Raises
    UsageError where it cannot predict."""
    batch = min(arm.batch for arm in bench.arms)
    timed = {arm.engine for arm in bench.arms if arm.kind == "speculative" and arm.profile == draft.profile}
    probed = {c.engine for c in bench.costs if c.profile == draft.profile and c.draft_s is not None}
    engines = dict.fromkeys(arm.engine for arm in bench.arms)
    found = []
    for own in engines:
        if own not in timed | probed or engine not in (None, own):
            continue
        predicted = predict(bench, draft.profile, own, batch, max_k)
        counted = [_counted(p.k, pooled(_expected(draft, p.k)), p.speedup, None) for p in predicted]
        if counted:
            found.append(_simulation(draft, UnitCosts(None, None, origin=OWN_COSTS, engine=own), counted))
    if not found and timed | probed:
        raise UsageError(f"{name}: {SINGLE}")
    if not found:
        raise UsageError(f"{name}: holds no cost of a draft step of {draft.profile}: give --c, and --verify-cost")
    return found


def _expected(draft: Draft, k: int) -> list[ExpectedRounds]:
    return [expected_rounds(t.ratios, k, limit=draft.limit, proposes=t.proposes) for t in draft.texts]


def _counted(k: int, e: ExpectedRounds, speedup: float, break_even: float | None) -> Predicted:
    return Predicted(k, e.tau, e.alpha, e.rounds, e.drafted, e.tested, e.accepted, speedup, break_even)


def _simulation(draft: Draft, costs: UnitCosts, predictions: Sequence[Predicted]) -> Simulation:
    tokens = sum(len(t.ratios) for t in draft.texts)
    proposed = sum(sum(t.proposes) for t in draft.texts)
    return Simulation(draft.profile, len(draft.texts), tokens, proposed, draft.limit, costs, tuple(predictions))


def _break_even(groups: Sequence[ExpectedRounds], calls: CallCosts) -> float | None:
    """The c at which the median over groups is 1. None where no c makes it 1: groups without a draft decide."""
    own = [break_even_draft(e, calls) for e in groups]
    known = sorted(c for c in own if c is not None)
    if not known:
        return None
    if len(own) == len(known) and len(known) % 2:
        return known[len(known) // 2]
    low, high = known[0], known[-1]  # at the lower end no group's speedup is below 1, at the upper none above
    for _ in range(100):
        middle = (low + high) / 2
        if _median_at(middle, groups, calls) > 1:
            low = middle
        else:
            high = middle
    return high


def _median_at(c: float, groups: Sequence[ExpectedRounds], calls: CallCosts) -> float:
    """The median speedup; c may be below 0, and a group's time with it: as fast as can be."""
    found, free = [], replace(calls, draft=0.0)
    for e in groups:
        spent = speculative_time(e, free) + c * e.drafted
        found.append(plain_time(e, calls) / spent if spent > 0 else np.inf)
    return float(np.median(found))


def widest(costs: Sequence[UnitCosts]) -> int | None:
    """The largest k whose call all these costs know; None where calls are flat."""
    known = [len(c.verify) - 1 for c in costs if c.verify is not None]
    return min(known, default=None)


def run(
    stored: Stored,
    *,
    c: float | None = None,
    verify: Sequence[float] | None = None,
    other: float | None = None,
    max_k: int | None = None,
    profile: str | None = None,
    engine: str | None = None,
) -> tuple[list[Simulation], list[str]]:
    """All simulations that a file and given costs allow, and what a reader must know of them.

    A bench without given costs has its own predictions; else the costs are those given, with the file's own where
    it has them. max_k: None for MAX_K, or as far as the file's own costs go. engine: one of a bench's several.
    Raises UsageError where costs are missing.
    """
    drafts, notes = chosen(stored, profile), list(stored.notes)
    if engine is not None:
        engines = {arm.engine for arm in stored.bench.arms} if stored.bench else set()
        if engine not in engines:
            held = ", ".join(sorted(engines)) or "none: only a bench does"
            raise UsageError(f"--engine {engine}: not in {stored.name}, which holds {held}")
    if stored.bench is not None and c is None and verify is None and other is None:
        found = [
            s
            for draft in drafts
            for s in own_predictions(stored.bench, draft, name=stored.name, max_k=max_k, engine=engine)
        ]
        batch = min(arm.batch for arm in stored.bench.arms)
        notes.append(OWN + (f", batch {batch}" if batch > 1 else ""))
        notes += _unmeasured(widest([costs for draft in drafts for costs in draft.costs]), max_k or 0)
    else:
        found, more = _priced(stored, drafts, c, verify, other or 0.0, max_k, engine)
        notes += more
    for s in {s.profile: s for s in found}.values():
        if s.proposed < s.tokens:
            notes.append(
                f"{s.profile}: the draft proposes nothing at {s.tokens - s.proposed} of {s.tokens} tokens; what is "
                "drafted behind a rejected token is taken to be all that k allows"
            )
    notes += dict.fromkeys(note for s in found for note in _cheap_calls(s, drafts))
    return found, notes


def _priced(
    stored: Stored,
    drafts: Sequence[Draft],
    c: float | None,
    verify: Sequence[float] | None,
    other: float,
    max_k: int | None,
    engine: str | None,
) -> tuple[list[Simulation], list[str]]:
    pairs = [
        (draft, costs)
        for draft in drafts
        for costs in costs_of(draft, name=stored.name, c=c, verify=verify, other=other)
        if engine is None or costs.engine in (None, engine)
    ]
    most, notes = widest([costs for _, costs in pairs]), []
    if most == 0:
        raise UsageError(f"{stored.name}: {SINGLE}")
    if max_k is None and most is not None and most < MAX_K:
        notes.append(f"k up to {most}: the costs go no further (--verify-cost)")
    top = max_k or (MAX_K if most is None else min(most, MAX_K))
    found = [simulate(draft, costs, top) for draft, costs in pairs]
    notes += _unmeasured(most, top)
    if stored.bench is not None:
        prompts = max(len(draft.groups) for draft in drafts)
        over = f"; the median over {prompts} prompts, as the bench takes it" if prompts > 1 else ""
        notes.append(f"not the bench's own predictions, which are made of what it timed: costs are as shown{over}")
    if any(s.costs.verify is None for s in found):
        notes.append(FREE)
    if not other:
        notes.append(BARE)
    return found, notes


def _unmeasured(most: int | None, top: int) -> list[str]:
    """A note where k goes further than the costs known."""
    if most is None or most >= top:
        return []
    return [f"calls on more than {most + 1} tokens were not measured: priced along the line through the two widest"]


def _cheap_calls(simulation: Simulation, drafts: Sequence[Draft]) -> list[str]:
    """A note where a call on several tokens costs less than one on a single token."""
    top = simulation.predictions[-1].k + 1
    verify = simulation.costs.verify
    if simulation.costs.c is None:  # a bench's own: what it probed
        of_draft = (costs for d in drafts if d.profile == simulation.profile for costs in d.costs)
        verify = next((x.verify for x in of_draft if x.engine == simulation.costs.engine), None)
    below = {w: cost for w, cost in enumerate((verify or ())[:top], 1) if cost < 1}
    if not below:
        return []
    width = min(below, key=lambda w: (below[w], w))
    return [
        f"a call on {width} tokens costs {below[width]:.3f} of one on a single token: noise, or a real effect of "
        "that machine"
    ]
