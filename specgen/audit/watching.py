"""Models, drafters and processors that watch, remember or bend what passes through them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specgen.models.protocol import LanguageModel, prefill
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import Stream, Uniforms


class Memoised(LanguageModel):
    """A model whose logits are computed once a prefix, so that thousands of rounds cost few calls.

    The model behind it is brought to a prefix by its own roll-back and forward; the least recently used rows go
    first. Where it has sliding windows, it begins anew instead: a trimmed window cannot be rolled back far.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = copy.copy(model)  # the same weights with a cache of its own, which nobody else resets
        self.role, self.vocabulary = model.role, model.vocabulary
        self.tokens: list[int] = []
        self.calls = 0
        self._held: list[int] = []  # what the model's cache holds
        self._rows: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._room = max(64, min(100_000, 2**27 // max(1, self.vocabulary)))
        self.device, self.dtype, self.windowed = model.device, model.dtype, model.windowed
        self.model.reset()

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self.tokens),)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """[V], of what follows the prefix."""
        return self._get(list(prefix), 1)[0]

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.tokens += tokens[0].tolist()
        return torch.stack(self._get(self.tokens, rows))[None]

    def rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"cannot roll back {count} of {len(self.tokens)} tokens")
        del self.tokens[len(self.tokens) - count :]

    def reset(self) -> None:
        self.tokens = []

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        return self.model.score(tokens, start)

    def _get(self, text: list[int], rows: int) -> list[Tensor]:
        first = len(text) - rows + 1
        keys = [tuple(text[:end]) for end in range(first, len(text) + 1)]
        missing = next((i for i, key in enumerate(keys) if key not in self._rows), None)
        known = {key: self._rows[key] for key in keys[:missing]}
        if missing is not None:
            for i, row in enumerate(self._compute(text, first + missing), missing):
                known[keys[i]] = self._rows[keys[i]] = row
        for key in keys:
            self._rows.move_to_end(key)
        while len(self._rows) > self._room:
            self._rows.popitem(last=False)
        return [known[key] for key in keys]

    def _compute(self, text: list[int], end: int) -> Tensor:
        """Rows of what follows text[:end], text[:end + 1], … text."""
        self.calls += 1
        same = 0
        for a, b in zip(self._held, text[: end - 1], strict=False):
            if a != b:
                break
            same += 1
        if self.windowed and same < len(self._held):
            self.model.reset()
            same = 0
        else:
            self.model.rollback([len(self._held) - same])
        prefill(self.model, text[same : end - 1])
        self._held = list(text)
        return self.model.forward(torch.tensor([text[end - 1 :]]), len(text) - end + 1)[0]


class AlwaysAccepts:
    """Every acceptance draw is 0.0, the lowest that a uniform can be; all other draws are real."""

    def __init__(self, uniforms: Uniforms) -> None:
        self.uniforms = uniforms

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor) -> float:
        if stream is Stream.ACCEPT:
            return 0.0
        return self.uniforms(stream, position, round_index, edges)


def plain_chain(processors: Processors) -> Processors:
    """The same chain in the class that plain decoding uses."""
    return Processors(processors.chain, greedy=processors.greedy)


def short_name(processor: Any) -> str:
    return type(processor).__name__.removesuffix("LogitsProcessor").removesuffix("LogitsWarper")


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Of two rows of logits; −∞ on both sides is a mask, and no difference."""
    a, b = a.double(), b.double()
    return float((a - b).masked_fill(a == b, 0.0).abs().max())


def widened(probs: Tensor) -> Tensor:
    """In float64 (on the CPU where the device has none), rows summing to 1."""
    wide = probs.cpu().double() if probs.device.type == "mps" else probs.double()
    return wide / wide.sum(-1, keepdim=True)
