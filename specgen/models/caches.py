"""Key-value caches that are written in place: nothing is copied but the new tokens, and forgetting is a number.

transformers' own dynamic layers concatenate, which copies the whole cache once a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

FIRST = 256  # tokens there is room for at first; then half as many more as there are, whenever they run out


class InPlaceLayer(DynamicLayer):
    """A layer of full attention: keys and values [B, heads, length, head_dim] are the front of larger buffers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None
        super().__init__(*args, **kwargs)

    @property
    def keys(self) -> Tensor | None:
        """A view of what is cached: made when asked for, so that forgetting is no more than a number."""
        return None if self._buffers is None else self._buffers[0][:, :, : self._length]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._replace(0, value)

    @property
    def values(self) -> Tensor | None:
        return None if self._buffers is None else self._buffers[1][:, :, : self._length]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._replace(1, value)

    def _replace(self, index: int, value: Tensor | None) -> None:
        """What transformers' own methods (selecting or reordering rows) assign; None and empty ones mean nothing."""
        if value is None or value.numel() == 0:
            return
        assert self._buffers is not None
        other = self._buffers[1 - index]
        self._buffers = (value, other) if index == 0 else (other, value)
        self._length = value.shape[-2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [B, heads, n, head_dim]; all that is cached, the new ones included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, end = self._length, self._length + key_states.shape[-2]
        keys, values = self._room(end, key_states, value_states)
        keys[:, :, begin:end] = key_states
        values[:, :, begin:end] = value_states
        self._length = end
        return keys[:, :, :end], values[:, :, :end]

    def _room(self, length: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers that hold `length` tokens, with what is cached in front."""
        if self._buffers is None or self._buffers[0].shape[-2] < length:
            old, size = self._buffers, max(FIRST, length + length // 2)
            new = tuple(s.new_empty(*s.shape[:2], size, s.shape[-1]) for s in (key_states, value_states))
            if old is not None:
                for buffer, before in zip(new, old, strict=True):
                    buffer[:, :, : self._length] = before[:, :, : self._length]
            self._buffers = (new[0], new[1])
        return self._buffers

    def get_seq_length(self) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last −tokens_to_remove tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes 0 or less, not {tokens_to_remove}")
        self._length = max(0, self._length + tokens_to_remove)

    def reset(self) -> None:
        self._length, self._buffers, self.is_initialized = 0, None, False


def in_place(cache: DynamicCache) -> DynamicCache:
    """The same cache with every layer that only concatenates replaced; others (sliding, recurrent) are left alone."""
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = InPlaceLayer
    return cache


class Rows:
    """Where the next call's tokens go, for B rows that have cached different numbers of tokens; all layers share it.

    lengths: [B] int64, on the model's device, so that a captured graph can read and move them. Rolling a row back is
    a smaller length: what lies behind it is hidden by the mask and written over.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu") -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slots = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self.extent = 0

    def begin(self, n: int, extent: int) -> None:
        """The next call brings n tokens a row and sees the first `extent` slots (at least every length + n)."""
        self.slots = self.lengths[:, None] + torch.arange(n, device=self.lengths.device)
        self.extent = extent

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, n, extent], to be added to attention scores: a token sees its own slot and those before it."""
        visible = torch.arange(self.extent, device=self.slots.device) <= self.slots[:, None, :, None]
        return torch.zeros((), dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


class RaggedLayer(DynamicLayer):
    """A layer of full attention for rows of different lengths, written at each row's own slots.

    Its buffers are [B, heads, capacity, head_dim]; they grow when the extent outgrows them, unless `fixed`.
    """

    def __init__(self, rows: Rows, capacity: int = FIRST, *, fixed: bool = False) -> None:
        super().__init__()
        self.rows, self.capacity, self.fixed = rows, capacity, fixed
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [B, heads, n, head_dim] to the rows' slots; the first `extent` slots of all rows."""
        keys, values = self._room(key_states, value_states)
        row = torch.arange(len(key_states), device=key_states.device)[:, None]
        keys[row, :, self.rows.slots] = key_states.transpose(1, 2)
        values[row, :, self.rows.slots] = value_states.transpose(1, 2)
        return keys[:, :, : self.rows.extent], values[:, :, : self.rows.extent]

    def _room(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        wanted, old = self.rows.extent, self._buffers
        if self.fixed and wanted > self.capacity:
            raise ValueError(f"{wanted} slots wanted of {self.capacity}")
        if old is None or wanted > self.capacity:
            self.capacity = max(self.capacity, wanted + wanted // 2 if wanted > self.capacity else 0)
            # Zeros: a masked slot's weight is 0, and 0 times what lies in fresh memory may be NaN.
            new = [s.new_zeros(*s.shape[:2], self.capacity, s.shape[-1]) for s in (key_states, value_states)]
            for buffer, before in zip(new, old or (), strict=False):
                buffer[:, :, : before.shape[-2]] = before
            self._buffers = (new[0], new[1])
        assert self._buffers is not None
        return self._buffers

    def get_seq_length(self) -> int:
        return self.rows.extent - self.rows.slots.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.extent, 0

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows [b] of the batch only."""
        if self._buffers is not None:
            self._buffers = (self._buffers[0][rows], self._buffers[1][rows])


def ragged(config: Any, rows: Rows, capacity: int = FIRST, *, fixed: bool = False) -> DynamicCache:
    """A cache of ragged layers for a model's configuration. Raises ValueError where a layer is not full attention."""
    cache = DynamicCache(config=config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError("not every layer is full attention")
    cache.layers = [RaggedLayer(rows, capacity, fixed=fixed) for _ in cache.layers]
    return cache
