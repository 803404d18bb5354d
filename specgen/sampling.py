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


class KeyedUniforms:
    """Uniforms by (seed, prompt digest, stream, position, round). Blocks of positions are computed at once."""

    _BLOCK = 64

    def __init__(self, seed: int, digest: int) -> None:
        self._key = (seed, digest)
        self._streams = torch.arange(max(Stream) + 1)[:, None]
        self._round = -1
        self._start = 0
        self._block: list[list[float]] = []

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor | None = None) -> float:
        if round_index != self._round or not self._start <= position < self._start + self._BLOCK:
            positions = torch.arange(position, position + self._BLOCK)[None, :]
            self._block = keyed_uniform(*self._key, self._streams, positions, round_index).tolist()
            self._round, self._start = round_index, position
        return self._block[stream][position - self._start]


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
            noise = -(-(u + 2.0**-54).log()).log()  # half a step up: u = 0 has no logarithm
            # Draft, target and bonus ask for one position soon after one another; older ones are done with.
            self._noise = {p: n for p, n in self._noise.items() if p > position - 128}
            self._noise[position] = noise
        return noise


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

# Those that do not read input_ids: all rows of a round go through them at once.
_STATELESS = (
    hf.SuppressTokensLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
)


def build_processors(sampling: Sampling, device: torch.device | str = "cpu") -> list[hf.LogitsProcessor]:
    """transformers' processors, in the order in which `generate` applies them (warpers only when sampling)."""
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
        chain.append(hf.SuppressTokensLogitsProcessor(list(s.ban), device=str(device)))
    if s.temperature is None:
        return chain
    if s.temperature != 1.0:
        chain.append(hf.TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        chain.append(hf.TopKLogitsWarper(s.top_k))
    if s.top_p is not None and s.top_p < 1.0:
        chain.append(hf.TopPLogitsWarper(s.top_p))
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

    @classmethod
    def of(cls, sampling: Sampling, device: torch.device | str = "cpu") -> Processors:
        return cls(build_processors(sampling, device), greedy=sampling.temperature is None)

    def scores(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        """Processed logits [n, V] of n successive positions, before the softmax.

        Row j is what follows prefix + drafted[:j]: a processor that reads its prefix sees exactly that one.
        logits is not changed.
        """
        ids = torch.tensor([[*prefix, *drafted]], device=logits.device)
        first = len(prefix)
        scores = logits.clone() if self.chain else logits  # some processors write in place
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
            return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
        return scores.softmax(-1)


def check_finite(logits: Tensor, model: str, first_position: int) -> None:
    """Raises RunError naming model and position at the first row [V] of logits [n, V] that is not finite."""
    bad = ~torch.isfinite(logits).all(-1)
    if bool(bad.any()):
        position = first_position + int(bad.nonzero()[0])
        raise RunError(
            f"the {model} produced logits that are not finite (NaN or inf) for position {position}; "
            "try --dtype float32, and check the checkpoint"
        )
