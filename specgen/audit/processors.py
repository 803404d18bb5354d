"""Check `processors`: every row that verification or drafting used, against plain decoding's with the same prefix."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specgen.audit.findings import Finding
from specgen.audit.law import PlainRows, memoised
from specgen.audit.subject import Subject, Work
from specgen.audit.watching import short_name, widened
from specgen.decoding.self_check import EDGE_FRACTION
from specgen.sampling.processors import Processors
from specgen.verification.law import total_variation

SAME_BOUND = 1e-5  # total variation of one processed row computed alone and among others, in float32


@dataclass
class Distance:
    """Rows that should be one: the largest total variation, and how often only the tokens let through differ.

    bound: for `used` and `plain` from the same logits, rounding of the processors; from calls of two kinds, more.
    """

    bound: float = SAME_BOUND
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
        if not distance <= self.bound and int((used > 0).sum()) != int((plain > 0).sum()):
            self.edges += 1
            self.where = self.where or where
            return
        if not distance <= self.worst:
            self.worst, self.where = distance, where

    @property
    def passed(self) -> bool:
        return self.worst <= self.bound and self.edges <= EDGE_FRACTION * self.rows


def check(subject: Subject) -> Work:
    """The target's rows are compared on the very logits that verification saw; the draft's on logits of its own
    model, which in batches and captured graphs come from calls of another kind."""
    target, drafter = memoised(subject)
    rows = PlainRows(target, drafter, subject.processors)
    chain = subject.pair.processors.chain
    kinds = []
    for processor in chain:
        alone = copy.copy(subject.pair.processors)
        alone.chain, alone.greedy = (processor,), False  # the argmax would hide most of what differs
        kinds.append((short_name(processor), alone, Processors((processor,))))
    found = {name: Distance() for name in ["all", "draft", *(name for name, _, _ in kinds)]}
    stand_ins: dict[str, Any] = {"target": target, "drafter": drafter} if subject.stands_alone else {}
    if not stand_ins:
        found["draft"].bound = subject.bound
    groups, left_out = subject.groups(subject.prompts_and_seeds()[: 2 * len(subject.prompts)]), 0
    for i, group in enumerate(groups):
        if i and not (yield):
            left_out = len(groups) - i
            break
        for watched in subject.generate(group, **stand_ins):
            text, seen = watched.text[: watched.before], watched.seen
            prefixes = [[*text, *seen.drafted[:j]] for j in range(len(seen.drafted) + 1)]
            for j, prefix in enumerate(prefixes):
                where = f"position {len(prefix)}, row {j} of its round"
                wanted = subject.processors(seen.logits[j : j + 1], prefix)[0]
                found["all"].add(seen.target_probs[j], wanted, where)
                plain = rows.of_draft(prefix) if j < len(seen.drafted) else None
                if plain is not None and len(seen.draft_probs):
                    found["draft"].add(seen.draft_probs[j], plain, where)
            for name, batch, single in kinds:
                used = batch(seen.logits, text, seen.drafted)
                for j, prefix in enumerate(prefixes):
                    found[name].add(used[j], single(seen.logits[j : j + 1], prefix)[0], f"position {len(prefix)}")
    return _finding(subject, found, left_out)


def _finding(subject: Subject, found: dict[str, Distance], left_out: int) -> Finding:
    worst = max((d.worst for d in found.values()), default=0.0)
    bad: Sequence[str] = [name for name, d in found.items() if not d.passed]
    notes = [
        f"{name}: largest total variation {d.worst:.2g} in {d.rows} rows, {d.edges} with other tokens let "
        f"through (first or worst at {d.where})"
        for name, d in found.items()
        if not d.passed
    ]
    measured = f"largest total variation {worst:.2g} over {', '.join(n for n, d in found.items() if d.rows)}"
    bound = f"{SAME_BOUND:g}" if subject.stands_alone else f"{SAME_BOUND:g}; draft {subject.bound:g}"
    return subject.finding("processors", not bad, measured, bound, worst, found["all"].rows, notes, left_out=left_out)
