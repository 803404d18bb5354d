"""A model's cache at fixed addresses, as captured calls need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgen.errors import CaptureError, RunError
from specgen.models.caches import RaggedLayer, Rows, ragged
from specgen.models.causal import CausalLM
from specgen.models.protocol import PREFILL_CHUNK
from specgen.models.rope import rope_changes_with_length

FIRST_TIER = 256  # slots that a captured call sees at least; then twice as many


FINE = 4096  # above it four tiers to a doubling: attention to slots that are not in use costs more than graphs do


AHEAD = 2048  # generated tokens for which there is room from the start; more only when they come


def tier(slots: int) -> int:
    """The smallest extent that holds so many: FIRST_TIER times a power of two, above FINE also quarters between."""
    size = FIRST_TIER
    while size < slots:
        size *= 2
    step = size // 8
    return size if size <= FINE else -(-slots // step) * step


class _OneRow(RaggedLayer):
    """A ragged layer for a single row: one kernel writes its tokens.

    transformers' `StaticLayer` would not do: it writes behind a counter of its own instead of at slots given, lets
    attention see all its slots instead of the first `extent`, and cannot grow.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._room(key_states, value_states)
        keys.index_copy_(2, self.rows.slots[0], key_states)
        values.index_copy_(2, self.rows.slots[0], value_states)
        return keys[:, :, : self.rows.extent], values[:, :, : self.rows.extent]

    def grow(self, capacity: int) -> None:
        self.capacity = capacity
        if self._buffers is not None:
            keys, values = (b.new_zeros(*b.shape[:2], capacity, b.shape[-1]) for b in self._buffers)
            for new, old in zip((keys, values), self._buffers, strict=True):
                new[:, :, : old.shape[2]] = old
            self._buffers = (keys, values)

    def clear(self) -> None:
        for buffer in self._buffers or ():
            buffer.zero_()


class StaticCache:
    """One model's cache at fixed addresses. version: changes whenever the addresses do.

    Raises ValueError where a layer is not full attention.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.dtype: torch.dtype = model.model.dtype
        self.rows = Rows(1, model.device)
        self.capacity, self.version = FIRST_TIER, 0
        self.cache = ragged(model.model.config, self.rows, FIRST_TIER, fixed=True)
        self.cache.layers = [_OneRow(self.rows, FIRST_TIER, fixed=True) for _ in self.cache.layers]

    def grow(self, capacity: int) -> None:
        """Room for so many slots, with what is cached."""
        if capacity > self.capacity:
            for layer in self.cache.layers:
                layer.grow(capacity)
            self.capacity, self.version = capacity, self.version + 1

    @torch.inference_mode()
    def clear(self) -> None:
        """Forgets even what is hidden: a weight of 0 times NaN is NaN."""
        for layer in self.cache.layers:
            layer.clear()

    def forward(
        self, tokens: Tensor, slots: Tensor, rows: int, extent: int, positions: Tensor | None = None
    ) -> Tensor:
        """Writes tokens [n] to slots [n], which are also their positions unless given; logits [rows, V] of the last.

        extent: how many slots attention looks at.
        """
        self.rows.slots, self.rows.extent = slots[None], extent
        return self.model.call(
            tokens[None],
            rows,
            self.cache,
            cached=extent,
            attention_mask=self.rows.mask(self.dtype),
            position_ids=(slots if positions is None else positions)[None],
        )[0]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Caches tokens from slot 0 on, in chunks."""
        for first in range(0, len(tokens), PREFILL_CHUNK):
            chunk = torch.tensor(tokens[first : first + PREFILL_CHUNK], device=self.model.device)
            slots = torch.arange(first, first + len(chunk), device=self.model.device)
            self.forward(chunk, slots, 1, min(self.capacity, -(-(first + len(chunk)) // 64) * 64))

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Whether calls on this cache give what a call without one does, also after a roll-back.

        Not every architecture reads its positions and its mask from its arguments.
        """
        n, kept, device = 24, 8, self.model.device
        limit = min(self.model.vocabulary, int(self.model.model.get_input_embeddings().weight.shape[0]))
        first = torch.arange(n, device=device) * 7 % limit
        second = torch.cat([first[:kept], (first[:4] + 3) % limit])
        slots = torch.arange(n, device=device)
        self.forward(first, slots, 1, FIRST_TIER)
        got = self.forward(second[kept:], slots[kept : len(second)], 4, FIRST_TIER)
        wanted = self.model.call(second[None], 4, None)[0]
        known = wanted > torch.finfo(wanted.dtype).min  # the rest is vocabulary that only the other side has
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        far = (got - wanted)[known].abs().max() > tolerance * wanted[known].abs().max()
        return not bool(far)


def static_cache(model: CausalLM) -> StaticCache:
    """A static cache for the model, tried before it is trusted. Raises CaptureError, with the reason."""
    name = f"the {model.role} ({type(model.model).__name__})"
    places = getattr(model.model, "hf_device_map", None) or {}
    if len({str(place) for place in places.values()}) > 1:
        raise CaptureError(f"{name} is spread over several devices")
    if rope_changes_with_length(model.model):
        raise CaptureError(f"{name} changes its rotary embedding with the text's length")
    try:
        cache = StaticCache(model)
    except ValueError as error:
        raise CaptureError(f"{name} cannot have a static cache: {error}") from error
    try:
        agrees = cache.agrees()
    except (RunError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CaptureError(f"{name} cannot run on a static cache: {first_line(error)}") from error
    if not agrees:
        raise CaptureError(f"{name} gives other logits on a static cache")
    return cache


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
