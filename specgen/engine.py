"""How a model call is executed and timed on a device: eager, with packed weights, or as a captured graph."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


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


@functools.total_ordering
class Mark:
    """A moment of a CUDA device's own time. The difference of two is seconds, for which alone the host waits.

    Behaves as a number of seconds does where it is compared, or where seconds are added.
    """

    def __init__(self, event: torch.cuda.Event, offset: float = 0.0) -> None:
        self._event, self._offset = event, offset

    @classmethod
    def now(cls, device: torch.device) -> Mark:
        """Behind all that has been given to the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def __sub__(self, earlier: Mark) -> float:
        self._event.synchronize()
        earlier._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000 + self._offset - earlier._offset

    def __add__(self, seconds: float) -> Mark:
        return Mark(self._event, self._offset + seconds)

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark) and self - other == 0

    def __lt__(self, other: Mark) -> bool:
        return self - other < 0

    __hash__ = None  # type: ignore[assignment]


def _allowed_cores() -> float:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        allowed = min(allowed, float(quota) / float(period))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        pass
    return allowed


def settle_threads() -> int:
    """Lets torch use no more threads than there are cores for it; how many it uses.

    More threads than cores wait for one another, which makes small operations a hundred times slower. What the user
    has set is left alone. It does not look at the load: another count of threads adds in another order, and the same
    seed has to give the same text.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > _allowed_cores():
        torch.set_num_threads(max(1, int(_allowed_cores())))
    return torch.get_num_threads()


def untimed() -> float:
    """A clock that stands still, for a loop that is not to time itself."""
    return 0.0


def clock_for(device: torch.device) -> Callable[[], Any]:
    """What to read the time from: differences are seconds of what the device did in between.

    On CUDA marks in the device's own queue, which cost the host next to nothing until they are subtracted; on MPS
    the host's time once the device has finished; else the host's.
    """
    if device.type == "cuda":
        return functools.partial(Mark.now, device)
    if device.type == "mps":

        def mps_clock() -> float:
            torch.mps.synchronize()
            return time.perf_counter()

        return mps_clock
    return time.perf_counter


ENGINES = ("auto", "eager", "packed", "graph")


def prepare(model: Any, engine: str) -> str:
    """Readies a loaded transformers model for an engine, in place; the engine that it now runs under.

    auto: packed on a CPU that can, graph on CUDA, eager elsewhere. Raises ValueError, with a sentence, where the
    engine asked for cannot be had.
    """
    from specgen.packing import pack, packs

    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}")
    on_cpu = model.device.type == "cpu"
    if engine == "packed" and not on_cpu:
        raise ValueError(f"engine packed is for the CPU, and the model is on {model.device}: use auto or eager")
    if engine == "packed" and not packs(model.dtype):
        raise ValueError(
            f"engine packed: this torch and CPU have no packed {str(model.dtype).removeprefix('torch.')} linears: "
            "use float32 or bfloat16, or engine eager"
        )
    if engine == "graph" and model.device.type != "cuda":
        raise ValueError(f"engine graph needs a CUDA device, and the model is on {model.device}: use auto")
    if engine == "graph" or (engine == "auto" and model.device.type == "cuda"):
        return "graph"
    if engine == "eager" or not on_cpu or not packs(model.dtype):
        return "eager"
    if pack(model):
        return "packed"
    if engine == "packed":
        raise ValueError("engine packed: this model has no linear that is worth packing: use auto or eager")
    return "eager"
