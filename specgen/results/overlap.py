"""What `specgen overlap --json` writes and what is read of it again: every position, and the tables made of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specgen.results.document import Head
from specgen.results.fields import Count, Free, Number, OpenRecord, Seconds, Share, Size

Relative = Annotated[float, Field(gt=0)]  # a call's cost in single-token target calls


class Temperature(OpenRecord):
    """Mean overlap at a temperature (0: greedy agreement), over positions with a proposal; its distribution."""

    temperature: float
    overlap: Share | None
    histogram: list[Count]
    deciles: list[float]


class Prediction(OpenRecord):
    """What one k would give. tested, accepted: [k] by position in the round. alpha: None where nothing is tested."""

    k: Size
    tau: float
    alpha: float | None
    tested: list[float]
    accepted: list[float]
    rounds: float
    drafted: float
    speedup: float


class Group(OpenRecord):
    """Positions with something in common. lost: their share of all rejections."""

    name: str
    count: Count
    overlap: float
    lost: float


class Positions(OpenRecord):
    """Columns, one entry a scored token. null: a log-probability of −∞, and what nothing was proposed for."""

    token: list[Count]
    target_log_prob: list[Number]
    ratio: list[Share | None]
    overlap: list[Share | None]


class Scores(OpenRecord):
    """Of one text or of all together. proposed: at how many of the tokens the draft proposes something."""

    tokens: Count
    proposed: Count
    greedy_agreement: Share | None
    temperatures: list[Temperature]
    predictions: list[Prediction]


class Text(Scores):
    """impossible: tokens to which the target gives probability 0. windows: 1 where the text fits the context."""

    name: str
    windows: Size
    impossible: Count
    positions: Positions


class Overall(Scores):
    """Kinds of text and single tokens, each with the lowest overlap first."""

    kinds: list[Group]
    worst_tokens: list[Group]


class Costs(OpenRecord):
    """c: of a draft step, verify: of calls on 1, 2, … tokens, both in single-token target calls. draft_s, target_s:
    seconds of a draft step and of calls by their number of tokens, where they were measured here."""

    origin: str = Field("given", alias="from")
    c: Annotated[float, Field(ge=0)]
    verify: Annotated[list[Relative], Field(min_length=1)]
    draft_s: Seconds | None = None
    target_s: dict[Size, Seconds] | None = None


class Overlap(Head, OpenRecord):
    """An overlap's file. own: how many tokens the target wrote behind each prompt; None for texts as they stand."""

    kind: Literal["overlap"]
    profile: Free
    temperature: float
    own: Size | None
    costs: Costs
    notes: list[str] = Field(default_factory=list)
    results: list[Text]
    overall: Overall
