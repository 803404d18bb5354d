"""B prompts at once: a step drafts, scores and verifies a round of every row in one call of each model.

Rows differ in length, in what they accept and in when they end; each keeps its own seed, law and text, whoever its
neighbours are. Finished rows leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.decoding.loop import Step, autoregressive_batch, speculative_batch
from specgen.decoding.pair import Pair
from specgen.decoding.text import TextStream
from specgen.drafting.drafter import Row
from specgen.drafting.rows import for_rows
from specgen.errors import UsageError
from specgen.models.causal import CausalLM
from specgen.models.ragged import RaggedLM
from specgen.rounds.record import Ended, Finish, Round
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, prompt_digest
from specgen.settings import Mode
from specgen.verification.rules import rule_for


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
                self._target,
                self._drafter,
                pair.processors,
                rows,
                k=pair.sampling.k,
                rule=pair.rule or rule_for(pair.sampling),
                clock=pair.clock,
            )
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
