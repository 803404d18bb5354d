"""Logits → probabilities through transformers' own processors; randomness as a pure function of its key.

There is no generator and no global seed anywhere. Every uniform is `KeyedUniforms(seed, digest)(stream, position,
round, edges)`; the same seam lets a test enumerate the whole tree of outcomes (see `Uniforms`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor
from transformers import generation as hf

from specgen.rounds import RunError, Sampling

# ---------------------------------------------------------------------------------------------------- randomness


class Stream(IntEnum):
    """What a uniform is for. Two purposes never share one: a shared draw correlates what must be independent."""

    DRAFT = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4
    PLAIN = 5
    CHECK = 6


class Uniforms(Protocol):
    """The seam between the algorithm and its randomness.

    edges: [n] float tensor, ascending, the upper edges of the n half-open cells the caller distinguishes, in units
    in which the last one is the whole. Production ignores them; a test that enumerates returns the left end of one
    cell (in units of 1) and weighs the leaf by the cell's width.
    """

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor) -> float:
        """A number in [0, 1)."""
        ...


_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch lacks (its own copies the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that avalanches."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def keyed_uniform(*words: Tensor | int, device: torch.device | str = "cpu") -> Tensor:
    """Uniforms in [0, 1), float64 with 53 random bits, one per element of the broadcast int64 key words.

    Plain tensor operations only, so that the same draws can come out of a captured graph.
    """
    state = torch.zeros((), dtype=torch.int64, device=device)
    for word in words:
        word = torch.as_tensor(_signed(word) if isinstance(word, int) else word, dtype=torch.int64, device=device)
        state = _mix((state ^ _mix(word + _GAMMA)) + _GAMMA)
    return _shift(state, 11).to(torch.float64) * 2.0**-53


def prompt_digest(tokens: Sequence[int]) -> int:
    """64 bits of the prompt's token ids, so that a prompt's draws do not depend on its neighbours in a file."""
    data = b"".join(int(t).to_bytes(8, "little") for t in tokens)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mix_word(x: int) -> int:
    """`_mix` of one word, in Python's own integers: a single draw is not worth a dozen tensor operations."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _absorb(state: int, word: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    return _mix_word(((state ^ _mix_word((word + gamma) & _MASK)) + gamma) & _MASK)


class KeyedUniforms:
    """Uniforms by (seed, prompt digest, stream, position, round): those of `keyed_uniform`, one at a time."""

    def __init__(self, seed: int, digest: int) -> None:
        self._key = (seed, digest)
        self._state = _absorb(_absorb(0, seed), digest)

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor | None = None) -> float:
        state = _absorb(_absorb(_absorb(self._state, stream), position), round_index)
        return (state >> 11) * 2.0**-53


def _gumbel(u: Tensor) -> Tensor:
    return -(-(u + 2.0**-54).log()).log()  # half a step up: u = 0 has no logarithm


class SharedNoise(KeyedUniforms):
    """Gumbel noise by (seed, prompt digest, position) alone: the same for target and draft, and for every k.

    `draw` then takes argmax(log weights + noise), which has the law of weights (Gumbel-max), and agrees between two
    distributions more often the closer they are.
    """

    _STREAM = 0  # no `Stream` has this number

    def __init__(self, seed: int, digest: int) -> None:
        super().__init__(seed, digest)
        self._noise: dict[int, Tensor] = {}

    def gumbel(self, position: int, like: Tensor) -> Tensor:
        """Standard Gumbel noise [V] in float64, for the vocabulary and on the device of `like`."""
        noise = self._noise.get(position)
        if noise is None or noise.shape != like.shape or noise.device != like.device:
            tokens = torch.arange(like.shape[-1], device=like.device)
            u = keyed_uniform(*self._key, self._STREAM, position, tokens, device=like.device)
            noise = _gumbel(u)
            # Draft, target and bonus ask for one position soon after one another; older ones are done with.
            self._noise = {p: n for p, n in self._noise.items() if p > position - 128}
            self._noise[position] = noise
        return noise


class DeviceUniforms:
    """The numbers of `KeyedUniforms` with every key word a tensor on a device: nothing is read or sent by the host.

    stream, position and round_index are int64 tensors, or a `Stream`; one number an element of their broadcast.
    """

    def __init__(self, device: torch.device) -> None:
        self.key = torch.zeros(2, dtype=torch.int64, device=device)
        self._streams = torch.arange(max(Stream) + 1, device=device)

    def take(self, uniforms: KeyedUniforms) -> None:
        """From now on that one's numbers."""
        self.key.copy_(torch.tensor([_signed(word) for word in uniforms._key]))

    def __call__(self, stream: Stream | Tensor, position: Tensor, round_index: Tensor, edges: Tensor) -> Tensor:
        purpose = stream if isinstance(stream, Tensor) else self._streams[int(stream)]
        return keyed_uniform(self.key[0], self.key[1], purpose, position, round_index, device=self.key.device)

    def either(self, condition: Tensor, yes: Stream, no: Stream) -> Tensor:
        """The stream `yes` where the condition holds, else `no`."""
        return torch.where(condition, self._streams[int(yes)], self._streams[int(no)])


class DeviceNoise(DeviceUniforms, SharedNoise):  # type: ignore[misc]
    """The noise of `SharedNoise`, in the same way."""

    def gumbel(self, position: Tensor | int, like: Tensor) -> Tensor:
        tokens = torch.arange(like.shape[-1], device=like.device)
        purpose = self._streams[self._STREAM]
        return _gumbel(keyed_uniform(self.key[0], self.key[1], purpose, position, tokens, device=like.device))


def draw(weights: Tensor, stream: Stream, position: int, round_index: int, uniforms: Uniforms) -> Tensor:
    """One category by inverse transform: the half-open cell of the cumulative sum that holds u.

    weights: [V], non-negative, not all zero, need not sum to 1. Returns an int64 scalar tensor. A category of
    weight 0 has a cell of width 0 and is never hit; u < 1 keeps u * total below the last edge. With `SharedNoise`
    the category is the argmax of log weights + noise instead.
    """
    if isinstance(uniforms, SharedNoise):
        return (weights.to(torch.float64).log() + uniforms.gumbel(position, weights)).argmax(-1)
    edges = weights.to(torch.float64).cumsum(-1)
    u = uniforms(stream, position, round_index, edges)
    index = torch.searchsorted(edges, edges[-1:] * u, right=True)[0]
    return index.clamp(max=weights.shape[-1] - 1)  # rows of NaN land here; they are reported, not indexed with


# ---------------------------------------------------------------------------------------------------- processors


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

    @classmethod
    def of(cls, sampling: Sampling, device: torch.device | str = "cpu") -> Processors:
        return cls(build_processors(sampling, device), greedy=sampling.temperature is None)

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

    def __call__(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        """Probabilities [n, V], rows sum to 1; float64 stays float64, all else is computed in float32."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores = self.scores(wide, prefix, drafted)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return scores.softmax(-1)


def check_finite(logits: Tensor, model: str, first_position: int) -> None:
    """Raises RunError naming model and position at the first row [V] of logits [n, V] that is not finite."""
    if bool(torch.isfinite(logits.sum())):
        return  # a sum is finite only if all of it is; the other way round it may just have overflowed
    bad = ~torch.isfinite(logits).all(-1)
    if bool(bad.any()):
        raise not_finite(model, first_position + int(bad.nonzero()[0]))


def not_finite(model: str, position: int) -> RunError:
    return RunError(
        f"the {model} produced logits that are not finite (NaN or inf) for position {position}; "
        "try --dtype float32, and check the checkpoint"
    )
