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


def signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GAMMA = signed(0x9E3779B97F4A7C15)


_MIX1 = signed(0xBF58476D1CE4E5B9)


_MIX2 = signed(0x94D049BB133111EB)


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
        word = torch.as_tensor(signed(word) if isinstance(word, int) else word, dtype=torch.int64, device=device)
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


def gumbel_of(u: Tensor) -> Tensor:
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
            noise = gumbel_of(u)
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
