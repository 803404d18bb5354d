"""Check `law`: what the rule would make of the target's distribution, exactly, whatever the machine does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specgen.audit.findings import Finding, Status
from specgen.audit.subject import Subject, Work
from specgen.audit.watching import Memoised, plain_chain, widened
from specgen.drafting.drafter import Drafter
from specgen.sampling.processors import Processors
from specgen.verification.law import law, total_variation

LAW_BOUND = 1e-6  # total variation: float64 arithmetic on float32 probabilities, normalised first


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


def memoised(subject: Subject) -> tuple[Memoised, Drafter]:
    """The pair's target and drafter over memoised models."""
    model = subject.drafter.model
    drafter = subject.drafter if model is None else subject.drafter.over(Memoised(model))
    return Memoised(subject.pair.target), drafter


def check(subject: Subject) -> Work:
    """The rule's own law at the positions of the target's own texts, on the vocabulary's full width."""
    biases: list[float] = []
    left_out = 0
    for i in range(len(subject.prompts)):
        if i and not (yield):
            left_out = len(subject.prompts) - i
            break
        text = subject.text(i)
        drafts = (row for _, rows in subject.drafter.score(text, 1) for row in rows)
        for first, logits in subject.pair.target.score(text, 1):
            for row in subject.processors(logits, text[:first], text[first : first + len(logits) - 1]):
                draft = next(drafts)
                if draft is not None:
                    target_probs = widened(row)
                    out = law(subject.verified_by, target_probs, widened(draft.to(row)).to(target_probs))
                    biases.append(float(total_variation(out, target_probs)))
    if not biases:
        return subject.finding("law", True, "", f"{LAW_BOUND:g}", None, 0)
    worst, mean = max(biases), sum(biases) / len(biases)
    measured = f"total variation from the target {worst:.2g} worst, {mean:.2g} mean"
    if subject.mode.approximate:
        measured = f"bias: {measured}, at {len(biases)} positions"
        return Finding("law", Status.SHOWN, measured, "none is promised", worst, len(biases))
    bound = f"{LAW_BOUND:g}"
    return subject.finding(
        "law", worst <= LAW_BOUND, measured, bound, worst, len(biases), unit="prompts", left_out=left_out
    )
