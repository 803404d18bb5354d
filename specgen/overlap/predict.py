"""Overlap → expected rounds and predicted speedup of every k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specgen.overlap.score import TextScores
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import pooled


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


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """As an overlap's document has them: c, and [max_k+1] costs of calls on 1, 2, … tokens, in units of a
    single-token target call; seconds as measured, None where given."""

    c: float
    verify: tuple[float, ...]
    draft_s: float | None = None
    target_s: Mapping[int, float] | None = None  # by the number of tokens in the call

    @classmethod
    def measured(cls, seconds: CallCosts, max_k: int) -> UnitCosts:
        own = seconds.with_first()
        return cls(own.draft, tuple(own.call(w) for w in range(1, max_k + 2)), seconds.draft, seconds.target)

    @property
    def calls(self) -> CallCosts:
        return CallCosts(dict(enumerate(self.verify, 1)), self.c)


def predictions(
    texts: Sequence[TextScores],
    ks: Sequence[int],
    costs: CallCosts,
    *,
    limit: int | None = None,
) -> list[Prediction]:
    """For each k, over all texts together."""
    found = []
    for k in ks:
        e = pooled([text.rounds(k, limit) for text in texts])
        counts = (e.tau, e.alpha, e.tested, e.accepted, e.rounds, e.drafted)
        found.append(Prediction(k, *counts, predicted_speedup(e, costs)))
    return found
