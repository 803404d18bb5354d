"""Check `caches`: what a model remembers of the text after a roll-back, against a pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.decoding.self_check import CheckResult
from specgen.drafting.drafter import Drafter
from specgen.models.protocol import LanguageModel
from specgen.sampling.randomness import Uniforms


def worst_row(result: CheckResult) -> str:
    drift = next(r.value or 0.0 for r in result.rows if r.name == "drift")
    events = next(r.value or 0.0 for r in result.rows if r.name == "impossible events")
    z = [abs(r.value) for r in result.rows if " z" in r.name and r.value is not None]
    largest = f"largest |z| {max(z):.2f} of {len(z)}" if z else "not enough variation for a z"
    return f"{largest}, drift {drift:.2g}, {events:.0f} impossible events"


class CacheProbe:
    """After each round one more call of either side, with its cache; in the end all of them from scratch."""

    def __init__(self, target: LanguageModel, drafter: Drafter, uniforms: Uniforms) -> None:
        self.models = {"target": target}
        self.drafter, self.uniforms = drafter, uniforms
        if drafter.model is not None:
            self.models["draft"] = drafter.model
        self.rows: dict[str, list[tuple[int, Tensor]]] = {role: [] for role in self.models}
        self.worst = dict.fromkeys(self.models, 0.0)
        self.flips = self.calls = 0
        self.faults: list[str] = []

    def after_round(self, text: Sequence[int]) -> None:
        for role, model in self.models.items():
            cached = model.lengths[0]
            if cached >= len(text):
                self.faults.append(f"{role}: {cached} tokens cached of a text of {len(text)}; it may keep one less")
                continue
            logits = model.forward(torch.tensor([text[cached:]]), 1)[0, -1]
            model.rollback([model.lengths[0] - cached])
            self.rows[role].append((len(text), logits))
        if "draft" not in self.models:
            self._compare_proposal(text)

    def _compare_proposal(self, text: Sequence[int]) -> None:
        """A drafter without a model: its next proposal against one made from scratch."""
        cached = self.drafter.cached
        proposal = self.drafter.propose(text, 1, 0, self.uniforms)
        self.drafter.rollback(self.drafter.cached - cached)
        _, (fresh,) = next(iter(self.drafter.score([*text, text[-1]], len(text))))
        self.calls += 1
        if (fresh is None) != (not proposal.tokens) or (
            fresh is not None and not torch.equal(fresh.double().cpu(), proposal.probs[0].double().cpu())
        ):
            self.flips += 1
            self.faults.append(f"draft: another proposal than from scratch at position {len(text)}")

    def judge(self, text: Sequence[int]) -> None:
        for role, model in self.models.items():
            due = dict(self.rows[role])
            if not due:
                continue
            for first, logits in model.score([*text, text[-1]], min(due)):
                for position, fresh in enumerate(logits, first):
                    if position in due:
                        used = due[position]
                        difference = float((used.double() - fresh.double()).abs().max())
                        if not difference <= self.worst[role]:
                            self.worst[role] = difference
                        self.flips += int(used.argmax() != fresh.argmax())
                        self.calls += 1
