"""Sessions → a bench: arms through the schedule, the baseline's texts scored, the costs of calls probed.

Nothing is computed here that the stored result does not allow to compute again: tables and verdict are
`analysis.py`'s. While timing, nothing ends a text but max_new_tokens, so that all arms do the same length; where an
end lies is kept, and what the analysis rests on is up to it.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.analysis.prediction import probed
from specgen.bench.divergence import margins_at
from specgen.bench.schedule import WARM_UP, Job, promising, schedule, turns
from specgen.bench.subjects import (
    CANDIDATES,
    UNPREDICTED,
    check_sessions,
    checkpoints_of,
    engine_of,
    measured_batch,
    measured_one,
)
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.decoding.probe import PROBE_PREFIX, all_widths, probe
from specgen.decoding.self_check import drift_bound
from specgen.decoding.text import TextStream, pieces
from specgen.errors import UsageError
from specgen.machine.environment import describe
from specgen.machine.memory import copy_bandwidth
from specgen.overlap.score import score_text
from specgen.profiles.effective import merged_settings
from specgen.results.bench import Arm, Bench, Costs, Design, Divergence, Measurement, Prompt, Row, Score
from specgen.results.document import plain_data
from specgen.results.files import SCHEMA_VERSION
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import expected_rounds
from specgen.rounds.record import Round
from specgen.session import Session
from specgen.settings import Mode

WARM_TOKENS = 16


CYCLE = 1000  # between the seeds of one prompt's rows in one batch


Tell = Callable[[str, float | None, float | None], None]  # what is going on; fraction done, seconds left


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after at least one whole run, with the bench that was measured until then."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench


def run_bench(
    sessions: Sequence[Session],
    prompts: Sequence[Prompt],
    *,
    ks: Sequence[int] | None = None,
    runs: int = 3,
    warmup: int = 1,
    batch_sizes: Sequence[int] = (1,),
    budget: float | None = None,
    order_seed: int = 0,
    progress: Tell = lambda what, done, left: None,
) -> Bench:
    """Times plain decoding against every session's draft and k, interleaved, and returns all that was seen.

    sessions: one a profile and engine, of one target (see `check_sessions`). ks: None chooses by prediction. budget:
    seconds for all of it. Raises UsageError; Interrupted, with a bench, on Ctrl-C after a whole run.
    """
    check_sessions(sessions)
    return _Runner(sessions, list(prompts), list(batch_sizes), runs, warmup, budget, order_seed, progress).run(ks)


@dataclass
class _Runner:
    sessions: Sequence[Session]
    prompts: list[Prompt]
    batch_sizes: list[int]
    runs: int
    warmup: int
    budget: float | None
    order_seed: int
    tell: Tell
    began: float = 0.0
    ways: dict[str, tuple[Arm, Session]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    texts: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # plain ones, by prompt and run
    costs: list[Costs] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)

    @property
    def first(self) -> Session:
        return self.sessions[0]

    @property
    def max_new_tokens(self) -> int:
        return self.first.sampling.max_new_tokens

    def run(self, ks: Sequence[int] | None) -> Bench:
        clock, before = self.first.pair.clock, describe()
        self.began = clock()
        self.notes = list(dict.fromkeys(note for session in self.sessions for note in session.notes))
        self._merge_equals()
        room = self.max_new_tokens - 1  # a round commits one token more than it drafts
        if ks is not None and max(ks) > room:
            raise UsageError(
                f"--k {max(ks)} with --max-new-tokens {self.max_new_tokens}: no round could draft so many; "
                + (f"use k up to {room}, or more tokens" if room else "use more tokens")
            )
        self.candidates = [k for k in CANDIDATES if k <= room]
        if not self.candidates:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens} leaves no room to draft: use 2 or more")
        most = max(self.candidates if ks is None else ks)
        self._write_texts(all_of_them=ks is None)
        self._probe(most)
        chosen = self._chosen() if ks is None else [sorted(set(ks))] * len(self.sessions)
        self._name_arms(chosen)
        warm = min(WARM_TOKENS, self.max_new_tokens)
        outcome = schedule(
            {name: arm.batch for name, (arm, _) in self.ways.items()},
            [p.category for p in self.prompts],
            self._measure,
            runs=self.runs,
            warmup=self.warmup,
            order=random.Random(self.order_seed),
            clock=clock,
            budget=self.budget,
            began=self.began,
            scale=self.max_new_tokens / warm,
            progress=lambda done, left: self.tell("timing", done, left),
        )
        if outcome.interrupted:
            if outcome.runs == 0:
                raise KeyboardInterrupt
            self.notes.append(f"interrupted in run {outcome.runs + 1} of {self.runs}: that run is left out")
        self._keep(outcome.prompts, outcome.runs)
        design = Design(
            k=sorted({k for own in chosen for k in own}),
            auto=ks is None,
            candidates=list(range(1, most + 1)),
            runs=self.runs,
            runs_done=outcome.runs,
            warmup=self.warmup,
            max_new_tokens=self.max_new_tokens,
            budget_s=self.budget,
            order_seed=self.order_seed,
            cut=outcome.cut,
        )
        interrupted = outcome.interrupted
        try:
            self._take_texts()
            self._score()
            self._compare()
        except KeyboardInterrupt:
            interrupted = True
            self.notes.append("interrupted while texts were scored: predictions are of the others")
        bench = self._bench(before, design)
        if interrupted:
            raise Interrupted(bench)
        return bench

    # ---------------------------------------------------------------------------------------------- which arms

    def _merge_equals(self) -> None:
        """A prompt that is there twice would be one text timed twice, and no second witness."""
        first: dict[tuple[int, ...], Prompt] = {}
        for prompt in self.prompts:
            kept = first.setdefault(tuple(prompt.tokens), prompt)
            if kept is not prompt:
                self.notes.append(f"{prompt.name} is the same prompt as {kept.name}: measured once")
        self.prompts = list(first.values())
        for batch in self.batch_sizes:
            if missing := -len(self.prompts) % batch:
                self.notes.append(
                    f"B = {batch}: the last group is filled with {missing} prompt{'s' * (missing != 1)} from the "
                    "beginning, under other seeds: groups are not wholly independent"
                )

    def _write_texts(self, *, all_of_them: bool) -> None:
        """Untimed, the plain texts of the first run to predict from and to probe in; else one for the probe.

        Of a budget they take a quarter at most, categories taking turns.
        """
        pair, lengths = dataclasses.replace(self.first.pair, drafter=None), [len(p.tokens) for p in self.prompts]
        middle = sorted(range(len(lengths)), key=lambda p: (lengths[p], p))[len(lengths) // 2]
        wanted = turns([p.category for p in self.prompts]) if all_of_them else [middle]
        for n, at in enumerate(wanted):
            late = self.budget is not None and pair.clock() - self.began > self.budget / 4
            if late and n > 0:
                self.notes.append(f"k was chosen from the texts of {n} prompts: the budget held no more")
                return
            self.tell(f"writing the baseline's texts, {n + 1} of {len(wanted)}", None, None)
            generation = Generation(pair, self.prompts[at].tokens, plain=True, ignore_ends=True)
            self.texts[at, 0] = list(generation.run().tokens)

    def _chosen(self) -> list[list[int]]:
        """The k to time of each session, by the prediction from the baseline's own texts and the probed costs."""
        self._score()
        if max(self.batch_sizes) > 1:
            self.notes.append("k was chosen from costs of calls on one row; batches were timed with the same k")
        if not self.scores:
            self.notes.append(
                f"mode {self.first.sampling.mode.value} has no prediction: k {', '.join(map(str, UNPREDICTED))} were "
                "timed"
            )
            return [[k for k in UNPREDICTED if k in self.candidates] or [1]] * len(self.sessions)
        return [promising(self._predicted(session)) for session in self.sessions]

    def _predicted(self, session: Session) -> dict[int, float]:
        """Predicted speedup by k, from the probed costs alone: the median over the texts, each up to its end."""
        costs = next(c for c in self.costs if (c.profile, c.engine) == (session.profile.name, engine_of(session)))
        texts = [s.ratios[: s.end] for s in self.scores if s.profile == session.profile.name]
        calls = probed(costs)
        if not calls.call(1):  # a clock too coarse for it
            calls = CallCosts({1: 1.0})
        return {
            k: statistics.median(
                predicted_speedup(expected_rounds(ratios, k, limit=self.max_new_tokens), calls) for ratios in texts
            )
            for k in self.candidates
        }

    def _name_arms(self, chosen: Sequence[Sequence[int]]) -> None:
        """A plain arm an engine and batch size, a speculative one for each profile and k besides."""
        several_profiles = len({s.profile.name for s in self.sessions}) > 1
        several_engines = len({engine_of(s) for s in self.sessions}) > 1

        def named(stem: str, session: Session, batch: int, profile: bool) -> str:
            parts = [stem]
            parts += [session.profile.name] if profile and several_profiles else []
            parts += [engine_of(session)] if several_engines else []
            return " ".join(parts + ([f"B={batch}"] if len(self.batch_sizes) > 1 else []))

        for batch in self.batch_sizes:
            for session, own in zip(self.sessions, chosen, strict=True):
                plain = named("plain", session, batch, False)
                common: dict[str, Any] = {
                    "profile": session.profile.name,
                    "engine": engine_of(session),
                    "batch": batch,
                    "mode": session.sampling.mode.value,
                    "baseline": plain,
                }
                if plain not in self.ways:
                    self.ways[plain] = Arm(name=plain, kind="plain", k=0, **common), session
                for k in own:
                    name = named(f"k={k}", session, batch, True)
                    self.ways[name] = Arm(name=name, kind="speculative", k=k, **common), session

    # ------------------------------------------------------------------------------------------------- timing

    def _pair(self, arm: Arm, session: Session, seed: int, tokens: int) -> Pair:
        sampling = dataclasses.replace(
            session.sampling, k=arm.k or session.sampling.k, seed=seed, max_new_tokens=tokens
        )
        return dataclasses.replace(session.pair, sampling=sampling)

    def _measure(self, job: Job) -> None:
        """Does one job and keeps what was seen. The seed of a row: the profile's + run + 1000 a repetition."""
        arm, session = self.ways[job.arm]
        warm = job.run == WARM_UP
        seed = session.sampling.seed + max(0, job.run)
        pair = self._pair(arm, session, seed, min(WARM_TOKENS, self.max_new_tokens) if warm else self.max_new_tokens)
        prompts = [self.prompts[p].tokens for p, _ in job.members]
        seeds = [seed + CYCLE * cycle for _, cycle in job.members]
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        measured = (
            measured_one(pair, arm, prompts[0]) if arm.batch == 1 else measured_batch(pair, arm, prompts, seeds)
        )
        prefill_s, steps, rounds = measured
        self.measurements.append(
            Measurement(
                arm=arm.name,
                group=job.group,
                run=job.run,
                order=job.order,
                prefill_s=prefill_s,
                first_s=prefill_s + steps.total_s[0],
                load=load,
                steps=steps,
                rows=[
                    _row(prompt, own, r, self._end([t for x in r for t in x.tokens]))
                    for (prompt, _), own, r in zip(job.members, seeds, rounds, strict=True)
                ],
            )
        )

    def _end(self, tokens: Sequence[int]) -> int | None:
        """The tokens up to and with the one that an end token or a stop string ends the text with; None without."""
        pair, sampling = self.first.pair, self.first.sampling
        stream = TextStream(pair.tokenizer, sampling.end_tokens, sampling.stop)
        return next((n for n, token in enumerate(tokens, 1) if stream(token) is not None), None)

    def _keep(self, prompts: Sequence[int], runs: int) -> None:
        """Drops what was measured of prompts that the budget left out and of a run that was not finished."""
        place = {old: new for new, old in enumerate(prompts)}
        kept = []
        for m in self.measurements:
            if m.run < runs and all(row.prompt in place for row in m.rows):
                for row in m.rows:
                    row.prompt = place[row.prompt]
                kept.append(m)
        self.measurements = kept
        self.scores = [s.model_copy(update={"prompt": place[s.prompt]}) for s in self.scores if s.prompt in place]
        self.texts = {(place[p], run): text for (p, run), text in self.texts.items() if p in place}
        self.prompts = [self.prompts[p] for p in prompts]

    # ---------------------------------------------------------------------------------- outside the schedule

    def _take_texts(self) -> None:
        """The plain texts of all runs, of the smallest batch: all engines' and batches' are of one law. Greedy, every
        run writes the same."""
        seed, greedy = self.first.sampling.seed, self.first.sampling.mode is Mode.GREEDY
        plain = {name: arm.batch for name, (arm, _) in self.ways.items() if arm.kind == "plain"}
        for m in sorted((m for m in self.measurements if m.arm in plain), key=lambda m: plain[m.arm]):
            for row in m.rows:
                if m.run >= 0 and row.seed == seed + m.run and not (greedy and m.run):
                    self.texts.setdefault((row.prompt, m.run), row.tokens)

    def _probe(self, most: int) -> None:
        """Costs of each session's calls on 1 … most + 1 tokens, in the middle of a text of usual length."""
        bandwidth: dict[str, float] = {}
        for session in self.sessions:
            target = session.pair.target
            self.tell(f"probing the costs of calls, {session.profile.name} {engine_of(session)}", None, None)
            text = self._probe_text()
            if session.both_hold is not None and len(text) + most > session.both_hold:
                text = text[: max(1, session.both_hold - most)]
            session.pair.hold.take(None)
            found = probe(session.pair, text, all_widths(most))
            device = target.device
            if str(device) not in bandwidth:
                bandwidth[str(device)] = copy_bandwidth(device, session.pair.clock)
            drafter = session.pair.drafter
            model = None if drafter is None else drafter.model
            whole, small = target.bytes_read, (0, 0) if model is None else model.bytes_read
            self.costs.append(
                Costs(
                    profile=session.profile.name,
                    engine=engine_of(session),
                    context=len(text) - 1,
                    draft_s=found.draft,
                    target_s=dict(found.target),
                    target_bytes=whole[0],
                    target_bytes_a_token=whole[1],
                    draft_bytes=small[0],
                    draft_bytes_a_token=small[1],
                    copy_bandwidth=bandwidth[str(device)],
                )
            )

    def _probe_text(self) -> list[int]:
        """The prompt of median length with the first half of its text."""
        prompts = sorted({p for p, _ in self.texts}, key=lambda p: (len(self.prompts[p].tokens), p))
        middle = prompts[len(prompts) // 2]
        half = self.texts[middle, 0][: max(1, len(self.texts[middle, 0]) // 2)]
        return [*self.prompts[middle].tokens, *half][-PROBE_PREFIX:]

    def _score(self) -> None:
        """Each profile's draft on the baseline's texts so far, teacher-forced; only in modes of the target's law."""
        if self.first.sampling.mode.approximate:
            return
        by_profile = {session.profile.name: session for session in reversed(self.sessions)}
        for name, session in by_profile.items():
            pair = session.pair
            assert pair.drafter is not None
            done = {(s.prompt, s.run) for s in self.scores if s.profile == name}
            missing = sorted(self.texts.keys() - done)
            for number, (at, run) in enumerate(missing, 1):
                self.tell(f"scoring the baseline's texts, {name}, {number} of {len(missing)}", None, None)
                prompt = self.prompts[at].tokens
                found = score_text(
                    pair.target,
                    pair.drafter,
                    pair.processors,
                    pair.sampling,
                    [*prompt, *self.texts[at, run]],
                    len(prompt),
                    temperatures=(),
                    context=session.both_hold,
                    coupled=pair.sampling.mode is Mode.COUPLED,
                )
                ratios = found.positions()["ratio"]
                end = self._end(self.texts[at, run])
                self.scores.append(Score(profile=name, prompt=at, run=run, ratios=ratios, end=end))

    def _compare(self) -> None:
        """Greedy only: every speculative text against the baseline's of the same prompt, run and seed."""
        if self.first.sampling.mode is not Mode.GREEDY:
            return
        rows = {(m.arm, m.run, r.prompt, r.seed): r for m in self.measurements if m.run >= 0 for r in m.rows}
        known: dict[tuple[str, int], tuple[float, float, float]] = {}
        for (name, run, prompt, seed), row in rows.items():
            arm, session = self.ways[name]
            plain = rows.get((arm.baseline, run, prompt, seed))
            if arm.kind == "plain" or plain is None or plain.tokens == row.tokens:
                continue
            pairs = enumerate(zip(plain.tokens, row.tokens, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(plain.tokens), len(row.tokens)))
            if (name, prompt) not in known:
                self.tell(f"looking into a divergence of {name}", None, None)
                known[name, prompt] = margins_at(session.pair, self.prompts[prompt].tokens, plain, row, at)
            plain_margin, verify_margin, difference = known[name, prompt]
            # Calls that differ by more than rounding can excuse nothing: that is a fault, whatever the margin.
            rounding = difference <= drift_bound(session.pair.dtype, None)
            self.divergences.append(
                Divergence(
                    arm=name,
                    prompt=prompt,
                    run=run,
                    position=at,
                    plain_token=plain.tokens[at],
                    token=row.tokens[at],
                    plain_margin=plain_margin,
                    verify_margin=verify_margin,
                    difference=difference,
                    tie=rounding and min(plain_margin, verify_margin) <= difference,
                )
            )

    # --------------------------------------------------------------------------------------------- the result

    def _bench(self, before: dict[str, Any], design: Design) -> Bench:
        rows = [row for m in self.measurements for row in m.rows]
        return Bench(
            schema_version=SCHEMA_VERSION,
            kind="bench",
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            sampling=plain_data(self.first.sampling),
            profiles={s.profile.name: merged_settings(s.profile) for s in self.sessions},
            checkpoints=checkpoints_of(self.sessions),
            dtype=str(self.first.pair.dtype).removeprefix("torch."),
            device=str(self.first.pair.target.device),
            environment=before,
            environment_after=describe(),
            design=design,
            prompts=self.prompts,
            arms=[arm for arm, _ in self.ways.values()],
            measurements=self.measurements,
            costs=self.costs,
            scores=self.scores,
            divergences=self.divergences,
            notes=self.notes,
            pieces=_pieces(self.first.pair.tokenizer, self.prompts, rows),
        )


def _pieces(tokenizer: Any, prompts: Sequence[Prompt], rows: Iterable[Row]) -> dict[int, str]:
    """The text of every token id as it reads where it first stands; the rows note where it reads otherwise."""
    found: dict[int, str] = {}
    for prompt in prompts:
        for token, piece in zip(prompt.tokens, pieces(tokenizer, prompt.tokens, 0), strict=True):
            found.setdefault(token, piece)
    read: dict[tuple[int, ...], list[str]] = {}  # many rows hold the same text
    for row in rows:
        prompt_tokens = prompts[row.prompt].tokens
        text = (row.prompt, *row.tokens)
        if text not in read:
            read[text] = pieces(tokenizer, [*prompt_tokens, *row.tokens], len(prompt_tokens))
        placed = enumerate(zip(row.tokens, read[text], strict=True))
        row.pieces = {at: piece for at, (token, piece) in placed if found.setdefault(token, piece) != piece}
    return found


def _row(prompt: int, seed: int, rounds: Sequence[Round], end: int | None) -> Row:
    def chained(parts: Iterable[Iterable[float]]) -> list[float]:
        return list(itertools.chain.from_iterable(parts))

    finish = rounds[-1].finish
    return Row(
        prompt=prompt,
        seed=seed,
        tokens=[t for r in rounds for t in r.tokens],
        finish=None if finish is None else finish.value,
        drafted=[r.drafted for r in rounds],
        tested=[r.tested for r in rounds],
        accepted=[r.accepted for r in rounds],
        committed=[len(r.committed) for r in rounds],
        overlaps=chained(r.overlaps for r in rounds),
        expected=chained(r.expected for r in rounds),
        biases=chained(r.biases for r in rounds),
        end=end,
    )
