"""What a bench measured: the rows of its tables, and each arm's timed steps as columns. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


def decode_seconds(measurement: Measurement) -> float:
    return sum(measurement.steps.total_s)


def committed_tokens(measurement: Measurement) -> int:
    return sum(sum(row.committed) for row in measurement.rows)


def seconds_per_token(measurement: Measurement) -> float:
    return decode_seconds(measurement) / committed_tokens(measurement)


def depths_of(measurement: Measurement) -> list[int]:
    """Drafting steps of each round: what the row that drafted most drafted. Every row decodes from the first step
    on until it is finished."""
    drafted = [row.drafted for row in measurement.rows]
    return [max((d[i] for d in drafted if i < len(d)), default=0) for i in range(len(measurement.steps.width))]


class Timed:
    """An arm's timed steps as columns over all its measurements, in seconds."""

    def __init__(self, bench: Bench, arm: Arm) -> None:
        self.arm = arm
        self.measurements = bench.timed(arm.name)
        steps = [m.steps for m in self.measurements]
        self.draft = np.array([s for x in steps for s in x.draft_s], dtype=float)
        self.verify = np.array([s for x in steps for s in x.verify_s], dtype=float)
        self.total = np.array([s for x in steps for s in x.total_s], dtype=float)
        self.other = self.total - self.draft - self.verify
        self.width = np.array([w for x in steps for w in x.width], dtype=int)
        self.depth = np.array([d for m in self.measurements for d in depths_of(m)], dtype=int)

    @cached_property
    def statistics(self) -> Statistics:
        return self.counted()

    @cached_property
    def rounds(self) -> list[tuple[int, tuple[Round, ...]]]:
        """(prompt, rounds) of every row."""
        return [(row.prompt, rounds_of(row)) for m in self.measurements for row in m.rows]

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
        return {g: float(np.median([seconds_per_token(m) for m in ms])) for g, ms in self.by_group.items()}

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
                for committed in row.committed:
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
        return sum(max(sum(row.committed) for row in m.rows) for m in self.measurements)


def median(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def paired_ratios(baseline: Timed, arm: Timed) -> dict[int, float]:
    """{group: the baseline's time / the arm's}, of the groups that both measured."""
    return {g: baseline.group_seconds[g] / s for g, s in arm.group_seconds.items() if g in baseline.group_seconds}
