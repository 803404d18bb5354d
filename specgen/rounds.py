"""Plain records and words that every room shares. Imports nothing of ours, and no torch.

The words are those of the field: a *round* proposes up to k tokens, scores k+1 positions in one target call,
verifies and commits (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class SpecgenError(Exception):
    """A run that failed: one or two lines that say what is wrong, where, and what to do. Exit code 1."""

    exit_code = 1


class RunError(SpecgenError):
    """The run itself failed: non-finite logits, out of memory, a cache that lost count. Exit code 1."""


class UsageError(SpecgenError):
    """The command, the profile or the pair is wrong; nothing was run. Exit code 2."""

    exit_code = 2


class Mode(StrEnum):
    """How a drafted token is verified; each mode's promise is in `PROMISES`."""

    EXACT = "exact"
    GREEDY = "greedy"
    COUPLED = "coupled"
    LENIENT = "lenient"
    TYPICAL = "typical"

    @property
    def approximate(self) -> bool:
        """Whether the law differs from the target's; its bias is measured and printed."""
        return self in (Mode.LENIENT, Mode.TYPICAL)


PROMISES = {
    Mode.EXACT: "the target's distribution, in exact arithmetic",
    Mode.GREEDY: "token for token what greedy decoding of the target yields, near ties of the two kinds of call "
    "aside",
    Mode.COUPLED: "the target's distribution, and the text of plain decoding with this seed whatever draft and k, "
    "near ties of the two kinds of call aside",
    Mode.LENIENT: "approximate: not the target's distribution; the bias is measured below",
    Mode.TYPICAL: "approximate: not the target's distribution; the bias is measured below",
}


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
class Sampling:
    """How the next-token distribution is made of the logits, and how tokens are verified: the effective settings.

    `temperature` is None in greedy mode, where it means nothing. `sources` says where each setting comes from
    (default, generation_config, profile, flag).
    """

    mode: Mode = Mode.EXACT
    k: int = 4
    max_new_tokens: int = 128
    seed: int = 0
    temperature: float | None = 1.0
    lenience: float = 0.5
    typical_epsilon: float = 0.3
    typical_delta: float = 0.09
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    ban: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


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
