"""A checkpoint that drafts: a model samples from its own distribution, token after token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specgen.drafting.drafter import Drafter, Ingredients, Proposal, Row, RowsDrafter
from specgen.models.protocol import LanguageModel, RowsModel, padded, prefill
from specgen.sampling.processors import Processors, check_finite
from specgen.sampling.randomness import Stream, Uniforms, draw


def within(model: LanguageModel | RowsModel, text: int, k: int) -> int:
    """How many of k tokens the model can draft behind a text of so many: none where that has outgrown its context,
    from where on it proposes nothing, and the target goes on alone."""
    return k if model.context is None else max(0, min(k, model.context + 1 - text))


class ModelDrafter(Drafter):
    """A checkpoint that drafts by sampling from its own processed distribution (greedy: its argmax)."""

    kind = "checkpoint"

    model: LanguageModel
    processors: Processors

    def __init__(self, model: LanguageModel, processors: Processors) -> None:
        self.model = model
        self.processors = processors
        self.chain = type(self).propose is ModelDrafter.propose  # what proposes otherwise is not the plain chain

    @classmethod
    def made(cls, ingredients: Ingredients) -> ModelDrafter:
        assert ingredients.model is not None
        assert ingredients.own_processors is not None
        return cls(ingredients.model, ingredients.own_processors)

    @property
    def cached(self) -> int:
        return self.model.lengths[0]

    def start(self, prompt: Sequence[int]) -> None:
        self.model.reset()
        if within(self.model, len(prompt), 1):
            prefill(self.model, prompt[:-1])

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        drafted: list[int] = []
        rows: list[Tensor] = []
        feed = list(prefix[self.cached :])  # the last token; two after a round in which everything was accepted
        for j in range(within(self.model, len(prefix), k)):
            logits = self.model.forward(torch.tensor([feed]), 1)[0]
            check_finite(logits, self.model.role, len(prefix) + j)
            # A long text is copied only for those who read it.
            text = prefix if self.processors.stateless else [*prefix, *drafted]
            probs = self.processors(logits, text, side=self.model.role, position=len(prefix) + j)[0]
            token = int(draw(probs, Stream.DRAFT, len(prefix) + j, round_index, uniforms))
            rows.append(probs)
            drafted.append(token)
            feed = [token]
        return Proposal(tuple(drafted), torch.stack(rows) if rows else torch.empty(0, self.model.vocabulary))

    def rollback(self, count: int) -> None:
        self.model.rollback([count])

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        context = self.model.context
        end = len(tokens) if context is None else min(len(tokens), context + 1)
        for first, logits in self.model.score(tokens[:end], start) if start < end else ():
            drafted = tokens[first : first + len(logits) - 1]
            probs = self.processors(logits, tokens[:first], drafted, side=self.model.role)
            yield first, list(probs)
        for i in range(max(start, end), len(tokens)):
            yield i, [None]

    def for_rows(self, rows: int) -> RowsDrafter:
        if not self.chain:
            return super().for_rows(rows)
        return CheckpointRows(self.model.for_rows(), self.processors)


class CheckpointRows:
    """A checkpoint that drafts for all rows together: what `ModelDrafter` does for one, in as many calls.

    A row that wants fewer tokens than another stops drafting and waits.
    """

    def __init__(self, model: RowsModel, processors: Processors) -> None:
        self.model: RowsModel | None = model
        self._model = model
        self.processors = processors
        self.start, self.rollback, self.keep = model.start, model.rollback, model.keep

    def of_row(self, row: int) -> None:
        """One model drafts for all rows."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._model.lengths

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        ks = [within(self._model, len(row.tokens), k) for row, k in zip(rows, ks, strict=True)]
        texts = [list(row.tokens) for row in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        for j in range(max(ks)):
            # What is not cached yet: at first one token, or two after full acceptance; then the one just drafted.
            feeds = [t[c:] if j < k else [] for t, c, k in zip(texts, self._model.lengths, ks, strict=True)]
            logits = self._model.forward(*padded(feeds))
            for b, feed in enumerate(feeds):
                if feed:
                    last, position = logits[b, len(feed) - 1 : len(feed)], len(texts[b])
                    check_finite(last, self._model.role + rows[b].name, position)
                    probs[b].append(self.processors(last, texts[b], side=self._model.role + rows[b].name)[0])
                    token = draw(probs[b][-1], Stream.DRAFT, position, round_index, rows[b].uniforms)
                    texts[b].append(int(token))
        return [
            Proposal(tuple(text[len(row.tokens) :]), torch.stack(p) if p else torch.empty(0, self._model.vocabulary))
            for row, text, p in zip(rows, texts, probs, strict=True)
        ]
