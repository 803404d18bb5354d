"""Clocks: the host's, a CUDA device's, and one that stands still; medians of interleaved calls."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def interleaved_medians(
    steps: dict[str, Callable[[], object]], clock: Callable[[], float], *, repeats: int = 5
) -> dict[str, float]:
    """Median seconds of each step, after one untimed call each, taken in turns so that drift hits all alike."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = clock()
            step()
            times[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in times.items()}


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
