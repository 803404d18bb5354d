"""The audit: honest pairs pass, each planted fault fails the check that is there for it, and the levels hold."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import typer
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner

from specgen.audit import auditor, control
from specgen.audit.auditor import Auditor
from specgen.audit.findings import CHECKS, AuditResult, Status
from specgen.audit.itself import RUN_LEVEL
from specgen.audit.sampler import LEVEL, g_statistic
from specgen.audit.watching import Memoised
from specgen.decoding import settle
from specgen.decoding.eager import Eager
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.models.causal import CausalLM
from specgen.results.audit import Audit, ControlAudit
from specgen.results.document import json_text
from specgen.sampling import randomness
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, Stream
from specgen.settings import Mode, Sampling
from specgen.verification import judge
from specgen.verification import rules as rules_module
from support.doubles import (
    BonusFromDraft,
    DropsUnlikely,
    PenaltyFromRoundStart,
    TableModel,
    UnprocessedProbs,
    mutant,
    random_table,
)
from support.smollm2 import Sessions
from support.tiny import tiny_pair

PROMPTS = [[1, 2, 1], [3, 3]]
SETTINGS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
APPLICABLE = {
    Mode.EXACT: {"law", "sampler", "run", "caches", "processors", "seeds"},
    Mode.GREEDY: {"caches", "processors", "greedy", "seeds"},
    Mode.COUPLED: {"sampler", "run", "caches", "processors", "invariance", "seeds"},
    Mode.LENIENT: {"sampler", "caches", "processors", "seeds"},  # and law, which shows the bias
}


def settings(mode: Mode = Mode.EXACT, **changes: Any) -> Sampling:
    s = Sampling(mode=mode, k=3, max_new_tokens=24)
    s = dataclasses.replace(s, **changes)
    return dataclasses.replace(s, temperature=None) if mode is Mode.GREEDY else s


def pair_of(
    target: Any,
    draft: Any,
    s: Sampling,
    *,
    drafter: Callable[..., Drafter] = ModelDrafter,
    used: Processors | None = None,
    dtype: torch.dtype = torch.float64,
) -> Pair:
    """used: what the loop processes the target's logits with."""
    honest = Processors.of(s)
    return Pair(target, drafter(draft, honest), used or honest, s, None, dtype, time.perf_counter)


def tables(vocabulary: int = 8, seed: int = 1, noise: float = 0.8) -> tuple[TableModel, TableModel]:
    table = random_table(vocabulary, seed)
    return TableModel(table), TableModel(table + noise * random_table(vocabulary, seed + 1), "draft")


def table_pair(s: Sampling, **options: Any) -> Pair:
    return pair_of(*tables(), s, **options)


def llama_pair(s: Sampling) -> Pair:
    return pair_of(*tiny_pair(), s, dtype=torch.float32)


def audited(pair: Pair, checks: Sequence[str] = CHECKS, *, prompts: Any = PROMPTS, **options: Any) -> AuditResult:
    return Auditor(pair, prompts, **{"seeds": 2, "rounds": 300, **options}).run(checks)


def statuses(result: AuditResult, status: Status) -> set[str]:
    return {f.name for f in result.findings if f.status is status}


@pytest.mark.parametrize("mode", APPLICABLE, ids=str)
@pytest.mark.parametrize("kind", ["tables", "llama"])
def test_an_honest_pair_passes_every_check_that_applies(kind: str, mode: Mode) -> None:
    s = settings(mode) if mode is Mode.GREEDY else settings(mode, **SETTINGS)
    pair = table_pair(s) if kind == "tables" else llama_pair(s)
    result = audited(pair, rounds=200)
    assert result.passed, result
    assert [f.name for f in result.findings] == list(CHECKS)
    assert statuses(result, Status.PASS) == APPLICABLE[mode]
    assert all(f.positions > 0 for f in result.findings if f.status is Status.PASS)
    assert result.verdict.startswith("no fault seen in ")
    if mode is Mode.LENIENT:
        assert result["law"].status is Status.SHOWN
        assert result["law"].value > 0.05


@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.COUPLED], ids=str)
def test_prompt_lookup_passes(mode: Mode) -> None:
    s = settings(mode, **SETTINGS)
    pair = table_pair(s, drafter=lambda model, processors: NgramDrafter(8, dtype=torch.float64))
    result = audited(pair, prompts=[[0, 1, 2, 0, 1, 2, 0], [3, 3, 4, 3]])
    assert result.passed, result
    assert statuses(result, Status.PASS) == APPLICABLE[mode]


def test_a_generation_under_way_finds_its_caches_taken() -> None:
    pair = table_pair(settings())
    rounds = iter(Generation(pair, PROMPTS[0]))
    next(rounds)
    assert audited(pair, ["seeds"]).passed
    with pytest.raises(RuntimeError, match="another generation of this session has begun"):
        next(rounds)


def caught(pair: Pair, name: str, **options: Any) -> None:
    """The check of that name fails; without the fault it does not (`test_an_honest_pair_…`)."""
    result = audited(pair, [name], **{"rounds": 1200, **options})
    assert result.failed == (name,), result
    assert result.verdict == f"FAILED: {name}"


@pytest.mark.parametrize("name", ["law", "sampler", "run"])
@pytest.mark.parametrize("rule", [control.raw_resample(), control.membership()], ids=lambda r: r.name)
def test_fault_wrong_rule(rule: rules_module.Rule, name: str) -> None:
    caught(table_pair(settings()), name, rule=rule, seeds=4)


def test_the_rule_of_the_pair_is_what_is_audited() -> None:
    caught(dataclasses.replace(table_pair(settings()), rule=control.raw_resample()), "law")


@pytest.mark.parametrize("name", ["processors", "sampler", "run"])
def test_fault_draft_probabilities_before_the_processors(name: str) -> None:
    caught(table_pair(settings(temperature=0.5), drafter=UnprocessedProbs), name)


@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.GREEDY, Mode.COUPLED], ids=str)
def test_fault_penalty_from_the_start_of_the_round(mode: Mode) -> None:
    s = settings(mode, repetition_penalty=1.7)
    caught(
        table_pair(s, used=PenaltyFromRoundStart(Processors.of(s).chain, greedy=mode is Mode.GREEDY)), "processors"
    )


class OffByOne(TableModel):
    """Its cached calls do not see the last token; its teacher-forced ones do."""

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.tokens += tokens[0].tolist()
        n = len(self.tokens)
        return torch.stack([self.logits(self.tokens[: n - rows + i]) for i in range(rows)])[None]


class KeepsTheRejected(TableModel):
    """Forgets the right number of tokens, one place too early."""

    def rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        if count:
            del self.tokens[len(self.tokens) - count - 1 : -1]


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("broken", [OffByOne, KeepsTheRejected])
@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.GREEDY, Mode.COUPLED], ids=str)
def test_fault_cache_off_by_one(broken: type[TableModel], side: str, mode: Mode) -> None:
    target, draft = tables()
    models = {"target": target, "draft": draft}
    models[side] = broken(models[side].table, side)
    caught(pair_of(models["target"], models["draft"], settings(mode)), "caches")


def test_fault_loop_keeps_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(Eager.roll_back, "(len(row.tokens) - 1)", "len(row.tokens)")
    monkeypatch.setattr(Eager, "roll_back", wrong)
    caught(table_pair(settings()), "caches")


class RemembersStale(NgramDrafter):
    """Forgets the tokens and keeps what followed what."""

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]


def test_fault_prompt_lookup_remembers_what_was_thrown_away() -> None:
    pair = table_pair(settings(), drafter=lambda model, processors: RemembersStale(8, dtype=torch.float64))
    caught(pair, "caches", prompts=[[0, 1, 2, 0, 1, 2, 0]], seeds=12)


def test_fault_bonus_from_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop, where no list of processors shows it."""
    right = Eager.__init__

    def wrong(self: Eager, target: Any, drafter: Any, processors: Processors, *rule: Any) -> None:
        bent = processors if drafter is None else BonusFromDraft(processors, tables()[1])
        right(self, target, drafter, bent, *rule)

    monkeypatch.setattr(Eager, "__init__", wrong)
    caught(table_pair(settings()), "sampler")
    caught(table_pair(settings()), "run")


def test_fault_bonus_from_the_draft_among_the_processors() -> None:
    s = settings()
    caught(table_pair(s, used=BonusFromDraft(Processors.of(s), tables()[1])), "processors")


@pytest.mark.parametrize("name", ["sampler", "run"])
def test_fault_unlikely_token_dropped_after_drawing(name: str) -> None:
    caught(table_pair(settings(max_new_tokens=100), drafter=DropsUnlikely), name, seeds=5)


def test_fault_acceptance_not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """At u = 0 a token of probability 0 comes through. Only the boundary draws can see it."""
    target, draft = tables()
    target.table[:, 3] = torch.finfo(torch.float64).min
    pair = pair_of(target, draft, settings())
    prompts = [[1, 2, 1], [2, 0]]
    result = audited(pair, ["sampler"], prompts=prompts)
    assert result.passed
    assert "(0 drafted" not in result["sampler"].measured
    wrong = mutant(judge.HostDraws.kept, "if not u < probability:", "if not u <= probability:")
    monkeypatch.setattr(judge.HostDraws, "kept", wrong)
    caught(pair, "sampler", prompts=prompts)
    assert "boundary" in audited(pair, ["sampler"], prompts=prompts)["sampler"].notes[0]


class OneStream(KeyedUniforms):
    """The acceptance test of a position gets the uniform that its token was drawn with."""

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor | None = None) -> float:
        return super().__call__(Stream.DRAFT if stream is Stream.ACCEPT else stream, position, round_index, edges)


def test_fault_draft_and_acceptance_share_their_randomness() -> None:
    caught(table_pair(settings()), "sampler", uniforms=OneStream)


def test_fault_draws_from_bent_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "draw", mutant(randomness.draw, "edges[-1:] * u", "edges[-1:] * u * u"))
    caught(table_pair(settings()), "sampler")


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED], ids=str)
def test_fault_rule_that_keeps_too_much_is_no_tie(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(judge.verify, "own[:k] == drafted", "(own[:k] == drafted) | (ahead == 0)")
    monkeypatch.setattr(settle, "verify", wrong)  # plain decoding drafts nothing, and stays as it is
    further = mutant(judge.HostDraws.own, "if own[j] != token:", "if own[j] != token and j:")
    monkeypatch.setattr(judge.HostDraws, "own", further)
    name = "greedy" if mode is Mode.GREEDY else "invariance"
    result = audited(table_pair(settings(mode)), [name])
    assert result.failed == (name,)
    assert "not explained by rounding: a bug" in result[name].notes[0]


def test_fault_noise_that_is_not_shared() -> None:
    caught(table_pair(settings(Mode.COUPLED)), "invariance", uniforms=KeyedUniforms)


class Rounds(TableModel):
    """Its one-token calls and its longer ones differ by rounding, and two tokens tie."""

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        logits = super().forward(tokens, rows)
        best = logits.max(-1, keepdim=True).values
        tied = torch.cat([best + (1e-9 if rows == 1 else 0), best + (0 if rows == 1 else 1e-9)], -1)
        return torch.cat([tied, logits[..., 2:]], -1)


def test_greedy_tie_broken_by_arithmetic_passes_and_is_told() -> None:
    target, draft = tables()
    result = audited(pair_of(Rounds(target.table), draft, settings(Mode.GREEDY)), ["greedy"])
    assert result.passed
    assert "a tie broken by arithmetic" in result["greedy"].notes[0]
    assert "at a tie that rounding breaks" in result["greedy"].measured


def test_fault_run_that_does_not_repeat() -> None:
    count = iter(range(10_000))
    caught(table_pair(settings()), "seeds", uniforms=lambda seed, digest: KeyedUniforms(next(count), digest))


@pytest.mark.slow
def test_false_alarms_stay_within_the_stated_levels() -> None:
    """200 audits of honest pairs: at most so many failures a check as a binomial of its level has in 999 of 1000."""
    n = 200
    failures = dict.fromkeys(CHECKS, 0)
    small = 0
    for seed in range(n):
        pair = pair_of(*tables(5, 10 * seed), Sampling(k=2, max_new_tokens=16, seed=1000 * seed))
        result = audited(pair, prompts=[[1, 2, 1]], rounds=40, seeds=2)
        for name in result.failed:
            failures[name] += 1
        assert result["sampler"].status is not Status.NOT_APPLICABLE
        small += result["sampler"].value < 0.01
    levels = {"sampler": 3 * LEVEL, "run": RUN_LEVEL}
    for name, count in failures.items():
        assert count <= stats.binom.ppf(0.999, n, levels.get(name, 0.0)), failures
    assert small <= stats.binom.ppf(0.999, n, 3 * 0.01)  # the tests' p values are not too small elsewhere either


def test_memoised_logits_are_the_model_s_own_whatever_was_asked_before() -> None:
    target, _ = tiny_pair()
    memo = Memoised(target)
    texts = [[1, 2, 3, 4], [1, 2, 7], [1, 2, 3, 4, 5, 6], [9], [1, 2, 3, 8, 8, 8]]
    for text in [*texts, *texts]:
        ((_, rows),) = list(target.score([*text, 0], len(text)))
        torch.testing.assert_close(memo.logits(text), rows[0], atol=1e-4, rtol=1e-4)
    calls = memo.calls
    assert calls == len(texts)
    memo.tokens = [1, 2]
    rows = memo.forward(torch.tensor([[3, 4, 5]]), 2)
    assert rows.shape == (1, 2, 50)
    torch.testing.assert_close(rows[0, 0], memo.logits([1, 2, 3, 4]))
    memo.rollback([4])
    assert memo.lengths == (1,)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_memo_does_not_return_rows_of_trimmed_windows(name: str) -> None:
    target, _ = tiny_pair(name)
    memo = Memoised(target)
    long = [(7 * i) % 50 for i in range(40)]
    for end in (40, 30, 20, 38, 12):
        text = [*long[:end], 11]
        ((_, rows),) = list(target.score([*text, 0], len(text)))
        torch.testing.assert_close(memo.logits(text), rows[0], atol=1e-4, rtol=1e-4)


class Ticking:
    """A clock that a second passes on at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_what_finds_no_time_is_said_and_not_passed() -> None:
    result = audited(table_pair(settings()), budget=1.5, clock=Ticking())
    assert result.no_time
    assert result.passed
    assert statuses(result, Status.PASS).isdisjoint(result.no_time)
    assert "seeds" not in result.no_time  # the first
    assert result["seeds"].notes[-1].startswith("no time for ")
    everything = audited(table_pair(settings()), clock=Ticking(), rounds=50)
    assert not everything.no_time
    assert not everything["seeds"].notes


def test_no_budget_at_all_judges_nothing() -> None:
    result = audited(table_pair(settings()), budget=0.0)
    assert set(result.no_time) == APPLICABLE[Mode.EXACT]
    assert result.verdict == "nothing was judged"


def test_control_catches_both_wrong_rules_and_only_replaces_exact() -> None:
    found = control.control(Auditor(table_pair(settings()), PROMPTS, seeds=2, rounds=200))
    assert [(c.rule, c.caught) for c in found] == [("raw_resample", True), ("membership", True)]
    assert all("law" in c.result.failed for c in found)
    same = tables()[0]
    alike = control.control(
        Auditor(pair_of(same, TableModel(same.table, "draft"), settings()), PROMPTS, seeds=1, rounds=20)
    )
    assert not alike[0].caught  # draft and target are one: nothing is ever resampled
    with pytest.raises(ValueError, match="mode exact"):
        control.control(Auditor(table_pair(settings(Mode.COUPLED)), PROMPTS))


def test_an_audit_needs_a_draft_and_prompts() -> None:
    pair = table_pair(settings())
    with pytest.raises(ValueError, match="draft"):
        Auditor(dataclasses.replace(pair, drafter=None), PROMPTS)
    with pytest.raises(ValueError, match="prompts"):
        Auditor(pair, [])


SMOLLM2 = [
    pytest.mark.smollm2,
    pytest.mark.slow,
]


def program() -> typer.Typer:
    """The command alone, so that what is tested here is this file's."""
    from specgen.cli.audit import register

    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    return app


class Words:
    """Stands in for a session: one token a word."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.sampling, self.located, self.profile = pair, pair.sampling, {}, None

    def encode(self, text: str) -> list[int]:
        return [len(word) % 8 for word in text.split()]


@pytest.fixture
def commanded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command on a table pair."""

    def run(pair: Pair, *arguments: str) -> Any:
        pair.target.device = torch.device("cpu")  # type: ignore[attr-defined]
        monkeypatch.setattr("specgen.cli.audit.load_quietly", lambda profile, **options: Words(pair))
        monkeypatch.setattr(auditor, "Auditor", functools.partial(Auditor, rounds=150))
        monkeypatch.setattr("specgen.session.merged_settings", lambda profile: {})
        monkeypatch.setenv("COLUMNS", "160")
        return CliRunner().invoke(program(), ["audit", "--seeds", "1", *arguments])

    return run


def test_command_prints_one_table_and_exits_by_the_verdict(commanded: Callable[..., Any]) -> None:
    right = commanded(table_pair(settings()), "--budget", "600")
    assert right.exit_code == 0, right.output
    for name in CHECKS:
        assert f"\n {name} " in right.stdout
    assert "no fault seen in " in right.stdout
    assert "not applicable" in right.stdout
    wrong = commanded(dataclasses.replace(table_pair(settings()), rule=control.raw_resample()), "--budget", "600")
    assert wrong.exit_code == 1
    assert "FAILED: law" in wrong.stdout


def test_command_json(commanded: Callable[..., Any]) -> None:
    document = json.loads(commanded(table_pair(settings()), "--json", "--budget", "600").stdout)
    assert document["kind"] == "audit"
    assert document["passed"] is True
    assert [f["name"] for f in document["findings"]] == list(CHECKS)
    assert all(f["meaning"].endswith(".") for f in document["findings"])
    assert json.loads(json_text(Audit.model_validate(document))) == document
    control = json.loads(commanded(table_pair(settings()), "--control", "--json", "--budget", "600").stdout)
    assert (control["passed"], "findings" in control) == (True, False)
    assert [(c["rule"], c["caught"]) for c in control["control"]] == [("raw_resample", True), ("membership", True)]
    assert json.loads(json_text(ControlAudit.model_validate(control))) == control


def test_command_control(commanded: Callable[..., Any]) -> None:
    result = commanded(table_pair(settings()), "--control", "--budget", "600")
    assert result.exit_code == 0, result.output
    assert "raw_resample: caught by law" in result.stdout
    assert "membership: caught by law" in result.stdout
    same = tables()[0]
    alike = pair_of(same, TableModel(same.table, "draft"), settings())
    missed = commanded(alike, "--control", "--budget", "600")
    assert missed.exit_code == 1
    assert "raw_resample: NOT CAUGHT" in missed.stdout
    refused = commanded(table_pair(settings(Mode.COUPLED)), "--control")
    assert refused.exit_code == 2


def test_command_refuses_a_proof_in_another_dtype(commanded: Callable[..., Any]) -> None:
    assert commanded(table_pair(settings()), "--prove", "--dtype", "bfloat16").exit_code == 2


@pytest.mark.parametrize("mode", ["exact", "greedy", "coupled"])
class TestSmolLM2:
    pytestmark = SMOLLM2

    def test_passes(self, mode: str, small: Sessions) -> None:
        flags: dict[str, Any] = {} if mode == "greedy" else SETTINGS
        session = small(mode=mode, k=2, max_new_tokens=8, prompt__template="raw", **flags)
        assert isinstance(session.pair.target, CausalLM)
        prompts = [session.encode("one two three one two three one two"), session.encode("a b a b a b a")]
        result = audited(session.pair, prompts=prompts, seeds=1, rounds=60)
        assert result.passed, result
        expected = APPLICABLE[Mode(mode)]
        assert statuses(result, Status.PASS) == expected
        assert math.isfinite(result["caches"].value)


def test_the_g_statistic_is_by_williams_correction_over_bins_of_counts_enough() -> None:
    # Expected 50, 30, 12, and 8 for the four rare tokens together: G = 2 Σ o ln(o/e), over q = 1 + (Σ n/e − 1) / 6nν.
    row = np.array([0.5, 0.3, 0.12, 0.02, 0.02, 0.02, 0.02])
    g, bins = g_statistic(np.array([40.0, 35, 15, 4, 3, 0, 3]), row)
    raw = 2 * sum(o * math.log(o / e) for o, e in ((40, 50), (35, 30), (15, 12), (10, 8)))
    q = 1 + (100 / 50 + 100 / 30 + 100 / 12 + 100 / 8 - 1) / (6 * 100 * 3)
    assert (g, bins) == (pytest.approx(raw / q), 4)
    # Rare tokens that together are expected less than five times join the least of the others; an empty bin adds 0.
    g, bins = g_statistic(np.array([80.0, 0, 20, 0]), np.array([0.8, 0.09, 0.08, 0.03]))
    raw = 2 * 20 * math.log(20 / 11)
    assert (g, bins) == (pytest.approx(raw / (1 + (100 / 80 + 100 / 9 + 100 / 11 - 1) / 1200)), 3)
    assert g_statistic(np.array([12.0, 0]), np.array([1.0, 0]))[1] == 1
    rounded = torch.softmax(torch.arange(9.0).sin(), -1)  # float32: its sum is 1 up to rounding
    assert g_statistic(np.full(9, 100.0), rounded.double().numpy() * (1 + 1e-6))[1] == 9
