"""A whole bench with a clock that only model calls move: every time in the result is known exactly."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.analysis.analyse import analyse
from specgen.bench import divergence, runner
from specgen.bench.runner import Interrupted, run_bench
from specgen.bench.subjects import check_sessions, encoded
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.errors import UsageError
from specgen.models.causal import CausalLM
from specgen.overlap.score import score_text
from specgen.profiles.schema import Profile
from specgen.results.bench import Bench, Prompt
from specgen.results.files import parse_bench
from specgen.sampling.processors import Processors
from specgen.session import Session
from specgen.settings import Mode, Sampling
from specgen.verification.law import coupled_acceptance
from specgen.verification.rules import Rule
from support.doubles import TableModel, random_table
from support.tiny import noisy_copy, tiny_llama

V = 5
STEP = 0.125  # a draft step, and every token of a target call but its first


class Clock:
    """Binary fractions throughout, so that sums are exact and times can be compared with ==."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(TableModel):
    """A call costs `first` and STEP for each further token; memory of one token."""

    def __init__(self, table: Tensor, role: str, clock: Clock, first: float) -> None:
        super().__init__(table, role, memory=1)
        self.clock, self.first, self.calls = clock, first, 0

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.calls += 1
        self.clock.now += self.first + STEP * (tokens.shape[-1] - 1)
        return super().forward(tokens, rows)


def successor(*, wrong_after: Sequence[int] = ()) -> Tensor:
    """[V + 1, V]: after token t comes t + 1 (mod V); but the token after that, where the draft is wrong."""
    table = torch.zeros(V + 1, V, dtype=torch.float64)
    for t in range(V):
        table[t + 1, (t + (2 if t in wrong_after else 1)) % V] = 4.0
    return table


def session(
    target: Any, draft: Any, clock: Any, *, name: str = "scripted", rule: Rule | None = None, **settings: Any
) -> Session:
    sampling = Sampling(**{"mode": Mode.GREEDY, "temperature": None, "k": 2, "max_new_tokens": 8, **settings})
    processors = Processors.of(sampling)
    drafter = None if draft is None else ModelDrafter(draft, processors)
    dtype = getattr(getattr(target, "model", None), "dtype", torch.float64)
    pair = Pair(target, drafter, processors, sampling, None, dtype, clock, rule=rule)
    profile = Profile.model_validate({"name": name, "target": {"checkpoint": "none"}})
    return Session(profile, pair, {}, None)


def scripted(name: str = "scripted", *, wrong_after: Sequence[int] = (3,), **settings: Any) -> Session:
    """The draft errs after token 3 only. A target call on w tokens costs 1 + (w − 1)/8, a draft step 1/8."""
    clock = Clock()
    target = Timed(successor(), "target", clock, 1.0)
    draft = Timed(successor(wrong_after=wrong_after), "draft", clock, STEP)
    draft_calls = draft.forward
    draft.forward = lambda tokens, rows: _flat(draft, draft_calls, tokens, rows)  # type: ignore[method-assign]
    return session(target, draft, clock, name=name, **settings)


def _flat(draft: Timed, call: Any, tokens: Tensor, rows: int) -> Tensor:
    """A draft's call costs the same for one token and for the two that follow full acceptance."""
    before = draft.clock.now
    logits = call(tokens, rows)
    draft.clock.now = before + STEP
    return logits


def prompts(*tokens: list[int], category: str | None = None) -> list[Prompt]:
    return [Prompt(name=f"p{i}", category=category, text="", tokens=t) for i, t in enumerate(tokens)]


TWO = prompts([4, 0], [2, 3])


def measured(bench: Bench, arm: str, prompt: int, run: int = 0) -> Any:
    (found,) = (m for m in bench.timed(arm) if m.run == run and m.rows[0].prompt == prompt)
    return found


def test_plain_times_are_those_of_its_calls() -> None:
    bench = run_bench([scripted()], TWO, ks=[2], runs=2)
    m = measured(bench, "plain", 0)
    assert (m.prefill_s, m.first_s) == (1.0, 2.0)
    assert m.steps.verify_s == m.steps.total_s == [1.0] * 8
    assert m.steps.draft_s == m.steps.rollback_s == [0.0] * 8
    assert (m.steps.width, m.steps.rows) == ([1] * 8, [1] * 8)
    (row,) = m.rows
    assert row.tokens == [1, 2, 3, 4, 0, 1, 2, 3]
    assert (row.drafted, row.committed, row.finish) == ([0] * 8, [1] * 8, "length")


def test_speculative_times_and_counts_are_those_of_its_rounds() -> None:
    """From 0: 1 2 drafted and kept, bonus 3; 0 drafted after 3 where 4 is right; 0 1 kept, bonus 2; one is left."""
    bench = run_bench([scripted()], TWO, ks=[2], runs=2)
    m = measured(bench, "k=2", 0)
    (row,) = m.rows
    assert row.tokens == [1, 2, 3, 4, 0, 1, 2, 3]
    assert row.drafted == [2, 2, 2, 0]
    assert row.tested == [2, 1, 2, 0]
    assert row.accepted == [2, 0, 2, 0]
    assert row.committed == [3, 1, 3, 1]
    assert row.overlaps == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert m.prefill_s == 1.0 + STEP
    assert m.steps.width == [3, 3, 3, 1]
    assert m.steps.draft_s == [2 * STEP, 2 * STEP, 2 * STEP, 0.0]
    assert m.steps.verify_s == [1.25, 1.25, 1.25, 1.0]
    assert m.steps.total_s == [1.5, 1.5, 1.5, 1.0]
    assert m.first_s == 1.0 + STEP + 1.5


def test_speedup_follows_and_the_prediction_is_the_same_number() -> None:
    """5.5 s for 8 tokens against 8 s, from [0]; from [3] the same text begins one round later."""
    session = scripted()
    bench = run_bench([session], prompts([4, 0], [0]), ks=[2], runs=3)
    plain, k2 = analyse(bench).arms
    assert plain.seconds_per_token == 1.0
    assert k2.seconds_per_token == 5.5 / 8
    assert [ratio for _, ratio in k2.groups] == [8 / 5.5] * 2
    assert (k2.alpha, k2.tau) == (4 / 5, 2.0)
    assert k2.speedup is not None
    assert k2.speedup.estimate == k2.predicted == pytest.approx(8 / 5.5, rel=1e-12)


def test_costs_are_those_of_the_calls() -> None:
    bench = run_bench([scripted()], TWO, ks=[2, 4], runs=1)
    (costs,) = bench.costs
    assert costs.draft_s == STEP
    assert costs.target_s == {w: 1 + STEP * (w - 1) for w in range(1, 6)}
    assert costs.context == 5  # a prompt of two tokens with half of its text, less one
    assert (costs.profile, costs.engine) == ("scripted", "eager")
    assert (costs.target_bytes, costs.copy_bandwidth) == (0, 0.0)  # no module, and a clock that copies do not move


def test_scores_are_of_the_baselines_first_texts() -> None:
    bench = run_bench([scripted()], TWO, ks=[2], runs=2)
    assert [(s.prompt, s.run) for s in bench.scores] == [(0, 0), (1, 0)]
    wrong = [0.0 if t == 4 else 1.0 for t in measured(bench, "plain", 0).rows[0].tokens]  # 4 is what follows 3
    assert bench.scores[0].ratios == wrong


def test_ends_and_stop_strings_end_nothing() -> None:
    bench = run_bench([scripted(end_tokens=(2,), stop=("3",))], TWO, ks=[2], runs=1)
    assert all(len(row.tokens) == 8 and row.finish == "length" for m in bench.timed("plain") for row in m.rows)
    assert all(len(row.tokens) == 8 for m in bench.timed("k=2") for row in m.rows)


@pytest.mark.parametrize("ends", [{"end_tokens": (3,)}, {"stop": ("1 2 3",)}])
def test_what_lies_behind_an_end_does_not_count(ends: dict[str, Any]) -> None:
    """As a run that heeds its ends would have it: the same rounds, and so α, τ, speedup, and prediction."""
    own = scripted(**ends, wrong_after=(1, 2))
    bench = run_bench([own], TWO, ks=[2], runs=1)
    # p0 is 1 2 3 …; p1 is 4 0 1 2 3 4 0 1, whose first 3 is the prompt's.
    assert {row.prompt: row.end for m in bench.measurements if m.run >= 0 for row in m.rows} == {0: 3, 1: 5}
    assert {s.prompt: s.end for s in bench.scores} == {0: 3, 1: 5}
    plain, k2 = analyse(bench).arms
    rounds = [r for p in TWO for r in Generation(own.pair, p.tokens).run().rounds]
    assert sum(len(r.committed) for r in rounds) == 8
    assert k2.alpha == sum(r.accepted for r in rounds) / sum(r.tested for r in rounds)
    assert k2.tau == 8 / len(rounds)
    assert plain.seconds_per_token == 1.0
    assert k2.speedup is not None
    assert k2.speedup.estimate == k2.predicted
    assert "2 of 2 texts passed their end" in analyse(bench).verdict.text


def test_auto_chooses_by_the_texts_up_to_their_ends() -> None:
    """The draft errs up to the end, token 3, and never behind it: the least k costs least up to it, without it the
    largest pay."""
    rest = {"max_new_tokens": 40, "mode": Mode.GREEDY}
    table = torch.zeros(V + 1, V, dtype=torch.float64)
    target, draft = table.clone(), table.clone()
    for t, then in ((0, 1), (1, 3), (3, 4), (4, 4)):
        target[t + 1, then] = 4.0
        draft[t + 1, then if t > 1 else 2] = 4.0
    chosen = []
    for ends in ((), (3,)):
        clock = Clock()
        own = session(
            Timed(target, "target", clock, 1.0), Timed(draft, "draft", clock, STEP), clock, **rest, end_tokens=ends
        )
        chosen.append(run_bench([own], prompts([2, 0], [0]), ks=None, runs=1).design.k)
    assert min(chosen[0]) > 4
    assert chosen[1] == [1]


def test_the_result_is_whole_and_round_trips() -> None:
    bench = run_bench([scripted()], TWO, ks=[2, 3], runs=2, warmup=1, order_seed=7)
    assert parse_bench(json.loads(json.dumps(bench.model_dump(mode="json"), allow_nan=False)), "x") == bench
    assert [(a.name, a.kind, a.k, a.baseline) for a in bench.arms] == [
        ("plain", "plain", 0, "plain"),
        ("k=2", "speculative", 2, "plain"),
        ("k=3", "speculative", 3, "plain"),
    ]
    assert bench.design.model_dump() == {
        "k": [2, 3],
        "auto": False,
        "candidates": [1, 2, 3],
        "runs": 2,
        "runs_done": 2,
        "warmup": 1,
        "max_new_tokens": 8,
        "budget_s": None,
        "order_seed": 7,
        "cut": None,
    }
    assert sorted(m.order for m in bench.measurements) == list(range(3 + 2 * 2 * 3))
    assert {m.run for m in bench.measurements} == {-1, 0, 1}
    assert bench.pieces == {i: f" {i}" for i in range(V)}
    assert (bench.dtype, bench.device, bench.sampling["mode"]) == ("float64", "cpu", "greedy")
    assert bench.environment["python"]
    assert bench.environment_after["python"]


def test_warm_ups_are_short() -> None:
    bench = run_bench([scripted(max_new_tokens=40)], TWO, ks=[2], runs=1)
    lengths = {m.run: {len(row.tokens) for row in m.rows} for m in bench.measurements}
    assert lengths == {-1: {runner.WARM_TOKENS}, 0: {40}}


def test_a_row_is_what_the_same_settings_generate_alone() -> None:
    """Seeds are the profile's + run; every arm of a run has the same."""
    clock = Clock()
    tables = [random_table(V, seed) for seed in (1, 2)]
    models = [Timed(t, role, clock, 1.0) for t, role in zip(tables, ("target", "draft"), strict=True)]
    own = session(*models, clock, mode=Mode.EXACT, temperature=1.0, seed=11)
    bench = run_bench([own], TWO, ks=[3], runs=3)
    for name, plain in (("plain", True), ("k=3", False)):
        for m in bench.timed(name):
            (row,) = m.rows
            assert row.seed == 11 + m.run
            sampling = dataclasses.replace(own.sampling, k=3, seed=row.seed)
            alone = Generation(dataclasses.replace(own.pair, sampling=sampling), TWO[row.prompt].tokens, plain=plain)
            assert tuple(row.tokens) == alone.run().tokens


def test_auto_times_the_best_predicted_k_and_its_neighbours() -> None:
    """The draft errs at every fifth token; what each k then takes follows from the rounds by hand for k = 4."""
    bench = run_bench([scripted(max_new_tokens=40)], TWO, ks=None, runs=1)
    predicted = {p.k: p.speedup for p in analyse(bench).predictions}
    best = max(predicted, key=lambda k: predicted[k])
    assert bench.design.auto
    assert bench.design.candidates == list(range(1, 9))
    assert best in bench.design.k
    assert set(bench.design.k) <= {best - 1, best, best + 1}
    assert all(predicted[k] >= 0.95 * predicted[best] for k in bench.design.k)
    assert [a.name for a in bench.arms] == ["plain", *(f"k={k}" for k in bench.design.k)]
    assert bench.costs[0].target_s.keys() == set(range(1, 10))


def test_auto_predicts_from_the_very_texts_that_it_then_times() -> None:
    bench = run_bench([scripted()], TWO, ks=None, runs=1)
    for score in bench.scores:
        tokens = measured(bench, "plain", score.prompt).rows[0].tokens
        assert score.ratios == [0.0 if t == 4 else 1.0 for t in tokens]


def test_auto_writes_only_as_many_texts_as_the_budget_holds() -> None:
    """A text takes 9 s; a quarter of the budget is up after the second. The other prompts are scored afterwards."""
    six = prompts(*([i % V, 0] for i in range(6)))
    bench = run_bench([scripted()], six, ks=None, runs=1, budget=60.0)
    assert "k was chosen from the texts of 2 prompts: the budget held no more" in bench.notes
    assert {s.prompt for s in bench.scores} == set(range(len(bench.prompts)))


def test_auto_in_a_mode_without_prediction_says_so() -> None:
    bench = run_bench([scripted(mode=Mode.LENIENT, temperature=1.0, max_new_tokens=10)], TWO, ks=None, runs=1)
    assert bench.design.k == [2, 4, 8]
    assert bench.scores == []
    assert any("no prediction" in note for note in bench.notes)


def test_k_that_no_round_could_draft_is_refused() -> None:
    with pytest.raises(UsageError, match="no round could draft so many; use k up to 7"):
        run_bench([scripted()], TWO, ks=[2, 8], runs=1)
    with pytest.raises(UsageError, match="leaves no room to draft"):
        run_bench([scripted(max_new_tokens=1)], TWO, ks=None, runs=1)
    assert max(run_bench([scripted(max_new_tokens=4)], TWO, ks=None, runs=1).design.candidates) == 3


def test_a_prompt_that_is_there_twice_is_one_witness() -> None:
    bench = run_bench([scripted()], [*TWO, *prompts([2, 3])], ks=[2], runs=1)
    assert [p.tokens for p in bench.prompts] == [[4, 0], [2, 3]]
    assert "p0 is the same prompt as p1: measured once" in bench.notes
    speedup = next(a for a in analyse(bench).arms if a.kind == "speculative").speedup
    assert speedup.n == 2


def test_a_group_that_is_filled_up_says_so() -> None:
    note = "B = 2: the last group is filled with 1 prompt from the beginning"
    for number, filled in ((3, True), (2, False)):
        model = tiny_llama(seed=5, dtype=torch.float64)
        own = session(CausalLM(model, "target"), CausalLM(model, "draft"), time.perf_counter)
        bench = run_bench([own], prompts([1, 2], [7], [4, 4])[:number], ks=[2], runs=1, batch_sizes=[2])
        assert any(n.startswith(note) for n in bench.notes) is filled


@pytest.mark.parametrize("probs", [([0.7, 0.3, 0.0], [0.1, 0.2, 0.7]), ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])])
def test_coupled_ratios_average_to_the_rate_of_acceptance(probs: tuple[list[float], ...]) -> None:
    """Σ_x target(x) · ratio(x) = P(both draw the same), at every position."""
    target, draft = (torch.tensor([p], dtype=torch.float64) for p in probs)
    models = [TableModel(p.log().clamp(min=-1e4), role) for p, role in ((target, "target"), (draft, "draft"))]
    sampling = Sampling(mode=Mode.COUPLED)
    processors = Processors.of(sampling)

    def ratio(token: int, coupled: bool) -> float:
        found = score_text(
            models[0],
            ModelDrafter(models[1], processors),
            processors,
            sampling,
            [0, token],
            1,
            temperatures=(),
            coupled=coupled,
        )
        return found.ratios[0]

    tokens = range(len(probs[0]))
    rate = sum(probs[0][x] * ratio(x, True) for x in tokens)
    assert rate == pytest.approx(float(coupled_acceptance(target, draft)), abs=1e-12)
    assert all(ratio(x, True) <= ratio(x, False) + 1e-12 for x in tokens)
    assert rate <= sum(probs[0][x] * ratio(x, False) for x in tokens) + 1e-12


def test_mode_coupled_is_scored_by_its_own_rule() -> None:
    """Under shared noise a token is kept less often than in mode exact; the texts are plain decoding's."""
    clock = Clock()
    models = [Timed(random_table(V, seed), "m", clock, 1.0) for seed in (1, 2)]
    own = session(*models, clock, mode=Mode.COUPLED, temperature=1.0)
    bench = run_bench([own], TWO, ks=[2], runs=1)
    assert analyse(bench).identical == {"k=2": (2, 2)}
    for score in bench.scores:
        prompt = TWO[score.prompt].tokens
        text = [*prompt, *measured(bench, "plain", score.prompt).rows[0].tokens]
        as_exact = score_text(
            models[0], own.pair.drafter, own.pair.processors, own.sampling, text, len(prompt), temperatures=()
        )
        pairs = list(zip(score.ratios, as_exact.ratios, strict=True))
        assert all(ours <= theirs + 1e-12 for ours, theirs in pairs)
        assert any(ours < theirs - 1e-3 for ours, theirs in pairs)


def test_several_drafts_of_one_target() -> None:
    good, bad = scripted("good", wrong_after=()), scripted("bad", wrong_after=range(V))
    bad = dataclasses.replace(bad, pair=dataclasses.replace(bad.pair, target=good.pair.target, clock=good.pair.clock))
    bench = run_bench([good, bad], TWO, ks=[1, 2], runs=1)
    assert [a.name for a in bench.arms] == ["plain", "k=1 good", "k=2 good", "k=1 bad", "k=2 bad"]
    assert {a.baseline for a in bench.arms} == {"plain"}
    assert {row.tested[0] - row.accepted[0] for m in bench.timed("k=2 bad") for row in m.rows} == {1}
    assert {tuple(s.ratios) for s in bench.scores if s.profile == "good"} == {(1.0,) * 8}
    assert {tuple(s.ratios) for s in bench.scores if s.profile == "bad"} == {(0.0,) * 8}
    assert set(bench.profiles) == {"good", "bad"}


def test_each_engine_has_a_baseline_of_its_own() -> None:
    eager, packed = scripted(), scripted()
    packed.pair.target.engine = "packed"  # type: ignore[attr-defined]
    bench = run_bench([eager, packed], TWO, ks=[2], runs=1)
    assert [(a.name, a.baseline) for a in bench.arms] == [
        ("plain eager", "plain eager"),
        ("k=2 eager", "plain eager"),
        ("plain packed", "plain packed"),
        ("k=2 packed", "plain packed"),
    ]
    assert [(c.profile, c.engine) for c in bench.costs] == [("scripted", "eager"), ("scripted", "packed")]
    assert {s.profile for s in bench.scores} == {"scripted"}
    assert len(bench.scores) == 2


def test_what_cannot_be_benched_together_is_refused() -> None:
    with pytest.raises(UsageError, match="has no draft"):
        check_sessions([session(TableModel(successor()), None, Clock())])
    with pytest.raises(UsageError, match="differ in temperature"):
        check_sessions([scripted("a", mode=Mode.EXACT, temperature=t) for t in (0.5, 0.7)])
    with pytest.raises(UsageError, match="there twice under engine eager"):
        check_sessions([scripted(), scripted()])
    other = dataclasses.replace(scripted("b"), located={"target": object()})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="different targets"):
        check_sessions([scripted("a"), other])


def test_sessions_must_agree_on_a_prompts_tokens() -> None:
    class Fixed(Session):
        def encode(self, prompt: str) -> list[int]:
            return [len(self.profile.name)]

    a, b = (Fixed(s.profile, s.pair, {}, None) for s in (scripted("a"), scripted("longer")))
    assert encoded([a], [("x", "chat", "hi")]) == [Prompt(name="x", category="chat", text="hi", tokens=[1])]
    with pytest.raises(UsageError, match="x: profiles a and longer make different tokens"):
        encoded([a, b], [("x", None, "hi")])


def test_prompts_that_the_budget_leaves_out_are_in_no_part_of_the_result() -> None:
    four = [
        *prompts([4, 0], [2, 3], category="a"),
        *[p.model_copy(update={"name": f"q{i}"}) for i, p in enumerate(prompts([0], [1], category="b"))],
    ]
    # Some 45 s go into one text and the probe, 16 s into the warm-ups, and as much into each prompt.
    bench = run_bench([scripted()], four, ks=[2], runs=3, budget=100.0)
    assert [p.name for p in bench.prompts] == ["p0", "q0"]
    assert bench.design.cut is not None
    assert bench.design.cut == "the budget of 100 s left out 2 of 4 prompts and 2 of 3 runs"
    assert {row.prompt for m in bench.measurements for row in m.rows} == {0, 1}
    assert {s.prompt for s in bench.scores} == {0, 1}
    assert measured(bench, "plain", 1).rows[0].tokens[0] == 1  # q0 goes on from token 0


class Impatient(Timed):
    """Ctrl-C in the n-th call."""

    limit = 10**9

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        if self.calls >= self.limit:
            self.limit = 10**9
            raise KeyboardInterrupt
        return super().forward(tokens, rows)


def interrupted_after(calls: int) -> Session:
    clock = Clock()
    target = Impatient(successor(), "target", clock, 1.0)
    target.limit = calls
    return session(target, Timed(successor(wrong_after=(3,)), "draft", clock, STEP), clock)


def test_an_interrupted_bench_has_its_whole_runs() -> None:
    with pytest.raises(Interrupted) as stopped:
        run_bench([interrupted_after(130)], TWO, ks=[2], runs=5)
    bench = stopped.value.bench
    done = bench.design.runs_done
    assert 1 <= done < 5
    assert {m.run for m in bench.measurements} == {-1, *range(done)}
    assert len(bench.timed("plain")) == len(bench.timed("k=2")) == 2 * done
    assert any("interrupted in run" in note for note in bench.notes)
    assert analyse(bench).arms[1].predicted is not None  # scores and costs are there


@pytest.mark.parametrize("calls", [3, 20, 80])  # in a text, in the probe, in the first run
def test_interrupted_before_a_whole_run_there_is_no_bench(calls: int) -> None:
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_bench([interrupted_after(calls)], TWO, ks=[2], runs=5)
    assert not isinstance(stopped.value, Interrupted)


class Shifting(Timed):
    """A call on several tokens computes every logit of token 4 a little larger, as another kernel might."""

    shift = 0.0

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        logits = super().forward(tokens, rows)
        if tokens.shape[-1] > 1:
            logits[..., 4] += self.shift
        return logits


def near_tie(gap: float, shift: float) -> Session:
    """After token 1 the target prefers 2 to 4 by `gap`; in calls on several tokens 4 gains `shift`."""
    clock, table = Clock(), successor()
    table[1 + 1, 4] = table[1 + 1, 2] - gap
    target = Shifting(table, "target", clock, 1.0)
    target.shift = shift
    return session(target, Timed(successor(), "draft", clock, STEP), clock)


def test_a_flipped_near_tie_is_reported_and_excused() -> None:
    bench = run_bench([near_tie(1e-7, 9e-7)], prompts([4, 0]), ks=[2], runs=2)
    assert [(d.arm, d.prompt, d.run) for d in bench.divergences] == [("k=2", 0, 0), ("k=2", 0, 1)]
    d = bench.divergences[0]
    assert (d.position, d.plain_token, d.token) == (1, 2, 4)
    assert d.plain_margin == pytest.approx(1e-7)
    assert d.verify_margin == pytest.approx(8e-7)
    assert d.difference == pytest.approx(9e-7)
    assert d.tie


def test_calls_that_differ_by_more_than_rounding_excuse_nothing() -> None:
    (d,) = run_bench([near_tie(0.001, 0.5)], prompts([4, 0]), ks=[2], runs=1).divergences
    assert d.plain_margin < d.difference
    assert not d.tie


def test_equal_texts_have_no_divergence() -> None:
    assert run_bench([near_tie(0.02, 0.01)], prompts([4, 0]), ks=[2], runs=1).divergences == []


def test_a_wrong_rule_is_no_tie() -> None:
    keeps_all = Rule("greedy", lambda target, draft: torch.ones_like(target))
    clock = Clock()
    models = (Timed(successor(wrong_after=w), "m", clock, 1.0) for w in ((), (3,)))
    bench = run_bench([session(*models, clock, rule=keeps_all)], prompts([4, 0]), ks=[2], runs=1)
    (d,) = bench.divergences
    assert (d.position, d.plain_token, d.token) == (3, 4, 0)
    assert (d.plain_margin, d.verify_margin, d.difference) == (4.0, 4.0, 0.0)
    assert not d.tie


def test_a_real_models_greedy_texts_are_the_baselines() -> None:
    model = tiny_llama(seed=5)
    pair = CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.3), "draft")
    bench = run_bench(
        [session(*pair, time.perf_counter, max_new_tokens=12)], prompts([1, 2, 3], [7]), ks=[1, 3], runs=1
    )
    assert bench.divergences == []
    assert analyse(bench).identical == {"k=1": (2, 2), "k=3": (2, 2)}
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert bench.costs[0].target_bytes == whole - 50 * 32 * 4  # of the embeddings a call reads one row
    assert bench.costs[0].target_bytes_a_token == 2 * 2 * 2 * 8 * 4  # k and v, layers, heads, size, float32


def test_replayed_calls_are_those_that_were_made() -> None:
    """The logits that a token was drawn from, whatever its place in a round, from the row alone."""
    model = tiny_llama(seed=5, dtype=torch.float64)
    pair = CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.3), "draft")
    bench = run_bench([session(*pair, time.perf_counter, max_new_tokens=12)], prompts([1, 2, 3]), ks=[3], runs=1)
    (row,) = measured(bench, "k=3", 0).rows
    assert any(row.accepted)
    for at in range(12):
        assert int(divergence.replayed(pair[0], [1, 2, 3], row, at).argmax()) == row.tokens[at]


@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.GREEDY])
def test_rows_of_a_batch_are_their_single_runs(mode: Mode) -> None:
    """Three prompts two at a time: the fourth row is the first prompt again, with a seed of its own."""
    model = tiny_llama(seed=5, dtype=torch.float64)
    pair = CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.3), "draft")
    own = session(
        *pair,
        time.perf_counter,
        mode=mode,
        temperature=None if mode is Mode.GREEDY else 1.0,
        seed=5,
        max_new_tokens=9,
    )
    three = prompts([1, 2, 3], [7], [4, 4])
    bench = run_bench([own], three, ks=[2], runs=2, batch_sizes=[1, 2])
    assert [(a.name, a.batch, a.baseline) for a in bench.arms] == [
        ("plain B=1", 1, "plain B=1"),
        ("k=2 B=1", 1, "plain B=1"),
        ("plain B=2", 2, "plain B=2"),
        ("k=2 B=2", 2, "plain B=2"),
    ]
    for name in ("plain", "k=2"):
        alone = {(row.prompt, row.seed): row for m in bench.timed(f"{name} B=1") for row in m.rows}
        groups = bench.timed(f"{name} B=2")
        assert {(m.run, m.group): [(r.prompt, r.seed) for r in m.rows] for m in groups} == {
            (run, group): rows
            for run in (0, 1)
            for group, rows in enumerate([[(0, 5 + run), (1, 5 + run)], [(2, 5 + run), (0, 1005 + run)]])
        }
        for m in groups:
            assert len(m.steps.width) == max(len(row.drafted) for row in m.rows)
            assert m.steps.rows[0] == 2
            for row in m.rows:
                if (row.prompt, row.seed) in alone:
                    single = alone[row.prompt, row.seed]
                    assert row.model_copy(update={"overlaps": []}) == single.model_copy(update={"overlaps": []})
                    assert row.overlaps == pytest.approx(single.overlaps)
    assert bench.divergences == []
    assert len(bench.scores) == (3 if mode is Mode.GREEDY else 6)  # greedy, every run writes the same
    assert analyse(bench).arms[3].predicted is not None


class Ticking(CausalLM):
    """A real model whose every call takes one second, on one token or on several."""

    clock: Clock

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.clock.now += 1.0
        return super().forward(tokens, rows)


def test_the_target_as_its_own_draft_does_not_pay() -> None:
    model, clock = tiny_llama(seed=3), Clock()
    target, draft = Ticking(model, "target"), Ticking(model, "draft")
    target.clock = draft.clock = clock
    own = session(target, draft, clock, mode=Mode.EXACT, temperature=1.0, max_new_tokens=10)
    seven = prompts(*([i, i + 1] for i in range(7)))
    bench = run_bench([own], seven, ks=[1, 3], runs=2)
    for name, k in (("k=1", 1), ("k=3", 3)):
        rows = [row for m in bench.timed(name) for row in m.rows]
        assert len(rows) == 14
        for row in rows:
            assert sum(row.accepted) == sum(row.tested) == sum(row.drafted)
            assert set(row.committed[:-1]) == {k + 1}
            assert min(row.overlaps) > 1 - 1e-5
    assert min(min(r for r in s.ratios if r is not None) for s in bench.scores) > 1 - 1e-4
    analysis = analyse(bench)
    assert not analysis.verdict.pays
    for arm in analysis.arms[1:]:
        assert arm.speedup is not None
        assert arm.speedup.low is not None
        assert arm.speedup.low <= 1.0
        assert arm.alpha == 1.0
