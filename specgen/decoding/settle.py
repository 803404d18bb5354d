"""A scored proposal → the round it makes: verdict, cut at the first end, the numbers that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgen.drafting.drafter import Proposal
from specgen.rounds.record import Committed, Ended, Finish, Origin, Round
from specgen.sampling.randomness import Stream, Uniforms, draw
from specgen.settings import Mode
from specgen.verification.judge import Verdict, verify
from specgen.verification.law import expected_acceptance, law, overlap, total_variation
from specgen.verification.rules import Rule


def settle(
    rule: Rule,
    target_probs: Tensor,
    proposal: Proposal,
    *,
    round_index: int,
    position: int,
    room: int,
    uniforms: Uniforms,
    ended: Ended,
) -> Round:
    """One row's proposal verified and cut at the first end: its Round, but for the times.

    target_probs: [n+1, V], behind the committed text and behind each of the n drafted tokens. position: how many
    tokens are committed, the prompt's among them. room: how many more may be.
    """
    draft_probs = proposal.probs.to(target_probs)
    verdict = verify(
        rule,
        target_probs,
        draft_probs,
        proposal.tokens,
        position=position,
        round_index=round_index,
        uniforms=uniforms,
    )
    written = [*proposal.tokens[: verdict.accepted], verdict.next_token]
    written, finish = until_the_end(written, ended, room)
    return Round(
        index=round_index,
        drafted=len(proposal.tokens),
        tested=min(verdict.tested, len(written)),
        accepted=min(verdict.accepted, len(written)),
        **_record(rule, target_probs, draft_probs, proposal.tokens, verdict, written),
        finish=finish,
    )


def settle_plain(
    probs: Tensor, *, round_index: int, position: int, room: int, uniforms: Uniforms, ended: Ended
) -> Round:
    """The same for a row that is decoded plainly. probs: [1, V]."""
    token = int(draw(probs[0], Stream.PLAIN, position, 0, uniforms))
    written, finish = until_the_end([token], ended, room)
    return Round(round_index, 0, 0, 0, _committed(probs, written, [Origin.PLAIN], []), finish=finish)


def until_the_end(written: list[int], ended: Ended, room: int) -> tuple[list[int], Finish | None]:
    """The tokens up to and with the first end, and which end it was."""
    for i, token in enumerate(written, 1):
        if (finish := ended(token)) is not None:
            return written[:i], finish
    return written, Finish.LENGTH if len(written) == room else None


def _committed(
    probs: Tensor, tokens: Sequence[int], origins: Sequence[Origin], overlaps: Sequence[float]
) -> tuple[Committed, ...]:
    """The few numbers a run keeps of each committed token's distribution (rows of probs [n, V])."""
    rows = probs[: len(tokens)]
    chosen = rows[range(len(tokens)), list(tokens)].log().tolist()
    # Twice as fast as torch.special.entr; 0 · log 0 is 0 here as well.
    entropy = (-(rows * rows.clamp(min=torch.finfo(rows.dtype).tiny).log()).sum(-1)).tolist()
    support = rows.count_nonzero(-1).tolist()
    return tuple(
        Committed(token, origin, chosen[i], entropy[i], support[i], overlaps[i] if i < len(overlaps) else None)
        for i, (token, origin) in enumerate(zip(tokens, origins, strict=True))
    )


def _record(
    rule: Rule,
    target_probs: Tensor,
    draft_probs: Tensor,
    drafted: Sequence[int],
    verdict: Verdict,
    written: Sequence[int],
) -> dict[str, Any]:
    """What a Round says of its distributions: committed tokens, overlaps, and events that cannot be."""
    tested = min(verdict.tested, len(written))
    overlaps = tuple(overlap(target_probs[:tested], draft_probs[:tested]).tolist())
    origins = [Origin.ACCEPTED] * verdict.accepted + [verdict.origin]
    committed = _committed(target_probs, written, origins[: len(written)], overlaps)
    impossible = [
        f"committed token {c.token}, to which the target gives 0" for c in committed if c.log_prob == -torch.inf
    ]
    if verdict.origin is Origin.CORRECTION and not rule.by_match:
        j, x, y = verdict.accepted, drafted[verdict.accepted], verdict.next_token
        if target_probs[j, x] >= draft_probs[j, x]:
            impossible.append(f"rejected token {x}, to which the target gives no less than the draft")
        if target_probs[j, y] <= draft_probs[j, y]:
            impossible.append(f"corrected to token {y}, to which the target gives no more than the draft")
    record: dict[str, Any] = {"committed": committed, "overlaps": overlaps, "impossible": tuple(impossible)}
    if rule.name not in (Mode.EXACT, Mode.GREEDY):
        record["expected"] = tuple(expected_acceptance(rule, target_probs[:tested], draft_probs[:tested]).tolist())
    if not rule.by_match and rule.name != Mode.EXACT:
        bias = total_variation(law(rule, target_probs[:tested], draft_probs[:tested]), target_probs[:tested])
        record["biases"] = tuple(bias.tolist())
    return record
