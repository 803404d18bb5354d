"""Memory: how much of it is free, and how fast the machine copies in it."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from specgen.machine import cgroup

MEGABYTE = 1 << 20


def copy_bandwidth(device: torch.device, clock: Callable[[], float], *, repeats: int = 5) -> float:
    """Bytes read and written a second by the fastest of a few copies of a large tensor; 0 where the clock stands."""
    size = 256 * MEGABYTE if free_memory(device) > 2048 * MEGABYTE else 64 * MEGABYTE
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    copy = torch.zeros_like(source)
    times = []
    for _ in range(repeats):
        began = clock()
        copy.copy_(source)
        times.append(clock() - began)
    return 2 * size / min(times) if min(times) > 0 else 0.0


def free_memory(device: torch.device | None = None) -> int:
    """Bytes that this process may still take: of a CUDA device's memory, else of the machine's, as far as its
    control groups let it."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available, left = psutil.virtual_memory().available, cgroup.memory_left()
    return available if left is None else min(available, left)
