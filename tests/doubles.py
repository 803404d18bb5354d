"""Small exact stand-ins: models that are tables, and a source of uniforms that enumerates every outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specgen.sampling import Stream


class TableModel:
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
    return torch.randn(rows, vocabulary, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(seed)) * scale  # fmt: skip


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
