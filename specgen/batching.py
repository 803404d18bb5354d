"""B prompts at once: a step drafts, scores and verifies a round of every row in one call of each model.

Rows differ in length, in what they accept and in when they end; each keeps its own seed, law and text, whoever its
neighbours are. Finished rows leave.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from specgen.cache import Rows, in_place, ragged
from specgen.decoding import Clock, Ended, settle, settle_plain
from specgen.drafting import Drafter, ModelDrafter, NgramDrafter, Proposal
from specgen.generation import Pair
from specgen.models import PREFILL_CHUNK, CausalLM, rope_changes_with_length
from specgen.rounds import Finish, Mode, Round, UsageError
from specgen.sampling import (
    KeyedUniforms,
    Processors,
    SharedNoise,
    Stream,
    Uniforms,
    check_finite,
    draw,
    prompt_digest,
)
from specgen.text import TextStream
from specgen.verification import Rule, rule_for


@dataclass(slots=True)
class Row:
    """One prompt of a batch on its way. tokens: prompt and committed text; limit: how long they may become."""

    number: int
    tokens: list[int]
    limit: int
    uniforms: Uniforms
    ended: Ended

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)

    def check(self, logits: Tensor, role: str, position: int) -> None:
        """Raises RunError naming model, prompt (counted from 1) and position where logits [n, V] are not finite."""
        check_finite(logits, f"{role} (prompt {self.number + 1} of the batch)", position)


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


# ----------------------------------------------------------------------------------------------------------- models


class RowsModel(Protocol):
    """What the loop needs of a model for B rows. `lengths[b]` tokens of row b are cached."""

    role: str
    vocabulary: int

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """A new batch: row b takes in all of prompts[b] but its last token."""
        ...

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Appends the first counts[b] of row b's tokens [B, n]; logits [B, n, V], of which row b's first counts[b]
        mean something."""
        ...

    def rollback(self, counts: Sequence[int]) -> None:
        """Forgets the last counts[b] >= 0 cached tokens of row b."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order."""
        ...


class RaggedLM:
    """The transformers model of a `CausalLM` for B rows of text, with a cache of its own; the other's stays as it is.

    Row b's next tokens go to slots lengths[b], lengths[b] + 1, …, which are also their positions. A row that brings
    fewer than the others is padded on the right: only other padding sees a padded slot, and the row's next tokens
    are written over it. Raises UsageError where a layer is not full attention, or positions cannot be given.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model, self.role, self.vocabulary = model, model.role, model.vocabulary
        hf = model.model
        name = f"the {model.role} ({type(hf).__name__})"
        alibi = getattr(hf.config.get_text_config(), "alibi", False)  # positions come from the mask's own shape
        if alibi or "position_ids" not in inspect.signature(hf.forward).parameters:
            raise UsageError(f"{name} cannot be told the positions of a batch's rows: run with --batch-size 1")
        if rope_changes_with_length(hf):
            raise UsageError(
                f"{name} changes its rotary embedding with the longest row, so that a row's text would depend on its "
                "neighbours: run with --batch-size 1"
            )
        try:
            ragged(hf.config, Rows(0))
        except ValueError:
            raise UsageError(
                f"{name} has sliding or recurrent layers, and a batch needs full attention in every layer: run with "
                "--batch-size 1"
            ) from None
        self._reset(0)

    def _reset(self, batch: int) -> None:
        self._rows = Rows(batch, self.model.device)
        self._cache = ragged(self.model.model.config, self._rows)
        self._set([0] * batch)

    def _set(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._rows.lengths = torch.tensor(lengths, dtype=torch.int64, device=self.model.device)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._lengths

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each row alone, in the calls of a single run, so that what it caches is what that run caches."""
        self._reset(len(prompts))
        longest = max(len(p) for p in prompts) - 1
        if longest == 0:
            return
        alone = [self._prefilled(p[:-1]) for p in prompts]
        self._rows.begin(longest, longest)
        for i, layer in enumerate(self._cache.layers):
            layers = [cache.layers[i] for cache in alone]
            layer.update(_stacked([x.keys for x in layers], longest), _stacked([x.values for x in layers], longest))
        self._set([len(p) - 1 for p in prompts])

    def _prefilled(self, tokens: Sequence[int]) -> Any:
        cache = in_place(DynamicCache(config=self.model.model.config))
        for first in range(0, len(tokens), PREFILL_CHUNK):
            self.model.call(torch.tensor([tokens[first : first + PREFILL_CHUNK]]), 1, cache, cached=first)
        return cache

    @torch.inference_mode()
    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        n, longest = tokens.shape[-1], max(self._lengths)
        self._rows.begin(n, longest + n)
        slots = self._rows.slots
        real = torch.arange(n) < torch.tensor(counts)[:, None]
        logits = self.model.call(
            tokens, n, self._cache, cached=longest, attention_mask=self._rows.mask(self.model.model.dtype),
            position_ids=torch.where(real.to(slots.device), slots, 0),  # padding may lie beyond the last position
        )  # fmt: skip
        self._set([length + count for length, count in zip(self._lengths, counts, strict=True)])
        return logits

    def rollback(self, counts: Sequence[int]) -> None:
        for b, (length, count) in enumerate(zip(self._lengths, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot roll back {count} of {length} cached tokens of row {b}")
        if any(counts):
            self._set([length - count for length, count in zip(self._lengths, counts, strict=True)])

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        kept = torch.tensor(rows, device=self.model.device)
        for layer in self._cache.layers:
            layer.keep(kept)
        self._set([self._lengths[b] for b in rows])


def _stacked(parts: Sequence[Tensor | None], length: int) -> Tensor:
    """[B, heads, length, head_dim] from one [1, heads, m, head_dim] a row, zeros behind; None where m is 0."""
    shape = next(p for p in parts if p is not None)
    whole = shape.new_zeros(len(parts), shape.shape[1], length, shape.shape[3])
    for row, part in zip(whole, parts, strict=True):
        if part is not None:
            row[:, : part.shape[-2]] = part[0]
    return whole


def padded(feeds: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """tokens [B, n] and counts [B] of rows that bring different numbers of tokens."""
    counts = [len(feed) for feed in feeds]
    return torch.tensor([[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds]), counts


# --------------------------------------------------------------------------------------------------------- drafting


class RowsDrafter(Protocol):
    """A `Drafter` for B rows: `lengths[b]` tokens of row b are known to it."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def start(self, prompts: Sequence[Sequence[int]]) -> None: ...

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        """A proposal of up to ks[b] tokens for each row."""
        ...

    def rollback(self, counts: Sequence[int]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...


class CheckpointRows:
    """A checkpoint that drafts for all rows together: what `ModelDrafter` does for one, in as many calls.

    A row that wants fewer tokens than another stops drafting and waits.
    """

    def __init__(self, model: RowsModel, processors: Processors) -> None:
        self.model = model
        self.processors = processors
        self.start, self.rollback, self.keep = model.start, model.rollback, model.keep

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.model.lengths

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        texts = [list(row.tokens) for row in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        for j in range(max(ks)):
            # What is not cached yet: at first one token, or two after full acceptance; then the one just drafted.
            feeds = [t[c:] if j < k else [] for t, c, k in zip(texts, self.model.lengths, ks, strict=True)]
            logits = self.model.forward(*padded(feeds))
            for b, feed in enumerate(feeds):
                if feed:
                    last, position = logits[b, len(feed) - 1 : len(feed)], len(texts[b])
                    rows[b].check(last, self.model.role, position)
                    probs[b].append(self.processors(last, texts[b])[0])
                    token = draw(probs[b][-1], Stream.DRAFT, position, round_index, rows[b].uniforms)
                    texts[b].append(int(token))
        return [
            Proposal(tuple(text[len(row.tokens) :]), torch.stack(p) if p else torch.empty(0, self.model.vocabulary))
            for row, text, p in zip(rows, texts, probs, strict=True)
        ]


class EachRow:
    """A drafter without a model, once for every row."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._rows: list[NgramDrafter] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(drafter.cached for drafter in self._rows)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._rows = [copy.copy(self._drafter) for _ in prompts]
        for drafter, prompt in zip(self._rows, prompts, strict=True):
            drafter.start(prompt)  # from here on it shares nothing with what it is a copy of

    def propose(self, rows: Sequence[Row], ks: Sequence[int], round_index: int) -> list[Proposal]:
        return [
            drafter.propose(row.tokens, k, round_index, row.uniforms)
            for drafter, row, k in zip(self._rows, rows, ks, strict=True)
        ]

    def rollback(self, counts: Sequence[int]) -> None:
        for drafter, count in zip(self._rows, counts, strict=True):
            drafter.rollback(count)

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[b] for b in rows]


def for_rows(drafter: Drafter) -> RowsDrafter:
    """The same drafter for a batch. Raises UsageError for a kind that knows one row only."""
    if isinstance(drafter, NgramDrafter):
        return EachRow(drafter)
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.model, CausalLM):
        return CheckpointRows(RaggedLM(drafter.model), drafter.processors)
    raise UsageError(f"a draft of kind {drafter.kind} proposes for one prompt at a time: run with --batch-size 1")


# --------------------------------------------------------------------------------------------------------- the loop


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
                settled.append(settle(
                    rule, processors(own, row.tokens, proposal.tokens), proposal, round_index=index,
                    position=len(row.tokens), room=row.room, uniforms=row.uniforms, ended=row.ended,
                ))  # fmt: skip
            _commit(live, settled)
        finally:  # also when interrupted: caches hold no more than what is committed
            settling = clock()
            _roll_back(target, live)
            _roll_back(drafter, live)
        stay = [b for b, finished in enumerate(settled) if finished.finish is None]
        _leave(target, stay, len(live))
        _leave(drafter, stay, len(live))
        done = clock()
        yield _step(index, live, settled, drafted - began, verified - drafted, done - settling, done - began,
                    width=max(len(feed) for feed in feeds))  # fmt: skip
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
                settled.append(settle_plain(
                    processors(own, row.tokens), round_index=index, position=len(row.tokens), room=row.room,
                    uniforms=row.uniforms, ended=row.ended,
                ))  # fmt: skip
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
    index: int, live: Sequence[Row], settled: Sequence[Round], draft_s: float, verify_s: float, rollback_s: float,
    total_s: float, *, width: int,
) -> Step:  # fmt: skip
    rounds = {
        row.number: replace(r, draft_s=draft_s, verify_s=verify_s, rollback_s=rollback_s, total_s=total_s)
        for row, r in zip(live, settled, strict=True)
    }
    return Step(index, rounds, draft_s, verify_s, rollback_s, total_s, width, len(live))


# ------------------------------------------------------------------------------------------------------- generation


class BatchGeneration:
    """Iterate over it to generate for several prompts at once: each step is a finished `Step`. May be left early.

    prefill_s: seconds until all prompts were taken in. rows_rounds: the rounds of each prompt, in order.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        plain: bool = False,
        ignore_ends: bool = False,
    ) -> None:
        """seeds: one a prompt, else everybody's is the pair's. ignore_ends: neither an end token nor a stop string
        ends a row, for timing rows of one length.

        Raises UsageError where target or draft cannot decode several rows, ValueError for prompts without tokens or
        seeds of another number.
        """
        self.pair = pair
        self.prompts = [tuple(prompt) for prompt in prompts]
        self.seeds = [pair.sampling.seed] * len(self.prompts) if seeds is None else list(seeds)
        if not self.prompts or not all(self.prompts):
            raise ValueError("a batch needs prompts, and every prompt a token")
        if len(self.seeds) != len(self.prompts):
            raise ValueError(f"{len(self.seeds)} seeds for {len(self.prompts)} prompts")
        if not isinstance(pair.target, CausalLM):
            raise UsageError("this target decodes one prompt at a time: run with --batch-size 1")
        self._target = RaggedLM(pair.target)
        self._drafter = None if plain or pair.drafter is None else for_rows(pair.drafter)
        self._ignore_ends = ignore_ends
        self.rows_rounds: list[list[Round]] = [[] for _ in self.prompts]
        self.prefill_s = 0.0

    def _row(self, number: int) -> Row:
        sampling, prompt = self.pair.sampling, self.prompts[number]
        source = SharedNoise if sampling.mode is Mode.COUPLED else KeyedUniforms
        stream = TextStream(self.pair.tokenizer, sampling.end_tokens, sampling.stop)
        ended: Ended = (lambda token: None) if self._ignore_ends else stream
        uniforms = source(self.seeds[number], prompt_digest(prompt))
        return Row(number, list(prompt), len(prompt) + sampling.max_new_tokens, uniforms, ended)

    def __iter__(self) -> Iterator[Step]:
        if any(self.rows_rounds):
            raise RuntimeError("this batch has been run; make a new one")
        pair = self.pair
        rows = [self._row(number) for number in range(len(self.prompts))]
        began = pair.clock()
        self._target.start(self.prompts)
        if self._drafter is not None:
            self._drafter.start(self.prompts)
        self.prefill_s = pair.clock() - began
        if self._drafter is None:
            steps = autoregressive_batch(self._target, pair.processors, rows, clock=pair.clock)
        else:
            steps = speculative_batch(
                self._target, self._drafter, pair.processors, rows, k=pair.sampling.k,
                rule=pair.rule or rule_for(pair.sampling), clock=pair.clock,
            )  # fmt: skip
        for step in steps:
            for number, finished in step.rounds.items():
                self.rows_rounds[number].append(finished)
            yield step

    def run(self) -> BatchGeneration:
        """Generates to the end."""
        for _ in self:
            pass
        return self

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Each row's committed token ids, the end token among them."""
        return [tuple(t for r in rounds for t in r.tokens) for rounds in self.rows_rounds]

    @property
    def finish(self) -> list[Finish | None]:
        """How each row ended; None where it was interrupted."""
        return [rounds[-1].finish if rounds else None for rounds in self.rows_rounds]
