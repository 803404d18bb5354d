"""What follows from a rule: overlap, expected acceptance, and the law of what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.settings import Mode
from specgen.verification.rules import Rule


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Σ min(target, draft) [...]: 1 − total variation distance, the canonical rule's probability of acceptance."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Half the L1 distance of two distributions [..., V]."""
    return (a - b).abs().sum(-1) / 2


def expected_acceptance(rule: Rule, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The probability [...] that a token drawn from draft_probs is kept under the rule."""
    if rule.name == Mode.COUPLED:
        return coupled_acceptance(target_probs, draft_probs)
    return (draft_probs * rule.accept(target_probs, draft_probs)).sum(-1)


def coupled_acceptance(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The probability [...] that two Gumbel-max draws with the same noise agree.

    P(both draw x) = 1 / Σ_y max(target_y/target_x, draft_y/draft_x); it lies between (1 − TV)/(1 + TV) and 1 − TV.
    The maximum is the target's term exactly where y's ratio target/draft is at least x's, so one sort replaces the
    sum over all pairs.
    """
    target, draft = target_probs.double(), draft_probs.double()
    order = (target / draft).nan_to_num(nan=0.0, posinf=torch.inf).argsort(-1, descending=True)
    target, draft = target.gather(-1, order), draft.gather(-1, order)
    above, below = target.cumsum(-1), draft.flip(-1).cumsum(-1).flip(-1) - draft
    both = (target > 0) & (draft > 0)
    total = above / target + below / draft
    return torch.where(both, 1 / total, torch.zeros_like(total)).sum(-1)


def coupled_joint(target_probs: Tensor, draft_probs: Tensor, tokens: Sequence[int]) -> list[float]:
    """[n] probabilities that two Gumbel-max draws with the same noise both yield tokens[i] of rows [n, V].

    1 / Σ_y max(target_y/target_x, draft_y/draft_x); divided by target_x it is what min(1, draft_x/target_x) is to
    mode exact.
    """
    at = torch.tensor(list(tokens), device=target_probs.device)[:, None]
    x, y = target_probs.gather(-1, at), draft_probs.gather(-1, at)
    joint = 1 / torch.maximum(target_probs / x, draft_probs / y).sum(-1)
    there = ((x > 0) & (y > 0))[:, 0]
    return torch.where(there, joint, torch.zeros_like(joint)).tolist()


def law(rule: Rule, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What comes out of a tested position under the rule, exactly: draft·a + (1 − Σ draft·a) · correction."""
    a = rule.accept(target_probs, draft_probs)
    kept = draft_probs * a
    weights = rule.correction(target_probs, draft_probs, a)
    mass = weights.sum(-1, keepdim=True)
    correction = torch.where(mass > 0, weights / mass, torch.zeros_like(weights))
    return kept + (1 - kept.sum(-1, keepdim=True)) * correction
