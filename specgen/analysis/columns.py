"""What a bench measured: its rows' rounds, and each arm's timed steps as columns. No torch.

Nothing ends a text while timing, so that all arms do the same length; what lies behind an end is nobody's text. Rates
and times are therefore of the rounds up to the one that holds the end, with what that one committed up to it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from specgen.results.bench import Arm, Bench, Measurement, Row
from specgen.rounds.record import Committed, Origin, Round
from specgen.rounds.statistics import Statistics, summarise


def rounds_of(row: Row) -> tuple[Round, ...]:
    """A stored row's rounds with their counts, overlaps and biases; times are the whole group's and stay there."""
    rounds, at = [], 0
    for index, (drafted, tested, accepted, committed) in enumerate(
        zip(row.drafted, row.tested, row.accepted, row.committed, strict=True)
    ):
        part = slice(at, at := at + tested)
        overlaps, expected, biases = (tuple(v[part]) for v in (row.overlaps, row.expected, row.biases))
        tokens = (_TOKEN,) * committed
        rounds.append(Round(index, drafted, tested, accepted, tokens, overlaps, expected, biases))
    return tuple(rounds)


_TOKEN = Committed(0, Origin.PLAIN, 0.0, 0.0, 0, None)  # which tokens they are makes no rate


def ended_rounds(row: Row) -> tuple[Round, ...]:
    """The same up to the row's end: the last round as it had been, had the end cut it."""
    rounds = rounds_of(row)[: rounds_to_end(row)]
    if not passed_end(row):
        return rounds
    *whole, last = rounds
    left = ended_tokens(row) - sum(len(r.committed) for r in whole)
    tested = min(last.tested, left)
    cut = replace(
        last,
        tested=tested,
        accepted=min(last.accepted, left),
        committed=last.committed[:left],
        overlaps=last.overlaps[:tested],
        expected=last.expected[:tested],
        biases=last.biases[:tested],
    )
    return (*whole, cut)


def ended_tokens(row: Row) -> int:
    """Committed tokens up to and with the end; all where there is none."""
    return sum(row.committed) if row.end is None else row.end


def rounds_to_end(row: Row) -> int:
    """How many rounds there are up to and with the one that holds the end."""
    begins = itertools.accumulate(row.committed[:-1], initial=0)
    return sum(begun < ended_tokens(row) for begun in begins)


def passed_end(row: Row) -> bool:
    """Whether the text went on behind an end."""
    return ended_tokens(row) < sum(row.committed)


def steps_to_end(measurement: Measurement) -> int:
    """Target calls until the last of the rows has reached its end."""
    return max(rounds_to_end(row) for row in measurement.rows)


def decode_seconds(measurement: Measurement, *, whole: bool = False) -> float:
    steps = measurement.steps.total_s
    return sum(steps if whole else steps[: steps_to_end(measurement)])


def committed_tokens(measurement: Measurement, *, whole: bool = False) -> int:
    return sum(sum(row.committed) if whole else ended_tokens(row) for row in measurement.rows)


def seconds_per_token(measurement: Measurement, *, whole: bool = False) -> float:
    """Up to the ends of the measurement's rows, or of all that was timed."""
    return decode_seconds(measurement, whole=whole) / committed_tokens(measurement, whole=whole)


def depths_of(measurement: Measurement) -> list[int]:
    """Drafting steps of each round: what the row that drafted most drafted. Every row decodes from the first step
    on until it is finished."""
    drafted = [row.drafted for row in measurement.rows]
    return [max((d[i] for d in drafted if i < len(d)), default=0) for i in range(len(measurement.steps.width))]


class Timed:
    """An arm's timed steps as columns over all its measurements, in seconds: up to the end of each text, or, where
    `whole`, all that was timed."""

    def __init__(self, bench: Bench, arm: Arm, *, whole: bool = False) -> None:
        self.arm, self.is_whole = arm, whole
        self.measurements = bench.timed(arm.name)
        steps = [(m.steps, None if whole else steps_to_end(m)) for m in self.measurements]
        self.draft = np.array([s for x, n in steps for s in x.draft_s[:n]], dtype=float)
        self.verify = np.array([s for x, n in steps for s in x.verify_s[:n]], dtype=float)
        self.total = np.array([s for x, n in steps for s in x.total_s[:n]], dtype=float)
        self.other = self.total - self.draft - self.verify
        self.width = np.array([w for x, n in steps for w in x.width[:n]], dtype=int)
        depths = zip(self.measurements, steps, strict=True)
        self.depth = np.array([d for m, (_, n) in depths for d in depths_of(m)[:n]], dtype=int)

    @cached_property
    def statistics(self) -> Statistics:
        return self.counted()

    @cached_property
    def rounds(self) -> list[tuple[int, tuple[Round, ...]]]:
        """(prompt, rounds) of every row."""
        own = rounds_of if self.is_whole else ended_rounds
        return [(row.prompt, own(row)) for m in self.measurements for row in m.rows]

    def counted(self, prompts: set[int] | None = None) -> Statistics:
        """Counts and rates, of these prompts' rows or of all."""
        chosen = (rounds for prompt, rounds in self.rounds if prompts is None or prompt in prompts)
        return summarise([r for rounds in chosen for r in rounds], drafting=self.arm.k > 0)

    @cached_property
    def by_group(self) -> dict[int, list[Measurement]]:
        groups: dict[int, list[Measurement]] = {}
        for m in sorted(self.measurements, key=lambda m: (m.group, m.run)):
            groups.setdefault(m.group, []).append(m)
        return groups

    @cached_property
    def group_seconds(self) -> dict[int, float]:
        """{group: median over runs of the seconds per token}."""
        return {g: float(np.median([self.per_token(m) for m in ms])) for g, ms in self.by_group.items()}

    def per_token(self, measurement: Measurement) -> float:
        return seconds_per_token(measurement, whole=self.is_whole)

    @cached_property
    def drafted(self) -> dict[int, int]:
        """{tokens drafted in a round: rounds}, of every row."""
        return dict(sorted(Counter(r.drafted for _, rounds in self.rounds for r in rounds).items()))

    @property
    def with_room(self) -> int:
        """Rounds of every row that could have drafted: a last one with room for a single token could not."""
        count = 0
        for m in self.measurements:
            for row in m.rows:
                left = sum(row.committed)
                for committed in row.committed[: None if self.is_whole else rounds_to_end(row)]:
                    count += left > 1
                    left -= committed
        return count

    @property
    def draft_step(self) -> float | None:
        """Median seconds of a drafting step."""
        return median(self.draft[self.depth > 0] / self.depth[self.depth > 0])

    @property
    def texts(self) -> dict[tuple[int, int, int], list[int]]:
        """{(prompt, run, seed): tokens}: a batch may hold a prompt twice, under two seeds."""
        return {(row.prompt, m.run, row.seed): row.tokens for m in self.measurements for row in m.rows}

    @property
    def per_row_token(self) -> float:
        """Decoding seconds per token of a row, all measurements together."""
        return self.total.sum() / self.row_tokens

    @property
    def row_tokens(self) -> int:
        of = (lambda row: sum(row.committed)) if self.is_whole else ended_tokens
        return sum(max(of(row) for row in m.rows) for m in self.measurements)


def median(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def paired_ratios(baseline: Timed, arm: Timed) -> dict[int, float]:
    """{group: the baseline's time / the arm's}, of the groups that both measured."""
    return {g: baseline.group_seconds[g] / s for g, s in arm.group_seconds.items() if g in baseline.group_seconds}


def texts_and_ends(bench: Bench) -> tuple[int, int]:
    """(how many of the timed texts went on behind their end, how many texts): a text that several arms or runs wrote
    is one."""
    seen = {
        (row.prompt, tuple(row.tokens)): passed_end(row) for m in bench.measurements if m.run >= 0 for row in m.rows
    }
    return sum(seen.values()), len(seen)
