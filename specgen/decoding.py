"""The loop: autoregressive() and speculative() are generators that yield Round. Everything a round does is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specgen.drafting import Drafter, Proposal
from specgen.models import LanguageModel, prefill
from specgen.rounds import Committed, Finish, Mode, Origin, Round
from specgen.sampling import Processors, Stream, Uniforms, check_finite, draw
from specgen.verification import (
    RULES,
    Rule,
    Verdict,
    expected_acceptance,
    law,
    overlap,
    total_variation,
    verify,
)

Clock = Callable[[], float]
Ended = Callable[[int], Finish | None]  # told each committed token once, in order; says whether the text ends with it


def ends_at(end_tokens: Sequence[int]) -> Ended:
    """The plainest `Ended`: an end token, and nothing else, ends the text."""
    ends = frozenset(end_tokens)
    return lambda token: Finish.END if token in ends else None


def start(target: LanguageModel, drafter: Drafter | None, prompt: Sequence[int]) -> None:
    """Prefill: both sides take in all of the prompt but its last token, which the first round feeds."""
    if not prompt:
        raise ValueError("the prompt holds no token")
    target.reset()
    prefill(target, prompt[:-1])
    if drafter is not None:
        drafter.start(prompt)


def speculative(
    target: LanguageModel,
    drafter: Drafter,
    processors: Processors,
    prompt: Sequence[int],
    *,
    k: int,
    max_new_tokens: int,
    uniforms: Uniforms,
    ended: Ended,
    rule: Rule = RULES[Mode.EXACT],
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Speculative generation (Leviathan et al. 2023, Algorithm 1) after `start(target, drafter, prompt)`.

    Yields a Round at a time until the text ends or max_new_tokens are committed, never more. k shrinks at the end.
    """
    tokens = list(prompt)
    limit = len(prompt) + max_new_tokens
    finish, index = None, 0
    while finish is None:
        began = clock()
        try:
            proposal = drafter.propose(tokens, min(k, limit - len(tokens) - 1), index, uniforms)
            drafted = clock()
            feed = [*tokens[target.lengths[0] :], *proposal.tokens]
            logits = target.forward(torch.tensor([feed]), len(proposal.tokens) + 1)[0]
            verified = clock()
            check_finite(logits, target.role, len(tokens))
            settled = settle(
                rule, processors(logits, tokens, proposal.tokens), proposal, round_index=index,
                position=len(tokens), room=limit - len(tokens), uniforms=uniforms, ended=ended,
            )  # fmt: skip
            tokens += settled.tokens
        finally:  # also when interrupted: a caller that goes on finds the caches right
            settling = clock()
            target.rollback([max(0, target.lengths[0] - (len(tokens) - 1))])
            drafter.rollback(max(0, drafter.cached - (len(tokens) - 1)))
        done = clock()
        yield replace(
            settled,
            draft_s=drafted - began,
            verify_s=verified - drafted,
            rollback_s=done - settling,
            total_s=done - began,
        )
        finish, index = settled.finish, index + 1


def autoregressive(
    target: LanguageModel,
    processors: Processors,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    uniforms: Uniforms,
    ended: Ended,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Plain decoding after `start(target, None, prompt)`: rounds that draft nothing and commit one token each."""
    tokens = list(prompt)
    limit = len(prompt) + max_new_tokens
    finish, index = None, 0
    while finish is None:
        began = clock()
        logits = target.forward(torch.tensor([tokens[target.lengths[0] :]]), 1)[0]
        verified = clock()
        check_finite(logits, target.role, len(tokens))
        settled = settle_plain(
            processors(logits, tokens), round_index=index, position=len(tokens), room=limit - len(tokens),
            uniforms=uniforms, ended=ended,
        )  # fmt: skip
        tokens += settled.tokens
        target.rollback([0])
        done = clock()
        yield replace(settled, verify_s=verified - began, total_s=done - began)
        finish, index = settled.finish, index + 1


def settle(
    rule: Rule, target_probs: Tensor, proposal: Proposal, *, round_index: int, position: int, room: int,
    uniforms: Uniforms, ended: Ended,
) -> Round:  # fmt: skip
    """One row's proposal verified and cut at the first end: its Round, but for the times.

    target_probs: [n+1, V], behind the committed text and behind each of the n drafted tokens. position: how many
    tokens are committed, the prompt's among them. room: how many more may be.
    """
    draft_probs = proposal.probs.to(target_probs)
    verdict = verify(
        rule, target_probs, draft_probs, proposal.tokens,
        position=position, round_index=round_index, uniforms=uniforms,
    )  # fmt: skip
    written = [*proposal.tokens[: verdict.accepted], verdict.next_token]
    written, finish = _until_the_end(written, ended, room)
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
    written, finish = _until_the_end([token], ended, room)
    return Round(round_index, 0, 0, 0, _committed(probs, written, [Origin.PLAIN], []), finish=finish)


def _until_the_end(written: list[int], ended: Ended, room: int) -> tuple[list[int], Finish | None]:
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
    rule: Rule, target_probs: Tensor, draft_probs: Tensor, drafted: Sequence[int], verdict: Verdict,
    written: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
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
