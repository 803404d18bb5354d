"""Drafters for several rows of text at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

from specgen.drafting.checkpoint import CheckpointRows, ModelDrafter
from specgen.drafting.drafter import Drafter, Proposal, Row
from specgen.drafting.ngram import NgramDrafter
from specgen.errors import UsageError
from specgen.models.causal import CausalLM
from specgen.models.ragged import RaggedLM


class RowsDrafter(Protocol):
    """A `Drafter` for B rows: `lengths[b]` tokens of row b are known to it."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def start(self, prompts: Sequence[Sequence[int]]) -> None: ...

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        """A proposal of up to ks[b] tokens for each row."""
        ...

    def rollback(self, counts: Sequence[int]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...


class EachRow:
    """A drafter without a model, once for every row."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._rows: list[NgramDrafter] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(drafter.cached for drafter in self._rows)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._rows = [copy.copy(self._drafter) for _ in prompts]
        for drafter, prompt in zip(self._rows, prompts, strict=True):
            drafter.start(prompt)  # from here on it shares nothing with what it is a copy of

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        return [
            drafter.propose(row.tokens, k, round_index, row.uniforms)
            for drafter, row, k in zip(self._rows, rows, ks, strict=True)
        ]

    def rollback(self, counts: Sequence[int]) -> None:
        for drafter, count in zip(self._rows, counts, strict=True):
            drafter.rollback(count)

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[b] for b in rows]


def for_rows(drafter: Drafter) -> RowsDrafter:
    """The same drafter for a batch. Raises UsageError for a kind that knows one row only."""
    if isinstance(drafter, NgramDrafter):
        return EachRow(drafter)
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.model, CausalLM):
        return CheckpointRows(RaggedLM(drafter.model), drafter.processors)
    raise UsageError(f"a draft of kind {drafter.kind} proposes for one prompt at a time: run with --batch-size 1")
