"""A run's check of itself: what was used against what a fresh, cache-free pass gives, and z statistics.

The run's own distributions would agree with themselves whatever they were, so the moments come from the fresh pass.
A pass is "no fault seen in n positions", never a certificate: its power depends on the pair and on n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgen.drafting.drafter import Drafter
from specgen.models.protocol import LanguageModel
from specgen.rounds.record import Origin, Round
from specgen.rounds.statistics import ratio
from specgen.sampling.processors import Processors
from specgen.settings import Mode
from specgen.verification.law import coupled_joint, overlap

Z_BOUND = 4.0


SKEW_BOUND = 0.5  # L = Σ E|f − E f|³ / (Σ Var f)^1.5: above it the normal tail says nothing


ROUNDING = 1e-6  # a standard deviation of f below it is rounding: target and draft are one model, say


# Share of positions whose support (top-p's, top-k's edge) may differ between two kinds of call: 4 to 6 % were seen on
# honest bfloat16 runs, none in float32.
EDGE_FRACTION = 0.02


EDGE_FRACTION_BFLOAT16 = 0.12


# Two kinds of call of one model differ by rounding: bounds on log-probabilities (nats), entropies and overlaps.
MOST_DRIFT = 0.5


DRIFT_BOUND = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.6}


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check: value against bound. passed is None where there was nothing to decide; note says why."""

    name: str
    value: float | None
    bound: float
    passed: bool | None
    note: str


@dataclass
class ZSum:
    """z = Σ(f − E f) / sqrt(Σ Var f), for f of the committed token, given the past; moments are centred."""

    n: int = 0
    deviation: float = 0.0
    variance: float = 0.0
    third: float = 0.0

    def add(self, f: Tensor, probs: Tensor, outcome: int) -> None:
        """f, probs: [V] float64. f may be infinite where probs is 0: 0 · ∞ is 0 here."""
        probs = probs / probs.sum()  # float32 rows sum to 1 within 1e-7, which a nearly constant f would show
        f = torch.where(probs > 0, f, torch.zeros_like(f))
        mean = float((probs * f).sum())
        centred = (f - mean).abs()
        value = float(f[outcome]) if probs[outcome] > 0 else math.inf
        self.put(value - mean, float((probs * centred**2).sum()), float((probs * centred**3).sum()))

    def put(self, deviation: float, variance: float, third: float) -> None:
        self.n += 1
        self.deviation += deviation
        self.variance += variance
        self.third += third

    def row(self, name: str, meaning: str) -> CheckRow:
        if self.n == 0:
            return CheckRow(name, None, Z_BOUND, None, "no such position")
        if self.deviation == math.inf:
            return CheckRow(name, math.inf, Z_BOUND, False, "a committed token has fresh probability 0")
        if self.variance <= self.n * ROUNDING**2 or self.third / self.variance**1.5 > SKEW_BOUND:
            return CheckRow(name, None, Z_BOUND, None, f"not enough variation in {self.n} positions")
        z = self.deviation / math.sqrt(self.variance)
        return CheckRow(name, z, Z_BOUND, abs(z) <= Z_BOUND, f"{meaning}; {self.n} positions")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All rows. passed: no row failed. reason: why there is no row, where there is none.

    ratios: [positions] of the committed tokens (see `kept_ratio`); None where the draft proposes nothing.
    """

    positions: int
    rows: tuple[CheckRow, ...]
    reason: str | None = None
    ratios: tuple[float | None, ...] = ()

    @property
    def passed(self) -> bool:
        return all(row.passed is not False for row in self.rows)

    @property
    def verdict(self) -> str:
        if self.reason:
            return f"not applicable: {self.reason}"
        failed = [row.name for row in self.rows if row.passed is False]
        if failed:
            return f"FAILED: {', '.join(failed)} ({self.positions} positions)"
        return f"no fault seen in {self.positions} positions"


@dataclass
class SelfCheck:
    """Collects the runs of one pair under one setting; `result()` judges them pooled.

    tolerance: bound on drift, in nats (and for overlaps).
    """

    tolerance: float
    mode: Mode = Mode.EXACT
    edge_fraction: float = EDGE_FRACTION
    positions: int = 0
    edges: int = 0
    drafts: int = 0
    drift: float = 0.0
    draft_drift: float = 0.0
    impossible: list[str] = field(default_factory=list)
    z: dict[str, ZSum] = field(default_factory=dict)
    ratios: list[float | None] = field(default_factory=list)

    def add(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        processors: Processors,
        prompt: Sequence[int],
        rounds: Sequence[Round],
    ) -> None:
        """Teacher-forces the run's text through both sides from scratch and compares. Disturbs no cache."""
        committed = [c for r in rounds for c in r.committed]
        tested = [i < r.tested for r in rounds for i in range(len(r.committed))]
        text = [*prompt, *(c.token for c in committed)]
        self.impossible += [event for r in rounds for event in r.impossible]
        if not committed:
            return
        drafts = self._draft_rows(drafter, text, len(prompt))
        for first, logits in target.score(text, len(prompt)):
            probs = processors(logits, text[:first], text[first : first + len(logits) - 1]).double()
            for row, i in zip(probs, range(first - len(prompt), len(committed)), strict=False):
                draft = next(drafts)
                self._compare(row, draft, committed[i])
                self.ratios.append(None if draft is None else kept_ratio(self.mode, row, draft, committed[i].token))
                self._accumulate(row, draft, committed[i].token, committed[i].origin, tested[i])

    @staticmethod
    def _draft_rows(drafter: Drafter | None, text: Sequence[int], start: int):  # type: ignore[no-untyped-def]
        if drafter is None:
            while True:
                yield None
        for _, rows in drafter.score(text, start):
            yield from rows

    def _compare(self, fresh: Tensor, draft: Tensor | None, used) -> None:  # type: ignore[no-untyped-def]
        self.positions += 1
        if int((fresh > 0).sum()) != used.support:
            self.edges += 1  # judged by how often it happens: one token at top-p's edge moves all the others
            return
        entropy = float(torch.special.entr(fresh).sum())
        log_prob = float(fresh[used.token].log())
        self.drift = max(self.drift, abs(entropy - used.entropy), abs(log_prob - used.log_prob))
        if used.overlap is not None:
            self.drafts += 1
            fresh_overlap = float(overlap(fresh, draft.double())) if draft is not None else 0.0
            self.draft_drift = max(self.draft_drift, abs(fresh_overlap - used.overlap))

    def _sum(self, name: str) -> ZSum:
        return self.z.setdefault(name, ZSum())

    def _accumulate(self, target: Tensor, draft: Tensor | None, token: int, origin: Origin, tested: bool) -> None:
        surprisal = -target.log()
        kind = "tested" if tested else "bonus" if origin is Origin.BONUS else "plain"
        self._sum("surprisal z, all").add(surprisal, target, token)
        if self.mode is Mode.COUPLED:
            return  # the draft's draw and the target's are one: what is tested depends on what is drawn
        self._sum(f"surprisal z, {kind}").add(surprisal, target, token)
        if draft is None:
            return
        draft = draft.to(target)
        kept = torch.where(target > 0, draft / target, torch.zeros_like(target)).clamp(max=1)
        self._sum(f"draft z, {kind}").add(kept, target, token)
        if tested:
            beta = float(overlap(target, draft))
            variance = beta * (1 - beta)
            accepted = origin is Origin.ACCEPTED
            self._sum("acceptance z").put(accepted - beta, variance, variance * (beta**2 + (1 - beta) ** 2))

    def result(self) -> CheckResult:
        edge_share = ratio(self.edges, self.positions) or 0.0
        compared = self.positions - self.edges
        note = f"used against fresh, cache-free: log-probability, entropy (nats); {compared} positions"
        rows = [
            CheckRow(
                "drift",
                self.drift if compared else None,
                self.tolerance,
                self.drift <= self.tolerance if compared else None,
                note,
            ),
            CheckRow(
                "drift of overlap",
                self.draft_drift if self.drafts else None,
                self.tolerance,
                self.draft_drift <= self.tolerance if self.drafts else None,
                f"the draft's side, at {self.drafts} tested positions",
            ),
            CheckRow(
                "support",
                edge_share,
                self.edge_fraction,
                self.edges <= max(2, self.edge_fraction * self.positions),
                f"{self.edges} positions where the tokens let through differ (edge of top-p, top-k, min-p)",
            ),
            CheckRow(
                "impossible events",
                float(len(self.impossible)),
                0.0,
                not self.impossible,
                self.impossible[0] if self.impossible else "none",
            ),
        ]
        rows += [
            self.z[name].row(name, meaning)
            for name, meaning in (
                ("surprisal z, all", "too peaked or too flat a law"),
                ("surprisal z, tested", "the same at tested positions"),
                ("surprisal z, bonus", "the same at bonus positions"),
                ("draft z, tested", "leans toward (+) or away from (−) the draft"),
                ("draft z, bonus", "a bonus that leans toward the draft"),
                ("acceptance z", "accepted more (+) or less (−) often than the overlap says"),
            )
            if name in self.z
        ]
        return CheckResult(self.positions, tuple(rows), ratios=tuple(self.ratios))


def kept_ratio(mode: Mode, target: Tensor, draft: Tensor, token: int) -> float:
    """The probability that the token, given that it was committed, would have been kept had it been tested.

    target, draft: [V]. min(1, draft(x)/target(x)); of mode coupled P(both draw x)/target(x), under shared noise. The
    overlap stands in where the target gives the token 0, so that no correct run commits it.
    """
    draft = draft.to(target)
    p, q = float(target[token]), float(draft[token])
    if p == 0:
        return min(1.0, float(overlap(target, draft)))
    if mode is Mode.COUPLED:
        (q,) = coupled_joint(target[None], draft[None], [token])
    return min(1.0, q / p)


def drift_bound(dtype: torch.dtype, temperature: float | None) -> float:
    """The tolerance for models computed in dtype; a temperature below 1 magnifies differences of logits.

    Never above MOST_DRIFT for that: a bound that nothing can exceed would let everything pass.
    """
    base = DRIFT_BOUND.get(dtype, DRIFT_BOUND[torch.bfloat16])
    return max(base, min(base / min(1.0, temperature or 1.0), MOST_DRIFT))


def edge_fraction(dtype: torch.dtype) -> float:
    """The share of positions whose support may differ, for models computed in dtype."""
    return EDGE_FRACTION_BFLOAT16 if dtype == torch.bfloat16 else EDGE_FRACTION


def not_applicable(mode: Mode) -> CheckResult:
    if mode is Mode.GREEDY:
        return CheckResult(0, (), "greedy mode draws nothing; compare its text with plain greedy decoding")
    return CheckResult(0, (), f"{mode.value} mode does not promise the target's distribution; its bias is above")
