"""Check `sampler`: frequencies of thousands of rounds against the law, by a G-test and transforms."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specgen.audit.findings import Finding, Status
from specgen.audit.law import PlainRows, memoised
from specgen.audit.subject import Subject, Watched, Work
from specgen.sampling.randomness import Stream, keyed_uniform, prompt_digest
from specgen.settings import Mode
from specgen.verification.law import law

LEVEL = 1e-4  # of each of the sampler's three tests: how often it may reject an honest pair


EXPECTED = 5.0  # the least expected count of a bin


SAMPLER_PREFIXES = 4


class Sampler:
    """Single rounds from fixed prefixes through the audited loop, and what their committed tokens say of its law.

    Given the text before it, and that the round got there, a committed token has the law of the target (approximate
    modes: of their rule, at tested positions). So its probability integral transform, randomised within its own cell,
    is uniform and independent of all before it; tokens are put in order of draft/target, so that a lean toward or
    away from the draft shows as a shift.
    """

    def __init__(self, auditor: Subject) -> None:
        self.auditor = auditor
        target, drafter = memoised(auditor)
        self.rows = PlainRows(target, drafter, auditor.processors)
        # Thousands of rounds cost few calls, where another model may stand in.
        self.stand_ins: dict[str, Any] = {"target": target, "drafter": drafter} if auditor.stands_alone else {}
        self.prefixes = self._prefixes()
        self.counts: dict[tuple[tuple[int, ...], bool], Counter[int]] = {}
        self.transforms: dict[str, list[float]] = {"all": [], "bonus": []}
        self.zeros: list[str] = []
        self.done = self.boundary_rounds = self.tried = self.tested = 0

    def _prefixes(self) -> list[list[int]]:
        """Places where the draft has something to propose: the prompts' ends, or else in the target's own text."""
        found = [list(prompt) for prompt in self.auditor.prompts[:SAMPLER_PREFIXES]]
        silent = [prefix for prefix in found if self.rows.of_draft(prefix) is None]
        found = [prefix for prefix in found if prefix not in silent]
        for i in range(len(self.auditor.prompts)):
            if len(found) >= 2:  # few, so that each is drawn from often
                break
            text, n = self.auditor.text(i), len(self.auditor.prompts[i])
            places = range(n + (len(text) - n) // 2, len(text))
            found += [text[:end] for end in places if self.rows.of_draft(text[:end]) is not None][:1]
        return found or silent

    def rounds(self, ns: Sequence[int], *, boundary: bool = False) -> None:
        """A round of each of these numbers, in one batch."""
        auditor = self.auditor
        seed = auditor.sampling.seed
        units = [(self.prefixes[n % len(self.prefixes)], seed + n) for n in ns]
        watched: dict[int, Watched] = {}
        with contextlib.closing(
            auditor.generate(units, length=auditor.sampling.k + 1, boundary=boundary, **self.stand_ins)
        ) as generated:
            for w in generated:
                if w.number in watched:
                    break  # the second step begins
                watched[w.number] = w
                if len(watched) == len(units):
                    break
        for number, w in watched.items():
            self._take(*units[number], w, boundary=boundary)

    def _take(self, prefix: Sequence[int], seed: int, watched: Watched, *, boundary: bool) -> None:
        r, text, drafted = watched.round, list(prefix), watched.seen.drafted
        spread = keyed_uniform(
            seed, prompt_digest(prefix), int(Stream.CHECK), torch.arange(len(prefix), len(prefix) + len(r.tokens))
        )
        for i, token in enumerate(r.tokens):
            row = self._expected(text, i < r.drafted)
            if boundary and i < len(drafted):
                self.tried += int(self.rows.of_target(text)[drafted[i]] == 0)
            if row[token] <= 0:
                where = "a boundary draw" if boundary else "an ordinary draw"
                self.zeros.append(f"token {token}, which the target gives 0, was committed at {where}")
            elif not boundary:
                key = (tuple(text), i < r.drafted)
                self.counts.setdefault(key, Counter())[token] += 1
                u = self._transform(row, self.rows.of_draft(text), token, float(spread[i]))
                self.transforms["all"].append(u)
                self.tested += i < r.drafted
                if i >= r.drafted:
                    self.transforms["bonus"].append(u)
            text.append(token)
        self.done += not boundary
        self.boundary_rounds += boundary

    def _expected(self, text: Sequence[int], tested: bool) -> Tensor:
        row = self.rows.of_target(text)
        if tested and self.auditor.mode.approximate:
            draft = self.rows.of_draft(text)
            assert draft is not None
            return law(self.auditor.verified_by, row, draft)
        return row

    @staticmethod
    def _transform(row: Tensor, draft: Tensor | None, token: int, spread: float) -> float:
        ids = torch.arange(len(row), device=row.device)
        if draft is None:
            below = ids < token
        else:
            lean = torch.where(row > 0, draft / row, torch.zeros_like(row))
            below = (lean < lean[token]) | ((lean == lean[token]) & (ids < token))
        return min(1.0, float(row[below].sum()) + spread * float(row[token]))

    def _g_test(self) -> tuple[float, int]:
        """G and its degrees of freedom, summed over the places with counts enough; by Williams' correction."""
        total, freedom = 0.0, 0
        for (text, tested), counter in self.counts.items():
            n = sum(counter.values())
            if n < 2 * EXPECTED:
                continue
            row = self._expected(text, tested).cpu().double().numpy()
            observed = np.zeros_like(row)
            observed[list(counter)] = list(counter.values())
            g, bins = g_statistic(observed, row)
            if bins > 1:
                total, freedom = total + g, freedom + bins - 1
        return total, freedom

    def finding(self, left_out: int) -> Finding:
        from scipy import stats

        g, freedom = self._g_test()
        p = {}
        if freedom:
            p[f"G {g:.1f} on {freedom} degrees of freedom"] = float(stats.chi2.sf(g, freedom))
        for name, values in self.transforms.items():
            if len(values) >= 2 * EXPECTED:
                p[f"uniformity, {name} ({len(values)})"] = float(stats.kstest(values, "uniform").pvalue)
        positions = len(self.transforms["all"])
        notes = [f"{name}: p = {value:.2g}" for name, value in p.items() if value < LEVEL] + self.zeros[:3]
        if self.auditor.mode is not Mode.COUPLED and not self.tried:
            notes.append(f"no token of target probability 0 was drafted in {self.boundary_rounds} boundary rounds")
        least = min(p.values(), default=None)
        tests = ", ".join(f"{name}: p {value:.2g}" for name, value in p.items()) or "too few rounds for a test"
        measured = f"{self.done} rounds, {self.tested} tested tokens: {tests}"
        measured += f"; {len(self.zeros)} tokens of target probability 0 committed ({self.tried} drafted at u = 0)"
        passed = not self.zeros and (least is None or least >= LEVEL)
        if passed and least is None:
            status = Status.NO_TIME if left_out else Status.NOT_APPLICABLE
            return Finding("sampler", status, measured, f"p {LEVEL:g}", None, positions)
        bound = f"p {LEVEL:g} each; 0"
        return self.auditor.finding(
            "sampler", passed, measured, bound, least, positions, notes, unit="rounds", left_out=left_out
        )


def check(subject: Subject) -> Work:
    """A third of the time at the most goes to boundary rounds, in turns with the others."""
    sampler = Sampler(subject)
    ordinary = subject.groups(range(subject.rounds))
    boundary = [] if subject.mode is Mode.COUPLED else subject.groups(range(subject.rounds // 4))
    left_out = 0
    for i, group in enumerate(ordinary):
        if i and not (yield):
            left_out = len(ordinary) - i
            break
        sampler.rounds(group)
        if i % 2 == 0 and i // 2 < len(boundary):
            sampler.rounds(boundary[i // 2], boundary=True)
    return sampler.finding(left_out)


def g_statistic(observed: np.ndarray, row: np.ndarray) -> tuple[float, int]:
    """G of counts [V] against the law row [V], by Williams' correction, and how many bins it was taken over.

    Tokens whose expected count is below EXPECTED share a bin, or where that is below it too the least of the others.
    """
    from scipy.stats import power_divergence

    n = observed.sum()
    expected = row * (n / row.sum())  # scipy wants equal sums, and a row's is 1 to the rounding of its dtype only
    alone = expected >= EXPECTED
    o, e = observed[alone], expected[alone]
    rest_o, rest_e = observed[~alone].sum(), expected[~alone].sum()
    if rest_e >= EXPECTED:
        o, e = np.append(o, rest_o), np.append(e, rest_e)
    elif len(e):
        least = e.argmin()
        o[least] += rest_o
        e[least] += rest_e
    if len(e) < 2:
        return 0.0, len(e)
    g = power_divergence(o, e, lambda_="log-likelihood").statistic
    return float(g / (1 + ((n / e).sum() - 1) / (6 * n * (len(e) - 1)))), len(e)
