"""Two bench results against each other: the same arms over the same prompts, paired. No torch.

What may not differ is refused with its reasons, since a ratio of times would then measure that and not the change.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.analysis.columns import (
    committed_tokens,
    decode_seconds,
    ended_rounds,
    seconds_per_token,
    texts_and_ends,
)
from specgen.analysis.intervals import Interval, median_interval
from specgen.analysis.verdict import ends_text
from specgen.errors import UsageError
from specgen.results.bench import Arm, Bench, Measurement, Prompt
from specgen.rounds.statistics import ratio
from specgen.settings import Mode

# Of the settings, what says how long a text is or which, not how a token is drawn. End tokens and stop strings end
# nothing while benching; where they say up to which token numbers are, a note does.
FREE_SETTINGS = {"k", "seed", "sources", "max_new_tokens", "end_tokens", "stop"}


OF_A_MODE = {
    "lenience": Mode.LENIENT,
    "typical_epsilon": Mode.TYPICAL,
    "typical_delta": Mode.TYPICAL,
}


SHOWN = 60  # characters of a value in a reason


@dataclass(frozen=True, slots=True)
class Side:
    """An arm's numbers in one of the two files, over the paired groups alone.

    alpha: accepted / tested, tau: committed a target call. speedup: against that file's own baseline, median over
    groups; None for a plain arm, and where the baseline was not measured over these groups. seconds_per_token: median
    over groups.
    """

    arm: str
    profile: str
    engine: str
    alpha: float | None
    tau: float | None
    seconds_per_token: float
    speedup: Interval | None


@dataclass(frozen=True, slots=True)
class Matched:
    """An arm that both files hold. groups: (label, time(a) / time(b)); above 1, b is the faster.

    ratio: their median, with its interval. speedups: speedup(b) / speedup(a), None for plain arms.
    """

    kind: str
    k: int
    batch: int
    a: Side
    b: Side
    groups: tuple[tuple[str, float], ...]
    ratio: Interval
    speedups: float | None

    @property
    def name(self) -> str:
        return self.a.arm if self.a.arm == self.b.arm else f"{self.a.arm} / {self.b.arm}"

    @property
    def finding(self) -> str:
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None:
            return f"too few prompts for an interval ({self.ratio.n})"
        if low <= 1 <= high:
            return "no measurable difference"
        return "b is faster" if low > 1 else "b is slower"

    def below(self, bound: float) -> bool:
        """Whether b is surely slower than bound × a's speed: the whole interval lies below. Without an interval, the
        estimate does. An interval that reaches the bound is no failure: a gate must not cry wolf over noise."""
        return (self.ratio.estimate if self.ratio.high is None else self.ratio.high) < bound


@dataclass(frozen=True, slots=True)
class Comparison:
    """All matched arms, in the order of a. differs: (what, in a, in b). notes: what was left out. missing: arms of a
    that were not compared, since b has none like it or measured it on other prompts."""

    a: str
    b: str
    arms: tuple[Matched, ...]
    differs: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def failing(self, bound: float) -> list[Matched]:
        return [arm for arm in self.arms if arm.below(bound)]


def compare(a: Bench, b: Bench, *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Raises UsageError with every reason why the two are not comparable."""
    reasons = _reasons(a, b)
    prompts = match_prompts(a.prompts, b.prompts)
    arms = match_arms(a, b)
    if not prompts:
        reasons.append("no prompt in common")
    if not arms:
        reasons.append(f"no arm in common: {_listed(x.name for x in a.arms)} and {_listed(x.name for x in b.arms)}")
    found: list[Matched] = []
    notes: list[str] = []
    if not reasons:
        for pair in arms:
            matched = _matched(a, b, *pair, prompts)
            if matched is not None:
                found.append(matched)
            else:
                notes.append(f"{pair[0].name}: no prompt that both files measured")
        if not found:
            reasons.append("no arm was measured over the same prompts in both")
    if reasons:
        raise UsageError(f"{names[0]} and {names[1]} are not comparable: {'; '.join(reasons)}")
    notes += _left_out(a, b, arms, prompts, names)
    compared = {matched.a.arm for matched in found}
    missing = tuple(arm.name for arm in a.arms if arm.name not in compared)
    return Comparison(*names, tuple(found), tuple(_differences(a, b)), tuple(notes), missing)


def _reasons(a: Bench, b: Bench) -> list[str]:
    pairs: list[tuple[str, Any, Any]] = [
        ("target", _targets(a, b), _targets(b, a)),
        ("dtype", a.dtype, b.dtype),
        ("device", a.device.split(":")[0], b.device.split(":")[0]),
        ("processor", a.environment.get("processor"), b.environment.get("processor")),
        ("GPU", _gpu(a), _gpu(b)),
        ("threads", a.environment.get("threads"), b.environment.get("threads")),
    ]
    for name in sorted({*a.sampling, *b.sampling} - FREE_SETTINGS):
        x, y = a.sampling.get(name), b.sampling.get(name)
        # A setting of one mode says nothing in another; where the modes differ, that is the reason.
        if name not in OF_A_MODE or a.sampling.get("mode") == b.sampling.get("mode") == OF_A_MODE[name]:
            pairs.append((name, x, y))
    pairs.append(("max_new_tokens", a.design.max_new_tokens, b.design.max_new_tokens))
    return [f"{what} differs, {_shown(x)} and {_shown(y)}" for what, x, y in pairs if x != y]


def _checkpoints(bench: Bench, side: str) -> list[dict[str, Any]]:
    """The target's, or the drafts', each once. The draft of one profile among several is "draft NAME"."""
    found = [c for name, c in bench.checkpoints.items() if name.split(" ")[0] == side and isinstance(c, dict)]
    return [c for i, c in enumerate(found) if c not in found[:i]]


def _targets(bench: Bench, other: Bench) -> list[str]:
    """What must be one: revisions where both files know them, since one checkpoint has many addresses; else the
    checkpoint as the profile names it."""
    mine, theirs = _checkpoints(bench, "target"), _checkpoints(other, "target")
    if all(c.get("revision") for c in (*mine, *theirs)):
        return sorted({str(c["revision"]) for c in mine})
    return sorted({_address(c) for c in mine})


def _address(checkpoint: dict[str, Any]) -> str:
    revision = checkpoint.get("revision")
    return f"{checkpoint.get('checkpoint')}{f' ({revision})' if revision else ''}"


def _gpu(bench: Bench) -> str | None:
    """The name of the GPU in use; None on a CPU."""
    kind, _, index = bench.device.partition(":")
    names = bench.environment.get("gpu")
    if kind != "cuda" or not isinstance(names, list):
        return None
    at = int(index) if index.isdigit() else 0
    return str(names[at]) if at < len(names) else None


def match_prompts(a: Sequence[Prompt], b: Sequence[Prompt]) -> dict[int, int]:
    """Index in a → index in b of the same token ids; of the same text where a file has none. A prompt that occurs
    several times is matched in order."""
    free = list(range(len(b)))
    found: dict[int, int] = {}

    def same(x: Prompt, y: Prompt) -> bool:
        return x.tokens == y.tokens if x.tokens and y.tokens else x.text == y.text

    for i, prompt in enumerate(a):
        for j in free:
            if same(prompt, b[j]):
                found[i] = j
                free.remove(j)
                break
    return found


def match_arms(a: Bench, b: Bench) -> list[tuple[Arm, Arm]]:
    """Arms with the same kind, k and batch; of the same profile and engine where a file has several of them. A plain
    arm has no draft: its profile counts only where that leaves several."""

    def several(field: str) -> bool:
        return any(len({getattr(arm, field) for arm in bench.arms}) > 1 for bench in (a, b))

    engines, profiles = several("engine"), several("profile")

    def key(arm: Arm, profile: bool) -> tuple[Any, ...]:
        return (arm.kind, arm.k, arm.batch, arm.engine if engines else None, arm.profile if profile else None)

    found = []
    for arm in a.arms:
        strict = profiles
        if arm.kind == "plain":
            strict = any(sum(key(x, False) == key(arm, False) for x in bench.arms) > 1 for bench in (a, b))
        twins = [x for x in b.arms if key(x, strict) == key(arm, strict)]
        if len(twins) == 1 and sum(key(x, strict) == key(arm, strict) for x in a.arms) == 1:
            found.append((arm, twins[0]))
    return found


def _groups(bench: Bench, arm: str) -> dict[tuple[int, ...], list[Measurement]]:
    """An arm's measurements by the prompts of their group, sorted indices."""
    found: dict[tuple[int, ...], list[Measurement]] = defaultdict(list)
    for m in bench.timed(arm):
        if committed_tokens(m) and decode_seconds(m) > 0:
            found[tuple(sorted(row.prompt for row in m.rows))].append(m)
    return found


def _time(measurements: Iterable[Measurement]) -> float:
    return statistics.median(seconds_per_token(m) for m in measurements)


def _matched(a: Bench, b: Bench, arm: Arm, twin: Arm, prompts: dict[int, int]) -> Matched | None:
    mine, theirs = _groups(a, arm.name), _groups(b, twin.name)
    keys = {}  # a group of a → the group of b over the same prompts
    for group in mine:
        there = tuple(sorted(prompts[p] for p in group if p in prompts))
        if len(there) == len(group) and there in theirs:
            keys[group] = there
    if not keys:
        return None
    ratios = {g: _time(mine[g]) / _time(theirs[h]) for g, h in keys.items()}
    left, right = _side(a, arm, mine, list(keys)), _side(b, twin, theirs, list(keys.values()))
    speedups = None
    if left.speedup is not None and right.speedup is not None:
        speedups = right.speedup.estimate / left.speedup.estimate
    labelled = tuple((" + ".join(a.prompts[p].name for p in g), value) for g, value in ratios.items())
    return Matched(
        arm.kind, arm.k, arm.batch, left, right, labelled, median_interval(list(ratios.values())), speedups
    )


def _side(
    bench: Bench, arm: Arm, groups: dict[tuple[int, ...], list[Measurement]], chosen: Sequence[tuple[int, ...]]
) -> Side:
    rounds = [r for g in chosen for m in groups[g] for row in m.rows for r in ended_rounds(row)]
    baseline = _groups(bench, arm.baseline) if arm.kind == "speculative" else {}
    against = [_time(baseline[g]) / _time(groups[g]) for g in chosen if g in baseline]
    return Side(
        arm.name,
        arm.profile,
        arm.engine,
        alpha=ratio(sum(r.accepted for r in rounds), sum(r.tested for r in rounds)),
        tau=ratio(sum(len(r.committed) for r in rounds), len(rounds)),
        seconds_per_token=statistics.median(_time(groups[g]) for g in chosen),
        speedup=median_interval(against) if against else None,
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value)) or "none"
    text = "not set" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values)) or "none"


def _differences(a: Bench, b: Bench) -> list[tuple[str, str, str]]:
    """What may differ and does: (what, in a, in b)."""

    def described(bench: Bench) -> dict[str, Any]:
        e = bench.environment
        git = e.get("git") or {}
        packages = e.get("packages") or {}
        load = e.get("load_average")
        kinds = {_draft_kind(p) for p in bench.profiles.values()} - {"checkpoint"}
        return {
            "specgen": e.get("specgen"),
            "commit": f"{git.get('commit')}{' (changed)' if git.get('dirty') else ''}" if git else None,
            "python": e.get("python"),
            **{name: packages[name] for name in sorted(packages)},
            "engine": sorted({arm.engine for arm in bench.arms}),
            "profile": sorted({arm.profile for arm in bench.arms}),
            "draft": sorted({_address(c) for c in _checkpoints(bench, "draft")} | kinds),
            "date": bench.created,
            "load": f"{load[0]:.2f}" if load else None,
            "platform": e.get("platform"),
            "CPUs": e.get("cpu_count"),
            "runs": bench.design.runs_done,
            "seed": bench.sampling.get("seed"),
        }

    x, y = described(a), described(b)
    return [(what, _shown(x.get(what)), _shown(y.get(what))) for what in {**x, **y} if x.get(what) != y.get(what)]


def _draft_kind(profile: dict[str, Any]) -> str:
    draft = profile.get("draft")
    return str(draft.get("kind", "unknown")) if isinstance(draft, dict) else "none"


def _left_out(
    a: Bench, b: Bench, arms: Sequence[tuple[Arm, Arm]], prompts: dict[int, int], names: tuple[str, str]
) -> list[str]:
    notes = []
    for bench, side, name in ((a, 0, names[0]), (b, 1, names[1])):
        paired = {pair[side].name for pair in arms}
        if alone := [arm.name for arm in bench.arms if arm.name not in paired]:
            notes.append(f"arms in {name} alone: {_listed(alone)}")
        passed, texts = texts_and_ends(bench)
        if passed:
            notes.append(f"{name}: {ends_text(passed, texts)}: its numbers are up to it")
    if len(prompts) < max(len(a.prompts), len(b.prompts)):
        notes.append(
            f"{len(prompts)} prompts in common, of {len(a.prompts)} and {len(b.prompts)}: all numbers are over those"
        )
    return notes
