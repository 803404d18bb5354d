"""What the loop asks of a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

PREFILL_CHUNK = 512  # tokens a call: bounds the activations of a long prompt


class LanguageModel(Protocol):
    """What the loop needs of a model. `lengths[b]` tokens of row b are cached; `vocabulary` columns are returned."""

    role: str
    vocabulary: int

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        """Appends tokens [B, n] to the cache; logits [B, rows, V] that follow each of the last `rows` of them."""
        ...

    def rollback(self, counts: Sequence[int]) -> None:
        """Forgets the last counts[b] >= 0 cached tokens of row b. Called once a round, also with 0."""
        ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        """Teacher-forced logits without the cache: (i, [m, V]) in chunks, row 0 of a chunk predicting tokens[i]."""
        ...


def prefill(model: LanguageModel, tokens: Sequence[int]) -> None:
    """Caches tokens in chunks; their logits are not wanted."""
    for first in range(0, len(tokens), PREFILL_CHUNK):
        model.forward(torch.tensor([tokens[first : first + PREFILL_CHUNK]]), 1)
        model.rollback([0])
