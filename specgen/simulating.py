"""A stored result's texts under other costs: τ, α and predicted speedup for every k. No torch, and no model.

What is needed of a result is the ratio at each committed token (`theory.expected_rounds`). A run has it from its
check of itself, a bench from the baseline's texts teacher-forced, an overlap by its nature.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from specgen.analysis import predict
from specgen.results import Bench, parse_bench, read
from specgen.rounds import Mode, UsageError
from specgen.theory import ExpectedRounds, best_k, expected_rounds, pooled, predicted_speedup

KINDS = ("run", "bench", "overlap")
MAX_K = 8
INDICATIVE = (
    "the target did not write these texts: τ, α and predicted speedup are only indicative, and too high where the "
    "target finds a text unlikely (specgen overlap --own N lets the target write)"
)
FREE = "calls on several tokens are taken to cost what a single-token call does (--verify-cost says what they cost)"
BARE = "costs are of target and draft calls alone (--other adds the rest of a round, of either kind)"
OWN = "the bench's own predictions: what its own calls, drafts and rounds cost, median over its groups of prompts"
OWN_COSTS = "the bench's own times"


@dataclass(frozen=True, slots=True)
class Text:
    """One committed text. ratios: of each token, 0 where the draft proposes nothing; proposes: where it does."""

    ratios: tuple[float, ...]
    proposes: tuple[bool, ...]

    @classmethod
    def of(cls, ratios: Sequence[float | None]) -> Text:
        return cls(tuple(r or 0.0 for r in ratios), tuple(r is not None for r in ratios))


@dataclass(frozen=True, slots=True)
class Costs:
    """In units of a single-token target call. c: of a draft step. verify: of calls on 1, 2, … tokens, None where
    nobody measured them. other: of the rest of a round, speculative or plain. origin: where they are from. engine:
    whose they are. Of a bench's own prediction, whose prices are in seconds and by k, c and verify are None."""

    c: float | None
    verify: tuple[float, ...] | None
    other: float = 0.0
    origin: str = "given"
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """The texts scored with one profile's draft. limit: max_new_tokens of their generation, None for other texts.

    costs: the file's own, one an engine; none where it holds none. groups: indices of the texts of each prompt of a
    bench, over which its predicted speedup is the median; one group of all elsewhere.
    """

    profile: str
    texts: tuple[Text, ...]
    limit: int | None
    costs: tuple[Costs, ...]
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """What a result file holds for a simulation. data: the file's document. bench: the same, of a bench."""

    name: str
    kind: str
    data: dict[str, Any]
    drafts: tuple[Draft, ...]
    notes: tuple[str, ...]
    bench: Bench | None = None


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
    costs: Costs
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


# --------------------------------------------------------------------------------------------- what files hold

Ratios = list[Annotated[float, Field(ge=0, le=1)] | None]
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Part = TypeVar("_Part", bound=BaseModel)
CallCost = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Check(BaseModel):
    reason: str | None = None
    ratios: Ratios = []


class _RunCost(BaseModel):
    c: Cost


class _RunResult(BaseModel):
    name: str
    plain: bool = False
    finish: str | None = None
    cost: _RunCost | None = None
    check: _Check | None = None


class _Sampling(BaseModel):
    mode: Mode
    max_new_tokens: Annotated[int, Field(ge=1)]


class _Profile(BaseModel):
    name: str | None = None


class _Run(BaseModel):
    profile: _Profile
    sampling: _Sampling
    results: list[_RunResult]


class _Positions(BaseModel):
    ratio: Ratios


class _OverlapText(BaseModel):
    positions: _Positions


class _OverlapCosts(BaseModel):
    c: Cost
    verify: Annotated[list[CallCost], Field(min_length=1)]


class _Overlap(BaseModel):
    profile: _Profile
    own: Annotated[int, Field(ge=1)] | None
    costs: _OverlapCosts
    notes: list[str] = []
    results: list[_OverlapText]


def load(path: Path | str) -> Stored:
    """What a result of run, bench or overlap holds for a simulation. Raises UsageError, with what to do, for a file
    that is none, or that holds no ratios."""
    data = read(path, KINDS)
    name, kind = str(path), data["kind"]
    bench = parse_bench(data, name) if kind == "bench" else None
    drafts, notes = _bench(bench, name) if bench else {"run": _run, "overlap": _overlap}[kind](data, name)
    for draft in drafts:
        if not any(any(t.proposes) for t in draft.texts):
            raise UsageError(
                f"{name}: the draft of {draft.profile} proposes nothing in these texts: nothing to predict"
            )
    return Stored(name, kind, data, tuple(drafts), tuple(notes), bench)


def _whole(model: type[_Part], data: dict[str, Any], name: str) -> _Part:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: not a whole result of specgen {data['kind']}: {where}: {first['msg']}") from None


def _run(data: dict[str, Any], name: str) -> tuple[list[Draft], list[str]]:
    run = _whole(_Run, data, name)
    texts = [Text.of(_run_ratios(r, run.sampling.mode, data["schema_version"], name)) for r in run.results]
    if not any(t.ratios for t in texts):
        raise UsageError(f"{name}: holds no generated token")
    measured = [r.cost.c for r in run.results if r.cost is not None]
    costs = (Costs(statistics.median(measured), None, origin="the run's"),) if measured else ()
    profile = run.profile.name or "the run's profile"
    return [Draft(profile, _nonempty(texts), run.sampling.max_new_tokens, costs)], []


def _run_ratios(result: _RunResult, mode: Mode, version: int, name: str) -> Ratios:
    """A result's ratios; or why there are none, and how to get them."""
    if version < 2:
        raise UsageError(f"{name}: written before runs kept their ratios: run it again with this specgen")
    if result.plain:
        raise UsageError(f"{name}: {result.name}: decoded without a draft (--plain): run it again with one")
    if mode not in (Mode.EXACT, Mode.COUPLED):
        raise UsageError(
            f"{name}: a run in mode {mode.value}, whose check keeps no ratios: "
            + ("give a result of specgen bench or overlap" if mode is Mode.GREEDY else "run it in mode exact")
        )
    if result.check is None and result.finish == "interrupted":
        raise UsageError(f"{name}: {result.name}: interrupted, so that it holds no ratios: run it again to its end")
    if result.check is None:
        raise UsageError(
            f"{name}: {result.name}: made with --no-check, and the ratios are the check's: run it again without"
        )
    return result.check.ratios


def _overlap(data: dict[str, Any], name: str) -> tuple[list[Draft], list[str]]:
    found = _whole(_Overlap, data, name)
    texts = [Text.of(r.positions.ratio) for r in found.results]
    if not any(t.ratios for t in texts):
        raise UsageError(f"{name}: holds no scored token")
    costs = Costs(found.costs.c, tuple(found.costs.verify), origin="the file's")
    profile = found.profile.name or "the overlap's profile"
    notes = [INDICATIVE] if found.own is None else []
    return [Draft(profile, _nonempty(texts), found.own, (costs,))], notes


def _bench(bench: Bench, name: str) -> tuple[list[Draft], list[str]]:
    mode = str(bench.sampling.get("mode"))
    if not bench.scores:
        why = f" (mode {mode}: the text is not the target's)" if mode in (Mode.LENIENT, Mode.TYPICAL) else ""
        raise UsageError(f"{name}: holds no scored text{why}: bench in mode exact, coupled or greedy keeps them")
    drafts = []
    for profile in dict.fromkeys(score.profile for score in bench.scores):
        scores = [score for score in bench.scores if score.profile == profile and score.ratios]
        if not scores:
            raise UsageError(f"{name}: holds no scored token of profile {profile}")
        groups: dict[int, list[int]] = {}
        for i, score in enumerate(scores):
            groups.setdefault(score.prompt, []).append(i)
        costs = [
            Costs(c.draft_s / c.target_s[1], _curve(c.target_s), origin="the file's probe", engine=c.engine)
            for c in bench.costs
            if c.profile == profile and c.draft_s is not None and 1 in c.target_s and min(c.target_s.values()) > 0
        ]
        texts = tuple(Text.of([None if r is None else min(r, 1.0) for r in score.ratios]) for score in scores)
        limit = max(bench.design.max_new_tokens, *(len(t.ratios) for t in texts))
        drafts.append(Draft(profile, texts, limit, tuple(costs), tuple(map(tuple, groups.values()))))
    notes = ["mode greedy: a ratio is 1 where the draft's argmax is the target's, else 0"] * (mode == Mode.GREEDY)
    return drafts, notes


def _nonempty(texts: Sequence[Text]) -> tuple[Text, ...]:
    return tuple(t for t in texts if t.ratios)


def _curve(target_s: Mapping[int, float]) -> tuple[float, ...]:
    """Relative costs of calls on 1, 2, … tokens up to the widest measured, by straight lines between those."""
    widths = sorted(target_s)
    seconds = np.interp(range(1, widths[-1] + 1), widths, [target_s[w] for w in widths])
    return tuple(float(s / target_s[1]) for s in seconds)


# ----------------------------------------------------------------------------------------------- the simulation


def chosen(stored: Stored, profile: str | None) -> tuple[Draft, ...]:
    """The drafts of one profile, of all where none is named. Raises UsageError for a name that is not there."""
    found = tuple(d for d in stored.drafts if profile is None or d.profile == profile)
    if not found:
        names = ", ".join(d.profile for d in stored.drafts)
        raise UsageError(f"--profile {profile}: not in {stored.name}, which holds {names}")
    return found


def costs_of(
    draft: Draft, *, name: str, c: float | None, verify: Sequence[float] | None, other: float = 0.0
) -> list[Costs]:
    """The costs to simulate with: those given, else the file's own. With c alone, calls are taken to be flat: the
    file's curve belongs to the file's machine. Raises UsageError where there are none."""
    given = None if verify is None else tuple(verify)
    if c is not None:
        return [Costs(c, given, other)]
    if not draft.costs:
        raise UsageError(f"{name}: holds no cost of a draft step of {draft.profile}: give --c, and --verify-cost")
    found = []
    for own in draft.costs:
        origin = own.origin if given is None else f"c: {own.origin}, calls: given"
        found.append(Costs(own.c, given or own.verify, other, origin, own.engine))
    return found


def simulate(draft: Draft, costs: Costs, max_k: int) -> Simulation:
    """k = 1 … max_k over all texts together; of a bench the predicted speedup is the median over its prompts.
    costs.c: not None; costs.verify: at least max_k + 1 entries, or None for flat calls."""
    assert costs.c is not None
    verify = costs.verify or (1.0,) * (max_k + 1)
    predictions = []
    for k in range(1, max_k + 1):
        texts = _expected(draft, k)
        groups = [pooled([texts[i] for i in group]) for group in draft.groups] or [pooled(texts)]
        speedup = _median_speedup(groups, costs.c, verify, costs.other)
        predictions.append(_counted(k, pooled(texts), speedup, _break_even(groups, verify, costs.other)))
    return _simulation(draft, costs, predictions)


def own_predictions(
    bench: Bench, draft: Draft, *, name: str, max_k: int | None, engine: str | None
) -> list[Simulation]:
    """The bench's own predictions of one profile, to the digit, one an engine, of its smallest batch. Raises
    UsageError where it cannot predict, or not as far as max_k."""
    batch = min(arm.batch for arm in bench.arms)
    timed = {arm.engine for arm in bench.arms if arm.kind == "speculative" and arm.profile == draft.profile}
    probed = {c.engine for c in bench.costs if c.profile == draft.profile and c.draft_s is not None}
    engines = dict.fromkeys(arm.engine for arm in bench.arms)
    found = []
    for own in engines:
        if own not in timed | probed or engine not in (None, own):
            continue
        predicted = [p for p in predict(bench, draft.profile, own, batch) if max_k is None or p.k <= max_k]
        if max_k is not None and predicted and predicted[-1].k < max_k:
            most = predicted[-1].k
            raise UsageError(f"{name}: predicts k up to {most}: --max-k {most}, or give --c and --verify-cost")
        counted = [_counted(p.k, pooled(_expected(draft, p.k)), p.speedup, None) for p in predicted]
        if counted:
            found.append(_simulation(draft, Costs(None, None, origin=OWN_COSTS, engine=own), counted))
    if not found:
        raise UsageError(f"{name}: holds no cost of a draft step of {draft.profile}: give --c, and --verify-cost")
    return found


def _expected(draft: Draft, k: int) -> list[ExpectedRounds]:
    return [expected_rounds(t.ratios, k, limit=draft.limit, proposes=t.proposes) for t in draft.texts]


def _counted(k: int, e: ExpectedRounds, speedup: float, break_even: float | None) -> Predicted:
    return Predicted(k, e.tau, e.alpha, e.rounds, e.drafted, e.tested, e.accepted, speedup, break_even)


def _simulation(draft: Draft, costs: Costs, predictions: Sequence[Predicted]) -> Simulation:
    tokens = sum(len(t.ratios) for t in draft.texts)
    proposed = sum(sum(t.proposes) for t in draft.texts)
    return Simulation(draft.profile, len(draft.texts), tokens, proposed, draft.limit, costs, tuple(predictions))


def _median_speedup(groups: Sequence[ExpectedRounds], c: float, verify: Sequence[float], other: float) -> float:
    return statistics.median(
        predicted_speedup(e, draft_cost=c, verify_cost=verify, other_cost=other, plain_other=other) for e in groups
    )


def _break_even(groups: Sequence[ExpectedRounds], verify: Sequence[float], other: float) -> float | None:
    """The c at which the median over groups is 1. None where no c makes it 1: groups without a draft decide."""
    own = [_break_even_of(e, verify, other) for e in groups]
    known = sorted(c for c in own if c is not None)
    if not known:
        return None
    if len(own) == len(known) and len(known) % 2:
        return known[len(known) // 2]
    low, high = known[0], known[-1]  # at the lower end no group's speedup is below 1, at the upper none above
    for _ in range(100):
        middle = (low + high) / 2
        if _median_at(middle, groups, verify, other) > 1:
            low = middle
        else:
            high = middle
    return high


def _median_at(c: float, groups: Sequence[ExpectedRounds], verify: Sequence[float], other: float) -> float:
    """As `_median_speedup`; c may be below 0, and a group's time with it: as fast as can be."""
    found = []
    for e in groups:
        plain = e.tokens * (1 + other)
        free = plain / predicted_speedup(e, draft_cost=0.0, verify_cost=verify, other_cost=other, plain_other=other)
        spent = free + c * e.drafted
        found.append(plain / spent if spent > 0 else np.inf)
    return float(np.median(found))


def _break_even_of(e: ExpectedRounds, verify: Sequence[float], other: float) -> float | None:
    if not e.drafted:
        return None
    plain = e.tokens * (1 + other)
    free = plain / predicted_speedup(e, draft_cost=0.0, verify_cost=verify, other_cost=other, plain_other=other)
    return (plain - free) / e.drafted


def widest(costs: Sequence[Costs]) -> int | None:
    """The largest k whose call all these costs know; None where calls are flat."""
    known = [len(c.verify) - 1 for c in costs if c.verify is not None]
    return min(known, default=None)


def run(
    stored: Stored, *, c: float | None = None, verify: Sequence[float] | None = None, other: float | None = None,
    max_k: int | None = None, profile: str | None = None, engine: str | None = None,
) -> tuple[list[Simulation], list[str]]:  # fmt: skip
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
    stored: Stored, drafts: Sequence[Draft], c: float | None, verify: Sequence[float] | None, other: float,
    max_k: int | None, engine: str | None,
) -> tuple[list[Simulation], list[str]]:  # fmt: skip
    pairs = [
        (draft, costs)
        for draft in drafts
        for costs in costs_of(draft, name=stored.name, c=c, verify=verify, other=other)
        if engine is None or costs.engine in (None, engine)
    ]
    most, notes = widest([costs for _, costs in pairs]), []
    if most == 0:
        raise UsageError(f"{stored.name}: costs of single-token calls only: give --verify-cost 1,A,B,…")
    if max_k is not None and most is not None and most < max_k:
        raise UsageError(
            f"{stored.name}: costs of calls on 1 to {most + 1} tokens only: --max-k {most}, or give --verify-cost"
        )
    if max_k is None and most is not None and most < MAX_K:
        notes.append(f"k up to {most}: the costs go no further (--verify-cost)")
    top = max_k or (MAX_K if most is None else min(most, MAX_K))
    found = [simulate(draft, costs, top) for draft, costs in pairs]
    if stored.bench is not None:
        prompts = max(len(draft.groups) for draft in drafts)
        over = f"; the median over {prompts} prompts, as the bench takes it" if prompts > 1 else ""
        notes.append(f"not the bench's own predictions, which are made of what it timed: costs are as shown{over}")
    if any(s.costs.verify is None for s in found):
        notes.append(FREE)
    if not other:
        notes.append(BARE)
    return found, notes


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
