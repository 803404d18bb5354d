"""Plain records and words that every room shares. Imports nothing of ours, and no torch.

The words are those of the field: a *round* proposes up to k tokens, scores k+1 positions in one target call,
verifies and commits (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Finish(StrEnum):
    """Why a generation ended."""

    END = "end"  # an end token
    STOP = "stop"  # a stop string
    LENGTH = "length"  # max_new_tokens


class Origin(StrEnum):
    """Who wrote a committed token."""

    ACCEPTED = "accepted"  # drafted, and kept by verification
    CORRECTION = "correction"  # drawn at the first rejection
    BONUS = "bonus"  # drawn from the target after all drafted tokens were kept (also when none was drafted)
    PLAIN = "plain"  # decoding without a draft


@dataclass(frozen=True, slots=True)
class Committed:
    """One committed token with the few numbers that the run's check of itself needs.

    log_prob: log target_probs[token], as used. entropy: of target_probs, in nats, as used.
    overlap: Σ min(target_probs, draft_probs), as used; None where nothing was drafted at the position.
    """

    token: int
    origin: Origin
    log_prob: float
    entropy: float
    support: int
    overlap: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round, as committed. Times in seconds.

    drafted: tokens proposed. tested: positions on which the rule was applied. accepted: drafted tokens committed.
    overlaps: Σ min(target_probs, draft_probs) at the tested positions.
    expected: the probability of acceptance there under the mode's own rule, where that is not the overlap.
    biases: total variation between the rule's law and target_probs there; approximate modes only.
    impossible: events that no correct exact run can show, in words.
    """

    index: int
    drafted: int
    tested: int
    accepted: int
    committed: tuple[Committed, ...]
    overlaps: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()
    biases: tuple[float, ...] = ()
    impossible: tuple[str, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    total_s: float = 0.0
    finish: Finish | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(c.token for c in self.committed)

    @property
    def other_s(self) -> float:
        """Everything that is neither drafting nor the target call: the rule, the roll-back, the loop."""
        return self.total_s - self.draft_s - self.verify_s


Ended = Callable[[int], Finish | None]  # told each committed token once, in order; says whether the text ends with it


def ends_at(end_tokens: Sequence[int]) -> Ended:
    """The plainest `Ended`: an end token, and nothing else, ends the text."""
    ends = frozenset(end_tokens)
    return lambda token: Finish.END if token in ends else None
