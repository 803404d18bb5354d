"""The device that a model runs on, and the threads and cores that it runs with."""

from __future__ import annotations

import os

import psutil
import torch

from specgen.machine import cgroup


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is CUDA where there is one, else MPS, else the CPU. Raises ValueError."""
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
        else:
            name = "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} asked for, but torch sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} asked for, but torch sees {torch.cuda.device_count()} CUDA device(s)")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name!r} asked for, but torch sees no MPS device")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda, cuda:N, mps or auto")
    return device


def allowed_cores() -> float:
    """Cores that this process may use: its affinity, and the quotas of its control groups."""
    process = psutil.Process()
    allowed = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1
    quota = cgroup.cores()
    return float(allowed) if quota is None else min(float(allowed), quota)


def settle_threads() -> int:
    """Lets torch use no more threads than there are cores for it; how many it uses.

    More threads than cores wait for one another, which makes small operations a hundred times slower. What the user
    has set is left alone. It does not look at the load: another count of threads adds in another order, and the same
    seed has to give the same text.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > allowed_cores():
        torch.set_num_threads(max(1, int(allowed_cores())))
    return torch.get_num_threads()
