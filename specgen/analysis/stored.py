"""A stored result of any kind → its texts, acceptance ratios and costs, for `simulate`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.analysis.prediction import probed
from specgen.analysis.verdict import ends_text
from specgen.errors import UsageError
from specgen.results.bench import Bench, Costs
from specgen.results.files import parse_bench, parsed, read
from specgen.results.overlap import Overlap
from specgen.results.run import Result, Run
from specgen.rounds.costs import CallCosts
from specgen.settings import Mode

KINDS = ("run", "bench", "overlap")


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
        return cls(tuple(min(r or 0.0, 1.0) for r in ratios), tuple(r is not None for r in ratios))


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """In units of a single-token target call. c: of a draft step. verify: of calls on 1, 2, … tokens, None where
    nobody measured them. other: of the rest of a round, speculative or plain. origin: where they are from. engine:
    whose they are. Of a bench's own prediction, whose prices are in seconds and by k, c and verify are None."""

    c: float | None
    verify: tuple[float, ...] | None
    other: float = 0.0
    origin: str = "given"
    engine: str | None = None

    @property
    def calls(self) -> CallCosts:
        """Flat where nobody measured calls on several tokens."""
        return CallCosts(dict(enumerate(self.verify or (1.0,), 1)), self.c or 0.0, self.other, self.other)


@dataclass(frozen=True, slots=True)
class Draft:
    """The texts scored with one profile's draft. limit: max_new_tokens of their generation, None for other texts.

    costs: the file's own, one an engine; none where it holds none. groups: indices of the texts of each prompt of a
    bench, over which its predicted speedup is the median; one group of all elsewhere.
    """

    profile: str
    texts: tuple[Text, ...]
    limit: int | None
    costs: tuple[UnitCosts, ...]
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


def _run(data: dict[str, Any], name: str) -> tuple[list[Draft], list[str]]:
    run = parsed(Run, data, name)
    texts = [Text.of(_run_ratios(r, Mode(run.sampling["mode"]), run.schema_version, name)) for r in run.results]
    if not any(t.ratios for t in texts):
        raise UsageError(f"{name}: holds no generated token")
    measured = [r.cost.c for r in run.results if r.cost is not None]
    costs = (UnitCosts(statistics.median(measured), None, origin="the run's"),) if measured else ()
    profile = run.profile.get("name") or "the run's profile"
    return [Draft(profile, _nonempty(texts), run.sampling.get("max_new_tokens"), costs)], []


def _run_ratios(result: Result, mode: Mode, version: int, name: str) -> list[float | None]:
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
    found = parsed(Overlap, data, name)
    texts = [Text.of(r.positions.ratio) for r in found.results]
    if not any(t.ratios for t in texts):
        raise UsageError(f"{name}: holds no scored token")
    costs = UnitCosts(found.costs.c, tuple(found.costs.verify), origin="the file's")
    profile = found.profile.get("name") or "the overlap's profile"
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
            _of_probe(c)
            for c in bench.costs
            if c.profile == profile and c.draft_s is not None and 1 in c.target_s and min(c.target_s.values()) > 0
        ]
        texts = tuple(Text.of(score.ratios[: score.end]) for score in scores)
        limit = max(bench.design.max_new_tokens, *(len(t.ratios) for t in texts))
        drafts.append(Draft(profile, texts, limit, tuple(costs), tuple(map(tuple, groups.values()))))
    notes = ["mode greedy: a ratio is 1 where the draft's argmax is the target's, else 0"] * (mode == Mode.GREEDY)
    ends = {(s.prompt, s.run): s.end is not None and s.end < len(s.ratios) for s in bench.scores if s.ratios}
    if passed := sum(ends.values()):
        notes.append(f"{ends_text(passed, len(ends))}, since nothing ends a text while timing: they count up to it")
    return drafts, notes


def _of_probe(costs: Costs) -> UnitCosts:
    """Up to the widest call probed, every width."""
    own = probed(costs).with_first()
    verify = tuple(own.call(w) for w in range(1, own.widest + 1))
    return UnitCosts(own.draft, verify, origin="the file's probe", engine=costs.engine)


def _nonempty(texts: Sequence[Text]) -> tuple[Text, ...]:
    return tuple(t for t in texts if t.ratios)


def chosen(stored: Stored, profile: str | None) -> tuple[Draft, ...]:
    """The drafts of one profile, of all where none is named. Raises UsageError for a name that is not there."""
    found = tuple(d for d in stored.drafts if profile is None or d.profile == profile)
    if not found:
        names = ", ".join(d.profile for d in stored.drafts)
        raise UsageError(f"--profile {profile}: not in {stored.name}, which holds {names}")
    return found


def costs_of(
    draft: Draft, *, name: str, c: float | None, verify: Sequence[float] | None, other: float = 0.0
) -> list[UnitCosts]:
    """The costs to simulate with: those given, else the file's own. With c alone, calls are taken to be flat: the
    file's curve belongs to the file's machine. Raises UsageError where there are none."""
    given = None if verify is None else tuple(verify)
    if c is not None:
        return [UnitCosts(c, given, other)]
    if not draft.costs:
        raise UsageError(f"{name}: holds no cost of a draft step of {draft.profile}: give --c, and --verify-cost")
    found = []
    for own in draft.costs:
        origin = own.origin if given is None else f"c: {own.origin}, calls: given"
        found.append(UnitCosts(own.c, given or own.verify, other, origin, own.engine))
    return found
