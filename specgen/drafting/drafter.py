"""What a drafter is: the protocol, and what it proposes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specgen.rounds.record import Ended
from specgen.sampling.processors import check_finite
from specgen.sampling.randomness import Uniforms


@dataclass(slots=True)
class Row:
    """One prompt of a batch on its way. tokens: prompt and committed text; limit: how long they may become."""

    number: int
    tokens: list[int]
    limit: int
    uniforms: Uniforms
    ended: Ended

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)

    def check(self, logits: Tensor, role: str, position: int) -> None:
        """Raises RunError naming model, prompt (counted from 1) and position where logits [n, V] are not finite."""
        check_finite(logits, f"{role} (prompt {self.number + 1} of the batch)", position)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens (n <= k) with the distributions [n, V] they were really drawn from."""

    tokens: tuple[int, ...]
    probs: Tensor


class Drafter(Protocol):
    """Proposes tokens one after another.

    `cached` tokens of the text are known to it; after a round the loop calls `rollback`, so that it never holds
    more than the committed text less one token.
    """

    kind: str

    @property
    def cached(self) -> int: ...

    def start(self, prompt: Sequence[int]) -> None:
        """A new text: forget the last one and take in all of the prompt but its last token."""
        ...

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal: ...

    def rollback(self, count: int) -> None: ...

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        """Teacher-forced, from scratch: (i, one distribution [V] a token from tokens[i] on, None where it would
        propose nothing), in chunks."""
        ...
