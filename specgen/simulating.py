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

from specgen.results import parse_bench, read
from specgen.rounds import Mode, UsageError
from specgen.theory import ExpectedRounds, best_k, expected_rounds, pooled, predicted_speedup

KINDS = ("run", "bench", "overlap")
MAX_K = 8
INDICATIVE = (
    "the target did not write these texts: τ, α and predicted speedup are only indicative, and too high where the "
    "target finds a text unlikely (specgen overlap --own N lets the target write)"
)
FREE = "calls on several tokens are taken to cost what a single-token call does (--verify-cost says what they cost)"
BARE = "costs are of target and draft calls alone (--other adds the rest of a round)"


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
    nobody measured them. other: of the rest of a round. origin: where they are from. engine: whose they are."""

    c: float
    verify: tuple[float, ...] | None
    other: float = 0.0
    origin: str = "given"
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """The texts scored with one profile's draft. limit: max_new_tokens of their generation, None for other texts.

    costs: the file's own, one an engine; none where it holds none.
    """

    profile: str
    texts: tuple[Text, ...]
    limit: int | None
    costs: tuple[Costs, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a result file holds for a simulation. data: the file's document."""

    name: str
    kind: str
    data: dict[str, Any]
    drafts: tuple[Draft, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one k would give. alpha: accepted / tested, None where nothing would be tested.

    break_even_c: the c at which this k decodes as fast as plain decoding, under the same other costs; below 0 where
    no draft is cheap enough. None where nothing would be drafted.
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
    max_new_tokens: int


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
    own: int | None
    costs: _OverlapCosts
    notes: list[str] = []
    results: list[_OverlapText]


def load(path: Path | str) -> Stored:
    """What a result of run, bench or overlap holds for a simulation. Raises UsageError, with what to do, for a file
    that is none, or that holds no ratios."""
    data = read(path, KINDS)
    name, kind = str(path), data["kind"]
    drafts, notes = {"run": _run, "bench": _bench, "overlap": _overlap}[kind](data, name)
    for draft in drafts:
        if not any(any(t.proposes) for t in draft.texts):
            raise UsageError(
                f"{name}: the draft of {draft.profile} proposes nothing in these texts: nothing to predict"
            )
    return Stored(name, kind, data, tuple(drafts), tuple(notes))


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


def _bench(data: dict[str, Any], name: str) -> tuple[list[Draft], list[str]]:
    bench = parse_bench(data, name)
    mode = str(bench.sampling.get("mode"))
    if not bench.scores:
        why = f" (mode {mode}: the text is not the target's)" if mode in (Mode.LENIENT, Mode.TYPICAL) else ""
        raise UsageError(f"{name}: holds no scored text{why}: bench in mode exact, coupled or greedy keeps them")
    by_profile: dict[str, list[Text]] = {}
    for score in bench.scores:
        if any(r is not None and not 0 <= r <= 1 for r in score.ratios):
            raise UsageError(f"{name}: not a whole bench result: a ratio of prompt {score.prompt} is not in 0 … 1")
        by_profile.setdefault(score.profile, []).append(Text.of(score.ratios))
    drafts = []
    for profile, texts in by_profile.items():
        if not any(t.ratios for t in texts):
            raise UsageError(f"{name}: holds no scored token of profile {profile}")
        costs = [
            Costs(c.draft_s / c.target_s[1], _curve(c.target_s), origin="the file's probe", engine=c.engine)
            for c in bench.costs
            if c.profile == profile and c.draft_s is not None and 1 in c.target_s and min(c.target_s.values()) > 0
        ]
        drafts.append(Draft(profile, _nonempty(texts), bench.design.max_new_tokens, tuple(costs)))
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
    """k = 1 … max_k over all texts together. costs.verify: at least max_k + 1 entries, or None for flat calls."""
    verify = costs.verify or (1.0,) * (max_k + 1)
    predictions = []
    for k in range(1, max_k + 1):
        e = pooled([expected_rounds(t.ratios, k, limit=draft.limit, proposes=t.proposes) for t in draft.texts])
        speedup = predicted_speedup(e, draft_cost=costs.c, verify_cost=verify, other_cost=costs.other)
        predictions.append(
            Predicted(k, e.tau, e.alpha, e.rounds, e.drafted, e.tested, e.accepted, speedup,
                      _break_even(e, verify, costs.other))
        )  # fmt: skip
    tokens = sum(len(t.ratios) for t in draft.texts)
    proposed = sum(sum(t.proposes) for t in draft.texts)
    return Simulation(draft.profile, len(draft.texts), tokens, proposed, draft.limit, costs, tuple(predictions))


def _break_even(e: ExpectedRounds, verify: Sequence[float], other: float) -> float | None:
    if not e.drafted:
        return None
    without_draft = e.tokens / predicted_speedup(e, draft_cost=0.0, verify_cost=verify, other_cost=other)
    return (e.tokens - without_draft) / e.drafted


def widest(costs: Sequence[Costs]) -> int | None:
    """The largest k whose call all these costs know; None where calls are flat."""
    known = [len(c.verify) - 1 for c in costs if c.verify is not None]
    return min(known, default=None)


def run(
    stored: Stored, *, c: float | None = None, verify: Sequence[float] | None = None, other: float = 0.0,
    max_k: int | None = None, profile: str | None = None,
) -> tuple[list[Simulation], list[str]]:  # fmt: skip
    """All simulations that a file and given costs allow, and what a reader must know of them.

    max_k: None for MAX_K, or as far as the file's own costs go. Raises UsageError where costs are missing.
    """
    pairs = [
        (draft, costs)
        for draft in chosen(stored, profile)
        for costs in costs_of(draft, name=stored.name, c=c, verify=verify, other=other)
    ]
    most = widest([costs for _, costs in pairs])
    notes = list(stored.notes)
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
    if any(s.costs.verify is None for s in found):
        notes.append(FREE)
    for s in {s.profile: s for s in found}.values():
        if s.proposed < s.tokens:
            notes.append(
                f"{s.profile}: the draft proposes nothing at {s.tokens - s.proposed} of {s.tokens} tokens; what is "
                "drafted behind a rejected token is taken to be all that k allows"
            )
    if not other:
        notes.append(BARE)
    return found, notes
