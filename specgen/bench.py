"""The measuring schedule: takes callables and a clock, knows no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable


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
