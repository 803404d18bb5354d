"""Medians with order-statistic intervals, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_COVERAGE = 0.93  # an interval that covers less often is not given


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of `n` values, and two of the values that enclose the median of what they were drawn from with
    probability `coverage`. low, high and coverage are None where n is too small for `LEAST_COVERAGE`."""

    estimate: float
    low: float | None
    high: float | None
    coverage: float | None
    n: int


def median_interval(values: Sequence[float], coverage: float = 0.95) -> Interval:
    """The order-statistic interval of the median, for values drawn independently from any continuous law.

    The r-th smallest and the r-th largest enclose the median unless fewer than r of n fair coins fall on one side:
    coverage 1 − 2 P(Binomial(n, 1/2) < r). The largest r that reaches `coverage`; where none does the widest pair
    (n = 5 covers .9375), and no interval below `LEAST_COVERAGE`. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    ordered, n = sorted(values), len(values)
    covered = 1 - 2 * 0.5**n
    r = 1
    while 2 * (r + 1) <= n and (wider := _pair_coverage(n, r + 1)) >= coverage:
        covered, r = wider, r + 1
    estimate = float(np.median(ordered))
    if covered < min(coverage, LEAST_COVERAGE):
        return Interval(estimate, None, None, None, n)
    return Interval(estimate, float(ordered[r - 1]), float(ordered[n - r]), covered, n)


def _pair_coverage(n: int, r: int) -> float:
    return 1 - 2 * sum(math.comb(n, i) for i in range(r)) / 2**n


def interval_text(interval: Interval | None) -> str:
    """1.32 [1.25, 1.41]; the estimate alone where there were too few groups for an interval."""
    if interval is None:
        return "-"
    if interval.low is None:
        return f"{interval.estimate:.2f}"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
