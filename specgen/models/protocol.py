"""What the loop asks of a language model: of one row of text, and of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specgen.errors import UsageError

PREFILL_CHUNK = 512  # tokens a call: bounds the activations of a long prompt


class RowsModel(Protocol):
    """A model for B rows of text. `lengths[b]` tokens of row b are cached; `vocabulary` columns are returned."""

    role: str
    vocabulary: int
    context: int | None

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """A new batch: row b takes in all of prompts[b] but its last token."""
        ...

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Appends the first counts[b] of row b's tokens [B, n]; logits [B, n, V], of which row b's first counts[b]
        mean something."""
        ...

    def rollback(self, counts: Sequence[int]) -> None:
        """Forgets the last counts[b] >= 0 cached tokens of row b. Called once a round, also with 0."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order."""
        ...


class LanguageModel(Protocol):
    """A model for one row of text. A class that names this one as its base has its defaults.

    engine: how its calls are executed. dtype: of its weights. context: the most tokens that it holds, None where
    nobody says. windowed: whether layers see no more than a window, so that it cannot be rolled back far. bytes_read:
    of the weights that a call on one token reads, and of each cached token's keys and values; zeros where they are
    not known.
    """

    role: str
    vocabulary: int
    engine: str = "eager"
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    context: int | None = None
    windowed: bool = False
    bytes_read: tuple[int, int] = (0, 0)

    @property
    def lengths(self) -> tuple[int, ...]:
        """[1]: how many tokens are cached."""
        ...

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        """Appends tokens [1, n] to the cache; logits [1, rows, V] that follow each of the last `rows` of them."""
        ...

    def rollback(self, counts: Sequence[int]) -> None:
        """Forgets the last counts[0] >= 0 cached tokens. Called once a round, also with 0."""
        ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        """Teacher-forced logits without the cache: (i, [m, V]) in chunks, row 0 of a chunk predicting tokens[i]."""
        ...

    def for_rows(self) -> RowsModel:
        """The same weights for several rows, with a cache of their own. Raises UsageError where it has none."""
        raise UsageError(f"the {self.role} decodes one prompt at a time: run with --batch-size 1")


class OneRow:
    """A `LanguageModel` as a batch of one, in the calls and with the cache that it has anyway."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.role, self.vocabulary, self.context = model, model.role, model.vocabulary, model.context
        self.rollback = model.rollback

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.model.lengths

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.model.reset()
        prefill(self.model, prompts[0][:-1])

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        return self.model.forward(tokens, counts[0])

    def keep(self, rows: Sequence[int]) -> None:
        """There is no other row to leave."""


def prefill(model: LanguageModel, tokens: Sequence[int]) -> None:
    """Caches tokens in chunks; their logits are not wanted."""
    for first in range(0, len(tokens), PREFILL_CHUNK):
        model.forward(torch.tensor([tokens[first : first + PREFILL_CHUNK]]), 1)
        model.rollback([0])


def padded(feeds: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """tokens [B, n] and counts [B] of rows that bring different numbers of tokens."""
    counts = [len(feed) for feed in feeds]
    return torch.tensor([[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds]), counts
