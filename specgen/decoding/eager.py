"""The eager executor: every step is calls of models and drafters, for one row as for several."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specgen.decoding.loop import Clock, Seen, rounds_of, steps
from specgen.decoding.settle import settle
from specgen.drafting.drafter import Drafter, EachRow, Proposal, Row, RowsDrafter
from specgen.models.protocol import LanguageModel, OneRow, RowsModel, padded
from specgen.rounds.record import Ended, Round
from specgen.sampling.processors import Processors, check_finite
from specgen.sampling.randomness import Uniforms
from specgen.settings import Mode
from specgen.verification.rules import RULES, Rule


class Eager:
    """Usage: `start` with the prompts of the rows, then `loop.steps`.

    proposals, scored, probs: of each row what the last round drafted, and the logits and distributions [n+1, V] that
    verified it.
    """

    def __init__(
        self, target: RowsModel, drafter: RowsDrafter | None, processors: Processors, rule: Rule = RULES[Mode.EXACT]
    ) -> None:
        self.target, self.drafter, self.processors, self.rule = target, drafter, processors, rule
        self.drafts = drafter is not None
        self._nothing = Proposal((), torch.empty(0, target.vocabulary))
        self.proposals: list[Proposal] = []
        self.scored: list[Tensor] = []
        self.probs: list[Tensor] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        if not all(prompts):
            raise ValueError("the prompt holds no token")
        self.target.start(prompts)
        if self.drafter is not None:
            self.drafter.start(prompts)

    def begin(self, rows: Sequence[Row]) -> None:
        """Nothing of the rows is kept here."""

    def ready(self, live: Sequence[Row]) -> None:
        self.proposals = [self._nothing] * len(live)

    def propose(self, live: Sequence[Row], most: Sequence[int], index: int) -> None:
        assert self.drafter is not None
        self.proposals = self.drafter.propose(live, most, index)

    def score(self, live: Sequence[Row]) -> int:
        feeds = [
            [*row.tokens[cached:], *proposal.tokens]
            for row, cached, proposal in zip(live, self.target.lengths, self.proposals, strict=True)
        ]
        tokens, counts = padded(feeds)
        logits = self.target.forward(tokens, counts)
        self.scored = [
            own[count - len(proposal.tokens) - 1 : count]
            for own, count, proposal in zip(logits, counts, self.proposals, strict=True)
        ]
        return tokens.shape[-1]

    def settle(self, live: Sequence[Row], index: int) -> list[Round]:
        found = []
        self.probs = []
        for row, proposal, logits in zip(live, self.proposals, self.scored, strict=True):
            check_finite(logits, self.target.role + row.name, len(row.tokens))
            probs = self.processors(logits, row.tokens, proposal.tokens, side=self.target.role + row.name)
            self.probs.append(probs)
            found.append(settle(self.rule, probs, proposal, row, index, plain=not self.drafts))
        return found

    def roll_back(self, live: Sequence[Row]) -> None:
        for side in (self.target, self.drafter):
            if side is not None:
                side.rollback([max(0, n - (len(row.tokens) - 1)) for n, row in zip(side.lengths, live, strict=True)])

    def keep(self, rows: Sequence[int]) -> None:
        for side in (self.target, self.drafter):
            if side is not None:
                side.keep(rows)

    def seen(self, row: int) -> Seen:
        proposal = self.proposals[row]
        return Seen(proposal.tokens, proposal.probs, self.scored[row], self.probs[row])

    def peek(self, row: int, text: Sequence[int]) -> Iterator[tuple[str, int, Tensor | None]]:
        yield "target", *_peeked(self.target, row, text)
        if self.drafter is not None and self.drafter.model is not None:
            yield "draft", *_peeked(self.drafter.model, row, text)

    def drafter_of(self, row: int) -> Drafter | None:
        return None if self.drafter is None else self.drafter.of_row(row)


def _peeked(model: RowsModel, row: int, text: Sequence[int]) -> tuple[int, Tensor | None]:
    cached = model.lengths[row]
    if cached >= len(text):
        return cached, None
    feeds = [text[cached:] if b == row else [] for b in range(len(model.lengths))]
    logits = model.forward(*padded(feeds))[row, len(text) - cached - 1]
    model.rollback([len(feed) for feed in feeds])
    return cached, logits


def alone(
    target: LanguageModel, drafter: Drafter | None, processors: Processors, rule: Rule = RULES[Mode.EXACT]
) -> Eager:
    """The executor of one row, in the caches that model and drafter have anyway."""
    return Eager(OneRow(target), None if drafter is None else EachRow([drafter]), processors, rule)


def start(target: LanguageModel, drafter: Drafter | None, prompt: Sequence[int]) -> None:
    """Prefill of one row: both sides take in all of the prompt but its last token."""
    Eager(OneRow(target), None if drafter is None else EachRow([drafter]), Processors(())).start([prompt])


def speculative(
    target: LanguageModel,
    drafter: Drafter,
    processors: Processors,
    prompt: Sequence[int],
    *,
    k: int,
    max_new_tokens: int,
    uniforms: Uniforms,
    ended: Ended,
    rule: Rule = RULES[Mode.EXACT],
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """One prompt's speculative generation after `start(target, drafter, prompt)`."""
    row = Row(0, list(prompt), len(prompt) + max_new_tokens, uniforms, ended)
    return rounds_of(steps(alone(target, drafter, processors, rule), [row], k=k, clock=clock))


def autoregressive(
    target: LanguageModel,
    processors: Processors,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    uniforms: Uniforms,
    ended: Ended,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """One prompt's plain decoding after `start(target, None, prompt)`: rounds that draft nothing."""
    row = Row(0, list(prompt), len(prompt) + max_new_tokens, uniforms, ended)
    return rounds_of(steps(alone(target, None, processors), [row], k=0, clock=clock))
