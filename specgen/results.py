"""Result files: what `specgen bench` writes, and how any result file is read again. No torch.

A bench's file holds every raw time and count; all tables, the verdict and the warnings are computed from it alone
(`analysis.py`), so that they can be rebuilt, compared and re-analysed later.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from specgen.rounds import Finish, Mode, Origin, UsageError

SCHEMA_VERSION = 2  # 1: run, overlap and audit of specgen 0.1; 2 adds bench, and pieces and ratios to run
READABLE = (1, 2)


SLACK = 1e-6  # of probabilities that are sums of rounded ones
LEAST_SECONDS = 1e-9  # of a whole decoding: less is no measured time


def _finite(value: Any) -> Any:
    """A part without a schema of its own, refused where a number in it is NaN or infinite."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inside:
        _finite(part)
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite", "holds a number that is not finite")
    return value


def _settings(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("mode") not in list(Mode):
        raise PydanticCustomError("mode", "its mode is none of " + ", ".join(Mode))
    return value


def _machine(value: dict[str, Any]) -> dict[str, Any]:
    """The few entries of an environment that are computed with."""
    _Machine.model_validate(value)
    return value


Count = Annotated[int, Field(ge=0, le=2**62)]
Size = Annotated[int, Field(ge=1, le=2**62)]
Depth = Annotated[int, Field(ge=0, le=4096)]  # of a round: tables have a row for each position
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1 + SLACK)]
Free = Annotated[dict[str, Any], AfterValidator(_finite)]
Settings = Annotated[Free, AfterValidator(_settings)]
Environment = Annotated[Free, AfterValidator(_machine)]


class _Machine(BaseModel):
    threads: int | None = None
    cpu_count: int | None = None
    load_average: Annotated[list[float], Field(min_length=1)] | None = None
    packages: dict[str, Any] | None = None
    git: dict[str, Any] | None = None


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _same_length(record: BaseModel, *columns: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in columns}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise PydanticCustomError("columns", "columns of unequal length: {listed}", {"listed": listed})


class Prompt(_Record):
    """A prompt as it was fed. category: chat, code, …; None for a user's own."""

    name: str
    category: str | None
    text: str
    tokens: list[Count]


class Arm(_Record):
    """One way of decoding that was timed. k: 0 for plain. batch: prompts at once. baseline: the plain arm that its
    speedup is against (same target, engine and batch); its own name for a plain arm."""

    name: str
    kind: Literal["plain", "speculative"]
    profile: str
    k: Depth
    engine: str
    batch: Size
    mode: Annotated[str, Field(pattern="^(" + "|".join(Mode) + ")$")]
    baseline: str

    @model_validator(mode="after")
    def _of_its_kind(self) -> Arm:
        if (self.k == 0) != (self.kind == "plain"):
            raise PydanticCustomError("k", "k is 0 for a plain arm, and at least 1 for a speculative one")
        return self


class Steps(_Record):
    """Columns, one entry a target call, in seconds. width: tokens a row in the call; rows: rows still decoding."""

    draft_s: list[Seconds]
    verify_s: list[Seconds]
    rollback_s: list[Seconds]
    total_s: list[Seconds]
    width: list[Size]
    rows: list[Size]

    @model_validator(mode="after")
    def _columns(self) -> Steps:
        _same_length(self, "draft_s", "verify_s", "rollback_s", "total_s", "width", "rows")
        return self


class Row(_Record):
    """What became of one prompt. drafted, tested, accepted, committed: one entry a round.

    overlaps: Σ min(target, draft) at each tested position, in order; sum(tested) of them.
    expected: the probability of acceptance under the mode's rule, where that is not the overlap; else empty.
    """

    prompt: Count
    seed: int
    tokens: list[Count]
    finish: str | None
    drafted: list[Count]
    tested: list[Count]
    accepted: list[Count]
    committed: list[Size]
    overlaps: list[Share]
    expected: list[Share] = []
    biases: list[Share] = []

    @model_validator(mode="after")
    def _counts(self) -> Row:
        _same_length(self, "drafted", "tested", "accepted", "committed")
        columns = zip(self.drafted, self.tested, self.accepted, self.committed, strict=True)
        for at, (drafted, tested, accepted, committed) in enumerate(columns):
            # An end may cut a round short: then nothing is tested, and no bonus committed, behind the last accepted.
            if not accepted <= tested <= drafted or tested > accepted + 1:
                said = f"round {at}: {drafted} drafted, {tested} tested and {accepted} accepted cannot be"
                raise PydanticCustomError("round", "{said}", {"said": said})
            if not accepted <= committed <= accepted + 1:
                said = f"round {at}: {committed} committed of {accepted} accepted cannot be"
                raise PydanticCustomError("round", "{said}", {"said": said})
        for name, values, wanted, of in (
            ("tokens", self.tokens, sum(self.committed), "committed"),
            ("overlaps", self.overlaps, sum(self.tested), "tested"),
            ("expected", self.expected, sum(self.tested), "tested"),
            ("biases", self.biases, sum(self.tested), "tested"),
        ):
            if len(values) != wanted and (values or name in ("tokens", "overlaps")):
                said = f"{name} has {len(values)} entries, where {wanted} were {of}"
                raise PydanticCustomError("length", "{said}", {"said": said})
        return self


class Measurement(_Record):
    """One timed generation of one group of prompts (one prompt where batch is 1).

    run: 0, 1, …; −1 for a warm-up, which enters no table. order: its place in the whole schedule.
    prefill_s: the prompt's; first_s: prefill and the first round, the time to the first token. load: the machine's
    one-minute load average as it began.
    """

    arm: str
    group: int
    run: Annotated[int, Field(ge=-1)]
    order: int
    prefill_s: Seconds
    first_s: Seconds
    load: float | None
    steps: Steps
    rows: Annotated[list[Row], Field(min_length=1)]


class Costs(_Record):
    """Probed costs of one profile's calls under one engine, behind `context` cached tokens, in seconds.

    target_s: by the number of tokens in the call. draft_s: a draft step. bytes: of parameters, and of keys and values
    a cached token; of the draft where it is a checkpoint. copy_bandwidth: bytes read and written a second by a plain
    copy of a large tensor on the same device.
    """

    profile: str
    engine: str
    context: Count
    draft_s: Seconds | None
    target_s: dict[Size, Seconds]
    target_bytes: Count
    target_bytes_a_token: Count
    draft_bytes: Count
    draft_bytes_a_token: Count
    copy_bandwidth: Annotated[float, Field(ge=0)]


class Score(_Record):
    """The baseline's text of one prompt and run, teacher-forced: at each position min(1, draft(x)/target(x)) of the
    committed token x (the probability that it had been accepted, given that it was committed; of mode coupled the
    same under shared noise; greedy 1 or 0). null where the draft proposes nothing."""

    profile: str
    prompt: Count
    run: Count
    ratios: list[Share | None]


class Divergence(_Record):
    """Greedy only: the first position at which a speculative text is not the baseline's.

    margins: of the top two logits in a call on one token and in the call that verified. difference: the largest
    between the two calls' logits there. tie: the margin lies within the difference.
    """

    arm: str
    prompt: Count
    run: Count
    position: Count
    plain_token: int
    token: int
    plain_margin: float
    verify_margin: float
    difference: float
    tie: bool


class Design(_Record):
    """What was asked for and what was done. auto: k was chosen from the prediction. candidates: every k predicted."""

    k: list[Size]
    auto: bool
    candidates: list[Annotated[Depth, Field(ge=1)]]
    runs: Count
    runs_done: Count
    warmup: Count
    max_new_tokens: Size
    budget_s: float | None
    order_seed: int
    cut: str | None = None  # what the budget left out, in words


class Bench(_Record):
    """A bench's whole result. sampling, profiles, checkpoints and environment as in every result file; pieces: the
    text of every token id that occurs."""

    schema_version: int
    kind: Literal["bench"]
    created: str
    sampling: Settings
    profiles: dict[str, Free]
    checkpoints: Free
    dtype: str
    device: str
    environment: Environment
    environment_after: Environment
    design: Design
    prompts: list[Prompt]
    arms: list[Arm]
    measurements: list[Measurement]
    costs: list[Costs]
    scores: list[Score]
    divergences: list[Divergence]
    notes: list[str] = []
    pieces: dict[int, str] = {}

    def arm(self, name: str) -> Arm:
        return next(a for a in self.arms if a.name == name)

    def timed(self, arm: str) -> list[Measurement]:
        """An arm's measurements without warm-ups."""
        return [m for m in self.measurements if m.arm == arm and m.run >= 0]


def read(path: Path | str, kinds: Collection[str]) -> dict[str, Any]:
    """A result file's data. Raises UsageError, with what to do, for what is no result of these kinds, or of a
    schema version that this specgen does not read. `-` is stdin."""
    import sys

    name = str(path)
    try:
        text = sys.stdin.read() if name == "-" else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not UTF-8: not a result of specgen") from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{name}: not JSON: give what `specgen … --json` wrote") from None
    if not isinstance(data, dict) or "schema_version" not in data or "kind" not in data:
        raise UsageError(f"{name}: JSON, but no result of specgen (no schema_version, no kind)")
    wanted = " or ".join(sorted(kinds))
    if not isinstance(data["kind"], str) or data["kind"] not in kinds:
        raise UsageError(f"{name}: a result of specgen {data['kind']}, where one of {wanted} is needed")
    version = data["schema_version"]
    if version not in READABLE:
        raise UsageError(
            f"{name}: schema version {version}, and this specgen reads {READABLE[0]} to {READABLE[-1]}: "
            "read it with the specgen that wrote it, or measure again"
        )
    return data


def read_bench(path: Path | str) -> Bench:
    """A bench's result file, validated. Raises UsageError."""
    return parse_bench(read(path, {"bench"}), str(path))


def parse_bench(data: dict[str, Any], name: str) -> Bench:
    """Raises UsageError, in one sentence, for what no bench can have written: tables made of it would be false."""
    bench = _parsed(Bench, data, name, "bench")
    for where, what in _contradictions(bench):
        raise UsageError(f"{name}: not a whole bench result: {where}: {what}")
    return bench


_Whole = TypeVar("_Whole", bound=BaseModel)


def _parsed(model: type[_Whole], data: dict[str, Any], name: str, kind: str) -> _Whole:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: not a whole {kind} result: {where}: {first['msg']}") from None


def _contradictions(bench: Bench) -> Iterator[tuple[str, str]]:
    """(where, what) of parts that do not fit together; each part by itself is whole."""
    arms = {arm.name: arm for arm in bench.arms}
    for arm_name, times in Counter(arm.name for arm in bench.arms).items():
        if times > 1:
            yield "arms", f"{times} are named {arm_name}"
    for at, arm in enumerate(bench.arms):
        if arm.profile not in bench.profiles:
            yield f"arms.{at}.profile", f"{arm.profile} is none of the file's profiles"
        if arm.baseline not in arms or arms[arm.baseline].kind != "plain":
            yield f"arms.{at}.baseline", f"{arm.baseline} is no plain arm of the file"
    for at, cost in enumerate(bench.costs):
        if cost.profile not in bench.profiles:
            yield f"costs.{at}.profile", f"{cost.profile} is none of the file's profiles"
        if not all(cost.target_s.values()):
            yield f"costs.{at}.target_s", "a call that took no time"
    for at, score in enumerate(bench.scores):
        if score.profile not in bench.profiles:
            yield f"scores.{at}.profile", f"{score.profile} is none of the file's profiles"
        if score.prompt >= len(bench.prompts):
            yield f"scores.{at}.prompt", f"there is no prompt {score.prompt}"
    for at, d in enumerate(bench.divergences):
        if d.arm not in arms or d.prompt >= len(bench.prompts):
            yield f"divergences.{at}", "names no known arm and prompt"
    for at, m in enumerate(bench.measurements):
        if m.arm not in arms or any(r.prompt >= len(bench.prompts) for r in m.rows):
            yield f"measurements.{at}", "names no known arm and prompt"
        elif any(drafted > arms[m.arm].k for r in m.rows for drafted in r.drafted):
            yield f"measurements.{at}", f"a round that drafted more than the {arms[m.arm].k} of its arm"
        yield from ((f"measurements.{at}.{where}", what) for where, what in _unmeasured(m))
    if not any(m.run >= 0 for m in bench.measurements):
        yield "measurements", "no timed measurement"


def _unmeasured(m: Measurement) -> Iterator[tuple[str, str]]:
    steps, most = len(m.steps.total_s), max(len(row.committed) for row in m.rows)
    if steps == 0 or sum(m.steps.total_s) < LEAST_SECONDS:
        yield "steps", "no decoding time"
    elif not all(m.steps.verify_s):
        yield "steps.verify_s", "a target call that took no time"
    if steps != most:
        yield "steps", f"{steps} target calls, where a row has {most} rounds"
    if any(not row.committed for row in m.rows):
        yield "rows", "a row without a round"


# ---------------------------------------------------------------------------------------------------------- a run


class _Part(BaseModel):
    """What is read of a run's file; it may hold more."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _RunToken(_Part):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    token: Count
    origin: Origin
    log_prob: float | None
    entropy: float | None
    support: int
    overlap: Share | None


class _RunRound(_Part):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    index: Count
    drafted: Depth
    tested: Count
    accepted: Count
    committed: Annotated[list[_RunToken], Field(min_length=1)]
    overlaps: list[Share]
    expected: list[Share] = []
    biases: list[Share] = []
    impossible: list[str] = []
    draft_s: Seconds
    verify_s: Seconds
    rollback_s: Seconds
    total_s: Seconds
    finish: Finish | None = None

    @model_validator(mode="after")
    def _counts(self) -> _RunRound:
        if not self.accepted <= self.tested <= self.drafted or len(self.overlaps) != self.tested:
            said = (
                f"{self.drafted} drafted, {self.tested} tested, {self.accepted} accepted and {len(self.overlaps)} "
                "overlaps cannot be"
            )
            raise PydanticCustomError("round", "{said}", {"said": said})
        return self


class _RunCheckRow(_Part):
    name: str
    value: float | None
    bound: float
    passed: bool | None
    note: str


class _RunCheck(_Part):
    verdict: str
    rows: list[_RunCheckRow]


class _RunResult(_Part):
    name: str
    prompt: str
    plain: bool
    tokens: list[Count]
    pieces: list[str | None] = []
    check: _RunCheck | None
    rounds: list[_RunRound]

    @model_validator(mode="after")
    def _lengths(self) -> _RunResult:
        committed = sum(len(r.committed) for r in self.rounds)
        if len(self.tokens) != committed or (self.pieces and len(self.pieces) != committed):
            said = f"{len(self.tokens)} tokens and {len(self.pieces)} pieces, where {committed} were committed"
            raise PydanticCustomError("length", "{said}", {"said": said})
        return self


class _RunProfile(_Part):
    name: str | None


class _RunSampling(_Part):
    mode: str


class _Run(_Part):
    profile: _RunProfile
    sampling: _RunSampling
    checkpoints: dict[str, Any]
    dtype: str
    device: str | None
    environment: dict[str, Any]
    results: list[_RunResult]


def check_run(data: dict[str, Any], name: str) -> None:
    """Raises UsageError, in one sentence, for a run's file that is not whole."""
    _parsed(_Run, data, name, "run")
