"""The one loop: propose, score, settle, roll back. A single prompt is a batch of one; plain decoding drafts nothing.

How the four steps are carried out is an `Executor`'s business: eagerly (`decoding.eager`), or as captured graphs
(`decoding.captured`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from specgen.drafting.drafter import Drafter, Row
from specgen.rounds.record import Round

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a row's last round looked at: n drafted tokens with the distributions [n, V] they were drawn from (no rows
    where all is greedy and the device kept none), and the logits and processed distributions [n+1, V] that verified
    them."""

    drafted: tuple[int, ...]
    draft_probs: Tensor
    logits: Tensor
    target_probs: Tensor


class Executor(Protocol):
    """The four steps of a round, for all rows that are still decoding.

    drafts: whether there is a drafter; without one every round is one of plain decoding.
    """

    drafts: bool

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill: both sides take in all of each prompt but its last token, which the first round feeds."""
        ...

    def begin(self, rows: Sequence[Row]) -> None:
        """From now on the rounds are those rows', whose prompts have been taken in."""
        ...

    def ready(self, live: Sequence[Row]) -> None:
        """Whatever must be there before the round begins, and is not timed."""
        ...

    def propose(self, live: Sequence[Row], most: Sequence[int], index: int) -> None:
        """Drafts up to most[b] tokens for each row."""
        ...

    def score(self, live: Sequence[Row]) -> int:
        """The target's call on each row's uncached and drafted tokens; how many tokens wide it was."""
        ...

    def settle(self, live: Sequence[Row], index: int) -> list[Round]:
        """The verified rounds, cut at their ends, without times. Changes no row. Raises RunError for logits that are
        not finite."""
        ...

    def roll_back(self, live: Sequence[Row]) -> None:
        """Leaves of each row no more cached than its committed text but the last token, whatever happened before."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only."""
        ...

    def seen(self, row: int) -> Seen:
        """For audits: the last round of the row that stood there when the round began."""
        ...

    def peek(self, row: int, text: Sequence[int]) -> Iterator[tuple[str, int, Tensor | None]]:
        """For audits: of each model ("target", "draft") how many tokens of the row's text it has cached, and the
        logits [V] that follow the text, computed with its cache and leaving that as it was; None where more is cached
        than may be."""
        ...

    def drafter_of(self, row: int) -> Drafter | None:
        """For audits: the row's own drafter, where it has one that proposes on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One round of every row that was still decoding. Times in seconds, of the whole step.

    rounds: by row; each carries the step's times. width: tokens a row in the target call, padding included. rows:
    how many were decoding.
    """

    index: int
    rounds: dict[int, Round]
    draft_s: float
    verify_s: float
    rollback_s: float
    total_s: float
    width: int
    rows: int


def steps(executor: Executor, rows: Sequence[Row], *, k: int, clock: Clock = time.perf_counter) -> Iterator[Step]:
    """Speculative generation (Leviathan et al. 2023, Algorithm 1) of rows whose prompts the executor has taken in.

    Yields a step at a time until every row has ended or is full, never overfull; k shrinks at the end. May be left
    early: what the models hold is then what is committed. Raises RunError.
    """
    live, index = list(rows), 0
    while live:
        executor.ready(live)
        began = drafted = clock()
        try:
            if executor.drafts:
                executor.propose(live, [min(k, row.room - 1) for row in live], index)
                drafted = clock()
            width = executor.score(live)
            verified = clock()
            settled = executor.settle(live, index)
            for row, finished in zip(
                live, settled, strict=True
            ):  # once all are settled: a step is whole or not at all
                row.tokens += finished.tokens
        finally:  # also when interrupted: a caller that goes on finds the caches right
            settling = clock()
            executor.roll_back(live)
        stay = [b for b, finished in enumerate(settled) if finished.finish is None]
        if 0 < len(stay) < len(live):
            executor.keep(stay)
        done = clock()
        times = (drafted - began, verified - drafted, done - settling, done - began)
        rounds = {row.number: timed(r, *times) for row, r in zip(live, settled, strict=True)}
        yield Step(index, rounds, *times, width=width, rows=len(live))
        live, index = [live[b] for b in stay], index + 1


def timed(settled: Round, draft_s: float, verify_s: float, rollback_s: float, total_s: float) -> Round:
    return replace(settled, draft_s=draft_s, verify_s=verify_s, rollback_s=rollback_s, total_s=total_s)


def rounds_of(steps: Iterator[Step]) -> Iterator[Round]:
    """The rounds of a batch of one."""
    for step in steps:
        (finished,) = step.rounds.values()
        yield finished
