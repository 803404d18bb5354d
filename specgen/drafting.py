"""Drafters: what proposes. A checkpoint is one kind, prompt lookup another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.models import LanguageModel, prefill
from specgen.sampling import Processors, Stream, Uniforms, check_finite, draw


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens (n <= k) with the distributions [n, V] they were really drawn from."""

    tokens: tuple[int, ...]
    probs: Tensor


class Drafter(Protocol):
    """Proposes tokens one after another.

    `cached` tokens of the text are known to it; after a round the loop calls `rollback`, so that it never holds
    more than the committed text less one token.
    """

    kind: str

    @property
    def cached(self) -> int: ...

    def start(self, prompt: Sequence[int]) -> None:
        """A new text: forget the last one and take in all of the prompt but its last token."""
        ...

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal: ...

    def rollback(self, count: int) -> None: ...

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        """Teacher-forced, from scratch: (i, one distribution [V] a token from tokens[i] on, None where it would
        propose nothing), in chunks."""
        ...


class ModelDrafter:
    """A checkpoint that drafts by sampling from its own processed distribution (greedy: its argmax)."""

    kind = "checkpoint"

    def __init__(self, model: LanguageModel, processors: Processors) -> None:
        self.model = model
        self.processors = processors

    @property
    def cached(self) -> int:
        return self.model.lengths[0]

    def start(self, prompt: Sequence[int]) -> None:
        self.model.reset()
        prefill(self.model, prompt[:-1])

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        drafted: list[int] = []
        rows: list[Tensor] = []
        feed = list(prefix[self.cached :])  # the last token; two after a round in which everything was accepted
        for j in range(k):
            logits = self.model.forward(torch.tensor([feed]), 1)[0]
            check_finite(logits, self.model.role, len(prefix) + j)
            # A long text is copied only for those who read it.
            text = prefix if self.processors.stateless else [*prefix, *drafted]
            probs = self.processors(logits, text)[0]
            token = int(draw(probs, Stream.DRAFT, len(prefix) + j, round_index, uniforms))
            rows.append(probs)
            drafted.append(token)
            feed = [token]
        return Proposal(tuple(drafted), torch.stack(rows) if rows else torch.empty(0, self.model.vocabulary))

    def rollback(self, count: int) -> None:
        self.model.rollback([count])

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        for first, logits in self.model.score(tokens, start):
            probs = self.processors(logits, tokens[:first], tokens[first : first + len(logits) - 1])
            yield first, list(probs)


class NgramDrafter:
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
