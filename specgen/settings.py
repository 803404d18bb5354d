"""The modes with their promises, and the effective settings of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


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
