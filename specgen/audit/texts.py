"""Checks `greedy`, `invariance` and `seeds`: whole texts against plain decoding's, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specgen.audit.subject import SHORT, Subject, Work, at_least_float32
from specgen.audit.watching import largest_difference
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.rounds.record import Round
from specgen.sampling.randomness import SharedNoise, prompt_digest
from specgen.settings import Mode

INVARIANCE_K = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where two texts differ. margins: of the token chosen over the other's, by kind of call.

    explained: each call's own logits give the token it wrote, and the two calls' logits differ by rounding only.
    """

    position: int
    plain_token: int
    token: int
    plain_margin: float
    margin: float
    difference: float
    explained: bool

    def __str__(self) -> str:
        verdict = "a tie broken by arithmetic" if self.explained else "not explained by rounding: a bug"
        return (
            f"position {self.position}: plain decoding wrote {self.plain_token} (margin {self.plain_margin:.3g} in "
            f"its one-token call), the loop {self.token} (margin {self.margin:.3g} in its verification call); the "
            f"calls' scores of the two differ by {self.difference:.3g}: {verdict}"
        )


Kind = tuple[str, Drafter, int]  # a draft's name, the draft, k


def bits_of(r: Round) -> tuple[Any, ...]:
    """What two runs with one seed must share, to the bit."""
    return (r.committed, r.overlaps, r.drafted, r.tested, r.accepted, r.finish)


def check_seeds(subject: Subject) -> Work:
    positions, differing = 0, []
    length = min(SHORT, subject.sampling.max_new_tokens)
    units = subject.prompts_and_seeds()[: 2 * len(subject.prompts)]
    groups, left_out = subject.groups(units), 0
    for i, group in enumerate(groups):
        if i and not (yield):
            left_out = len(groups) - i
            break
        runs = [[(w.number, bits_of(w.round)) for w in subject.generate(group, length=length)] for _ in range(2)]
        positions += sum(len(bits[0]) for _, bits in runs[0])
        if runs[0] != runs[1]:
            prompt, seed = group[0]
            differing.append(f"seed {seed}, prompt {list(prompt)[:8]}…: two runs differ")
    measured, value = f"{len(differing)} runs differ when repeated", float(len(differing))
    bound = "0, bit for bit"
    return subject.finding("seeds", not differing, measured, bound, value, positions, differing, left_out=left_out)


def check_greedy(subject: Subject) -> Work:
    return _same_texts(subject, "greedy", [("draft", subject.drafter, subject.sampling.k)], [0])


def check_invariance(subject: Subject) -> Work:
    target = subject.pair.target
    drafts: list[tuple[str, Drafter]] = [("draft", subject.drafter)]
    if subject.drafter.kind != NgramDrafter.kind:
        drafts.append(("ngram", NgramDrafter(target.vocabulary, device=target.device)))
    kinds = [(name, drafter, k) for name, drafter in drafts for k in INVARIANCE_K]
    seeds = range(subject.sampling.seed, subject.sampling.seed + max(1, subject.seeds))
    return _same_texts(subject, "invariance", kinds, seeds)


def _same_texts(subject: Subject, name: str, kinds: Sequence[Kind], seeds: Sequence[int]) -> Work:
    """Every kind (draft and k) against plain decoding with that seed."""
    positions, texts = 0, 0
    ties: list[str] = []
    bugs: list[str] = []
    plain: dict[tuple[int, int], list[int]] = {}
    groups = subject.groups(range(len(subject.prompts)))
    units = [(seed, group, kind) for seed in seeds for group in groups for kind in kinds]
    left_out = 0
    for n, (seed, group, (draft, drafter, k)) in enumerate(units):
        if n and not (yield):
            left_out = len(units) - n
            break
        for i in group:
            if (seed, i) not in plain:
                plain[seed, i] = subject.plain_tokens(subject.prompts[i], seed)
        compared = _compare(subject, group, seed, [plain[seed, i] for i in group], drafter, k)
        for i, (same, divergence) in zip(group, compared, strict=True):
            positions, texts = positions + same + (divergence is not None), texts + 1
            if divergence is not None:
                where = f"{draft}, k = {k}, seed {seed}, prompt {i + 1}: {divergence}"
                (ties if divergence.explained else bugs).append(where)
    measured = f"{texts} texts against plain decoding: {len(bugs)} differ"
    if ties:
        measured += f", and {len(ties)} at a tie that rounding breaks"
    notes = [*bugs[:3], *ties[:3]]
    value = float(len(bugs))
    bound = "0, ties aside"
    return subject.finding(name, not bugs, measured, bound, value, positions, notes, unit="texts", left_out=left_out)


def _compare(
    subject: Subject, group: Sequence[int], seed: int, plain: Sequence[list[int]], drafter: Drafter, k: int
) -> list[tuple[int, Divergence | None]]:
    """Of each prompt how many tokens are the same, and what became of the first other one."""
    prompts = [subject.prompts[i] for i in group]
    lengths = [0] * len(group)
    found: list[tuple[int, Tensor] | None] = [None] * len(group)  # the first other token, and what verified it
    for watched in subject.generate([(prompt, seed) for prompt in prompts], drafter=drafter, k=k):
        b = watched.number
        for j, token in enumerate(watched.round.tokens if found[b] is None else ()):
            n = lengths[b]
            if n >= len(plain[b]) or token != plain[b][n]:
                found[b] = token, watched.seen.logits[j]
                break
            lengths[b] += 1
    told: list[tuple[int, Divergence | None]] = []
    for prompt, tokens, n, other in zip(prompts, plain, lengths, found, strict=True):
        divergence = None
        if other is not None:
            divergence = _explain(subject, prompt, seed, tokens, *other, n)
        elif n < len(tokens):
            divergence = Divergence(len(prompt) + n, tokens[n], -1, 0.0, 0.0, math.inf, False)
        told.append((n, divergence))
    return told


def _explain(
    subject: Subject, prompt: Sequence[int], seed: int, plain: list[int], token: int, verified: Tensor, n: int
) -> Divergence:
    """Plain decoding once more under the same engine, for the logits of its call."""
    position, prefix = len(prompt) + n, [*prompt, *plain[:n]]
    if n >= len(plain):
        return Divergence(position, -1, token, 0.0, 0.0, math.inf, False)
    for watched in subject.generate([(prompt, seed)], plain=True, length=n + 1):
        alone = watched.seen.logits[-1]
    a, b = (_choices(subject, logits, prefix, seed, prompt) for logits in (alone, verified))
    own = plain[n]
    near = float((a - b)[[own, token]].abs().nan_to_num(nan=0.0).sum())
    rounding = largest_difference(alone, verified) <= subject.bound
    explained = int(a.argmax()) == own and int(b.argmax()) == token and rounding
    margins = float(a[own] - a[token]), float(b[token] - b[own])
    return Divergence(position, own, token, *margins, near, explained)


def _choices(subject: Subject, logits: Tensor, prefix: Sequence[int], seed: int, prompt: Sequence[int]) -> Tensor:
    """[V] whose argmax is the token that this call's logits give."""
    if subject.mode is not Mode.COUPLED:
        return subject.processors.scores(at_least_float32(logits)[None], prefix)[0].double()
    noise = SharedNoise(seed, prompt_digest(prompt))
    probs = subject.processors(logits[None], prefix)[0]
    return probs.double().log() + noise.gumbel(len(prefix), probs)
