"""B prompts at once: a step drafts, scores and verifies a round of every row in one call of each model.

Rows differ in length, in what they accept and in when they end; each keeps its own seed, law and text, whoever its
neighbours are. Finished rows leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.decoding.eager import Eager
from specgen.decoding.loop import Step, steps
from specgen.decoding.pair import Pair
from specgen.decoding.text import TextStream
from specgen.drafting.drafter import Row
from specgen.rounds.record import Ended, Finish, Round
from specgen.sampling.randomness import prompt_digest


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
        drafter = None if plain or pair.drafter is None else pair.drafter.for_rows(len(self.prompts))
        self._executor = Eager(pair.target.for_rows(), drafter, pair.processors, pair.verified_by)
        self._ignore_ends = ignore_ends
        self.rows_rounds: list[list[Round]] = [[] for _ in self.prompts]
        self.prefill_s = 0.0

    def _row(self, number: int) -> Row:
        sampling, prompt = self.pair.sampling, self.prompts[number]
        stream = TextStream(self.pair.tokenizer, sampling.end_tokens, sampling.stop)
        ended: Ended = (lambda token: None) if self._ignore_ends else stream
        uniforms = self.pair.uniforms(self.seeds[number], prompt_digest(prompt))
        name = f" (prompt {number + 1} of the batch)"
        return Row(number, list(prompt), len(prompt) + sampling.max_new_tokens, uniforms, ended, name)

    def __iter__(self) -> Iterator[Step]:
        if any(self.rows_rounds):
            raise RuntimeError("this batch has been run; make a new one")
        clock = self.pair.clock
        rows = [self._row(number) for number in range(len(self.prompts))]
        began = clock()
        self._executor.start(self.prompts)
        self.prefill_s = clock() - began
        for step in steps(self._executor, rows, k=self.pair.sampling.k, clock=clock):
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
