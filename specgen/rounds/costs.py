"""What calls cost, the time T(w) of a target call on w rows among it, and the speedup that follows. No torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from specgen.rounds.expected import ExpectedRounds


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What the parts of a round cost, all in one unit: seconds where they were measured, single-token target calls
    where they were given (T(1) = 1). Speedups are the same in either.

    target: {width: T(width)} of the widths known, at least one. draft: of a draft step. other: of the rest of a
    round; plain_other: of the rest of a step of plain decoding. Raises ValueError for no width, a width below 1 or a
    cost that is not a number of 0 or more.
    """

    target: Mapping[int, float]
    draft: float = 0.0
    other: float = 0.0
    plain_other: float = 0.0

    def __post_init__(self) -> None:
        if not self.target or min(self.target) < 1:
            raise ValueError("needs the cost of a call on at least one width, and widths of 1 or more")
        if not all(0 <= x < math.inf for x in (*self.target.values(), self.draft, self.other, self.plain_other)):
            raise ValueError("costs are numbers, 0 or more")

    @property
    def widest(self) -> int:
        return max(self.target)

    def call(self, width: int) -> float:
        """T(width). Of a width known, that very number; between two of them on the straight line, which may fall:
        kernels change with the width, and a call on 3 rows can cost more than one on 5.

        Beyond the widest on along the line through the last two, but never below the last. Those two are what is
        known nearest to where it is asked for: a line from the first to the last forgets where calls stop being free
        (29.2, 30.3 and 35.1 ms for 1, 9 and 13 rows), and a flat end makes every wide round look cheap. A fall at the
        end is taken for noise or for a kernel's edge, and not prolonged. Below the narrowest, and of a single width
        everywhere, that one's cost: the textbook's flat call.
        """
        known = sorted(self.target)
        at = bisect.bisect_left(known, width)
        if at == 0 or (at < len(known) and known[at] == width):
            return self.target[known[at]]
        if at == len(known):
            last = self.target[known[-1]]
            if len(known) == 1:
                return last
            slope = (last - self.target[known[-2]]) / (known[-1] - known[-2])
            return last + max(0.0, slope) * (width - known[-1])
        low, high = known[at - 1], known[at]
        slope = (self.target[high] - self.target[low]) / (high - low)
        return self.target[low] + slope * (width - low)

    def with_first(self, first: float = 1.0) -> CallCosts:
        """The same proportions where T(1) is `first`: in units of a single-token call, as they stand (draft is then
        c), or on a machine of another speed. Raises ValueError where T(1) is 0."""
        own = self.call(1)
        if not own:
            raise ValueError("a call that took no time is no unit")
        return CallCosts(
            {w: cost * first / own for w, cost in self.target.items()},
            *(cost * first / own for cost in (self.draft, self.other, self.plain_other)),
        )


def plain_time(expected: ExpectedRounds, costs: CallCosts) -> float:
    """What decoding the same text plainly takes."""
    return expected.tokens * (costs.call(1) + costs.plain_other)


def speculative_time(expected: ExpectedRounds, costs: CallCosts) -> float:
    calls = sum(count * costs.call(m + 1) for m, count in enumerate(expected.lengths) if count)
    return calls + expected.rounds * costs.other + expected.drafted * costs.draft


def predicted_speedup(expected: ExpectedRounds, costs: CallCosts) -> float:
    """Plain decoding time / speculative time for the same text."""
    return plain_time(expected, costs) / speculative_time(expected, costs)


def break_even_draft(expected: ExpectedRounds, costs: CallCosts) -> float | None:
    """The cost of a draft step at which the predicted speedup is 1, in the unit of `costs`; below 0 where not even a
    free draft would do. None where nothing is drafted."""
    if not expected.drafted:
        return None
    return (plain_time(expected, costs) - speculative_time(expected, replace(costs, draft=0.0))) / expected.drafted
