"""What calls cost in a bench, and the speedup that its texts and these costs predict for every k. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specgen.analysis.columns import Timed, median
from specgen.analysis.tables import Predicted
from specgen.results.bench import Bench, Costs
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import ExpectedRounds, expected_rounds, pooled
from specgen.settings import Mode

LEAST_STEPS = 5  # of one width, for their median to be a price


class View:
    """A bench with what several tables need, computed once. timed: of each arm, up to the ends of its texts, which is
    what tables, verdict and predictions are of; whole: all that was timed, which is what calls are priced by."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.timed = {arm.name: Timed(bench, arm) for arm in bench.arms}
        self.whole = {arm.name: Timed(bench, arm, whole=True) for arm in bench.arms}
        self._prices: dict[tuple[str, str, int], Prices] = {}
        self._expected: dict[tuple[str, int, int], Expected | None] = {}

    def prices(self, profile: str, engine: str, batch: int) -> Prices:
        key = (profile, engine, batch)
        if key not in self._prices:
            self._prices[key] = Prices(self, *key)
        return self._prices[key]

    def expected(self, profile: str, batch: int, k: int) -> Expected | None:
        key = (profile, batch, k)
        if key not in self._expected:
            self._expected[key] = _expected(self, *key)
        return self._expected[key]


def _costs(bench: Bench, profile: str, engine: str) -> Costs | None:
    """The probe of this profile and engine; for a plain arm without one of its own, any of that engine."""
    same = [c for c in bench.costs if c.engine == engine]
    return next((c for c in same if c.profile == profile), same[0] if same else None)


def probed(costs: Costs) -> CallCosts:
    """The calls of a stored probe, in seconds; a draft step that was not probed is free."""
    return CallCosts(costs.target_s, costs.draft_s or 0.0)


class Prices:
    """What calls of one profile under one engine and batch cost in this bench, in seconds: medians of all its own
    timed steps where there are enough, elsewhere the probe, scaled to the bench's own T(1)."""

    def __init__(self, view: View, profile: str, engine: str, batch: int) -> None:
        mine = [a for a in view.bench.arms if (a.engine, a.batch) == (engine, batch)]
        self.drafted = {a.k: view.whole[a.name] for a in mine if a.kind == "speculative" and a.profile == profile}
        plain = [a for a in mine if a.kind == "plain"]
        own = [a for a in plain if any(t.arm.baseline == a.name for t in self.drafted.values())]
        self.plain = view.whole[(own or plain)[0].name] if plain else None
        self.costs = _costs(view.bench, profile, engine)

    @cached_property
    def measured(self) -> dict[int, float]:
        """{tokens in a call: median seconds} of the widths that were called often enough."""
        found: dict[int, float] = {}
        if self.plain is not None and (self.plain.width == 1).sum() >= LEAST_STEPS:
            found[1] = float(np.median(self.plain.verify[self.plain.width == 1]))
        by_width: dict[int, list[float]] = {}
        for own in self.drafted.values():
            for width, seconds in zip(own.width.tolist(), own.verify.tolist(), strict=True):
                by_width.setdefault(width, []).append(seconds)
        for width, times in by_width.items():
            if width > 1 and len(times) >= LEAST_STEPS:
                found[width] = float(np.median(times))
        return found

    @cached_property
    def probe(self) -> CallCosts | None:
        """The probe as it had been at the bench's own speed."""
        if self.costs is None or not self.costs.target_s:
            return None
        found = probed(self.costs)
        if not found.call(1):  # a clock too coarse for it
            return None
        return found.with_first(self.measured.get(1, found.call(1)))

    @cached_property
    def calls(self) -> CallCosts | None:
        """T(w) alone: of the widths measured here and, of the others, of those probed; None where T(1) is unknown."""
        target = {**(self.probe.target if self.probe else {}), **self.measured}
        return CallCosts(target) if self.probe or 1 in target else None

    def call(self, width: int) -> float | None:
        """A target call on so many tokens a row; None where nothing is known of single calls, or of wider ones."""
        if self.calls is None or (width > 1 and self.calls.widest == 1):
            return None
        return self.calls.call(width)

    def nearest(self, k: int) -> Timed | None:
        return self.drafted[min(self.drafted, key=lambda j: (abs(j - k), j))] if self.drafted else None

    def draft(self, k: int) -> float:
        """A drafting step: of the nearest arm that drafted, its own first; else the probe's, at the bench's speed as
        its calls are; 0 where nobody knows."""
        steps = {j: own.draft_step for j, own in self.drafted.items()}
        for j in sorted(steps, key=lambda j: (abs(j - k), j)):
            if (step := steps[j]) is not None:
                return step
        return self.probe.draft if self.probe else 0.0

    def other(self, k: int) -> float:
        nearest = self.nearest(k)
        return (median(nearest.other) if nearest else None) or 0.0

    @property
    def plain_other(self) -> float:
        return (median(self.plain.other) if self.plain else None) or 0.0

    @property
    def plain_step(self) -> float | None:
        first = self.call(1)
        return None if first is None else first + self.plain_other

    def at(self, k: int) -> CallCosts | None:
        """All that a round of k costs; None where no call on k + 1 tokens has a price."""
        if self.calls is None or self.call(k + 1) is None:
            return None
        return dataclasses.replace(self.calls, draft=self.draft(k), other=self.other(k), plain_other=self.plain_other)


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected rounds by the baseline's texts, each up to its end: of all rows together; of each group's slowest row,
    which is what a group's calls number, with the tokens of the group's longest; of those together."""

    rows: ExpectedRounds
    groups: tuple[ExpectedRounds, ...]

    @property
    def together(self) -> ExpectedRounds:
        return pooled(self.groups)


def _expected(view: View, profile: str, batch: int, k: int) -> Expected | None:
    """None without scores."""
    own = (s for s in view.bench.scores if s.profile == profile and s.ratios)
    scores = {(s.prompt, s.run): s.ratios[: s.end] for s in own}
    limit, known = view.bench.design.max_new_tokens, {}
    for ratios in {tuple(ratios) for ratios in scores.values()}:  # greedy runs repeat their text
        known[ratios] = _rounds_expected(ratios, k, limit)
    texts = {key: known[tuple(ratios)] for key, ratios in scores.items()}
    if not texts:
        return None
    groups = []
    for prompts in _groups(view, batch):
        slowest = []
        for run in sorted({run for _, run in texts}):
            rows = [texts[p, run] for p in prompts if (p, run) in texts]
            if len(rows) == len(prompts):
                longest = max(row.tokens for row in rows)  # rows with ends are not of one length
                slowest.append(dataclasses.replace(max(rows, key=lambda t: t.rounds), tokens=longest))
        groups += [pooled(slowest)] if slowest else []
    return Expected(pooled(list(texts.values())), tuple(groups or texts.values()))


def _rounds_expected(ratios: Sequence[float | None], k: int, limit: int) -> ExpectedRounds:
    return expected_rounds(ratios, k, limit=max(limit, len(ratios)))


def _groups(view: View, batch: int) -> list[list[int]]:
    """The prompts of each group of that batch; every prompt alone where nothing of it was measured."""
    groups = {
        g: [row.prompt for row in ms[0].rows]
        for arm in view.bench.arms
        if arm.batch == batch
        for g, ms in view.timed[arm.name].by_group.items()
    }
    return list(groups.values()) or [[i] for i in range(len(view.bench.prompts))]


def predicted_at(view: View, profile: str, engine: str, batch: int, k: int) -> Predicted | None:
    if Mode(view.bench.sampling["mode"]).approximate:
        return None  # the texts of the baseline are not those that this mode writes
    expected, costs = view.expected(profile, batch, k), view.prices(profile, engine, batch).at(k)
    if expected is None or costs is None or not costs.call(1):
        return None
    # As the measured one: the median over groups.
    speedup = float(np.median([predicted_speedup(group, costs) for group in expected.groups]))
    return Predicted(profile, engine, batch, k, expected.rows.tau, expected.rows.alpha, speedup)


def predict(bench: Bench, profile: str, engine: str, batch: int, max_k: int | None = None) -> list[Predicted]:
    """The predicted speedup at every candidate k, and at every k measured; or at 1 … max_k. From the baseline's texts
    and what calls cost, so that a plain arm, its scores and the probe are enough."""
    return _predict_all(View(bench), profile, engine, batch, max_k)


def _predict_all(view: View, profile: str, engine: str, batch: int, max_k: int | None = None) -> list[Predicted]:
    own = {a.k for a in view.bench.arms if (a.profile, a.engine, a.batch) == (profile, engine, batch)}
    ks = sorted((own | set(view.bench.design.candidates)) - {0}) if max_k is None else range(1, max_k + 1)
    found = (predicted_at(view, profile, engine, batch, k) for k in ks)
    return [p for p in found if p is not None]


def predictions_of(view: View) -> Iterable[Predicted]:
    for key in dict.fromkeys((a.profile, a.engine, a.batch) for a in view.bench.arms if a.kind == "speculative"):
        yield from _predict_all(view, *key)
