"""Rounds → the numbers in the tables. A number has one function that computes it; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specgen.rounds.record import Round


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 90th percentile of a latency in seconds, over `n` values; share of the wall time of all rounds."""

    n: int
    median: float
    p90: float
    share: float | None = None


@dataclass(frozen=True, slots=True)
class PositionRate:
    """What became of the drafted tokens at one position of a round (1 = the first drafted)."""

    position: int
    drafted: int
    tested: int
    accepted: int
    overlap: float | None  # mean over the times tested

    @property
    def rate(self) -> float | None:
        return ratio(self.accepted, self.tested)


@dataclass(frozen=True, slots=True)
class Statistics:
    """A run's counts, rates and latencies. Rates are None where their denominator is 0."""

    rounds: int
    drafted: int
    tested: int
    accepted: int
    committed: int
    nothing_proposed: int  # rounds that could have drafted and did not
    predicted_alpha: float | None  # mean probability of acceptance under the mode's rule, over tested positions
    mean_bias: float | None  # total variation between law and target at tested positions; approximate modes only
    worst_bias: float | None
    positions: tuple[PositionRate, ...]
    draft_per_token: Spread
    verify: Spread
    rollback: Spread
    other: Spread
    decode_s: float

    @property
    def alpha(self) -> float | None:
        """Acceptance rate α = accepted / tested."""
        return ratio(self.accepted, self.tested)

    @property
    def tau(self) -> float | None:
        """Block efficiency τ = committed tokens per target call."""
        return ratio(self.committed, self.rounds)

    @property
    def accepted_fraction(self) -> float | None:
        """accepted / drafted, which falls as k grows: not the acceptance rate."""
        return ratio(self.accepted, self.drafted)

    @property
    def tokens_per_second(self) -> float | None:
        """Committed tokens per second of decoding; the prefill is not in it."""
        return ratio(self.committed, self.decode_s)


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _spread(values: Sequence[float], share: float | None = None) -> Spread:
    if not values:
        return Spread(0, float("nan"), float("nan"), share)
    return Spread(len(values), float(np.median(values)), float(np.percentile(values, 90)), share)


def _position(rounds: Sequence[Round], j: int) -> PositionRate:
    overlaps = [r.overlaps[j - 1] for r in rounds if r.tested >= j]
    return PositionRate(
        j,
        drafted=sum(r.drafted >= j for r in rounds),
        tested=len(overlaps),
        accepted=sum(r.accepted >= j for r in rounds),
        overlap=float(np.mean(overlaps)) if overlaps else None,
    )


def summarise(rounds: Sequence[Round], *, drafting: bool = True) -> Statistics:
    """The statistics of one run's finished rounds. drafting: whether there was a drafter at all."""
    total = sum(r.total_s for r in rounds)
    expected = [e for r in rounds for e in (r.expected or r.overlaps)]
    biases = [b for r in rounds for b in r.biases]
    deepest = max((r.drafted for r in rounds), default=0)

    def share(seconds: float) -> float | None:
        return ratio(seconds, total)

    # A last round with room for one token only had no choice but to draft nothing.
    could_draft = [r for r in rounds if not (r.drafted == 0 and r.finish == "length")] if drafting else []
    return Statistics(
        rounds=len(rounds),
        drafted=sum(r.drafted for r in rounds),
        tested=sum(r.tested for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        committed=sum(len(r.committed) for r in rounds),
        nothing_proposed=sum(r.drafted == 0 for r in could_draft),
        predicted_alpha=float(np.mean(expected)) if expected else None,
        mean_bias=float(np.mean(biases)) if biases else None,
        worst_bias=max(biases, default=None),
        positions=tuple(_position(rounds, j) for j in range(1, deepest + 1)),
        draft_per_token=_spread(
            [r.draft_s / r.drafted for r in rounds if r.drafted], share(sum(r.draft_s for r in rounds))
        ),
        verify=_spread([r.verify_s for r in rounds], share(sum(r.verify_s for r in rounds))),
        rollback=_spread([r.rollback_s for r in rounds], share(sum(r.rollback_s for r in rounds))),
        other=_spread([r.other_s for r in rounds], share(sum(r.other_s for r in rounds))),
        decode_s=total,
    )
