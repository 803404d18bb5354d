"""Acceptance from text alone: two teacher-forced passes and no speculation; numbers a position are all that is kept.

First plain arithmetic on those numbers, then what asks the models for them, then what costs of calls are measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.drafting.drafter import Drafter
from specgen.models.protocol import LanguageModel
from specgen.rounds.expected import ExpectedRounds, expected_rounds
from specgen.sampling.processors import Processors, build_processors, check_finite
from specgen.settings import Sampling
from specgen.verification.law import coupled_joint, overlap

TEMPERATURES = (0.0, 0.5, 0.7, 1.0)


BLOCK = 32  # rows that are processed at once, at each temperature


@dataclass(frozen=True, slots=True)
class TextScores:
    """A text's scored positions, n of them; all but `overlaps` at the profile's own temperature.

    target_log_probs: of the text's token. ratios: min(1, draft(x)/target(x)) of it; where the target gives it 0, so
    that it cannot be the target's own text, the overlap stands in. Both ratio and overlap are 0 where the draft
    proposes nothing (`proposes`): nothing is tested there, and means leave these positions out.
    overlaps: {temperature: [n]}, 0 being greedy, where an overlap is 1 or 0: agreement.
    """

    tokens: tuple[int, ...]
    target_log_probs: tuple[float, ...]
    ratios: tuple[float, ...]
    proposes: tuple[bool, ...]
    overlaps: Mapping[float, tuple[float, ...]]
    temperature: float
    windows: int = 1

    @property
    def overlap(self) -> tuple[float, ...]:
        return self.overlaps[self.temperature]

    @property
    def impossible(self) -> int:
        """Tokens to which the target, at the profile's settings, gives probability 0."""
        return sum(lp == -math.inf for lp in self.target_log_probs)

    def at(self, temperature: float) -> list[float]:
        """The overlaps at a temperature, where there is a proposal."""
        return list(itertools.compress(self.overlaps[temperature], self.proposes))

    def rounds(self, k: int, limit: int | None = None) -> ExpectedRounds:
        return expected_rounds(self.ratios, k, limit=limit, proposes=self.proposes)

    def positions(self) -> dict[str, list[Any]]:
        """The columns of the JSON: null for a log-probability of −∞, and for what nothing was proposed for."""

        def proposed(values: Sequence[float]) -> list[float | None]:
            return [v if p else None for v, p in zip(values, self.proposes, strict=True)]

        return {
            "token": list(self.tokens),
            "target_log_prob": [lp if math.isfinite(lp) else None for lp in self.target_log_probs],
            "ratio": proposed(self.ratios),
            "overlap": proposed(self.overlap),
        }


def scores_from_positions(columns: Mapping[str, Sequence[Any]], temperature: float) -> TextScores:
    """What `positions` wrote, read again; of the overlaps only those at the profile's own temperature."""
    return TextScores(
        tokens=tuple(columns["token"]),
        target_log_probs=tuple(-math.inf if lp is None else lp for lp in columns["target_log_prob"]),
        ratios=tuple(0.0 if r is None else r for r in columns["ratio"]),
        proposes=tuple(r is not None for r in columns["ratio"]),
        overlaps={temperature: tuple(0.0 if o is None else o for o in columns["overlap"])},
        temperature=temperature,
    )


def at_temperature(processors: Processors, sampling: Sampling, temperature: float) -> Processors:
    """The same processors with another temperature; 0: greedy, which leaves out all that only shapes a sample."""
    warpers = _warpers(sampling)
    kept = [p for p in processors.chain if type(p) not in warpers]
    if temperature == 0:
        return Processors(kept, greedy=True)
    return Processors([*kept, *_warpers(dataclasses.replace(sampling, temperature=temperature)).values()])


def _warpers(sampling: Sampling) -> dict[type, Any]:
    """The processors that `generate` leaves out when it is greedy: temperature and what truncates, by type."""
    only = {"ban": (), "bad_words_ids": (), "repetition_penalty": None, "no_repeat_ngram_size": None}
    return {type(p): p for p in build_processors(dataclasses.replace(sampling, **only))}  # type: ignore[arg-type]


def spans(length: int, first: int, context: int | None) -> list[tuple[int, int, int]]:
    """(begin, end, first scored) of the windows that score each of the tokens first … length − 1 once.

    A text that fits is one window. Otherwise they have the context's length, and each but the first scores its
    second half.
    """
    if context is None or length <= context:
        return [(0, length, first)]
    step = max(1, context // 2)
    found, scored, begin = [], first, 0
    while scored < length:
        end = min(begin + context, length)
        if end > scored:
            found.append((begin, end, scored))
            scored = end
        begin += step
    return found


Row = tuple[Tensor, Tensor | None]  # target logits [V]; draft logits, or its own distribution, or None


def _rows(target: LanguageModel, drafter: Drafter, tokens: Sequence[int], first: int) -> Iterator[Row]:
    """Both sides' rows, whatever the chunks that each computes them in."""
    source = drafter.score(tokens, first) if drafter.model is None else drafter.model.score(tokens, first)
    theirs: Iterator[Tensor | None] = (row for _, rows in source for row in rows)
    ours = (row for _, rows in target.score(tokens, first) for row in rows)
    return zip(ours, theirs, strict=True)


@torch.inference_mode()
def score_text(
    target: LanguageModel,
    drafter: Drafter,
    processors: Processors,
    sampling: Sampling,
    tokens: Sequence[int],
    first: int,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    context: int | None = None,
    coupled: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> TextScores:
    """Scores tokens[first:], each once, given all before it (in its window). first >= 1.

    processors, sampling: of the target's side; a drafter that is a model has its own, for its device. coupled: the
    ratios are those of mode coupled, the probability that the draft had drawn the token too under shared noise.
    progress is told how many positions are done.
    """
    if not 1 <= first < len(tokens):
        raise ValueError(f"cannot score from token {first} of {len(tokens)}: the first has nothing before it")
    own = sampling.temperature or 0.0
    wanted = sorted({*temperatures, own})
    chains = {t: at_temperature(processors, sampling, t) for t in wanted}
    theirs = drafter.processors
    drafts = {} if theirs is None else {t: at_temperature(theirs, sampling, t) for t in wanted}
    log_probs: list[float] = []
    ratios: list[float] = []
    proposes: list[bool] = []
    overlaps: dict[float, list[float]] = {t: [] for t in wanted}
    windows = spans(len(tokens), first, context)
    for begin, end, scored in windows:
        text = list(tokens[begin:end])
        rows = _rows(target, drafter, text, scored - begin)
        at = scored - begin
        while block := list(itertools.islice(rows, BLOCK)):
            n, prefix, inside = len(block), text[:at], text[at : at + len(block) - 1]
            logits = torch.stack([row for row, _ in block])
            check_finite(logits, target.role, begin + at)
            offered = [row is not None for _, row in block]
            raw = torch.stack([torch.zeros_like(logits[0]) if row is None else row for _, row in block])
            if drafter.model is not None:
                check_finite(raw, drafter.model.role, begin + at)
            for t in wanted:
                target_probs = chains[t](logits, prefix, inside, position=begin + at).double()
                draft_probs = raw
                if drafts:
                    draft_probs = drafts[t](raw, prefix, inside, side="draft", position=begin + at)
                draft_probs = draft_probs.to(target_probs)
                betas = overlap(target_probs, draft_probs).tolist()
                overlaps[t] += [beta if is_there else 0.0 for beta, is_there in zip(betas, offered, strict=True)]
                if t == own:
                    chosen = (range(n), text[at : at + n])
                    p, q = target_probs[chosen].tolist(), draft_probs[chosen].tolist()
                    log_probs += [math.log(x) if x > 0 else -math.inf for x in p]
                    if coupled:
                        q = coupled_joint(target_probs, draft_probs, text[at : at + n])
                    ratios += [
                        0.0 if not is_there else min(1.0, y / x) if x > 0 else min(1.0, beta)
                        for x, y, beta, is_there in zip(p, q, betas, offered, strict=True)
                    ]
            proposes += offered
            at += n
            progress(len(ratios))
    return TextScores(
        tuple(tokens[first:]),
        tuple(log_probs),
        tuple(ratios),
        tuple(proposes),
        {t: tuple(values) for t, values in overlaps.items()},
        own,
        len(windows),
    )
