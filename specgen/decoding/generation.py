"""One prompt's generation: an iterable of rounds that keeps its text, its statistics and its check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.decoding.captured.loop import GraphLoop
from specgen.decoding.executors import executor_for
from specgen.decoding.loop import rounds_of, steps
from specgen.decoding.pair import Pair
from specgen.decoding.probe import probe_here
from specgen.decoding.self_check import CheckResult, SelfCheck, drift_bound, edge_fraction, not_applicable
from specgen.decoding.text import TextStream
from specgen.drafting.drafter import Row
from specgen.machine.clocks import untimed
from specgen.rounds.record import Ended, Finish, Round
from specgen.rounds.statistics import Statistics, summarise
from specgen.sampling.randomness import Uniforms, prompt_digest
from specgen.settings import PROMISES, Mode


class Generation:
    """Iterate over it to generate: each step is a finished `Round`. May be left early.

    >>> generation = session.generate("Hello")      # doctest: +SKIP
    >>> for round in generation: print(generation.take(), end="")      # doctest: +SKIP
    """

    def __init__(
        self,
        pair: Pair,
        prompt: Sequence[int],
        *,
        plain: bool = False,
        ignore_ends: bool = False,
        timed: bool = True,
    ) -> None:
        """ignore_ends: neither an end token nor a stop string ends the text, for timing runs of one length.

        timed: whether rounds and prefill are; else their seconds are 0, and no clock is read.
        """
        self.pair = pair
        self.prompt = tuple(prompt)
        self.drafter = None if plain else pair.drafter
        self.uniforms: Uniforms = pair.uniforms(pair.sampling.seed, prompt_digest(self.prompt))
        self.rounds: list[Round] = []
        self.prefill_s = 0.0
        self.engine_note: str | None = None  # why the captured loop was asked for and did not serve
        self._clock = pair.clock if timed else untimed
        self._loop: GraphLoop | None = None
        self._stream = TextStream(pair.tokenizer, pair.sampling.end_tokens, pair.sampling.stop)
        self._ended: Ended = (lambda token: None) if ignore_ends else self._stream

    def __iter__(self) -> Iterator[Round]:
        pair, sampling = self.pair, self.pair.sampling
        if self.rounds:
            raise RuntimeError("this generation has been run; make a new one")
        row = Row(0, list(self.prompt), len(self.prompt) + sampling.max_new_tokens, self.uniforms, self._ended)
        with pair.hold.alone():
            pair.hold.take(self)
            executor, self.engine_note = executor_for(pair, plain=self.plain, longest=len(self.prompt))
            self._loop = executor if isinstance(executor, GraphLoop) else None
            began = self._clock()
            executor.start([self.prompt])
            self.prefill_s = self._clock() - began
            executor.begin([row])
        rounds = rounds_of(steps(executor, [row], k=sampling.k, clock=self._clock))
        while True:
            with pair.hold.alone():
                pair.hold.check(self)
                finished = next(rounds, None)
            if finished is None:
                return
            self.rounds.append(finished)
            yield finished

    def run(self) -> Generation:
        """Generates to the end."""
        for _ in self:
            pass
        return self

    @property
    def plain(self) -> bool:
        return self.drafter is None

    @property
    def promise(self) -> str:
        """What the mode promises of the text; plain decoding is what the others are measured against."""
        if self.plain:
            return "plain decoding of the target, no draft"
        return PROMISES[self.pair.sampling.mode]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed token ids, the end token among them."""
        return tuple(t for r in self.rounds for t in r.tokens)

    @property
    def finish(self) -> Finish | None:
        """None where it was interrupted."""
        return self.rounds[-1].finish if self.rounds else None

    @property
    def text(self) -> str:
        """The text of the committed tokens, without special tokens and without a stop string."""
        stream = TextStream(self.pair.tokenizer, self.pair.sampling.end_tokens, self.pair.sampling.stop)
        for token in self.tokens:
            stream(token)
        return stream.take(final=True)

    def take(self, *, final: bool = False) -> str:
        """The text that became certain since the last call (see `TextStream`)."""
        return self._stream.take(final=final)

    @property
    def statistics(self) -> Statistics:
        return summarise(self.rounds, drafting=not self.plain)

    def check(self) -> CheckResult:
        """The run's check of itself: one more, cache-free pass through target and draft."""
        pair = self.pair
        if pair.sampling.mode is Mode.GREEDY:
            return not_applicable(Mode.GREEDY)
        if pair.sampling.mode.approximate and not self.plain:
            return not_applicable(pair.sampling.mode)
        check = SelfCheck(
            drift_bound(pair.dtype, pair.sampling.temperature), pair.sampling.mode, edge_fraction(pair.dtype)
        )
        check.add(pair.target, self.drafter, pair.processors, self.prompt, self.rounds)
        return check.result()

    def probe_cost(self, repeats: int = 5) -> dict[str, float] | None:
        """Seconds of a draft step and of a single-token target step at the end of this text, and their ratio c.

        Measured now, outside the run; None without a draft. Leaves the caches as they were.
        """
        if self.drafter is None or not self.rounds:
            return None
        self.pair.hold.check(self)
        text = [*self.prompt, *self.tokens]
        captured = {} if self._loop is None else self._loop.probes(text, [1])
        found = probe_here(self.pair, text, [1], self.uniforms, captured=captured, repeats=repeats)
        return {"target_s": found.call(1), "draft_s": found.draft, "c": found.with_first().draft}
