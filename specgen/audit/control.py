"""The control: two rules that are wrong on purpose, which the audit must catch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.audit.auditor import Auditor
from specgen.audit.findings import CONTROL_CHECKS, AuditResult
from specgen.settings import Mode
from specgen.verification.rules import Rule, accept_exact


def raw_resample() -> Rule:
    """Accepts as it should, and draws the correction from the target instead of the residual."""
    return Rule("raw_resample", accept_exact, lambda target, draft, a: target)


def membership(n: int = 3) -> Rule:
    """Keeps whatever is among the target's n likeliest, and draws the correction from the target."""

    def accept(target: Tensor, draft: Tensor) -> Tensor:
        best = target.topk(min(n, target.shape[-1]), -1).indices
        return torch.zeros_like(target).scatter(-1, best, 1.0)

    return Rule("membership", accept, lambda target, draft, a: target)


@dataclass(frozen=True, slots=True)
class Control:
    """A wrong rule, and what the audit found of it."""

    rule: str
    result: AuditResult

    @property
    def caught(self) -> bool:
        return bool(self.result.failed)


def control(auditor: Auditor) -> list[Control]:
    """The audit of two rules that are wrong on purpose; each must be caught. In mode exact only."""
    if auditor.mode is not Mode.EXACT:
        raise ValueError(f"the wrong rules take the place of mode exact's, not of {auditor.mode.value}'s")
    found = []
    for rule in (raw_resample(), membership()):
        wrong = dataclasses.replace(auditor, rule=rule, budget=auditor.budget / 2)
        wrong._texts = auditor._texts  # the target's own: no rule has a part in them
        found.append(Control(rule.name, wrong.run(CONTROL_CHECKS)))
    return found
