"""What `specgen run --json` writes and what is read of it again: every prompt's text, rounds and check."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, computed_field, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from specgen.results.document import Head, plain_data
from specgen.results.fields import Count, Depth, Free, Number, OpenRecord, Record, Seconds, Share
from specgen.rounds import record
from specgen.rounds.record import Finish, Origin
from specgen.rounds.statistics import Statistics, summarise


class Committed(Record):
    """`rounds.record.Committed`, as stored."""

    token: Count
    origin: Origin
    log_prob: Number
    entropy: Number
    support: int
    overlap: Share | None


class Round(Record):
    """`rounds.record.Round`, as stored: in a run's file, and with the prompt's name a line in its trace."""

    index: Count
    drafted: Depth
    tested: Count
    accepted: Count
    committed: list[Committed] = Field(min_length=1)
    overlaps: list[Share]
    expected: list[Share] = Field(default_factory=list)
    biases: list[Share] = Field(default_factory=list)
    impossible: list[str] = Field(default_factory=list)
    draft_s: Seconds
    verify_s: Seconds
    rollback_s: Seconds
    total_s: Seconds
    finish: Finish | None = None

    @model_validator(mode="after")
    def _counts(self) -> Round:
        if not self.accepted <= self.tested <= self.drafted or len(self.overlaps) != self.tested:
            said = (
                f"{self.drafted} drafted, {self.tested} tested, {self.accepted} accepted and {len(self.overlaps)} "
                "overlaps cannot be"
            )
            raise PydanticCustomError("round", "{said}", {"said": said})
        return self

    @classmethod
    def of(cls, live: record.Round) -> Round:
        return cls.model_validate(live)

    def live(self) -> record.Round:
        """The same for what computes with rounds; a number that was not finite comes back as NaN."""
        own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in self}
        nan = float("nan")
        committed = (
            record.Committed(
                c.token,
                c.origin,
                nan if c.log_prob is None else c.log_prob,
                nan if c.entropy is None else c.entropy,
                c.support,
                c.overlap,
            )
            for c in self.committed
        )
        return record.Round(**{**own, "committed": tuple(committed)})


class CheckRow(OpenRecord):
    """One number of a run's check of itself, with its bound. passed: None where there was nothing to decide."""

    name: str
    value: Number
    bound: float
    passed: bool | None
    note: str


class Check(OpenRecord):
    """A run's check of itself. ratios: min(1, draft(x)/target(x)) of each committed token x, null where the draft
    proposes nothing; none of an older file, and of modes whose check is not applicable (reason)."""

    positions: Count = 0
    rows: list[CheckRow]
    reason: str | None = None
    ratios: list[Share | None] = Field(default_factory=list)
    passed: bool
    verdict: str


class Cost(OpenRecord):
    """Seconds of a single-token target call and of a draft step, probed behind the text; c: their ratio."""

    target_s: Seconds
    draft_s: Seconds
    c: Seconds


class Result(OpenRecord):
    """One prompt's generation. finish: "interrupted" where it was; pieces: each token's text. statistics: of the
    rounds; written for whoever reads the file, and never read."""

    name: str
    prompt: str
    text: str = ""
    finish: str | None = None
    prompt_tokens: list[Count] = Field(default_factory=list)
    tokens: list[Count]
    pieces: list[str | None] = Field(default_factory=list)
    plain: bool
    promise: str = ""
    engine: str = ""
    prefill_s: Seconds = 0.0
    cost: Cost | None = None
    check: Check | None
    rounds: list[Round]

    @model_validator(mode="after")
    def _lengths(self) -> Result:
        committed = sum(len(r.committed) for r in self.rounds)
        if len(self.tokens) != committed or (self.pieces and len(self.pieces) != committed):
            said = f"{len(self.tokens)} tokens and {len(self.pieces)} pieces, where {committed} were committed"
            raise PydanticCustomError("length", "{said}", {"said": said})
        return self

    @cached_property
    def live_rounds(self) -> list[record.Round]:
        return [r.live() for r in self.rounds]

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def statistics(self) -> Statistics:
        return summarise(self.live_rounds, drafting=not self.plain)

    @field_serializer("statistics")
    def _with_rates(self, s: Statistics) -> dict[str, Any]:
        rates = ("alpha", "tau", "accepted_fraction", "tokens_per_second")
        return {**plain_data(s), **{name: getattr(s, name) for name in rates}}


class Run(Head, OpenRecord):
    """A run's file: a result a prompt. profile: all its settings."""

    kind: Literal["run"]
    profile: Free
    results: list[Result]
