"""What calls cost in a bench, and the speedup that its texts and these costs predict for every k. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specgen.analysis.columns import Timed, median
from specgen.analysis.tables import Predicted
from specgen.results.bench import Bench, Costs
from specgen.rounds.expected import ExpectedRounds, expected_rounds, pooled, predicted_speedup
from specgen.settings import Mode

LEAST_STEPS = 5  # of one width, for their median to be a price


class View:
    """A bench with what several tables need, computed once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.timed = {arm.name: Timed(bench, arm) for arm in bench.arms}
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


class Prices:
    """What calls of one profile under one engine and batch cost in this bench, in seconds: medians of its own
    timed steps where there are enough, the probe elsewhere."""

    def __init__(self, view: View, profile: str, engine: str, batch: int) -> None:
        mine = [a for a in view.bench.arms if (a.engine, a.batch) == (engine, batch)]
        self.drafted = {a.k: view.timed[a.name] for a in mine if a.kind == "speculative" and a.profile == profile}
        plain = [a for a in mine if a.kind == "plain"]
        own = [a for a in plain if any(t.arm.baseline == a.name for t in self.drafted.values())]
        self.plain = view.timed[(own or plain)[0].name] if plain else None
        self.costs = _costs(view.bench, profile, engine)
        self.measured: dict[int, float] = {}
        self._measure()

    def _measure(self) -> None:
        if self.plain is not None and (self.plain.width == 1).sum() >= LEAST_STEPS:
            self.measured[1] = float(np.median(self.plain.verify[self.plain.width == 1]))
        by_width: dict[int, list[float]] = {}
        for own in self.drafted.values():
            for width, seconds in zip(own.width.tolist(), own.verify.tolist(), strict=True):
                by_width.setdefault(width, []).append(seconds)
        for width, times in by_width.items():
            if width > 1 and len(times) >= LEAST_STEPS:
                self.measured[width] = float(np.median(times))

    def call(self, width: int) -> float | None:
        """A target call on so many tokens a row. The probed curve, where it stands in, is scaled to the T(1) of the
        bench itself. None where neither knows."""
        if width in self.measured:
            return self.measured[width]
        probed = self._probed(width)
        first = self._probed(1)
        if probed is None or first is None:
            return None
        return probed * self.measured.get(1, first) / first

    def _probed(self, width: int) -> float | None:
        curve = sorted(self.costs.target_s.items()) if self.costs else []
        if not curve:
            return None
        (narrow, least), (wide, most) = curve[0], curve[-1]
        if width > wide > narrow:  # beyond the probe: on along the line from end to end, since neighbours may jump
            return most + (width - wide) * (most - least) / (wide - narrow)
        return float(np.interp(width, [w for w, _ in curve], [s for _, s in curve]))

    def nearest(self, k: int) -> Timed | None:
        return self.drafted[min(self.drafted, key=lambda j: (abs(j - k), j))] if self.drafted else None

    def draft(self, k: int) -> float:
        """A drafting step: the arm's own, the probe's, the nearest arm's; 0 where nobody knows."""
        own = self.drafted[k].draft_step if k in self.drafted else None
        if own is None and self.costs is not None:
            own = self.costs.draft_s
        nearest = self.nearest(k)
        if own is None and nearest is not None:
            own = nearest.draft_step
        return own or 0.0

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


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected rounds by the baseline's texts: of all rows together; of each group's slowest row, which is what a
    group's calls number; of those together."""

    rows: ExpectedRounds
    groups: tuple[ExpectedRounds, ...]

    @property
    def together(self) -> ExpectedRounds:
        return pooled(self.groups)


def _expected(view: View, profile: str, batch: int, k: int) -> Expected | None:
    """None without scores."""
    scores = {(s.prompt, s.run): s.ratios for s in view.bench.scores if s.profile == profile and s.ratios}
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
                slowest.append(max(rows, key=lambda t: t.rounds))
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
    expected = view.expected(profile, batch, k)
    prices = view.prices(profile, engine, batch)
    calls = [prices.call(w) for w in range(1, k + 2)]
    first, plain = prices.call(1), prices.plain_step
    if expected is None or not first or plain is None:
        return None
    relative = [
        predicted_speedup(
            group,
            draft_cost=prices.draft(k) / first,
            verify_cost=[(s or 0.0) / first for s in calls],
            other_cost=prices.other(k) / first,
        )
        for group in expected.groups
    ]
    speedup = float(np.median(relative)) * plain / first  # as the measured one: the median over groups
    return Predicted(profile, engine, batch, k, expected.rows.tau, expected.rows.alpha, speedup)


def predict(bench: Bench, profile: str, engine: str, batch: int) -> list[Predicted]:
    """The predicted speedup at every candidate k, and at every k measured; from the baseline's texts and what calls
    cost, so that a plain arm, its scores and the probe are enough."""
    return _predict_all(View(bench), profile, engine, batch)


def _predict_all(view: View, profile: str, engine: str, batch: int) -> list[Predicted]:
    own = {a.k for a in view.bench.arms if (a.profile, a.engine, a.batch) == (profile, engine, batch)}
    ks = sorted((own | set(view.bench.design.candidates)) - {0})
    found = (predicted_at(view, profile, engine, batch, k) for k in ks)
    return [p for p in found if p is not None]


def predictions_of(view: View) -> Iterable[Predicted]:
    for key in dict.fromkeys((a.profile, a.engine, a.batch) for a in view.bench.arms if a.kind == "speculative"):
        yield from _predict_all(view, *key)
