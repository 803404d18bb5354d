"""What a drafter is: the protocol, for one row of text and for several, and what it proposes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor

from specgen.errors import UsageError
from specgen.models.protocol import LanguageModel, OneRow, RowsModel
from specgen.rounds.record import Ended
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import Uniforms

if TYPE_CHECKING:
    from specgen.profiles.schema import DraftSettings


@dataclass(slots=True)
class Row:
    """One prompt on its way. tokens: prompt and committed text; limit: how long they may become.

    number: its place in the batch. name: what errors call it besides the model's role.
    """

    number: int
    tokens: list[int]
    limit: int
    uniforms: Uniforms
    ended: Ended
    name: str = ""

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a drafter may be made of.

    settings: the profile's draft section. target, processors: what it is to draft for, and how that one's logits
    become probabilities. model, own_processors: the draft's checkpoint, and the same processors on its device; None
    where the settings name no checkpoint.
    """

    settings: DraftSettings
    target: LanguageModel
    processors: Processors
    model: LanguageModel | None = None
    own_processors: Processors | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens (n <= k) with the distributions [n, V] they were really drawn from."""

    tokens: tuple[int, ...]
    probs: Tensor


class RowsDrafter(Protocol):
    """A drafter for B rows: `lengths[b]` tokens of row b are known to it. model: the one it calls, if it is one."""

    model: RowsModel | None

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def start(self, prompts: Sequence[Sequence[int]]) -> None: ...

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        """A proposal of up to ks[b] tokens for each row."""
        ...

    def rollback(self, counts: Sequence[int]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def of_row(self, row: int) -> Drafter | None:
        """The row's own drafter; None where one model drafts for all."""
        ...


class Drafter(Protocol):
    """Proposes tokens one after another for one row of text. Classes that name this one as their base have its
    defaults.

    `cached` tokens of the text are known to it; after a round the loop calls `rollback`, so that it never holds
    more than the committed text less one token.

    kind: what a profile calls it.
    model, processors: the model it calls, and how that one's logits become the distributions it draws from; None for
    a drafter without a model. chain: whether it proposes k draws from those distributions one after another, no more
    and no less, so that a captured loop may make the same draws on the device; any other proposes on the host.
    """

    kind: str
    model: LanguageModel | None = None
    processors: Processors | None = None
    chain: bool = False

    @classmethod
    def made(cls, ingredients: Ingredients) -> Drafter:
        """From a profile's settings, of this kind's own class."""
        reason = f"no profile has a draft of kind {cls.kind}"
        raise NotImplementedError(reason)

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

    def over(self, model: LanguageModel) -> Self:
        """The same drafter on another model in place of its own."""
        other = copy.copy(self)
        other.model = model
        return other

    def for_rows(self, rows: int) -> RowsDrafter:
        """The same drafter for so many rows. Raises UsageError for a kind that knows one row only."""
        if self.model is not None:  # copies would write to one cache
            raise UsageError(
                f"a draft of kind {self.kind} proposes for one prompt at a time: run with --batch-size 1"
            )
        return EachRow([copy.copy(self) for _ in range(rows)])


class EachRow:
    """A drafter for every row. `start` leaves them nothing in common, though they may have been copies of one."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = list(drafters)
        own = [drafter.model for drafter in drafters if drafter.model is not None]
        self.model: RowsModel | None = OneRow(own[0]) if len(own) == 1 else None

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(drafter.cached for drafter in self._drafters)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        for drafter, prompt in zip(self._drafters, prompts, strict=True):
            drafter.start(prompt)

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        return [
            drafter.propose(row.tokens, k, round_index, row.uniforms)
            for drafter, row, k in zip(self._drafters, rows, ks, strict=True)
        ]

    def rollback(self, counts: Sequence[int]) -> None:
        for drafter, count in zip(self._drafters, counts, strict=True):
            drafter.rollback(count)

    def keep(self, rows: Sequence[int]) -> None:
        self._drafters = [self._drafters[b] for b in rows]

    def of_row(self, row: int) -> Drafter:
        return self._drafters[row]
