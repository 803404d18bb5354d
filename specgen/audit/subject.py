"""What is audited: a pair, run as it is run for a user, under its engine and in batches, round by round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgen.audit.findings import Finding, Status
from specgen.audit.watching import AlwaysAccepts, plain_chain
from specgen.decoding.captured.loop import GraphLoop
from specgen.decoding.executors import executor_for
from specgen.decoding.loop import Executor, Seen, steps
from specgen.decoding.pair import Pair
from specgen.decoding.self_check import DRIFT_BOUND
from specgen.drafting.drafter import Drafter, Row
from specgen.models.protocol import LanguageModel
from specgen.rounds.record import Round, ends_at
from specgen.sampling.randomness import Uniforms, prompt_digest
from specgen.verification.rules import Rule

SHORT = 16  # tokens of a text of which one run says as much as a longer one
CONTINUED = 32  # tokens of its own that the target adds to a prompt for the law

UniformsOf = Callable[[int, int], Uniforms]  # (seed, digest of the prompt)
Unit = tuple[Sequence[int], int]  # a prompt and a seed


# A check at work: it yields behind every unit of its work, is told whether there is time for another, and returns
# what it found.
Work = Generator[None, bool, Finding]


class Watched(NamedTuple):
    """One row's round as it has just been committed. number: the row's place in its batch; text: prompt and all that
    is committed; before: how long that was when the round began; seen: what the round looked at."""

    number: int
    text: list[int]
    before: int
    round: Round
    seen: Seen
    executor: Executor


@dataclass
class Subject:
    """A pair with a draft, and prompts (token ids) to audit it on.

    seeds: how many each pooled check uses. batch: rows that decode together. rounds: of the sampler. budget: seconds,
    all checks together, by clock. rule, uniforms: what is audited in place of the product's own.
    progress: told the name of each check as it begins.
    """

    pair: Pair
    prompts: Sequence[Sequence[int]]
    seeds: int = 4
    rounds: int = 2000
    budget: float = math.inf
    rule: Rule | None = None
    uniforms: UniformsOf | None = None
    clock: Callable[[], float] = time.perf_counter
    progress: Callable[[str], None] = lambda name: None
    batch: int = 1

    def __post_init__(self) -> None:
        if self.pair.drafter is None:
            raise ValueError("an audit needs a pair with a draft")
        if not self.prompts or not all(self.prompts):
            raise ValueError("an audit needs prompts, none of them empty")
        if self.rule is not None:
            self.pair = replace(self.pair, rule=self.rule)
        drafter = self.pair.drafter
        assert drafter is not None
        self.drafter: Drafter = drafter
        self.sampling = self.pair.sampling
        self.mode = self.sampling.mode
        self.processors = plain_chain(self.pair.processors)
        self.bound = DRIFT_BOUND.get(self.pair.dtype, DRIFT_BOUND[torch.bfloat16])
        self.engine_note: str | None = None  # why the engine that was asked for is not the one that was audited
        self._texts: dict[int, list[int]] = {}

    @property
    def verified_by(self) -> Rule:
        return self.pair.verified_by

    @property
    def engine(self) -> str:
        """The engine under which rounds were run."""
        return "eager" if self.engine_note else self.pair.target.engine

    @property
    def stands_alone(self) -> bool:
        """Whether rounds are calls of a model for one row, which another model may then stand in for."""
        return self.batch == 1 and self.pair.target.engine != "graph"

    def source(self, seed: int, prompt: Sequence[int]) -> Uniforms:
        return (self.uniforms or self.pair.uniforms)(seed, prompt_digest(prompt))

    def generate(
        self,
        units: Sequence[Unit],
        *,
        k: int | None = None,
        length: int | None = None,
        plain: bool = False,
        target: LanguageModel | None = None,
        drafter: Drafter | None = None,
        boundary: bool = False,
    ) -> Generator[Watched, None, None]:
        """Every round of a batch of prompts, by the loop and the engine that generate for a user.

        plain: decoded without the draft, with the mode's own randomness. target, drafter: instead of the pair's own.
        boundary: every acceptance draw is 0, the lowest that a uniform can be; all other draws are real.
        """
        new = length or self.sampling.max_new_tokens
        pair = replace(self.pair, sampling=replace(self.sampling, k=k or self.sampling.k, max_new_tokens=new))
        pair = replace(pair, target=target or pair.target, drafter=drafter or self.drafter)
        if plain:
            pair = replace(pair, rule=None, processors=self.processors if pair.rule else pair.processors)
        longest = max(len(prompt) for prompt, _ in units)
        executor, note = executor_for(pair, rows=len(units), plain=plain, longest=longest)
        self.engine_note = self.engine_note or note
        rows = []
        for number, (prompt, seed) in enumerate(units):
            drawn = pair.uniforms(seed, prompt_digest(prompt)) if plain else self.source(seed, prompt)
            if boundary and not isinstance(executor, GraphLoop):
                drawn = AlwaysAccepts(drawn)
            rows.append(Row(number, list(prompt), len(prompt) + new, drawn, ends_at(self.sampling.end_tokens)))
        executor.start([prompt for prompt, _ in units])
        executor.begin(rows)
        if boundary and isinstance(executor, GraphLoop):
            executor.at_boundary()
        live = [row.number for row in rows]
        for step in steps(executor, rows, k=pair.sampling.k, clock=pair.clock):
            for b, number in enumerate(live):
                done = step.rounds[number]
                text = list(rows[number].tokens)
                yield Watched(number, text, len(text) - len(done.tokens), done, executor.seen(b), executor)
            live = [number for number in live if step.rounds[number].finish is None]

    def plain_tokens(self, prompt: Sequence[int], seed: int, *, length: int | None = None) -> list[int]:
        return [
            t for watched in self.generate([(prompt, seed)], plain=True, length=length) for t in watched.round.tokens
        ]

    def text(self, index: int) -> list[int]:
        """A prompt with the target's own continuation."""
        if index not in self._texts:
            prompt = self.prompts[index]
            length = min(CONTINUED, self.sampling.max_new_tokens)
            self._texts[index] = [*prompt, *self.plain_tokens(prompt, self.sampling.seed, length=length)]
        return self._texts[index]

    def prompts_and_seeds(self) -> list[Unit]:
        seeds = range(self.sampling.seed, self.sampling.seed + max(1, self.seeds))
        return [(prompt, seed) for seed in seeds for prompt in self.prompts]

    def groups(self, units: Sequence[Any]) -> list[list[Any]]:
        """The units in batches."""
        return [list(units[first : first + self.batch]) for first in range(0, len(units), self.batch)]

    def finding(
        self,
        name: str,
        passed: bool,
        measured: str,
        bound: str,
        value: float | None,
        positions: int,
        notes: Sequence[str] = (),
        unit: str = "prompts × seeds",
        left_out: int = 0,
    ) -> Finding:
        """A check's finding. left_out: the units of its work for which there was no time."""
        if left_out:
            unit = unit if self.batch == 1 else f"batches of {self.batch}"
            notes = [*notes, f"no time for {left_out} more {unit}"]
        if positions == 0 and passed:
            return Finding(name, Status.NOT_APPLICABLE, "no position to judge", bound, None, 0, tuple(notes))
        if passed:
            measured = f"{measured}; no fault seen in {positions} positions"
        status = Status.PASS if passed else Status.FAIL
        return Finding(name, status, measured, bound, value, positions, tuple(notes))


def at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
