"""Prompt lookup: the text itself is the draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specgen.drafting.drafter import Drafter, Ingredients, Proposal
from specgen.sampling.randomness import Uniforms


class NgramDrafter(Drafter):
    """Prompt lookup: the token that followed the latest earlier occurrence of the longest matching suffix.

    Its distribution is one-hot and a function of the prefix alone (prompt, output and what it has drafted so far),
    so it can be verified by the same rule as any other. Where no suffix of min_ngram … max_ngram tokens has occurred
    before, it proposes nothing. Saxena 2023, "Prompt Lookup Decoding".
    """

    kind = "ngram"

    def __init__(
        self,
        vocabulary: int,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.vocabulary = vocabulary
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.dtype = dtype
        self.device = device
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}  # n-gram → the tokens that followed it, in order

    @classmethod
    def made(cls, ingredients: Ingredients) -> NgramDrafter:
        settings: Any = ingredients.settings
        target = ingredients.target
        return cls(
            target.vocabulary, max_ngram=settings.max_ngram, min_ngram=settings.min_ngram, device=target.device
        )

    @property
    def cached(self) -> int:
        return len(self._tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for gram in self._grams():
                self._followers.setdefault(gram, []).append(token)
            self._tokens.append(token)

    def _grams(self) -> Iterator[tuple[int, ...]]:
        """The suffixes of the text so far, longest first."""
        for n in self.sizes:
            if n <= len(self._tokens):
                yield tuple(self._tokens[-n:])

    def _lookup(self) -> int | None:
        for gram in self._grams():
            if followers := self._followers.get(gram):
                return followers[-1]
        return None

    def start(self, prompt: Sequence[int]) -> None:
        self._tokens, self._followers = [], {}
        self._append(prompt[:-1])

    def _one_hot(self, token: int) -> Tensor:
        row = torch.zeros(self.vocabulary, dtype=self.dtype, device=self.device)
        row[token] = 1
        return row

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        self._append(prefix[self.cached :])
        drafted: list[int] = []
        while len(drafted) < k and (token := self._lookup()) is not None:
            drafted.append(token)
            self._append([token])
        rows = torch.zeros(len(drafted), self.vocabulary, dtype=self.dtype, device=self.device)
        rows[range(len(drafted)), drafted] = 1
        return Proposal(tuple(drafted), rows)

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self._tokens.pop()
            for gram in self._grams():
                self._followers[gram].pop()

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        fresh = NgramDrafter(
            self.vocabulary,
            max_ngram=self.sizes.start,
            min_ngram=self.sizes.stop + 1,
            dtype=self.dtype,
            device=self.device,
        )
        fresh.start(tokens[: start + 1])
        for i in range(start, len(tokens)):
            token = fresh._lookup()
            yield i, [None if token is None else fresh._one_hot(token)]
            fresh._append([tokens[i]])
