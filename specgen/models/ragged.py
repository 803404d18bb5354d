"""A causal language model for several rows of different lengths."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specgen.errors import UsageError
from specgen.models.caches import Rows, in_place, ragged
from specgen.models.protocol import PREFILL_CHUNK
from specgen.models.rope import rope_changes_with_length

if TYPE_CHECKING:
    from specgen.models.causal import CausalLM


class RaggedLM:
    """The transformers model of a `CausalLM` for B rows of text, with a cache of its own; the other's stays as it is.

    Row b's next tokens go to slots lengths[b], lengths[b] + 1, …, which are also their positions. A row that brings
    fewer than the others is padded on the right: only other padding sees a padded slot, and the row's next tokens
    are written over it. Raises UsageError where a layer is not full attention, or positions cannot be given.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model, self.role, self.vocabulary, self.context = model, model.role, model.vocabulary, model.context
        hf = model.model
        name = f"the {model.role} ({type(hf).__name__})"
        alibi = getattr(hf.config.get_text_config(), "alibi", False)  # positions come from the mask's own shape
        if alibi or "position_ids" not in inspect.signature(hf.forward).parameters:
            raise UsageError(f"{name} cannot be told the positions of a batch's rows: run with --batch-size 1")
        if rope_changes_with_length(hf):
            raise UsageError(
                f"{name} changes its rotary embedding with the longest row, so that a row's text would depend on its "
                "neighbours: run with --batch-size 1"
            )
        try:
            ragged(hf.config, Rows(0))
        except ValueError:
            raise UsageError(
                f"{name} has sliding or recurrent layers, and a batch needs full attention in every layer: run with "
                "--batch-size 1"
            ) from None
        self._reset(0)

    def _reset(self, batch: int) -> None:
        self._rows = Rows(batch, self.model.device)
        self._cache = ragged(self.model.model.config, self._rows)
        self._set([0] * batch)

    def _set(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._rows.lengths = torch.tensor(lengths, dtype=torch.int64, device=self.model.device)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._lengths

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each row alone, in the calls of a single run, so that what it caches is what that run caches."""
        self._reset(len(prompts))
        longest = max(len(p) for p in prompts) - 1
        if longest == 0:
            return
        alone = [self._prefilled(p[:-1]) for p in prompts]
        self._rows.begin(longest, longest)
        for i, layer in enumerate(self._cache.layers):
            layers = [cache.layers[i] for cache in alone]
            layer.update(_stacked([x.keys for x in layers], longest), _stacked([x.values for x in layers], longest))
        self._set([len(p) - 1 for p in prompts])

    def _prefilled(self, tokens: Sequence[int]) -> Any:
        cache = in_place(DynamicCache(config=self.model.model.config))
        for first in range(0, len(tokens), PREFILL_CHUNK):
            self.model.call(torch.tensor([tokens[first : first + PREFILL_CHUNK]]), 1, cache, cached=first)
        return cache

    @torch.inference_mode()
    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        n, longest = tokens.shape[-1], max(self._lengths)
        self._rows.begin(n, longest + n)
        slots = self._rows.slots
        real = torch.arange(n) < torch.tensor(counts)[:, None]
        logits = self.model.call(
            tokens,
            n,
            self._cache,
            cached=longest,
            attention_mask=self._rows.mask(self.model.model.dtype),
            position_ids=torch.where(real.to(slots.device), slots, 0),  # padding may lie beyond the last position
        )
        self._set([length + count for length, count in zip(self._lengths, counts, strict=True)])
        return logits

    def rollback(self, counts: Sequence[int]) -> None:
        for b, (length, count) in enumerate(zip(self._lengths, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot roll back {count} of {length} cached tokens of row {b}")
        if any(counts):
            self._set([length - count for length, count in zip(self._lengths, counts, strict=True)])

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        kept = torch.tensor(rows, device=self.model.device)
        for layer in self._cache.layers:
            layer.keep(kept)
        self._set([self._lengths[b] for b in rows])


def _stacked(parts: Sequence[Tensor | None], length: int) -> Tensor:
    """[B, heads, length, head_dim] from one [1, heads, m, head_dim] a row, zeros behind; None where m is 0."""
    shape = next(p for p in parts if p is not None)
    whole = shape.new_zeros(len(parts), shape.shape[1], length, shape.shape[3])
    for row, part in zip(whole, parts, strict=True):
        if part is not None:
            row[:, : part.shape[-2]] = part[0]
    return whole
