"""The schema of what `specgen run --json` writes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from specgen.results.fields import Count, Depth, Seconds, Share
from specgen.results.files import parsed
from specgen.rounds.record import Finish, Origin


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
    parsed(_Run, data, name, "run")
