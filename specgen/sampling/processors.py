"""Logits → probabilities through transformers' own processors, the same way for target and draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import generation as hf

from specgen.errors import RunError
from specgen.settings import Sampling


class Ban(hf.LogitsProcessor):
    """−∞ for the tokens. transformers' own compares the whole vocabulary with the list, once a call."""

    def __init__(self, tokens: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, self.tokens, -torch.inf)


class TopP(hf.LogitsProcessor):
    """The smallest set of most probable tokens whose mass is top_p or more; −∞ for the others.

    transformers' own sorts the vocabulary, which costs as much as a small model's call; here only as many of the
    most probable are looked at as the mass needs. Where rounding decides what lies at the edge, the two may differ.
    """

    FIRST = 64

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probs, size = scores.softmax(-1), min(self.FIRST, scores.shape[-1])
        while True:
            mass = probs.topk(size, dim=-1).values  # the largest first
            before = mass.cumsum(-1) - mass
            if size == scores.shape[-1] or bool((before[..., -1] >= self.top_p).all()):
                break
            size = min(8 * size, scores.shape[-1])
        count = (before < self.top_p).sum(-1, keepdim=True)
        least = mass.gather(-1, count - 1)
        kept = probs >= least
        if bool((kept.sum(-1, keepdim=True) > count).any()):
            # Equals at the edge: the lower ids, whatever the rows beside this one and the order that topk left.
            equal, above = probs == least, (probs > least).sum(-1, keepdim=True)
            kept &= ~equal | (equal.cumsum(-1) <= count - above)
        return scores.masked_fill(~kept, -torch.inf)


# Those that do not read input_ids: all rows of a round go through them at once.
_STATELESS = (Ban, hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, TopP, hf.MinPLogitsWarper)


# Those that never rule out the most probable token.
_KEEP_THE_BEST = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    TopP,
    hf.MinPLogitsWarper,
)

# What the user calls those that may.
_SETTINGS = {
    Ban: "ban",
    hf.NoRepeatNGramLogitsProcessor: "no_repeat_ngram_size",
    hf.NoBadWordsLogitsProcessor: "bad_words_ids",
}


def _setting(processor: hf.LogitsProcessor) -> str:
    return _SETTINGS.get(type(processor), type(processor).__name__)


def build_processors(sampling: Sampling, device: torch.device | str = "cpu") -> list[hf.LogitsProcessor]:
    """transformers' processors (two of them in a faster form), in the order in which `generate` applies them
    (warpers only when sampling)."""
    s = sampling
    chain: list[hf.LogitsProcessor] = []
    if s.repetition_penalty is not None and s.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.no_repeat_ngram_size:
        chain.append(hf.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
    if s.bad_words_ids:
        ends = torch.tensor(s.end_tokens) if s.end_tokens else None
        chain.append(hf.NoBadWordsLogitsProcessor([list(w) for w in s.bad_words_ids], ends))
    if s.ban:
        chain.append(Ban(s.ban, device))
    if s.temperature is None:
        return chain
    if s.temperature != 1.0:
        chain.append(hf.TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        chain.append(hf.TopKLogitsWarper(s.top_k))
    if s.top_p is not None and s.top_p < 1.0:
        chain.append(TopP(s.top_p))
    if s.min_p:
        chain.append(hf.MinPLogitsWarper(s.min_p))
    return chain


class Processors:
    """Logits → next-token probabilities, the same way for target and draft.

    greedy: probabilities are the one-hot of the argmax after the processors (the first of equals, as torch.argmax).
    """

    def __init__(self, chain: Sequence[hf.LogitsProcessor], *, greedy: bool = False) -> None:
        self.chain = tuple(chain)
        self.greedy = greedy
        self.stateless = all(isinstance(p, _STATELESS) for p in self.chain)
        self._may_leave_none = not all(isinstance(p, _KEEP_THE_BEST) for p in self.chain)

    @classmethod
    def of(cls, sampling: Sampling, device: torch.device | str = "cpu") -> Processors:
        return cls(build_processors(sampling, device), greedy=sampling.temperature is None)

    @property
    def maskers(self) -> str:
        """The settings that may leave no token, by name."""
        return " or ".join(_setting(p) for p in self.chain if not isinstance(p, _KEEP_THE_BEST))

    def _last_straw(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int], row: int) -> str:
        """The setting whose processor leaves nothing of a row; all that may where none does it alone."""
        for n in range(1, len(self.chain) + 1):
            if bool(faulty(Processors(self.chain[:n]).scores(logits, prefix, drafted))[row]):
                return _setting(self.chain[n - 1])
        return self.maskers

    def scores(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        """Processed logits [n, V] of n successive positions, before the softmax.

        Row j is what follows prefix + drafted[:j]: a processor that reads its prefix sees exactly that one.
        logits is not changed.
        """
        first, scores = len(prefix), logits
        if self.stateless:
            ids = torch.empty(1, 0, dtype=torch.int64)  # which nobody reads: a long text costs nothing here
        else:
            ids = torch.tensor([[*prefix, *drafted]], device=logits.device)
            scores = logits.clone()  # some of these write in place
        for processor in self.chain:
            if isinstance(processor, _STATELESS):
                scores = processor(ids, scores)
            else:
                rows = [processor(ids[:, : first + j], scores[j : j + 1]) for j in range(len(scores))]
                scores = torch.cat(rows)
        return scores

    def __call__(
        self,
        logits: Tensor,
        prefix: Sequence[int],
        drafted: Sequence[int] = (),
        *,
        side: str = "target",
        position: int | None = None,
    ) -> Tensor:
        """Probabilities [n, V], rows sum to 1; float64 stays float64, all else is computed in float32.

        Raises RunError where a processor leaves no token to draw. side, position: what it calls the model and the
        first row's place (else len(prefix)).
        """
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores = self.scores(wide, prefix, drafted)
        if self._may_leave_none and bool((none := faulty(scores)).any()):
            row = int(none.nonzero()[0])
            raise nothing_left(
                side,
                (len(prefix) if position is None else position) + row,
                self._last_straw(wide, prefix, drafted, row),
            )
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return scores.softmax(-1)


def faulty(logits: Tensor) -> Tensor:
    """[...] whether a row of logits or scores [..., V] has no distribution: a NaN, a +inf, or −inf throughout.

    −inf beside finite numbers is a mask. Reads nothing back, so that a captured graph can ask too.
    """
    return ~torch.isfinite(logits.amax(-1))  # a NaN is the largest of all


def check_finite(logits: Tensor, model: str, first_position: int) -> None:
    """Raises RunError naming model and position at the first row [V] of logits [n, V] that is faulty."""
    bad = faulty(logits)
    if bool(bad.any()):
        raise not_finite(model, first_position + int(bad.nonzero()[0]))


def not_finite(model: str, position: int) -> RunError:
    return RunError(
        f"the {model} produced logits that are not finite (NaN or inf) for position {position}; "
        "try --dtype float32, and check the checkpoint"
    )


def nothing_left(model: str, position: int, setting: str) -> RunError:
    return RunError(
        f"the {model} has no token left to draw for position {position}: {setting} rules out the last one; "
        "loosen it (`decoding.generation_config: false` in the profile ignores what the checkpoint sets)"
    )


FAULT_OF_LOGITS, FAULT_OF_SCORES = 1, 2


def faults(logits: Tensor, scores: Tensor) -> Tensor:
    """[...] what is wrong with rows of logits and of the scores made of them, as a number; 0: nothing."""
    code = faulty(scores).to(torch.uint8) * FAULT_OF_SCORES
    return torch.where(faulty(logits), FAULT_OF_LOGITS, code).to(torch.uint8)


def fault_error(fault: int, model: str, position: int, processors: Processors) -> RunError:
    """What `faults` found, for the user."""
    if fault == FAULT_OF_LOGITS:
        return not_finite(model, position)
    return nothing_left(model, position, processors.maskers)
