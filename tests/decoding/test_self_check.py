"""A run's check of itself: honest runs pass, and each planted fault turns the row red that is there for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.decoding.eager import autoregressive, speculative, start
from specgen.decoding.self_check import SKEW_BOUND, CheckResult, SelfCheck, ZSum, drift_bound, not_applicable
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.models.causal import CausalLM
from specgen.rounds.record import Origin, ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, prompt_digest
from specgen.settings import Mode, Sampling
from specgen.verification.rules import RULES, Rule
from support.doubles import (
    BonusFromDraft,
    DropsUnlikely,
    PenaltyFromRoundStart,
    TableModel,
    UnprocessedProbs,
    membership,
    random_table,
    raw_resample,
)
from support.tiny import noisy_copy, tiny_llama, tiny_pair

EXACT = RULES[Mode.EXACT]


def checked(
    target: Any,
    drafter: Drafter | None,
    s: Sampling,
    *,
    seeds: Sequence[int] = range(4),
    rule: Rule = EXACT,
    used: Processors | None = None,
    tolerance: float = 1e-6,
    prompt: Sequence[int] = (1, 2, 1),
) -> CheckResult:
    """Runs pooled into one check. used: what the run processes the target's logits with; the check uses s."""
    promised = Processors.of(s)
    check = SelfCheck(tolerance)
    for seed in seeds:
        start(target, drafter, prompt)
        options: dict[str, Any] = {
            "max_new_tokens": s.max_new_tokens,
            "uniforms": KeyedUniforms(seed, prompt_digest(prompt)),
            "ended": ends_at(s.end_tokens),
        }
        if drafter is None:
            rounds = list(autoregressive(target, used or promised, prompt, **options))
        else:
            rounds = list(speculative(target, drafter, used or promised, prompt, k=s.k, rule=rule, **options))
        check.add(target, drafter, promised, prompt, rounds)
        cached = target.lengths
        assert cached == (len(prompt) + sum(len(r.tokens) for r in rounds) - 1,)  # the check disturbs no cache
    return check.result()


def failed(result: CheckResult) -> set[str]:
    assert result.passed == (not any(row.passed is False for row in result.rows))
    names = {row.name for row in result.rows if row.passed is False}
    assert result.verdict.startswith("FAILED: " if names else "no fault seen in ")
    assert all(name in result.verdict for name in names)
    return names


def tables(vocabulary: int = 8, noise: float = 0.8, **options: Any) -> tuple[TableModel, TableModel]:
    table = random_table(vocabulary, 1)
    return TableModel(table), TableModel(table + noise * random_table(vocabulary, 2), "draft", **options)


LONG = Sampling(k=3, max_new_tokens=150)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"ban": (3,)},
    {"repetition_penalty": 1.2},
    {"end_tokens": (0,)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["checkpoint", "ngram", "plain"])
def test_honest_runs_of_tables_pass(kind: str, settings: dict[str, Any]) -> None:
    s = Sampling(k=3, max_new_tokens=100, **settings)
    target, draft = tables()
    drafters: dict[str, Drafter | None] = {
        "checkpoint": ModelDrafter(draft, Processors.of(s)),
        "ngram": NgramDrafter(8, dtype=torch.float64),
        "plain": None,
    }
    result = checked(target, drafters[kind], s)
    assert failed(result) == set()
    drift = {row.name: row.value for row in result.rows}
    assert drift["drift"] < 1e-12
    if kind == "plain":
        assert drift["drift of overlap"] is None  # nothing was compared: no pass either
    else:
        assert drift["drift of overlap"] < 1e-12


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_honest_runs_through_real_caches_pass(name: str) -> None:
    target, draft = tiny_pair(name)
    result = checked(
        target,
        ModelDrafter(draft, Processors.of(LONG)),
        LONG,
        seeds=range(3),
        tolerance=drift_bound(torch.float32, 1.0),
        prompt=[5, 17, 3],
    )
    assert failed(result) == set()
    assert result.positions == 450
    assert result.verdict == "no fault seen in 450 positions"
    rows = {row.name: row for row in result.rows}
    assert rows["drift"].value < 1e-3
    assert rows["surprisal z, all"].value is not None


def test_positions_of_each_row() -> None:
    """Tested, bonus and all are counted apart."""
    target, draft = tables()
    result = checked(target, ModelDrafter(draft, Processors.of(LONG)), LONG, seeds=[0])
    count = {row.name: int(row.note.rpartition("; ")[2].split()[0]) for row in result.rows if " z" in row.name}
    assert count["surprisal z, all"] == result.positions == 150
    assert count["surprisal z, tested"] + count["surprisal z, bonus"] == 150
    assert count["draft z, tested"] == count["acceptance z"] == count["surprisal z, tested"]
    assert count["draft z, bonus"] == count["surprisal z, bonus"]


class OffByOne(TableModel):
    """Its cached calls do not see the last token; its teacher-forced ones do."""

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.tokens += tokens[0].tolist()
        n = len(self.tokens)
        return torch.stack([self.logits(self.tokens[: n - rows + i]) for i in range(rows)])[None]


class WrongRollback(TableModel):
    """Forgets the right number of tokens, one place too early: the last rejected one stays."""

    def rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        if count:
            del self.tokens[len(self.tokens) - count - 1 : -1]


def test_fault_target_cache_off_by_one() -> None:
    _, draft = tables()
    target = OffByOne(random_table(8, 1))
    assert "drift" in failed(checked(target, ModelDrafter(draft, Processors.of(LONG)), LONG))
    assert "drift" in failed(checked(target, None, LONG))


def test_fault_roll_back_of_the_target() -> None:
    _, draft = tables()
    target = WrongRollback(random_table(8, 1))
    assert "drift" in failed(checked(target, ModelDrafter(draft, Processors.of(LONG)), LONG))


def test_fault_roll_back_of_the_draft_is_the_drafts() -> None:
    """The text stays the target's; only what compares with the draft tells."""
    target, draft = tables()
    wrong = WrongRollback(draft.table, "draft")
    seen = failed(checked(target, ModelDrafter(wrong, Processors.of(LONG)), LONG))
    assert {"drift of overlap"} <= seen <= {"drift of overlap", "acceptance z"}


@pytest.mark.parametrize(("who", "row"), [("target", "drift"), ("draft", "drift of overlap")])
def test_fault_stale_keys_in_a_real_cache(who: str, row: str) -> None:
    class Stale(CausalLM):
        @torch.inference_mode()
        def rollback(self, counts: Sequence[int]) -> None:
            if counts[0]:
                for layer in self._cache.layers:
                    layer.keys.copy_(torch.roll(layer.keys, 1, -2))
            super().rollback(counts)

    model = tiny_llama()
    target = (Stale if who == "target" else CausalLM)(model, "target")
    draft = (Stale if who == "draft" else CausalLM)(noisy_copy(model, 0.3), "draft")
    s = Sampling(k=3, max_new_tokens=40)
    result = checked(
        target,
        ModelDrafter(draft, Processors.of(s)),
        s,
        seeds=[0],
        tolerance=drift_bound(torch.float32, 1.0),
        prompt=[5, 17, 3],
    )
    assert row in failed(result)


def test_fault_temperature() -> None:
    """.7 used where 1 was promised: drift sees it at once, the z of fresh distributions too."""
    target, draft = tables()
    used = Processors.of(Sampling(temperature=0.7))
    result = checked(target, ModelDrafter(draft, used), LONG, used=used)
    assert {"drift", "surprisal z, all"} <= failed(result)
    assert {row.name: row.value for row in result.rows}["surprisal z, all"] < -4


def test_fault_penalty_from_the_start_of_the_round() -> None:
    s = Sampling(k=3, max_new_tokens=12, repetition_penalty=1.5)
    target, draft = tables(30)
    used = PenaltyFromRoundStart(Processors.of(s).chain)
    assert "drift" in failed(checked(target, ModelDrafter(draft, used), s, used=used))


def test_fault_top_k_at_the_edge_of_the_support() -> None:
    target, draft = tables()
    used = Processors.of(Sampling(top_k=3))
    result = checked(target, ModelDrafter(draft, used), Sampling(k=3, max_new_tokens=100, top_k=4), used=used)
    assert "support" in failed(result)


@pytest.mark.parametrize("rule", [raw_resample(), membership(3)], ids=lambda r: r.name)
def test_fault_wrong_rule_shows_impossible_events(rule: Rule) -> None:
    target, draft = tables()
    result = checked(target, ModelDrafter(draft, Processors.of(LONG)), LONG, rule=rule)
    assert "impossible events" in failed(result)
    (row,) = [row for row in result.rows if row.name == "impossible events"]
    assert row.value > 0
    assert "to which the target gives no" in row.note


def test_fault_wrong_rule_shows_in_the_sums_too() -> None:
    target, draft = tables()
    drafter = ModelDrafter(draft, Processors.of(LONG))
    seen = failed(checked(target, drafter, LONG, rule=raw_resample(), seeds=range(12)))
    assert "draft z, tested" in seen
    assert "acceptance z" not in seen  # its acceptance is as it should be
    seen = failed(checked(target, drafter, LONG, rule=membership(2), seeds=range(12)))
    assert "acceptance z" in seen


def test_fault_committed_with_probability_zero() -> None:
    always = Rule("always", lambda target, draft: torch.ones_like(target))
    target, draft = tables()
    target.table[:, 0] = torch.finfo(torch.float64).min
    result = checked(target, ModelDrafter(draft, Processors.of(LONG)), LONG, rule=always)
    rows = {row.name: row for row in result.rows}
    assert {"impossible events", "surprisal z, all"} <= failed(result)
    assert "committed token 0, to which the target gives 0" in rows["impossible events"].note
    assert rows["surprisal z, all"].value == math.inf


def test_fault_unlikely_drafted_token_dropped() -> None:
    target, draft = tables()
    drafter = DropsUnlikely(draft, Processors.of(LONG))
    seen = failed(checked(target, drafter, LONG, seeds=range(12)))
    assert any(name.startswith("surprisal z") for name in seen)
    assert "impossible events" not in seen


def test_fault_bonus_from_the_draft() -> None:
    target, draft = tables()
    honest = Processors.of(LONG)
    used = BonusFromDraft(honest, draft)
    seen = failed(checked(target, ModelDrafter(draft, honest), LONG, used=used, seeds=range(12)))
    assert {"drift", "draft z, bonus"} <= seen


def test_fault_draft_probabilities_before_the_processors() -> None:
    s = Sampling(k=3, max_new_tokens=150, temperature=0.6)
    target, draft = tables()
    seen = failed(checked(target, UnprocessedProbs(draft, Processors.of(s)), s))
    assert "drift of overlap" in seen


def test_greedy_has_nothing_to_check() -> None:
    result = not_applicable(Mode.GREEDY)
    assert (result.passed, result.rows, result.positions) == (True, (), 0)
    assert result.verdict.startswith("not applicable: greedy mode draws nothing")


def test_no_tokens_is_no_fault() -> None:
    check = SelfCheck(1e-6)
    check.add(tables()[0], None, Processors.of(LONG), [1], [])
    assert check.result().verdict == "no fault seen in 0 positions"


def test_too_little_variation_gives_no_number() -> None:
    """Peaked models: one rare event would give any z at all."""
    table = torch.zeros(9, 8, dtype=torch.float64)
    table[:, 3] = 9
    result = checked(TableModel(table), ModelDrafter(TableModel(table, "draft"), Processors.of(LONG)), LONG)
    rows = {row.name: row for row in result.rows}
    row = rows["surprisal z, all"]
    assert (row.value, row.passed) == (None, None)
    assert row.note == f"not enough variation in {result.positions} positions"
    assert failed(result) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_target_that_is_its_own_draft_raises_no_alarm(dtype: torch.dtype) -> None:
    """draft/target is 1 throughout: what is left of its variation is rounding."""
    target, _ = tables()
    target.table = target.table.to(dtype)
    draft = TableModel(target.table, "draft")
    result = checked(target, ModelDrafter(draft, Processors.of(LONG)), LONG, tolerance=1e-4)
    assert failed(result) == set()
    rows = {row.name: row for row in result.rows}
    for name in ("draft z, tested", "draft z, bonus", "acceptance z"):
        assert rows[name].passed is None
    assert rows["surprisal z, all"].value is not None


def test_moments_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    total = ZSum()
    deviation = variance = third = 0.0
    for _ in range(60):
        weights = torch.rand(9, dtype=torch.float64, generator=generator)
        weights[int(torch.randint(9, (1,), generator=generator))] = 0
        probs = weights / weights.sum()
        f = -probs.log()  # infinite where probs is 0
        outcome = int(probs.argmax())
        total.add(f, probs, outcome)
        p, x = probs.tolist(), f.tolist()
        mean = sum(a * b for a, b in zip(p, x, strict=True) if a)
        deviation += x[outcome] - mean
        variance += sum(a * (b - mean) ** 2 for a, b in zip(p, x, strict=True) if a)
        third += sum(a * abs(b - mean) ** 3 for a, b in zip(p, x, strict=True) if a)
    assert total.n == 60
    assert total.deviation == pytest.approx(deviation, rel=1e-12)
    assert total.variance == pytest.approx(variance, rel=1e-12)
    assert total.third == pytest.approx(third, rel=1e-12)
    row = total.row("name", "meaning")
    assert row.value == pytest.approx(deviation / math.sqrt(variance), rel=1e-12)
    assert row.passed is (abs(row.value) <= 4)
    assert third / variance**1.5 < SKEW_BOUND


def test_moments_are_centred() -> None:
    """A large constant in f changes nothing."""
    probs = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    f = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    a, b = ZSum(), ZSum()
    a.add(f, probs, 2)
    b.add(f + 1e8, probs, 2)
    assert (a.deviation, a.variance, a.third) == pytest.approx((b.deviation, b.variance, b.third), rel=1e-6)


def test_acceptance_has_the_moments_of_a_coin() -> None:
    check = SelfCheck(1e-6)
    target, draft = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8]], dtype=torch.float64)
    check._accumulate(target, draft, 0, Origin.ACCEPTED, True)
    z, beta = check.z["acceptance z"], 0.2
    assert z.deviation == pytest.approx(1 - beta)
    assert z.variance == pytest.approx(beta * (1 - beta) ** 2 + (1 - beta) * beta**2)
    assert z.third == pytest.approx(beta * (1 - beta) ** 3 + (1 - beta) * beta**3)


def test_rows_of_a_sum() -> None:
    assert ZSum().row("x", "y").note == "no such position"
    surprising = ZSum()
    surprising.add(torch.tensor([0.0, math.inf]), torch.tensor([1.0, 0.0]), 1)
    assert surprising.row("x", "y").passed is False
    for z, passed in ((3.99, True), (4.01, False), (-4.01, False)):
        row = ZSum(100, z * 10, 100, 100).row("x", "y")
        assert (row.passed, row.value) == (passed, pytest.approx(z))
    assert ZSum(100, 0, 100, 501).row("x", "y").passed is None  # 501/1000 > .5


def test_tolerances() -> None:
    assert drift_bound(torch.float64, 1.0) < drift_bound(torch.float32, 1.0) < drift_bound(torch.bfloat16, 1.0)
    assert drift_bound(torch.float32, 0.5) == 2 * drift_bound(torch.float32, 1.0)
    assert drift_bound(torch.float32, 2.0) == drift_bound(torch.float32, None) == drift_bound(torch.float32, 1.0)


def test_honest_runs_fail_about_as_seldom_as_a_normal_tail_says() -> None:
    """40 checks of a fair pair: z values look standard normal, none beyond the bound."""
    target, draft = tables()
    s = Sampling(k=3, max_new_tokens=60)
    values: dict[str, list[float]] = {}
    for seed in range(40):
        result = checked(target, ModelDrafter(draft, Processors.of(s)), s, seeds=[seed])
        assert failed(result) == set()
        for row in result.rows:
            if " z" in row.name and row.value is not None:
                values.setdefault(row.name, []).append(row.value)
    assert {"surprisal z, all", "draft z, tested", "acceptance z"} <= values.keys()
    for zs in values.values():
        n = len(zs)
        assert abs(sum(zs) / n) < 4 / math.sqrt(n)
        assert n < 30 or 0.4 < sum(z * z for z in zs) / n < 2


def test_the_drift_bound_stays_one_that_something_can_exceed() -> None:
    assert drift_bound(torch.float32, 0.5) == 2 * drift_bound(torch.float32, 1.0)
    assert drift_bound(torch.float32, 0.001) == 0.5
    assert drift_bound(torch.bfloat16, 0.1) == drift_bound(torch.bfloat16, 1.0)
