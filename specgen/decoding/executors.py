"""Which executor carries out the rounds of a pair: the one list of engines' loops."""

from __future__ import annotations

from specgen.decoding.captured.fits import loop_for
from specgen.decoding.captured.loop import GraphLoop
from specgen.decoding.eager import Eager, alone
from specgen.decoding.pair import Pair
from specgen.errors import CaptureError


def executor_for(
    pair: Pair, *, rows: int | None = None, plain: bool = False, longest: int = 1
) -> tuple[Eager | GraphLoop, str | None]:
    """The executor, and why it is not the one that the engine asks for, where it is not.

    rows: of a batch; None, or 1, for a single prompt in the models' own caches. longest: tokens of the longest
    prompt, for which the captured loop makes room and graphs. Raises UsageError where such models have no batch.
    """
    drafter = None if plain else pair.drafter
    note = None
    if pair.target.engine == "graph" and (rows is None or rows == 1):
        try:
            loop = loop_for(pair, plain=plain)
            loop.prepare(longest, pair.sampling.max_new_tokens)
            return loop, None
        except CaptureError as reason:
            note = f"engine graph cannot serve, the eager loop does: {reason}"
    if rows is None or rows == 1:
        return alone(pair.target, drafter, pair.processors, pair.verified_by), note
    proposes = None if drafter is None else drafter.for_rows(rows)
    return Eager(pair.target.for_rows(), proposes, pair.processors, pair.verified_by), note
