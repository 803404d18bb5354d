"""The boundaries of an interval's coverage."""

from __future__ import annotations

import pytest

from specgen.analysis import intervals
from specgen.analysis.intervals import median_interval


@pytest.mark.parametrize(
    ("n", "coverage", "low", "high"),
    [
        (7, 0.875, 2, 6),  # the second of seven covers 1 − 2 · 8/128 = .875 to the bit
        (7, 0.8750001, 1, 7),
        (4, 0.375, 2, 3),  # the innermost pair of an even number
        (4, 0.3750001, 1, 4),
        (5, 0.375, 2, 4),
        (6, 0.3, 3, 4),
    ],
)
def test_a_pair_that_covers_just_as_much_as_is_asked_for_serves(n: int, coverage: float, low: int, high: int) -> None:
    found = median_interval([float(i) for i in range(1, n + 1)], coverage)
    assert (found.low, found.high) == (low, high)
    assert found.coverage is not None
    assert found.coverage >= coverage


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_widest_pair_is_given_where_it_covers_what_is_asked_for(n: int) -> None:
    values, widest = [float(i) for i in range(n)], 1 - 2 * 0.5**n
    assert median_interval(values, widest).coverage == widest
    assert median_interval(values, widest + 1e-9).coverage is None


def test_the_least_coverage_is_itself_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five values cover .9375, which is above the bound; at the bound they would still do, above it no longer."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert median_interval(values).coverage == 0.9375 > intervals.LEAST_COVERAGE > 0.875
    monkeypatch.setattr(intervals, "LEAST_COVERAGE", 0.9375)
    assert median_interval(values).coverage == 0.9375
    monkeypatch.setattr(intervals, "LEAST_COVERAGE", 0.94)
    assert median_interval(values).coverage is None
