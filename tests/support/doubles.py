"""Small exact stand-ins: models that are tables, uniforms that enumerate every outcome, and faults to be caught."""

from __future__ import annotations

import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Proposal
from specgen.models.protocol import LanguageModel
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import Stream, Uniforms
from specgen.settings import Sampling
from specgen.verification.rules import Rule, accept_exact


class TableModel(LanguageModel):
    """Logits as a float64 table by prefix: row = hash of the last `memory` tokens. Caches the tokens themselves."""

    def __init__(self, table: Tensor, role: str = "target", memory: int = 2) -> None:
        self.table, self.role, self.memory = table, role, memory
        self.vocabulary = table.shape[-1]
        self.tokens: list[int] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self.tokens),)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        row = 0
        for token in prefix[-self.memory :]:
            row = row * self.vocabulary + token + 1
        return self.table[row % len(self.table)]

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.tokens += tokens[0].tolist()
        n = len(self.tokens)
        return torch.stack([self.logits(self.tokens[: n - rows + 1 + i]) for i in range(rows)])[None]

    def rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        assert 0 <= count <= len(self.tokens)
        del self.tokens[len(self.tokens) - count :]

    def reset(self) -> None:
        self.tokens = []

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        yield start, torch.stack([self.logits(tokens[:i]) for i in range(start, len(tokens))])


def random_table(vocabulary: int, seed: int, *, rows: int = 101, scale: float = 1.5) -> Tensor:
    return torch.randn(rows, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


class Enumerating:
    """A `Uniforms` that walks the tree of outcomes depth first: one run of the loop a leaf.

    Each draw returns the left end of one half-open cell of positive width; the leaf weighs the product of widths. A
    repeated key refines the interval that the key already has, as a real uniform would.
    """

    def __init__(self, max_leaves: int = 200_000) -> None:
        self.path: list[int] = []
        self.counts: list[int] = []
        self.max_leaves = max_leaves

    def begin(self) -> None:
        self.depth, self.weight = 0, 1.0
        self.intervals: dict[tuple, tuple[float, float]] = {}

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor) -> float:
        key = self.key(stream, position, round_index)
        low, high = self.intervals.get(key, (0.0, 1.0))
        cuts = [0.0, *(edges / edges[-1]).tolist()]
        cells = [(max(a, low), min(b, high)) for a, b in itertools.pairwise(cuts)]
        cells = [(a, b) for a, b in cells if b > a]
        if self.depth == len(self.path):
            self.path.append(0)
            self.counts.append(len(cells))
        assert self.counts[self.depth] == len(cells), "the loop is not a function of its draws"
        a, b = cells[self.path[self.depth]]
        self.depth += 1
        self.weight *= (b - a) / (high - low)
        self.intervals[key] = (a, b)
        return self.inside(a, edges)

    @staticmethod
    def inside(a: float, edges: Tensor) -> float:
        """a, or the next number up where a times the whole rounds to below the edge that a came from."""
        whole = float(edges[-1])
        for edge in edges.tolist():
            if edge / whole == a and a * whole < edge:
                return math.nextafter(a, 2.0)
        return a

    def key(self, stream: Stream, position: int, round_index: int) -> tuple:
        return (stream, position, round_index)

    def advance(self) -> bool:
        del self.path[self.depth :], self.counts[self.depth :]
        while self.path and self.path[-1] == self.counts[-1] - 1:
            self.path.pop()
            self.counts.pop()
        if not self.path:
            return False
        self.path[-1] += 1
        return True


def enumerate_law(run: Callable[[Enumerating], tuple[int, ...]], uniforms: Enumerating | None = None) -> dict:
    """{outcome: probability} of run(uniforms), exactly."""
    uniforms = uniforms or Enumerating()
    law: dict[tuple[int, ...], float] = {}
    for _ in range(uniforms.max_leaves):
        uniforms.begin()
        outcome = run(uniforms)
        law[outcome] = law.get(outcome, 0.0) + uniforms.weight
        if not uniforms.advance():
            return law
    raise AssertionError(f"more than {uniforms.max_leaves} leaves")


def reference_probs(logits: Tensor, prefix: Sequence[int], s: Sampling) -> Tensor:
    """Next-token probabilities [V] by plain arithmetic in float64, without transformers' processors."""
    scores = [float(x) for x in logits]
    if s.repetition_penalty:
        for token in set(prefix):
            x = scores[token]
            scores[token] = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
    for token in s.ban:
        scores[token] = -math.inf
    if s.temperature is not None:
        scores = [x / s.temperature for x in scores]
    if s.top_k:
        edge = sorted(scores, reverse=True)[: s.top_k][-1]
        scores = [x if x >= edge else -math.inf for x in scores]
    top = max(scores)
    weights = [math.exp(x - top) for x in scores]
    if s.top_p is not None:
        total, above = sum(weights), 0.0
        for token in sorted(range(len(weights)), key=lambda t: -weights[t]):
            if above / total >= s.top_p:
                weights[token] = 0.0
            else:
                above += weights[token]
    if s.min_p:
        edge = s.min_p * max(weights)
        weights = [w if w >= edge else 0.0 for w in weights]
    total = sum(weights)
    return torch.tensor([w / total for w in weights], dtype=torch.float64)


def joint_law(
    logits: Callable[[Sequence[int]], Tensor], prompt: Sequence[int], length: int, sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """{text: probability} of plain sampling, as products of `reference_probs`; no loop of specgen's takes part."""
    law: dict[tuple[int, ...], float] = {}
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while todo:
        text, weight = todo.pop()
        probs = reference_probs(logits([*prompt, *text]), [*prompt, *text], sampling)
        for token, p in enumerate(probs.tolist()):
            if p > 0:
                longer = (*text, token)
                if len(longer) == length or token in sampling.end_tokens:
                    law[longer] = weight * p
                else:
                    todo.append((longer, weight * p))
    return law


def difference(a: dict, b: dict) -> float:
    """The largest difference of two laws at one text."""
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())


def raw_resample() -> Rule:
    """Accepts as it should; draws the correction from the target instead of the residual."""
    return Rule("raw_resample", accept_exact, lambda target, draft, a: target)


def membership(n: int) -> Rule:
    """Keeps whatever is among the target's n likeliest; draws the correction from the target."""

    def accept(target: Tensor, draft: Tensor) -> Tensor:
        return torch.zeros_like(target).scatter(-1, target.topk(n, -1).indices, 1.0)

    return Rule("membership", accept, lambda target, draft, a: target)


def mutant(function: Callable, right: str, wrong: str) -> Callable:
    """function with one piece of its source replaced: the fault as somebody might type it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{function.__name__} no longer reads {right!r}: plant this fault anew"
    scope: dict[str, Any] = {}
    header = "from __future__ import annotations\n"
    exec(compile(header + source.replace(right, wrong), "<mutant>", "exec"), function.__globals__, scope)
    return scope[function.__name__]


class PenaltyFromRoundStart(Processors):
    """Every row of a round is processed with the prefix of its first."""

    def scores(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        return torch.cat([Processors.scores(self, row[None], prefix) for row in logits])


class BonusFromDraft(Processors):
    """For the target: the last of a round's rows is the draft's own distribution."""

    def __init__(self, honest: Processors, draft: TableModel) -> None:
        super().__init__(honest.chain)
        self.draft = draft

    def __call__(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = (), **named: Any) -> Tensor:
        probs = super().__call__(logits, prefix, drafted, **named)
        if drafted:
            text = [*prefix, *drafted]
            probs[-1] = super().__call__(self.draft.logits(text)[None], text)[0]
        return probs


class DropsUnlikely(ModelDrafter):
    """Draws a token, finds it unlikely, and leaves it and what follows out of the proposal."""

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(prefix, k, round_index, uniforms)
        n = 0
        while n < len(proposal.tokens) and proposal.probs[n, proposal.tokens[n]] >= 0.4:
            n += 1
        return Proposal(proposal.tokens[:n], proposal.probs[:n])


class StopsEarly(ModelDrafter):
    """Stops after an unlikely token, and keeps it: exact, since all that was drawn is in the proposal."""

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(prefix, k, round_index, uniforms)
        for n, token in enumerate(proposal.tokens, 1):
            if proposal.probs[n - 1, token] < 0.4:
                return Proposal(proposal.tokens[:n], proposal.probs[:n])
        return proposal


class UnprocessedProbs(ModelDrafter):
    """Draws from processed distributions and hands over the raw ones."""

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(prefix, k, round_index, uniforms)
        text = [*prefix, *proposal.tokens]
        raw = [self.model.logits(text[: len(prefix) + j]) for j in range(len(proposal.tokens))]  # type: ignore[attr-defined]
        return Proposal(proposal.tokens, torch.stack(raw).softmax(-1) if raw else proposal.probs)


class AdaptiveK(ModelDrafter):
    """Drafts nothing if the last round's last drafted token, which may have been thrown away, was token 0."""

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        self.rests = False

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(prefix, 0 if self.rests else k, round_index, uniforms)
        self.rests = bool(proposal.tokens) and proposal.tokens[-1] == 0
        return proposal


class OneKeyForTwo(Enumerating):
    """The draft's draw and the acceptance test of a position share a uniform."""

    def key(self, stream: Stream, position: int, round_index: int) -> tuple:
        return (Stream.DRAFT if stream is Stream.ACCEPT else stream, position, round_index)


class KeyWithoutRound(Enumerating):
    """A position's uniforms are the same in every round."""

    def key(self, stream: Stream, position: int, round_index: int) -> tuple:
        return (stream, position)
