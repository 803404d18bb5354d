"""The rules, and what follows from them: tensors in, tensors out, no model.

A rule that handles positions one after another is one function `accept(target_probs, draft_probs) -> a` with the
probability of keeping each token of the vocabulary. The correction and the law of what comes out follow from it.

    target_probs, draft_probs: [..., V], rows sum to 1 (the literature's p and q, whichever way round)

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) give the canonical rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.settings import Mode, Sampling

Acceptance = Callable[[Tensor, Tensor], Tensor]


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, target − draft), not yet divided by its sum."""
    return (target_probs - draft_probs).clamp(min=0)


def accept_exact(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """min(1, target/draft); 1 throughout a row whose residual has no mass: there is nothing to correct there."""
    return _ratio(target_probs, draft_probs, _agree(target_probs, draft_probs))


def exact_at(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """[n]: `accept_exact` of rows [n, V] at one token each, which costs a division a row."""
    rows = torch.arange(len(tokens), device=tokens.device)
    agree = _agree(target_probs, draft_probs)[:, 0]
    return _ratio(target_probs[rows, tokens], draft_probs[rows, tokens], agree)


def _agree(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return residual(target_probs, draft_probs).sum(-1, keepdim=True) <= 0


def _ratio(target: Tensor, draft: Tensor, agree: Tensor) -> Tensor:
    ratio = (target / draft).nan_to_num(nan=1.0)  # 0/0: what the draft never draws
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
    at: accept at one token a row, where that is cheaper than whole rows.
    """

    name: str
    accept: Acceptance
    correction: Callable[[Tensor, Tensor, Tensor], Tensor] = best_correction
    by_match: bool = False
    at: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def accept_at(self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
        """[n]: accept of rows [n, V] at one token each; without the rest of the rows, where the rule can."""
        if self.at is not None:
            return self.at(target_probs, draft_probs, tokens)
        return self.accept(target_probs, draft_probs).gather(-1, tokens[:, None])[:, 0]


RULES = {
    Mode.EXACT: Rule("exact", accept_exact, at=exact_at),
    Mode.GREEDY: Rule("greedy", accept_greedy, lambda target, draft, a: accept_greedy(target, draft), by_match=True),
    Mode.COUPLED: Rule("coupled", accept_exact, by_match=True),
}


def rule_for(sampling: Sampling) -> Rule:
    """The rule of the effective settings."""
    if sampling.mode is Mode.LENIENT:
        lenience = sampling.lenience
        return Rule(
            "lenient",
            accept_lenient(lenience),
            at=lambda p, q, tokens: (exact_at(p, q, tokens) / lenience).clamp(max=1),
        )
    if sampling.mode is Mode.TYPICAL:
        return Rule("typical", accept_typical(sampling.typical_epsilon, sampling.typical_delta))
    return RULES[sampling.mode]
