"""Result files: what `specgen bench` writes, and how any result file is read again. No torch.

A bench's file holds every raw time and count; all tables, the verdict and the warnings are computed from it alone
(`analysis.py`), so that they can be rebuilt, compared and re-analysed later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specgen.results.document import Head
from specgen.results.fields import (
    LEAST_SECONDS,
    Count,
    Depth,
    Environment,
    Free,
    Record,
    Seconds,
    Share,
    Size,
    same_length,
)
from specgen.settings import Mode


def within(end: int | None, tokens: int) -> None:
    if end is not None and end > tokens:
        said = f"an end at token {end} of {tokens} cannot be"
        raise PydanticCustomError("end", "{said}", {"said": said})


class Prompt(Record):
    """A prompt as it was fed. category: chat, code, …; None for a user's own."""

    name: str
    category: str | None
    text: str
    tokens: list[Count]


class Arm(Record):
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


class Steps(Record):
    """Columns, one entry a target call, in seconds. width: tokens a row in the call; rows: rows still decoding."""

    draft_s: list[Seconds]
    verify_s: list[Seconds]
    rollback_s: list[Seconds]
    total_s: list[Seconds]
    width: list[Size]
    rows: list[Size]

    @model_validator(mode="after")
    def _columns(self) -> Steps:
        same_length(self, "draft_s", "verify_s", "rollback_s", "total_s", "width", "rows")
        return self


class Row(Record):
    """What became of one prompt. drafted, tested, accepted, committed: one entry a round.

    overlaps: Σ min(target, draft) at each tested position, in order; sum(tested) of them.
    expected: the probability of acceptance under the mode's rule, where that is not the overlap; else empty.
    end: tokens up to and with the one that an end token or a stop string would have ended the text with; nothing does
    while timing. None where none would, and in files that did not write it down.
    pieces: by its place in `tokens`, the text of a token that reads otherwise here than the file's `pieces` say (a
    character that several tokens make stands at the last of them).
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
    expected: list[Share] = Field(default_factory=list)
    biases: list[Share] = Field(default_factory=list)
    end: Size | None = None
    pieces: dict[int, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _counts(self) -> Row:
        within(self.end, len(self.tokens))
        same_length(self, "drafted", "tested", "accepted", "committed")
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


class Measurement(Record):
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


class Costs(Record):
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


class Score(Record):
    """The baseline's text of one prompt and run, teacher-forced: at each position min(1, draft(x)/target(x)) of the
    committed token x (the probability that it had been accepted, given that it was committed; of mode coupled the
    same under shared noise; greedy 1 or 0). null where the draft proposes nothing. end: as in a row."""

    profile: str
    prompt: Count
    run: Count
    ratios: list[Share | None]
    end: Size | None = None

    @model_validator(mode="after")
    def _end(self) -> Score:
        within(self.end, len(self.ratios))
        return self


class Divergence(Record):
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


class Design(Record):
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


class Bench(Head):
    """A bench's whole result. profiles: each one's settings, by its name; environment: before it, and after; pieces:
    the text of every token id that occurs."""

    kind: Literal["bench"]
    created: str
    profiles: dict[str, Free]
    environment_after: Environment
    design: Design
    prompts: list[Prompt]
    arms: list[Arm]
    measurements: list[Measurement]
    costs: list[Costs]
    scores: list[Score]
    divergences: list[Divergence]
    notes: list[str] = Field(default_factory=list)
    pieces: dict[int, str] = Field(default_factory=dict)

    def arm(self, name: str) -> Arm:
        return next(a for a in self.arms if a.name == name)

    def timed(self, arm: str) -> list[Measurement]:
        """An arm's measurements without warm-ups."""
        return [m for m in self.measurements if m.arm == arm and m.run >= 0]


def contradictions(bench: Bench) -> Iterator[tuple[str, str]]:
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
