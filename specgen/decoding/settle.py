"""A judged proposal → the round it makes: cut at the first end, with the numbers that are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specgen.drafting.drafter import Proposal, Row
from specgen.rounds.record import Committed, Ended, Finish, Origin, Round
from specgen.verification.judge import HostDraws, describe, verify
from specgen.verification.rules import Rule


def settle(rule: Rule, target_probs: Tensor, proposal: Proposal, row: Row, index: int, *, plain: bool) -> Round:
    """One row's proposal verified and cut at the first end: its Round, but for the times.

    target_probs: [n+1, V], behind the row's committed text and behind each of the n drafted tokens. plain: there is
    no drafter; the round is one of plain decoding.
    """
    draft_probs = proposal.probs.to(target_probs)
    drafted = torch.tensor(proposal.tokens, dtype=torch.int64, device=target_probs.device)
    verdict = verify(rule, target_probs, draft_probs, drafted, HostDraws(row.uniforms, len(row.tokens), index, plain))
    accepted = int(verdict.accepted)
    written, finish = until_the_end([*proposal.tokens[:accepted], int(verdict.token)], row.ended, row.room)
    t = min(accepted + (accepted < len(drafted)), len(written))
    told = describe(
        rule,
        target_probs[: len(written)],
        draft_probs[:t],
        torch.tensor(written, device=target_probs.device),
        drafted[:t],
    )
    numbers = {name: values.tolist() for name, values in told.items()}
    numbers["impossible"] = verdict.impossible.tolist()
    return recorded(rule, index, proposal.tokens, accepted, int(verdict.token), written, finish, numbers, plain=plain)


def until_the_end(written: list[int], ended: Ended, room: int) -> tuple[list[int], Finish | None]:
    """The tokens up to and with the first end, and which end it was."""
    for i, token in enumerate(written, 1):
        if (finish := ended(token)) is not None:
            return written[:i], finish
    return written, Finish.LENGTH if len(written) == room else None


def recorded(
    rule: Rule,
    index: int,
    drafted: Sequence[int],
    accepted: int,
    token: int,
    written: Sequence[int],
    finish: Finish | None,
    told: Mapping[str, Sequence[float]],
    *,
    plain: bool,
) -> Round:
    """The round's record, but for its times.

    accepted, token: what verification kept of the drafted tokens, and what followed them. written: what the first end
    leaves of these. told: `describe`'s numbers, of these positions at least, and the verdict's `impossible`.
    """
    rejected = accepted < len(drafted)
    tested = min(accepted + rejected, len(written))
    last = Origin.PLAIN if plain else Origin.CORRECTION if rejected else Origin.BONUS
    committed = tuple(
        Committed(
            token=written[i],
            origin=Origin.ACCEPTED if i < accepted else last,
            log_prob=told["log_prob"][i],
            entropy=told["entropy"][i],
            support=int(told["support"][i]),
            overlap=told["overlap"][i] if i < tested else None,
        )
        for i in range(len(written))
    )
    impossible = [
        f"committed token {c.token}, to which the target gives 0" for c in committed if c.log_prob == -math.inf
    ]
    if rejected and not rule.by_match:
        if told["impossible"][0]:
            impossible.append(f"rejected token {drafted[accepted]}, to which the target gives no less than the draft")
        if told["impossible"][1]:
            impossible.append(f"corrected to token {token}, to which the target gives no more than the draft")
    return Round(
        index=index,
        drafted=len(drafted),
        tested=tested,
        accepted=min(accepted, len(written)),
        committed=committed,
        overlaps=tuple(told["overlap"][:tested]),
        expected=tuple(told.get("expected", ())[:tested]),
        biases=tuple(told.get("biases", ())[:tested]),
        impossible=() if plain else tuple(impossible),
        finish=finish,
    )
