"""Overlap → expected rounds and predicted speedup of every k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.overlap.score import TextScores
from specgen.rounds.expected import pooled, predicted_speedup


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one k would give. alpha: accepted / tested, None where nothing would be tested."""

    k: int
    tau: float
    alpha: float | None
    tested: tuple[float, ...]
    accepted: tuple[float, ...]
    rounds: float
    drafted: float
    speedup: float


def predictions(
    texts: Sequence[TextScores],
    ks: Sequence[int],
    *,
    draft_cost: float,
    verify_cost: Sequence[float],
    limit: int | None = None,
) -> list[Prediction]:
    """For each k, over all texts together. draft_cost, verify_cost: as for `predicted_speedup`."""
    found = []
    for k in ks:
        e = pooled([text.rounds(k, limit) for text in texts])
        speedup = predicted_speedup(e, draft_cost=draft_cost, verify_cost=verify_cost[: k + 1])
        found.append(Prediction(k, e.tau, e.alpha, e.tested, e.accepted, e.rounds, e.drafted, speedup))
    return found
