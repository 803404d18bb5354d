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

from specgen.rounds import Mode, Origin, Sampling
from specgen.sampling import Stream, Uniforms, draw

Acceptance = Callable[[Tensor, Tensor], Tensor]


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
    agree = residual(target_probs, draft_probs).sum(-1, keepdim=True) <= 0
    ratio = (target_probs / draft_probs).nan_to_num(nan=1.0)  # 0/0: what the draft never draws
    return (ratio + agree).clamp(max=1)


def accept_greedy(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """1 for the target's argmax and 0 for everything else; the draft's distribution does not matter."""
    best = target_probs.argmax(-1, keepdim=True)
    return torch.zeros_like(target_probs).scatter(-1, best, 1.0)


def accept_lenient(lenience: float) -> Acceptance:
    """min(1, target/(ℓ·draft)), 0 < ℓ <= 1: keeps more than it may; ℓ = 1 is exact."""
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be in (0, 1], not {lenience}")
    return lambda target_probs, draft_probs: (accept_exact(target_probs, draft_probs) / lenience).clamp(max=1)


def accept_typical(epsilon: float, delta: float) -> Acceptance:
    """1 where target > min(ε, δ·exp(−entropy of the target)), else 0 (Cai et al. 2024, "Medusa", section 2.3.1)."""

    def accept(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        entropy = torch.special.entr(target_probs).sum(-1, keepdim=True)
        return (target_probs > (delta * (-entropy).exp()).clamp(max=epsilon)).to(target_probs.dtype)

    return accept


def best_correction(target_probs: Tensor, draft_probs: Tensor, accept: Tensor) -> Tensor:
    """max(0, target − draft·a), undivided: the correction that brings the law closest to the target."""
    return (target_probs - draft_probs * accept).clamp(min=0)


@dataclass(frozen=True, slots=True)
class Rule:
    """accept and correction weights (undivided) of one way of verifying; both act on [..., V].

    by_match: verified by drawing the target's own token and comparing (greedy, coupled), not by accept; the draft's
    draw and the target's are then not independent and `law` does not apply (greedy apart, where both are certain).
    """

    name: str
    accept: Acceptance
    correction: Callable[[Tensor, Tensor, Tensor], Tensor] = best_correction
    by_match: bool = False


RULES = {
    Mode.EXACT: Rule("exact", accept_exact),
    Mode.GREEDY: Rule("greedy", accept_greedy, lambda target, draft, a: accept_greedy(target, draft), by_match=True),
    Mode.COUPLED: Rule("coupled", accept_exact, by_match=True),
}


def rule_for(sampling: Sampling) -> Rule:
    """The rule of the effective settings."""
    if sampling.mode is Mode.LENIENT:
        return Rule("lenient", accept_lenient(sampling.lenience))
    if sampling.mode is Mode.TYPICAL:
        return Rule("typical", accept_typical(sampling.typical_epsilon, sampling.typical_delta))
    return RULES[sampling.mode]


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
    if rule.by_match:
        return _verify_by_match(target_probs, drafted, position, round_index, uniforms)
    for j, token in enumerate(drafted):
        keep = rule.accept(target_probs[j], draft_probs[j])
        a = float(keep[token])
        u = uniforms(Stream.ACCEPT, position + j, round_index, torch.tensor([a, 1.0], dtype=torch.float64))
        if not u < a:
            weights = rule.correction(target_probs[j], draft_probs[j], keep)
            chosen = draw(weights, Stream.CORRECTION, position + j, round_index, uniforms)
            return Verdict(j, j + 1, int(chosen), Origin.CORRECTION)
    chosen = draw(target_probs[k], Stream.BONUS, position + k, round_index, uniforms)
    return Verdict(k, k, int(chosen), Origin.BONUS)


def _verify_by_match(
    target_probs: Tensor, drafted: Sequence[int], position: int, round_index: int, uniforms: Uniforms
) -> Verdict:
    """Keeps a drafted token iff it is what the target draws itself at that position."""
    for j, token in enumerate(drafted):
        own = int(draw(target_probs[j], Stream.CORRECTION, position + j, round_index, uniforms))
        if own != token:
            return Verdict(j, j + 1, own, Origin.CORRECTION)
    own = int(draw(target_probs[-1], Stream.BONUS, position + len(drafted), round_index, uniforms))
    return Verdict(len(drafted), len(drafted), own, Origin.BONUS)
