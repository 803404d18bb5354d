"""What a call has to read, and how fast the machine reads and writes: bytes and bandwidth."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

MEGABYTE = 1 << 20


def cache_bytes(model: Any) -> int:
    """Bytes of keys and values that a cached token takes, in all layers of a transformers model; 0 where its
    configuration does not say."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not layers or not heads:
        return 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * layers * kv_heads * size * next(model.parameters()).element_size())


def copy_bandwidth(device: torch.device, clock: Callable[[], float], *, repeats: int = 5) -> float:
    """Bytes read and written a second by the fastest of a few copies of a large tensor; 0 where the clock stands."""
    size = 256 * MEGABYTE if _free_bytes(device) > 2048 * MEGABYTE else 64 * MEGABYTE
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    copy = torch.zeros_like(source)
    times = []
    for _ in range(repeats):
        began = clock()
        copy.copy_(source)
        times.append(clock() - began)
    return 2 * size / min(times) if min(times) > 0 else 0.0


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
