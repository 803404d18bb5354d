"""The rows of a bench's tables: plain records, filled by the modules beside this one."""

from __future__ import annotations

from dataclasses import dataclass

from specgen.analysis.intervals import Interval


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm. Times in seconds: draft_s the median per drafting step, verify_s and other_s per round, first_s the
    median time to the first token. tokens_per_second: 1 / seconds_per_token, of all rows of a batch together.
    predicted: predicted speedup; ratio: speedup / predicted. groups: each group's prompts and ratio."""

    name: str
    kind: str
    profile: str
    k: int
    engine: str
    batch: int
    alpha: float | None
    predicted_alpha: float | None
    tau: float | None
    draft_s: float | None
    verify_s: float | None
    other_s: float | None
    tokens_per_second: float | None
    first_s: float | None
    prefill_s: float | None
    speedup: Interval | None
    predicted: float | None
    ratio: float | None
    draft_share: float | None
    verify_share: float | None
    other_share: float | None
    seconds_per_token: float | None
    mean_bias: float | None
    groups: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PositionRow:
    """A position of an arm's rounds, 1 the first drafted. rate: accepted / tested. cumulative: accepted here / rounds
    that drafted at all, which no later position exceeds. overlap: mean over the times tested."""

    arm: str
    position: int
    drafted: int
    tested: int
    accepted: int
    rate: float | None
    cumulative: float | None
    overlap: float | None


@dataclass(frozen=True, slots=True)
class CostRow:
    """An arm's costs. widths: {tokens in a target call: seconds}, probed; relative: the same over that of 1 token.
    priced: {tokens: seconds} as the prediction prices this arm's calls. c: a draft step / a single-token call.
    bytes_per_token: of weights and cache read by target and draft per committed token; bandwidth: the same a second.
    """

    profile: str
    engine: str
    arm: str
    widths: dict[int, float]
    relative: dict[int, float]
    c: float | None
    draft_share: float | None
    verify_share: float | None
    other_share: float | None
    bytes_per_token: float | None
    bandwidth: float | None
    bandwidth_share: float | None
    priced: dict[int, float]


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """An arm on one category's prompts. speedup: None where no group is of this category alone."""

    category: str
    arm: str
    prompts: int
    alpha: float | None
    tau: float | None
    speedup: Interval | None


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the baseline's texts and the measured costs predict for one k, measured or not."""

    profile: str
    engine: str
    batch: int
    k: int
    tau: float
    alpha: float | None
    speedup: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """pays: whether the whole interval of the best arm lies above 1 (True) or below it (False); None where it holds
    1, or where there is no interval. reasons: why it does not pay and what would have to change, weightiest first."""

    text: str
    pays: bool | None
    best: str | None
    speedup: Interval | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything the tables show. identical: {arm: (texts equal to the baseline's, texts compared)}, for the modes
    that promise the same text. passed_end: (texts that went on behind their end, all texts): rates, times, speedups
    and predictions are up to it."""

    arms: tuple[ArmRow, ...]
    positions: tuple[PositionRow, ...]
    costs: tuple[CostRow, ...]
    categories: tuple[CategoryRow, ...]
    predictions: tuple[Predicted, ...]
    verdict: Verdict
    warnings: tuple[str, ...]
    identical: dict[str, tuple[int, int]]
    passed_end: tuple[int, int]
