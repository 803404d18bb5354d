"""Checks `law` and `processors`: the rule's own law, and every processed row against plain decoding's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specgen.audit.watching import Memoised, plain_chain, widened
from specgen.decoding.self_check import EDGE_FRACTION
from specgen.drafting.drafter import Drafter
from specgen.sampling.processors import Processors
from specgen.verification.law import total_variation

LAW_BOUND = 1e-6  # total variation: float64 arithmetic on float32 probabilities, normalised first


SAME_BOUND = 1e-5  # total variation of one processed row computed alone and among others, in float32


@dataclass
class PlainRows:
    """The distributions of plain decoding by prefix, of both sides, from memoised logits; the last few are kept."""

    target: Memoised
    drafter: Drafter
    processors: Processors
    kept: OrderedDict[tuple[str, tuple[int, ...]], Tensor | None] = field(default_factory=OrderedDict)

    def _of(self, side: str, prefix: Sequence[int], compute: Callable[[], Tensor | None]) -> Tensor | None:
        key = (side, tuple(prefix))
        if key not in self.kept:
            self.kept[key] = compute()
            while len(self.kept) > max(16, 2**24 // self.target.vocabulary):
                self.kept.popitem(last=False)
        return self.kept[key]

    def of_target(self, prefix: Sequence[int]) -> Tensor:
        row = self._of(
            "target", prefix, lambda: widened(self.processors(self.target.logits(prefix)[None], prefix)[0])
        )
        assert row is not None
        return row

    def of_draft(self, prefix: Sequence[int]) -> Tensor | None:
        """None where the drafter would propose nothing."""

        def compute() -> Tensor | None:
            model, processors = self.drafter.model, self.drafter.processors
            if isinstance(model, Memoised) and processors is not None:
                row = plain_chain(processors)(model.logits(prefix)[None], prefix)[0]
            else:
                _, rows = next(iter(self.drafter.score([*prefix, prefix[-1]], len(prefix))))
                if rows[0] is None:
                    return None
                row = rows[0]
            return widened(row).to(self.of_target(prefix).device)

        return self._of("draft", prefix, compute)


@dataclass
class Distance:
    """Rows that should be one: the largest total variation, and how often only the tokens let through differ."""

    rows: int = 0
    edges: int = 0
    worst: float = 0.0
    where: str = ""

    def add(self, used: Tensor, plain: Tensor, where: str) -> None:
        """used, plain: [V]. At the edge of top-p or top-k one token's rounding moves all the others."""
        self.rows += 1
        used, plain = widened(used), widened(plain)
        plain = plain.to(used.device)
        distance = float(total_variation(used, plain))
        if not distance <= SAME_BOUND and int((used > 0).sum()) != int((plain > 0).sum()):
            self.edges += 1
            self.where = self.where or where
            return
        if not distance <= self.worst:
            self.worst, self.where = distance, where

    @property
    def passed(self) -> bool:
        return self.worst <= SAME_BOUND and self.edges <= EDGE_FRACTION * self.rows
