"""The loop: autoregressive() and speculative() are generators that yield Round. Everything a round does is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specgen.decoding.settle import settle, settle_plain
from specgen.drafting.drafter import Drafter, Row
from specgen.drafting.rows import RowsDrafter
from specgen.models.protocol import LanguageModel, prefill
from specgen.models.ragged import RowsModel, padded
from specgen.rounds.record import Ended, Round
from specgen.sampling.processors import Processors, check_finite
from specgen.sampling.randomness import Uniforms
from specgen.settings import Mode
from specgen.verification.rules import RULES, Rule

Clock = Callable[[], float]


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
                rule,
                processors(logits, tokens, proposal.tokens),
                proposal,
                round_index=index,
                position=len(tokens),
                room=limit - len(tokens),
                uniforms=uniforms,
                ended=ended,
            )
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
            processors(logits, tokens),
            round_index=index,
            position=len(tokens),
            room=limit - len(tokens),
            uniforms=uniforms,
            ended=ended,
        )
        tokens += settled.tokens
        target.rollback([0])
        done = clock()
        yield replace(settled, verify_s=verified - began, total_s=done - began)
        finish, index = settled.finish, index + 1


@dataclass(frozen=True, slots=True)
class Step:
    """One round of every row that was still decoding. Times in seconds, of the whole step.

    rounds: by row; each carries the step's times. width: tokens a row in the target call, padding included. rows:
    how many were decoding.
    """

    index: int
    rounds: dict[int, Round]
    draft_s: float
    verify_s: float
    rollback_s: float
    total_s: float
    width: int
    rows: int


def speculative_batch(
    target: RowsModel,
    drafter: RowsDrafter,
    processors: Processors,
    rows: Sequence[Row],
    *,
    k: int,
    rule: Rule,
    clock: Clock,
) -> Iterator[Step]:
    """`decoding.speculative` for several rows, after target and drafter have started with their prompts."""
    live, index = list(rows), 0
    while live:
        began = clock()
        try:
            proposals = drafter.propose(live, [min(k, row.room - 1) for row in live], index)
            drafted = clock()
            feeds = [
                [*row.tokens[cached:], *proposal.tokens]
                for row, cached, proposal in zip(live, target.lengths, proposals, strict=True)
            ]
            logits = target.forward(*padded(feeds))
            verified = clock()
            settled: list[Round] = []
            for row, feed, proposal, scored in zip(live, feeds, proposals, logits, strict=True):
                own = scored[len(feed) - len(proposal.tokens) - 1 : len(feed)]
                row.check(own, target.role, len(row.tokens))
                settled.append(
                    settle(
                        rule,
                        processors(own, row.tokens, proposal.tokens),
                        proposal,
                        round_index=index,
                        position=len(row.tokens),
                        room=row.room,
                        uniforms=row.uniforms,
                        ended=row.ended,
                    )
                )
            _commit(live, settled)
        finally:  # also when interrupted: caches hold no more than what is committed
            settling = clock()
            _roll_back(target, live)
            _roll_back(drafter, live)
        stay = [b for b, finished in enumerate(settled) if finished.finish is None]
        _leave(target, stay, len(live))
        _leave(drafter, stay, len(live))
        done = clock()
        yield _step(
            index,
            live,
            settled,
            drafted - began,
            verified - drafted,
            done - settling,
            done - began,
            width=max(len(feed) for feed in feeds),
        )
        live, index = [live[b] for b in stay], index + 1


def autoregressive_batch(
    target: RowsModel, processors: Processors, rows: Sequence[Row], *, clock: Clock
) -> Iterator[Step]:
    """Plain decoding of several rows, after the target has started with their prompts: a token a row and step."""
    live, index = list(rows), 0
    while live:
        began = clock()
        try:
            feeds = [row.tokens[cached:] for row, cached in zip(live, target.lengths, strict=True)]
            logits = target.forward(*padded(feeds))
            verified = clock()
            settled: list[Round] = []
            for row, feed, scored in zip(live, feeds, logits, strict=True):
                own = scored[len(feed) - 1 : len(feed)]
                row.check(own, target.role, len(row.tokens))
                settled.append(
                    settle_plain(
                        processors(own, row.tokens),
                        round_index=index,
                        position=len(row.tokens),
                        room=row.room,
                        uniforms=row.uniforms,
                        ended=row.ended,
                    )
                )
            _commit(live, settled)
        finally:
            _roll_back(target, live)
        stay = [b for b, finished in enumerate(settled) if finished.finish is None]
        _leave(target, stay, len(live))
        done = clock()
        yield _step(index, live, settled, 0.0, verified - began, 0.0, done - began, width=1)
        live, index = [live[b] for b in stay], index + 1


def _commit(live: Sequence[Row], settled: Sequence[Round]) -> None:
    """Once every row is settled: a step is committed whole or not at all."""
    for row, finished in zip(live, settled, strict=True):
        row.tokens += finished.tokens


def _roll_back(side: RowsModel | RowsDrafter, live: Sequence[Row]) -> None:
    """Each row keeps at most its committed text but the last token."""
    side.rollback([max(0, n - (len(row.tokens) - 1)) for n, row in zip(side.lengths, live, strict=True)])


def _leave(side: RowsModel | RowsDrafter, stay: Sequence[int], of: int) -> None:
    if 0 < len(stay) < of:
        side.keep(stay)


def _step(
    index: int,
    live: Sequence[Row],
    settled: Sequence[Round],
    draft_s: float,
    verify_s: float,
    rollback_s: float,
    total_s: float,
    *,
    width: int,
) -> Step:
    rounds = {
        row.number: replace(r, draft_s=draft_s, verify_s=verify_s, rollback_s=rollback_s, total_s=total_s)
        for row, r in zip(live, settled, strict=True)
    }
    return Step(index, rounds, draft_s, verify_s, rollback_s, total_s, width, len(live))
