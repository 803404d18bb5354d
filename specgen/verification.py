"""The rules, and what follows from them: tensors in, tensors out, no model.

A rule that handles positions one after another is one function `accept(target_probs, draft_probs) -> a` with the
probability of keeping each token of the vocabulary. The correction and the law of what comes out follow from it.

    target_probs, draft_probs: [..., V], rows sum to 1 (the literature's p and q, whichever way round)

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) give the canonical rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.rounds import Mode, Origin
from specgen.sampling import Stream, Uniforms, draw


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Σ min(target, draft) [...]: 1 − total variation distance, the canonical rule's probability of acceptance."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Half the L1 distance of two distributions [..., V]."""
    return (a - b).abs().sum(-1) / 2


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, target − draft), not yet divided by its sum."""
    return (target_probs - draft_probs).clamp(min=0)


def accept_exact(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """min(1, target/draft); 1 throughout a row whose residual has no mass: there is nothing to correct there."""
    ratio = torch.where(draft_probs > 0, target_probs / draft_probs, torch.ones_like(target_probs)).clamp(max=1)
    agree = residual(target_probs, draft_probs).sum(-1, keepdim=True) <= 0
    return torch.where(agree, torch.ones_like(ratio), ratio)


def accept_greedy(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """1 for the target's argmax and 0 for everything else; the draft's distribution does not matter."""
    best = target_probs.argmax(-1, keepdim=True)
    return torch.zeros_like(target_probs).scatter(-1, best, 1.0)


def best_correction(target_probs: Tensor, draft_probs: Tensor, accept: Tensor) -> Tensor:
    """max(0, target − draft·a), undivided: the correction that brings the law closest to the target."""
    return (target_probs - draft_probs * accept).clamp(min=0)


@dataclass(frozen=True, slots=True)
class Rule:
    """accept and correction weights (undivided) of one way of verifying; both act on [..., V]."""

    name: str
    accept: Callable[[Tensor, Tensor], Tensor]
    correction: Callable[[Tensor, Tensor, Tensor], Tensor] = best_correction


RULES = {
    Mode.EXACT: Rule("exact", accept_exact),
    Mode.GREEDY: Rule("greedy", accept_greedy, lambda target, draft, a: accept_greedy(target, draft)),
}


def law(rule: Rule, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What comes out of a tested position under the rule, exactly: draft·a + (1 − Σ draft·a) · correction."""
    a = rule.accept(target_probs, draft_probs)
    kept = draft_probs * a
    weights = rule.correction(target_probs, draft_probs, a)
    mass = weights.sum(-1, keepdim=True)
    correction = torch.where(mass > 0, weights / mass, torch.zeros_like(weights))
    return kept + (1 - kept.sum(-1, keepdim=True)) * correction


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted drafted tokens, tested positions, the token that follows them and who wrote it."""

    accepted: int
    tested: int
    next_token: int
    origin: Origin


def verify(
    rule: Rule,
    target_probs: Tensor,
    draft_probs: Tensor,
    drafted: Sequence[int],
    *,
    position: int,
    round_index: int,
    uniforms: Uniforms,
) -> Verdict:
    """Goes through the k drafted tokens in order and stops at the first rejection (Leviathan et al., Algorithm 1).

    target_probs: [k+1, V]. draft_probs: [k, V], the distributions that drafted was really drawn from.
    position: absolute position of the first drafted token. A token is kept iff u < a(x), strictly, u in [0, 1):
    one that the target gives 0 is never kept.
    """
    k = len(drafted)
    keep = rule.accept(target_probs[:k], draft_probs) if k else None
    for j, token in enumerate(drafted):
        assert keep is not None
        a = float(keep[j, token])
        u = uniforms(Stream.ACCEPT, position + j, round_index, torch.tensor([a, 1.0], dtype=torch.float64))
        if not u < a:
            weights = rule.correction(target_probs[j], draft_probs[j], keep[j])
            chosen = draw(weights, Stream.CORRECTION, position + j, round_index, uniforms)
            return Verdict(j, j + 1, int(chosen), Origin.CORRECTION)
    chosen = draw(target_probs[k], Stream.BONUS, position + k, round_index, uniforms)
    return Verdict(k, k, int(chosen), Origin.BONUS)
