"""Result files: what `specgen bench` writes, and how any result file is read again. No torch.

A bench's file holds every raw time and count; all tables, the verdict and the warnings are computed from it alone
(`analysis.py`), so that they can be rebuilt, compared and re-analysed later.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from specgen.rounds import UsageError

SCHEMA_VERSION = 2  # 1: run, overlap and audit of specgen 0.1; 2 adds bench, and pieces and ratios to run
READABLE = (1, 2)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prompt(_Record):
    """A prompt as it was fed. category: chat, code, …; None for a user's own."""

    name: str
    category: str | None
    text: str
    tokens: list[int]


class Arm(_Record):
    """One way of decoding that was timed. k: 0 for plain. batch: prompts at once. baseline: the plain arm that its
    speedup is against (same target, engine and batch); its own name for a plain arm."""

    name: str
    kind: Literal["plain", "speculative"]
    profile: str
    k: int
    engine: str
    batch: int
    mode: str
    baseline: str


class Steps(_Record):
    """Columns, one entry a target call, in seconds. width: tokens a row in the call; rows: rows still decoding."""

    draft_s: list[float]
    verify_s: list[float]
    rollback_s: list[float]
    total_s: list[float]
    width: list[int]
    rows: list[int]


class Row(_Record):
    """What became of one prompt. drafted, tested, accepted, committed: one entry a round.

    overlaps: Σ min(target, draft) at each tested position, in order; sum(tested) of them.
    expected: the probability of acceptance under the mode's rule, where that is not the overlap; else empty.
    """

    prompt: int
    seed: int
    tokens: list[int]
    finish: str | None
    drafted: list[int]
    tested: list[int]
    accepted: list[int]
    committed: list[int]
    overlaps: list[float]
    expected: list[float] = []
    biases: list[float] = []


class Measurement(_Record):
    """One timed generation of one group of prompts (one prompt where batch is 1).

    run: 0, 1, …; −1 for a warm-up, which enters no table. order: its place in the whole schedule.
    prefill_s: the prompt's; first_s: prefill and the first round, the time to the first token. load: the machine's
    one-minute load average as it began.
    """

    arm: str
    group: int
    run: int
    order: int
    prefill_s: float
    first_s: float
    load: float | None
    steps: Steps
    rows: list[Row]


class Costs(_Record):
    """Probed costs of one profile's calls under one engine, behind `context` cached tokens, in seconds.

    target_s: by the number of tokens in the call. draft_s: a draft step. bytes: of parameters, and of keys and values
    a cached token; of the draft where it is a checkpoint. copy_bandwidth: bytes read and written a second by a plain
    copy of a large tensor on the same device.
    """

    profile: str
    engine: str
    context: int
    draft_s: float | None
    target_s: dict[int, float]
    target_bytes: int
    target_bytes_a_token: int
    draft_bytes: int
    draft_bytes_a_token: int
    copy_bandwidth: float


class Score(_Record):
    """The baseline's text of one prompt and run, teacher-forced: at each position min(1, draft(x)/target(x)) of the
    committed token x (the probability that it had been accepted, given that it was committed; of mode coupled the
    same under shared noise; greedy 1 or 0). null where the draft proposes nothing."""

    profile: str
    prompt: int
    run: int
    ratios: list[float | None]


class Divergence(_Record):
    """Greedy only: the first position at which a speculative text is not the baseline's.

    margins: of the top two logits in a call on one token and in the call that verified. difference: the largest
    between the two calls' logits there. tie: the margin lies within the difference.
    """

    arm: str
    prompt: int
    run: int
    position: int
    plain_token: int
    token: int
    plain_margin: float
    verify_margin: float
    difference: float
    tie: bool


class Design(_Record):
    """What was asked for and what was done. auto: k was chosen from the prediction. candidates: every k predicted."""

    k: list[int]
    auto: bool
    candidates: list[int]
    runs: int
    runs_done: int
    warmup: int
    max_new_tokens: int
    budget_s: float | None
    order_seed: int
    cut: str | None = None  # what the budget left out, in words


class Bench(_Record):
    """A bench's whole result. sampling, profiles, checkpoints and environment as in every result file; pieces: the
    text of every token id that occurs."""

    schema_version: int
    kind: Literal["bench"]
    created: str
    sampling: dict[str, Any]
    profiles: dict[str, dict[str, Any]]
    checkpoints: dict[str, Any]
    dtype: str
    device: str
    environment: dict[str, Any]
    environment_after: dict[str, Any]
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
    if data["kind"] not in kinds:
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
    try:
        bench = Bench.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: not a whole bench result: {where}: {first['msg']}") from None
    known = {a.name for a in bench.arms}
    for at, m in enumerate(bench.measurements):
        if m.arm not in known or any(not 0 <= r.prompt < len(bench.prompts) for r in m.rows):
            raise UsageError(f"{name}: not a whole bench result: measurement {at} names no known arm and prompt")
    return bench
