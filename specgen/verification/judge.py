"""The one judge: which drafted tokens are kept, what follows them, and the few numbers that a round keeps.

Tensors in, tensors out, and no host read but the draws' own: the same functions run eagerly and inside a captured
graph. What differs is where the randomness comes from, which is `Draws`.

    target_probs [n+1, V], behind the committed text and behind each of the n drafted tokens
    draft_probs  [n, V], the distributions that drafted [n] was really drawn from
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.sampling.randomness import Stream, Uniforms, draw
from specgen.settings import Mode
from specgen.verification.law import expected_acceptance, law, overlap, total_variation
from specgen.verification.rules import Rule


class Draws(Protocol):
    """One round's randomness."""

    def kept(self, a: Tensor) -> Tensor:
        """[n] bool: u < a at successive positions, strictly: what the target gives 0 is never kept. Behind the first
        False the answers mean nothing, and need not be drawn."""
        ...

    def own(self, target_probs: Tensor, drafted: Tensor) -> Tensor:
        """[n+1] int64: what the target itself draws at each position; behind the first that was not drafted the
        answers mean nothing."""
        ...

    def following(self, weights: Tensor, at: Tensor, rejected: Tensor) -> Tensor:
        """[1] int64: the token at position `at` [1] of the round, drawn from weights [V]: a correction if rejected
        [1], else a bonus."""
        ...


@dataclass(frozen=True, slots=True)
class HostDraws:
    """The draws of a round that begins at an absolute position, taken one after another and only as needed.

    plain: the round is one of plain decoding, whose draws have a stream of their own and no round in their key.
    """

    uniforms: Uniforms
    position: int
    round_index: int
    plain: bool = False

    def kept(self, a: Tensor) -> Tensor:
        kept = [False] * len(a)
        for j, probability in enumerate(a.tolist()):
            edges = torch.tensor([probability, 1.0], dtype=torch.float64)
            u = self.uniforms(Stream.ACCEPT, self.position + j, self.round_index, edges)
            if not u < probability:
                break
            kept[j] = True
        return torch.tensor(kept, dtype=torch.bool, device=a.device)

    def own(self, target_probs: Tensor, drafted: Tensor) -> Tensor:
        own = [-1] * len(target_probs)
        for j, token in enumerate([*drafted.tolist(), None]):
            stream = Stream.BONUS if token is None else Stream.CORRECTION
            own[j] = int(draw(target_probs[j], stream, self.position + j, self.round_index, self.uniforms))
            if own[j] != token:
                break
        return torch.tensor(own, device=target_probs.device)

    def following(self, weights: Tensor, at: Tensor, rejected: Tensor) -> Tensor:
        if self.plain:
            return draw(weights, Stream.PLAIN, self.position, 0, self.uniforms).view(1)
        stream = Stream.CORRECTION if bool(rejected) else Stream.BONUS
        return draw(weights, stream, self.position + int(at), self.round_index, self.uniforms).view(1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted [1] drafted tokens, and the token [1] that follows them.

    impossible [2]: whether a token was rejected to which the target gives no less than the draft, and whether one was
    corrected to that the target gives no more than the draft. They mean nothing unless there was a rejection.
    """

    accepted: Tensor
    token: Tensor
    impossible: Tensor


def verify(
    rule: Rule,
    target_probs: Tensor,
    draft_probs: Tensor,
    drafted: Tensor,
    draws: Draws,
    offered: Tensor | None = None,
) -> Verdict:
    """Goes through the drafted tokens in order and stops at the first rejection (Leviathan et al. 2023, Algorithm 1).

    offered [1]: how many of them were drafted; those behind are padding, and all are where it is not given. For
    greedy, target_probs may be any scores whose argmax is the target's.
    """
    k = len(drafted)
    none, never = torch.zeros(1, dtype=torch.int64, device=target_probs.device), target_probs.new_zeros(2)
    if k == 0 and not rule.by_match:
        return Verdict(none, draws.following(target_probs[0], none, none > 0), never)
    ahead = torch.arange(k, device=target_probs.device)
    offered = none + k if offered is None else offered
    if rule.by_match:
        own = target_probs.argmax(-1) if rule.name == Mode.GREEDY else draws.own(target_probs, drafted)
        accepted = _leading((own[:k] == drafted) & (ahead < offered))
        return Verdict(accepted, own.index_select(0, accepted), never)
    a = rule.accept_at(target_probs[:k], draft_probs, drafted).double()
    accepted = _leading(draws.kept(a) & (ahead < offered))
    rejected, at = accepted < offered, accepted.clamp(max=k - 1)
    target_row, draft_row = target_probs.index_select(0, accepted)[0], draft_probs.index_select(0, at)[0]
    correction = rule.correction(target_row, draft_row, rule.accept(target_row, draft_row))
    token = draws.following(torch.where(rejected, correction, target_row), accepted, rejected)
    both = torch.cat([drafted.index_select(0, at), token])
    target, draft = target_row.index_select(0, both), draft_row.index_select(0, both)
    return Verdict(accepted, token, torch.stack([target[0] >= draft[0], target[1] <= draft[1]]))


def _leading(kept: Tensor) -> Tensor:
    """[1]: how many of kept [n] are true before the first that is not."""
    return kept.long().cumprod(0).sum(0, keepdim=True)


def describe(
    rule: Rule, target_probs: Tensor, draft_probs: Tensor, written: Tensor, drafted: Tensor
) -> dict[str, Tensor]:
    """The few numbers that a round keeps: of committed positions [m] by the token written there, and of tested ones.

    target_probs [m, V], written [m]; draft_probs [t, V], drafted [t]. log_prob, entropy (nats) and support are the
    target's; overlap and, of rules other than exact and greedy, the expected acceptance and the bias, are the pair's.
    """
    t = len(drafted)
    if rule.name == Mode.GREEDY:  # the distributions are one-hot
        certain = torch.zeros(len(written), device=target_probs.device)
        overlaps = (target_probs[:t].argmax(-1) == drafted).to(certain)
        return {"log_prob": certain, "entropy": certain, "support": certain + 1, "overlap": overlaps}
    tiny = torch.finfo(target_probs.dtype).tiny
    told = {
        "log_prob": target_probs.gather(1, written[:, None])[:, 0].log(),
        # Twice as fast as torch.special.entr; 0 · log 0 is 0 here as well.
        "entropy": -(target_probs * target_probs.clamp(min=tiny).log()).sum(-1),
        "support": (target_probs > 0).sum(-1),
        "overlap": overlap(target_probs[:t], draft_probs),
    }
    if rule.name != Mode.EXACT:
        told["expected"] = expected_acceptance(rule, target_probs[:t], draft_probs)
        if not rule.by_match:
            told["biases"] = total_variation(law(rule, target_probs[:t], draft_probs), target_probs[:t])
    return told
