"""The one judge: which drafted tokens are kept, and what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.rounds.record import Origin
from specgen.sampling.randomness import Stream, Uniforms, draw
from specgen.verification.rules import Rule


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
