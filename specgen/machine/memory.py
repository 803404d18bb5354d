"""What a call has to read, and how fast the machine reads and writes: bytes and bandwidth."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

MEGABYTE = 1 << 20


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


def free_memory() -> int | None:
    """Bytes that this process may still take; None where nobody says."""
    free = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # in a container; "max" is no number
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    return min(free) if free else None
