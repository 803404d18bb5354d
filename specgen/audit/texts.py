"""Checks `greedy`, `invariance` and `seeds`: whole texts against plain decoding's, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specgen.rounds.record import Round

INVARIANCE_K = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where two texts differ. margins: of the token chosen over the other's, by kind of call.

    explained: each call's own logits give the token it wrote, and the two calls' logits differ by rounding only.
    """

    position: int
    plain_token: int
    token: int
    plain_margin: float
    margin: float
    difference: float
    explained: bool

    def __str__(self) -> str:
        verdict = "a tie broken by arithmetic" if self.explained else "not explained by rounding: a bug"
        return (
            f"position {self.position}: plain decoding wrote {self.plain_token} (margin {self.plain_margin:.3g} in "
            f"its one-token call), the loop {self.token} (margin {self.margin:.3g} in its verification call); the "
            f"calls' scores of the two differ by {self.difference:.3g}: {verdict}"
        )


def bits_of(r: Round) -> tuple[Any, ...]:
    """What two runs with one seed must share, to the bit."""
    return (r.committed, r.overlaps, r.drafted, r.tested, r.accepted, r.finish)
