"""The analysis of benches written by hand: exact numbers, scipy's word, simulated benches, warnings, the verdict."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from specgen.analysis.analyse import analyse
from specgen.analysis.intervals import median_interval
from specgen.analysis.prediction import View, predict
from specgen.analysis.tables import Analysis, ArmRow
from specgen.analysis.verdict import needed_alpha, pays
from specgen.results.bench import Bench
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import constant_alpha_tau, expected_rounds, pooled
from support.bench_documents import COSTS, K2, MS, PLAIN, Script, document

# k = 2 on 12 tokens: rounds of (2, 0, 2, 0, 2, 0) accepted, 3 + 1 + 3 + 1 + 3 + 1 committed; the last round has room
# for one token only and drafts nothing. Five rounds of 4 + 18 + 2 and one of 14 + 2 units: 136, where plain
# decoding takes 12 · 16 = 192.
SPEEDUP = 192 / 136


def arm(analysis: Analysis, name: str) -> ArmRow:
    return next(row for row in analysis.arms if row.name == name)


@pytest.mark.parametrize("n", range(5, 60))
def test_interval_is_the_tightest_pair_that_covers_by_the_binomial(n: int) -> None:
    values = np.random.default_rng(n).permutation(n).astype(float)
    interval = median_interval(values.tolist())
    low = int(interval.low) + 1  # the values are 0 … n − 1: the r-th smallest is r − 1
    assert interval.high == n - low
    assert interval.estimate == (n - 1) / 2
    assert interval.n == n
    assert interval.coverage == pytest.approx(1 - 2 * stats.binom.cdf(low - 1, n, 0.5), abs=1e-12)
    if n > 5:
        assert interval.coverage >= 0.95
        assert 1 - 2 * stats.binom.cdf(low, n, 0.5) < 0.95 or 2 * (low + 1) > n
    else:
        assert (interval.low, interval.high, interval.coverage) == (0, 4, 0.9375)


def test_interval_agrees_with_scipys_sign_test_interval() -> None:
    """The quantile interval of scipy, at the coverage reached: the same order statistics."""
    values = np.random.default_rng(1).lognormal(size=20)
    interval = median_interval(values.tolist())
    found = stats.quantile_test(values, p=0.5).confidence_interval(interval.coverage - 1e-9)
    assert (interval.low, interval.high) == (found.low, found.high)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_too_few_values_have_no_interval(n: int) -> None:
    interval = median_interval([1.0] * n)
    assert (interval.estimate, interval.low, interval.high, interval.coverage) == (1, None, None, None)
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])


@pytest.mark.parametrize(("prompts", "runs"), [(7, 5), (20, 3)])
def test_the_interval_covers_the_truth_in_simulated_benches(prompts: int, runs: int) -> None:
    """1,000 benches: each prompt has a speedup of its own around 1.3, each run of each arm its noise."""
    rng = np.random.default_rng(7)
    truth, held = 1.3, 0
    for _ in range(1000):
        own = truth * rng.lognormal(0, 0.25, size=prompts)
        plain = 1.0 * rng.lognormal(0, 0.08, size=(prompts, runs))
        fast = rng.lognormal(0, 0.08, size=(prompts, runs)) / own[:, None]
        interval = median_interval((np.median(plain, axis=1) / np.median(fast, axis=1)).tolist())
        held += interval.low <= truth <= interval.high
    assert held >= 930


def test_a_whole_bench_covers_the_truth_too() -> None:
    """The same through documents and `analyse`, with fewer repetitions: pairing and medians are the analysis's."""
    rng, held = np.random.default_rng(3), 0
    for _ in range(60):
        own, noise = rng.lognormal(0, 0.2, size=7), rng.lognormal(0, 0.05, size=(2, 7, 3))
        scripts = (
            Script("plain", scale=lambda p, r, noise=noise: float(noise[0, p, r])),
            Script(
                "k = 2", k=2, accepted=(2, 0), scale=lambda p, r, noise=noise, own=own: float(noise[1, p, r] / own[p])
            ),
        )
        speedup = arm(analyse(document(scripts, runs=3)), "k = 2").speedup
        held += speedup.low <= SPEEDUP <= speedup.high
    assert held >= 54  # 98.4 % each: fewer than 54 of 60 has probability 1e-5


def test_ratios_are_paired_by_prompt_and_medians_taken_over_runs_first() -> None:
    rng = np.random.default_rng(11)
    noise = {name: rng.lognormal(0, 0.3, size=(7, 5)) for name in ("plain", "k = 2")}
    scripts = (
        Script("plain", scale=lambda p, r: float(noise["plain"][p, r])),
        Script("k = 2", k=2, accepted=(2, 0), scale=lambda p, r: float(noise["k = 2"][p, r])),
    )
    bench = document(scripts, runs=5, warmup={"plain": 1000, "k = 2": 1000})
    row = arm(analyse(bench), "k = 2")
    ratios = SPEEDUP * np.median(noise["plain"], axis=1) / np.median(noise["k = 2"], axis=1)
    assert [label for label, _ in row.groups] == [f"p{i}" for i in range(7)]
    assert [ratio for _, ratio in row.groups] == pytest.approx(ratios)
    assert row.speedup.estimate == pytest.approx(np.median(ratios))
    assert (row.speedup.low, row.speedup.high) == pytest.approx((min(ratios), max(ratios)))
    seconds = 136 / 12 * MS * np.median(noise["k = 2"], axis=1)
    assert row.seconds_per_token == pytest.approx(np.median(seconds))
    assert row.tokens_per_second == pytest.approx(1 / np.median(seconds))


def test_every_number_of_an_arm() -> None:
    row = arm(analyse(document()), "k = 2")
    assert (row.kind, row.profile, row.k, row.engine, row.batch) == ("speculative", "small", 2, "eager", 1)
    # 5 rounds a prompt draft 2: three test both and accept both, two test one and accept none.
    assert row.alpha == 6 / 8
    assert row.predicted_alpha == 0.75
    assert row.tau == 2
    assert (row.draft_s, row.verify_s, row.other_s) == (2 * MS, 18 * MS, 2 * MS)
    assert (row.prefill_s, row.first_s) == (32 * MS, 56 * MS)
    assert row.seconds_per_token == pytest.approx(136 / 12 * MS)
    assert row.speedup.estimate == row.speedup.low == row.speedup.high == pytest.approx(SPEEDUP)
    assert (row.speedup.n, row.speedup.coverage) == (7, 1 - 2 / 2**7)
    assert row.draft_share == pytest.approx(20 / 136)
    assert row.verify_share == pytest.approx(104 / 136)
    assert row.other_share == pytest.approx(12 / 136)
    assert row.mean_bias is None
    assert row.predicted is None  # without scores
    plain = arm(analyse(document()), "plain")
    assert (plain.alpha, plain.tau, plain.draft_s, plain.speedup, plain.predicted) == (None, 1, None, None, None)
    assert plain.tokens_per_second == 64


def test_positions() -> None:
    rows = [p for p in analyse(document()).positions if p.arm == "k = 2"]
    first, second = rows
    assert (first.position, first.drafted, first.tested, first.accepted) == (1, 35, 35, 21)
    assert (first.rate, first.cumulative, first.overlap) == (21 / 35, 21 / 35, 0.75)
    assert (second.position, second.drafted, second.tested, second.accepted) == (2, 35, 21, 21)
    assert (second.rate, second.cumulative, second.overlap) == (1, 21 / 35, 0.75)


def test_the_cumulative_rate_never_rises() -> None:
    """Drafts 1 and rejects, drafts 2 and accepts both, and nothing at the end: 12 = 1 + 3 + 1 + 3 + 1 + 3."""
    script = Script("k = 2", k=2, drafts=(1, 2), accepted=(0, 2))
    first, second = analyse(document((PLAIN, script))).positions
    assert (first.drafted, first.accepted, first.cumulative) == (42, 21, 0.5)
    assert (second.drafted, second.accepted, second.rate, second.cumulative) == (21, 21, 1, 0.5)


def test_costs() -> None:
    plain, k2 = analyse(document()).costs
    assert k2.widths == {1: 7 * MS, 2: 8 * MS, 3: 9 * MS, 5: 14 * MS}
    assert k2.relative == {1: 1, 2: 8 / 7, 3: 9 / 7, 5: 2}
    assert k2.priced == {1: 14 * MS, 2: 16 * MS, 3: 18 * MS}  # 2: probed 8, scaled by the measured 14 / 7
    assert k2.c == 2 / 14
    # 12 calls behind 4, 5, … 15 cached tokens.
    read = 12 * 1_000_000 + sum(range(4, 16)) * 1000
    assert plain.bytes_per_token == read / 12
    assert plain.bandwidth == pytest.approx(read / (192 * MS))
    assert plain.bandwidth_share == pytest.approx(read / (192 * MS) / 1e9)
    # k = 2: six calls behind 4, 7, 8, 11, 12, 15; ten drafting steps, of which five see one token more.
    read = 6 * 1_000_000 + 57 * 1000 + 10 * 100_000 + (2 * (4 + 7 + 8 + 11 + 12) + 5) * 100
    assert k2.bytes_per_token == pytest.approx(read / 12)
    assert k2.bandwidth == pytest.approx(read / (136 * MS))
    assert (plain.c, plain.draft_share) == (None, 0)


def test_a_bench_without_a_probe_has_no_bytes() -> None:
    plain, k2 = analyse(document(costs=())).costs
    assert (plain.bytes_per_token, plain.bandwidth, plain.bandwidth_share, k2.widths) == (None, None, None, {})
    assert k2.priced == {1: 14 * MS, 2: 16 * MS, 3: 18 * MS}  # 2: on the line between


def test_categories() -> None:
    """Code accepts nothing (12 tokens: eleven rounds, the last but one drafting one, and a plain one)."""
    accepts = {**dict.fromkeys(range(3), (2, 0)), **dict.fromkeys(range(3, 7), (0,))}
    chat, code = analyse(document((PLAIN, Script("k = 2", k=2, accepted=accepts)))).categories
    assert (chat.category, chat.arm, chat.prompts, chat.alpha, chat.tau) == ("chat", "k = 2", 3, 6 / 8, 2)
    assert chat.speedup.estimate == pytest.approx(SPEEDUP)
    assert (chat.speedup.low, chat.speedup.coverage, chat.speedup.n) == (None, None, 3)
    assert (code.category, code.prompts, code.alpha, code.tau) == ("code", 4, 0, 1)
    # Ten rounds of 24, one of 2 + 16 + 2, one of 16.
    assert code.speedup.estimate == pytest.approx(192 / (240 + 20 + 16))
    assert analyse(document(categories=[None] * 7)).categories == ()


def test_identical_texts_are_counted_by_prompt_and_run() -> None:
    odd = Script("k = 2", k=2, accepted=(2, 0), differs=[(1, 0), (1, 1), (4, 1)])
    assert analyse(document((PLAIN, odd), runs=2)).identical == {"k = 2": (11, 14)}
    assert analyse(document((PLAIN, odd), runs=2, mode="coupled")).identical == {"k = 2": (11, 14)}
    assert analyse(document((PLAIN, odd), mode="exact")).identical == {}


def test_bias_is_the_mean_over_tested_positions() -> None:
    lenient = Script("k = 2", k=2, accepted=(2, 0), bias=0.125)
    analysis = analyse(document((PLAIN, lenient), mode="lenient", ratios={"small": [0.5] * 12}))
    assert arm(analysis, "k = 2").mean_bias == 0.125
    assert arm(analysis, "k = 2").predicted is None
    assert analysis.predictions == ()


def test_a_batchs_rows_share_their_calls() -> None:
    """Two rows: one accepts everything (4 rounds), one nothing (12). A call's width is that of the deepest row."""
    scripts = (Script("plain B=2", batch=2), Script("k=2 B=2", k=2, accepted={0: (2,), 1: (0,)}, batch=2))
    bench = document(scripts, categories=[None, None])
    plain, k2 = analyse(bench).arms
    assert plain.tokens_per_second == 128  # both rows
    assert k2.tau == 24 / 16
    assert k2.draft_s == 2 * MS
    assert k2.groups[0][0] == "p0 + p1"
    assert k2.speedup.estimate == pytest.approx(192 / (240 + 20 + 16))
    assert analyse(bench).identical == {"k=2 B=2": (2, 2)}
    # Weights are read once a call, caches once a row: 12 calls, 12 · 4 + 66 tokens each row.
    read = 12 * 1_000_000 + 2 * (48 + 66) * 1000
    assert analyse(bench).costs[0].bytes_per_token == read / 24
    # 21 drafting steps, whether one row takes part or both.
    read = 12 * 1_000_000 + 21 * 100_000 + 148 * 1000 + 266 * 100
    assert analyse(bench).costs[1].bytes_per_token == pytest.approx(read / 24)


def test_prediction_is_theory_at_this_benchs_prices() -> None:
    ratios = [1.0, 0.5, 0.25, 1.0, 0.5, 0.75, 1.0, 0.0, 0.5, 1.0, 0.5, 0.25]
    bench = document(ratios={"small": ratios}, candidates=[1, 2, 4])
    analysis = analyse(bench)
    assert [p.k for p in analysis.predictions] == [1, 2, 4]
    assert predict(bench, "small", "eager", 1) == list(analysis.predictions)
    # In units of MS: T(1) and T(3) of the bench itself; T(2) and T(5) probed 8 and 14 against 7, and T(4) between.
    calls = [14, 16, 18, 23, 28]
    for p in analysis.predictions:
        expected = pooled([expected_rounds(ratios, p.k)] * 7)
        assert p.tau == pytest.approx(expected.tau)
        assert p.alpha == pytest.approx(expected.alpha)
        seconds = sum(n * calls[m] for m, n in enumerate(expected.lengths))
        seconds += 2 * expected.rounds + 2 * expected.drafted
        assert p.speedup == pytest.approx(16 * expected.tokens / seconds)
        costs = CallCosts(dict(enumerate(calls, 1)), draft=2, other=2, plain_other=2)
        assert p.speedup == pytest.approx(predicted_speedup(expected, costs))
    row = arm(analysis, "k = 2")
    assert row.predicted == analysis.predictions[1].speedup
    assert row.ratio == row.speedup.estimate / row.predicted


def test_greedy_texts_predict_the_counts_themselves() -> None:
    """Ratios of 1 and 0 as greedy's teacher forcing gives them: the prediction equals the measurement."""
    ratios = [1.0, 1.0, 1.0, 0.0] * 3
    analysis = analyse(document(ratios={"small": ratios}))
    row = arm(analysis, "k = 2")
    assert row.predicted == pytest.approx(row.speedup.estimate)
    assert analysis.predictions[0].tau == row.tau
    assert not [w for w in analysis.warnings if "predicted" in w]


def test_where_the_draft_proposes_nothing_nothing_is_drafted() -> None:
    expected = expected_rounds([0.0] * 12, 2, proposes=[False] * 12)
    p = analyse(document(ratios={"small": [None] * 12})).predictions[0]
    assert (p.tau, p.alpha) == (expected.tau, None) == (1, None)
    assert p.speedup == pytest.approx(1)


def test_beyond_the_probe_the_curve_goes_on_along_its_line() -> None:
    p = analyse(document(ratios={"small": [0.0] * 12}, candidates=[6])).predictions[-1]
    # From 9 at 3 tokens to 14 at 5, of 7: 5 units a token beyond; six rounds of full depth, then 5, 4, … 0.
    calls = [14, 16, 18, 23, 28, 33, 38]
    seconds = 6 * (38 + 12 + 2) + sum(calls[d] + 2 * d + 2 for d in range(6))
    assert p.speedup == pytest.approx(192 / seconds)


def test_a_draft_step_of_an_unmeasured_k_is_the_nearest_arms() -> None:
    """The probe ran at half the bench's speed; k = 2 and 4 were timed with draft steps of 2 and 3 units."""
    slow = COSTS.model_copy(update={"draft_s": 9 * MS, "target_s": {w: 4 * s for w, s in COSTS.target_s.items()}})
    arms = (PLAIN, K2, Script("k = 4", k=4, accepted=(4, 0), draft=3.0))
    view = View(document(arms, ratios={"small": [0.5] * 12}, costs=(slow,), candidates=range(1, 7)))
    prices = view.prices("small", "eager", 1)
    assert [prices.draft(k) / MS for k in range(1, 7)] == [2, 2, 2, 3, 3, 3]  # of equally near ones the smaller
    # An arm that never drafted knows nothing of it.
    silent = (PLAIN, Script("k = 2", k=2, drafts=(0,)), Script("k = 4", k=4, accepted=(4, 0), draft=3.0))
    assert View(document(silent, costs=(slow,))).prices("small", "eager", 1).draft(2) == 3 * MS


@pytest.mark.parametrize("scripts", [(PLAIN,), (PLAIN, Script("k = 2", k=2, drafts=(0,)))])
def test_where_no_arm_drafted_the_probes_draft_step_is_scaled_as_its_calls_are(scripts: tuple[Script, ...]) -> None:
    """The same bench beside a probe at its own speed and beside one that ran at half of it: the same prices."""
    fast = COSTS.model_copy(update={"draft_s": 3 * MS, "target_s": {w: 2 * s for w, s in COSTS.target_s.items()}})
    slow = COSTS.model_copy(update={"draft_s": 6 * MS, "target_s": {w: 4 * s for w, s in COSTS.target_s.items()}})
    found = []
    for costs in (fast, slow):
        bench = document(scripts, ratios={"small": [0.5] * 12}, costs=(costs,), candidates=[1, 2, 3, 4])
        prices = View(bench).prices("small", "eager", 1)
        found.append((prices.draft(3), prices.call(1), prices.call(5), predict(bench, "small", "eager", 1)))
    assert found[0] == found[1]
    assert found[0][:3] == (3 * MS, 14 * MS, 28 * MS)


def test_a_bench_that_knows_single_token_calls_alone_predicts_nothing() -> None:
    single = COSTS.model_copy(update={"target_s": {1: 7 * MS}})
    for costs in ((), (single,)):
        assert (
            analyse(document((PLAIN,), ratios={"small": [0.5] * 12}, costs=costs, candidates=[2])).predictions == ()
        )
        assert predict(document((PLAIN,), ratios={"small": [0.5] * 12}, costs=costs), "small", "eager", 1, 2) == []


def test_a_batch_takes_the_rounds_of_its_slowest_row() -> None:
    scripts = (Script("plain", batch=2), Script("k=2", k=2, accepted={0: (2,), 1: (0,)}, batch=2))
    bench = document(scripts, categories=[None, None], ratios={"small": [1.0] * 12})
    bench.scores[1].ratios = [0.0] * 12
    p = analyse(bench).predictions[0]
    assert p.tau == 24 / 16
    # Two narrower rounds at the end are too few to be measured; the probe prices them (16) as they are.
    assert p.speedup == pytest.approx(192 / (240 + 20 + 16)) == arm(analyse(bench), "k=2").speedup.estimate


@pytest.mark.parametrize(
    ("arm", "steps", "part", "units", "reason"),
    [
        # Two of the five calls on 3 tokens take 58 units, not 18: their median stays, their mean is 34.
        (
            "k = 2",
            2,
            "verify_s",
            40,
            f"a call on 3 tokens took {34 * MS * 1000:.2f} ms on average and was priced at {18 * MS * 1000:.2f} ms",
        ),
        # Two of the five rounds draft two tokens in 34 units, not 4: 80 units for 10 tokens.
        (
            "k = 2",
            2,
            "draft_s",
            30,
            f"a draft step took {8 * MS * 1000:.2f} ms on average and was priced at {2 * MS * 1000:.2f} ms",
        ),
        (
            "k = 2",
            2,
            None,
            39,
            f"the rest of a round took {15 * MS * 1000:.2f} ms on average and was priced at {2 * MS * 1000:.2f} ms",
        ),
        (
            "plain",
            3,
            "verify_s",
            40,
            f"a token of plain decoding took {26 * MS * 1000:.2f} ms on average and was "
            f"priced at {16 * MS * 1000:.2f} ms",
        ),
    ],
)
def test_costs_that_are_not_those_priced_explain_a_miss(
    arm: str, steps: int, part: str | None, units: float, reason: str
) -> None:
    bench = document(ratios={"small": [1.0, 1.0, 1.0, 0.0] * 3})
    for m in bench.timed(arm):
        for i in range(steps):
            m.steps.total_s[i] += units * MS
            if part is not None:
                getattr(m.steps, part)[i] += units * MS
    (warning,) = warned("predicted", bench)
    assert warning.startswith("k = 2: the measured speedup ")
    assert warning.endswith(f": {reason}.")


def test_acceptance_that_is_not_the_texts_explains_a_miss() -> None:
    bench = document((PLAIN, Script("k = 2", k=2, accepted=(0,))), ratios={"small": [1.0] * 12})
    (warning,) = warned("predicted", bench)
    # 12 tokens in 12 rounds; the texts say 4 rounds of 3.
    assert warning == (
        "k = 2: the measured speedup 0.70 is 0.35 of the predicted 2.00: acceptance is not what the baseline's texts "
        "say: 1.00 tokens a round measured, 3.00 expected."
    )


UNEVEN = {**dict.fromkeys(range(3), (2,)), **dict.fromkeys(range(3, 7), (0,))}  # three accept all, four nothing


def test_prompts_that_differ_are_predicted_one_by_one() -> None:
    """Where the texts say so too, the median is that of the four on both sides."""
    bench = document((PLAIN, Script("k = 2", k=2, accepted=UNEVEN)), ratios={"small": [1.0] * 12})
    for score in bench.scores[3:]:
        score.ratios = [0.0] * 12
    row = arm(analyse(bench), "k = 2")
    assert row.speedup.estimate == pytest.approx(192 / 276)
    assert row.ratio == pytest.approx(1.0)


def test_prompts_that_differ_explain_a_miss() -> None:
    """The texts expect as many rounds in all, and the same of every prompt: the medians differ all the same."""
    bench = document((PLAIN, Script("k = 2", k=2, accepted=UNEVEN)), ratios={"small": [1.0] * 12})
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        few = expected_rounds([middle] * 12, 2).rounds < (3 * 4 + 4 * 12) / 7
        low, high = (low, middle) if few else (middle, high)
    for score in bench.scores:
        score.ratios = [high] * 12
    (warning,) = warned("predicted", bench)
    assert f"the prompts differ: all together they give {7 * 192 / (3 * 96 + 4 * 276):.2f} of " in warning
    assert "their medians are 0.70 and " in warning


def warned(word: str, bench: Bench) -> list[str]:
    return [w for w in analyse(bench).warnings if word in w]


def test_a_quiet_bench_warns_of_nothing() -> None:
    assert analyse(document(runs=5, load=1.0, load_after=1.0)).warnings == ()


def test_a_busy_machine() -> None:
    # 4 cores, 2 threads: above 2 before, above 4 while it ran and after.
    assert warned("busy", document(load_before=2.0, load=4.0, load_after=4.0, threads=2)) == []
    for busy in ({"load_before": 2.1}, {"load": 4.1}, {"load_after": 4.1}):
        assert len(warned("busy", document(threads=2, **busy))) == 2
        assert len(warned("busy", document(threads=1, **busy))) == 1
    (text, _) = warned("busy", document(threads=2, load_before=3.0, load=5.5))
    assert "load average 3.0 before it, 5.5 while it ran, on 4 cores of which the bench used 2" in text
    assert warned("More threads than cores: 8 on 4", document(threads=8))


@pytest.mark.parametrize("odd", ["x", None, True, float("nan"), -1, [], {}])
def test_an_environment_that_was_edited_is_unknown(odd: object) -> None:
    bench = document(load_before=9.0, threads=2)
    bench.environment["threads"] = odd
    (text,) = warned("busy", bench)
    assert text == (
        "The machine was busy: load average 9.0 before it, on 4 cores, the bench's own threads unknown: "
        "measure again on an idle machine."
    )
    for name, value in (("cpu_count", odd), ("load_average", odd), ("load_average", [odd, 1.0, 1.0])):
        bench = document(load_before=9.0, threads=2)
        bench.environment[name] = value
        assert warned("busy", bench) == []


def test_few_prompts_and_a_cut_budget() -> None:
    assert warned("Too few prompts for an interval: 4", document(categories=["chat"] * 4))
    assert warned("the interval of 5 covers 93.8%", document(categories=["chat"] * 5))
    assert not warned("prompts", document(categories=["chat"] * 6))
    assert warned("1 of 5 runs done: no run 1 to 4", document(runs_asked=5, cut="no run 1 to 4"))


def test_runs_that_differ() -> None:
    """Quartiles of 1, 1 + s and 1 + 2s: s apart in all, over a median of 1 + s."""
    for step, found in ((0.125, 1), (0.0625, 0)):
        script = Script("k = 2", k=2, accepted=(2, 0), scale=lambda p, r, step=step: 1 + r * step)
        warnings = warned("Runs of one prompt differ", document((PLAIN, script), runs=3))
        assert len(warnings) == found
    script = Script("k = 2", k=2, accepted=(2, 0), scale=lambda p, r: 1 + r / 4)
    assert "in 1 of 2 arms" in warned("Runs of", document((PLAIN, script), runs=3))[0]
    assert "worst k = 2: 20%" in warned("Runs of", document((PLAIN, script), runs=3))[0]


def test_a_wide_interval() -> None:
    script = Script("k = 2", k=2, accepted=(2, 0), scale=lambda p, r: {0: 0.8, 1: 1.25}.get(p, 1.0))
    (text,) = warned("wider than ±10%", document((PLAIN, script)))
    assert "k = 2: the interval of its speedup, 1.41 [1.13, 1.76]" in text
    assert "±23%" in text or "±22%" in text


def test_a_slow_first_run() -> None:
    slow = Script("plain", scale=lambda p, r: 1.25 if r == 0 else 1.0)
    (text,) = warned("first run", document((slow, K2), runs=3))
    assert "in 1 of 2 arms" in text
    assert "worst plain: 25% longer" in text
    assert not warned("first run", document((slow, K2), runs=1))
    # A slow warm-up alone is what it is for.
    assert not warned("first run", document(runs=3, warmup={"plain": 9.0, "k = 2": 9.0}))


def test_drifting_clocks_against_scipy() -> None:
    slower = Script("plain", scale=lambda p, r: 1 + 0.02 * (7 * r + p))
    bench = document((slower, K2), runs=3)
    (text,) = warned("clock drifted", bench)
    points = [(m.order, (7 * m.run + m.group)) for m in bench.timed("plain")]
    seconds = {(r, p): 1 + 0.02 * (7 * r + p) for r in range(3) for p in range(7)}
    relative = [seconds[divmod(i, 7)] / np.median([seconds[r, i % 7] for r in range(3)]) for _, i in points]
    rho = stats.spearmanr([o for o, _ in points], relative).statistic
    assert f"ρ = {rho:.2f}" in text
    assert "plain became" in text
    assert "slower" in text
    assert not warned("clock drifted", document(runs=3))
    small = Script("plain", scale=lambda p, r: 1 + 0.002 * (7 * r + p))
    assert not warned("clock drifted", document((small, K2), runs=3))


def test_it_pays() -> None:
    worse = Script("k = 4", k=4, accepted=(0,))
    verdict = analyse(document((PLAIN, K2, worse))).verdict
    assert (verdict.pays, verdict.best, verdict.reasons) == (True, "k = 2", ())
    assert verdict.speedup.estimate == pytest.approx(SPEEDUP)
    assert verdict.text == ("k = 2, the best of 2, pays: speedup 1.41 [1.41, 1.41] (98.4% interval over 7 prompts).")


def test_the_target_as_its_own_draft_is_too_dear() -> None:
    """α = 1, a draft step costs a target call: 11 tokens in rounds of 3 and 2 … , and none of it pays."""
    own = Script("k = 2", k=2, accepted=(2,), draft=14.0, calls={1: 14, 2: 14, 3: 14})
    analysis = analyse(document((PLAIN, own)))
    verdict, row = analysis.verdict, analysis.arms[1]
    assert (row.alpha, row.tau) == (1, 3)
    # Four rounds of 28 + 14 + 2.
    assert row.speedup.estimate == pytest.approx(192 / 176)
    assert verdict.pays is True  # no overhead but the plain loop's to share: that is what this machine says
    dearer = Script("k = 2", k=2, accepted=(2,), draft=17.5, calls={1: 14, 2: 16, 3: 18})
    analysis = analyse(document((PLAIN, dearer)))
    verdict, row = analysis.verdict, analysis.arms[1]
    assert row.speedup.estimate == pytest.approx(192 / (4 * (35 + 18 + 2)))
    assert verdict.pays is False
    # A round may take 3 · 16 = 48: 28 of drafting, so 14 a step, c = 1.
    assert verdict.reasons[0] == (
        "the draft is too dear (a draft step costs c = 1.25 of a target step, drafting 64% of the time; it would pay "
        "with c below 1.00)"
    )
    assert "does not pay here: speedup 0.87 [0.87, 0.87]" in verdict.text
    assert not any("acceptance" in reason for reason in verdict.reasons)


def test_acceptance_too_low() -> None:
    """Nothing accepted: rounds of 24 units for one token. 24/16 = 1.5 tokens a round are needed, and more for the
    end, which α cannot shorten."""
    verdict = analyse(document((PLAIN, Script("k = 2", k=2, accepted=(0,))))).verdict
    assert verdict.pays is False
    assert len(verdict.reasons) == 1
    needed = (240 + 20 + 16) / 192
    alpha = needed_alpha(0.0, {0: 1, 1: 1, 2: 10}, needed)
    assert (1 + (1 + alpha) + 10 * (1 + alpha + alpha**2)) / 12 == pytest.approx(needed)
    assert verdict.reasons[0].startswith("the acceptance is too low (α = 0.00; at these costs it would pay with α ")
    assert f"above {alpha:.2f}" in verdict.reasons[0]


def test_verification_not_free_and_overhead() -> None:
    dear = Script("k = 2", k=2, accepted=(2, 0), draft=1.0, calls={1: 14, 2: 28, 3: 35})
    verdict = analyse(document((PLAIN, dear))).verdict
    # 5 rounds of 2 + 35 + 2 and one of 16: 211 for 192; of the 5 · 21 beyond single-token calls 105 − 19 may stay.
    assert verdict.pays is False
    below = f"{1 + 1.5 * 86 / 105:.2f}"
    assert f"verification is not free (T(3)/T(1) = 2.50; it would pay with a ratio below {below})" in verdict.reasons
    slow = Script("k = 2", k=2, accepted=(2, 0), other=16.0)
    verdict = analyse(document((PLAIN, slow))).verdict
    # 5 · (4 + 18 + 16) + 14 + 16 = 220 for 192: of 96 overhead 68 may stay.
    assert verdict.pays is False
    assert any(
        "the overhead is too large (44% of the time is neither drafting nor a target call; it would pay with less "
        f"than {16 * MS * 68 / 96 * 1000:.2f} ms of it a round, now {16 * MS * 1000:.2f} ms)" in reason
        for reason in verdict.reasons
    )


def test_verification_is_weighed_by_the_widths_called() -> None:
    """Drafts 2 in one of three rounds and accepts one: 12 = (1 + 1 + 2) · 3, so 3 calls on 3 tokens and 6 on one."""
    script = Script("k = 2", k=2, drafts=(0, 0, 2), accepted=(0, 0, 1), draft=1.0, calls={1: 14, 2: 28, 3: 98})
    verdict = analyse(document((PLAIN, script))).verdict
    # 6 · 16 + 2 · (2 + 98 + 2) + (1 + 28 + 2), the last with room for one: 331 for 192. Beyond 14 a call: 182.
    assert verdict.pays is False
    below = f"{1 + 6 * (182 - 139) / 182:.2f}"
    (reason,) = (r for r in verdict.reasons if r.startswith("verification"))
    assert reason == f"verification is not free (T(3)/T(1) = 7.00; it would pay with a ratio below {below})"


def test_a_draft_that_proposes_too_seldom() -> None:
    """Drafts 2 in the fifth round only and both are accepted; an overhead of 6 a round, 4 more than plain
    decoding's."""
    script = Script("k = 2", k=2, drafts=(0, 0, 0, 0, 2), accepted=(0, 0, 0, 0, 2), draft=1.0, other=6.0)
    analysis = analyse(document((PLAIN, script)))
    verdict, row = analysis.verdict, analysis.arms[1]
    # Rounds commit 1 1 1 1 3 1 1 1 1 1: the last drafts nothing for want of room. 9 · 20 + 26 = 206 for 192.
    assert (row.alpha, row.tau) == (1, 1.2)
    assert verdict.pays is False
    # A share p of rounds commits 1 + 2p in 20 + 6p: to break even with 16 a token, 20 + 6p = 16 + 32p, p = 4 / 26.
    assert verdict.reasons[0] == (
        "the draft proposes too seldom (nothing in 56 of 63 rounds; it would pay with a proposal of 2 tokens in at "
        "least 16%)"
    )
    assert not any("acceptance" in reason for reason in verdict.reasons)


def test_where_proposals_do_not_help_their_number_is_no_reason() -> None:
    """One proposal in five, all of it accepted, but its rounds take 4.5 plain tokens' time for 3."""
    script = Script("k = 2", k=2, drafts=(0, 0, 0, 0, 2), accepted=(0, 0, 0, 0, 2), calls={1: 14, 2: 40, 3: 66})
    verdict = analyse(document((PLAIN, script))).verdict
    assert verdict.pays is False
    assert not any("seldom" in reason for reason in verdict.reasons)


def test_nothing_was_drafted() -> None:
    verdict = analyse(document((PLAIN, Script("k = 2", k=2, drafts=(0,), other=4.0)))).verdict
    assert verdict.pays is False
    assert verdict.reasons == (
        "nothing was drafted: the draft had no proposal in any of 77 rounds that had room for one",
    )
    assert verdict.text.endswith(f": {verdict.reasons[0]}.")


NOISY = Script("k = 4", k=4, accepted=(2, 0), scale=lambda p, r: {0: 2.0}.get(p, 0.75))  # one prompt pays not at all


def test_an_arm_that_surely_pays_is_not_hidden_by_a_noisy_one() -> None:
    analysis = analyse(document((PLAIN, K2, NOISY)))
    small, large = analysis.arms[1].speedup, analysis.arms[2].speedup
    assert large.estimate > small.estimate
    assert large.low < 1 < small.low
    verdict = analysis.verdict
    assert (verdict.pays, verdict.best, verdict.speedup) == (True, "k = 2", small)
    assert verdict.text == (
        "k = 2, one of 2, pays: speedup 1.41 [1.41, 1.41] (98.4% interval over 7 prompts); k = 4 measured more, "
        f"{large.estimate:.2f} [{large.low:.2f}, {large.high:.2f}], but did not prove it: its interval holds 1."
    )


def test_an_arm_without_an_interval_does_not_win_over_one_with() -> None:
    slow = Script("k = 2", k=2, accepted=(0,))
    batch = Script("k = 2 B=7", k=2, accepted=(2, 0), batch=7)
    verdict = analyse(document((PLAIN, slow, Script("plain B=7", batch=7), batch))).verdict
    assert (verdict.pays, verdict.best) == (False, "k = 2")
    assert "; k = 2 at B = 7 measured more, 1.41, but did not prove it: it has no interval." in verdict.text
    assert "At B = 7 k = 2 measured a speedup of 1.41" in verdict.text


def test_no_single_change_would_make_it_pay() -> None:
    bad = Script("k = 1", k=1, accepted=(0,), draft=20.0, calls={1: 14, 2: 42}, other=20.0)
    (reason,) = analyse(document((PLAIN, bad))).verdict.reasons
    assert reason.startswith("no single change would make it pay, neither ")
    for ideal in ("α = 1", "a free draft", "a flat call cost", "a round without overhead"):
        assert ideal in reason


def test_no_measurable_difference() -> None:
    """Prompts on both sides of 1: the interval holds it. What would change it brings the whole interval above 1."""
    even = Script("k = 2", k=2, accepted=(2, 0), scale=lambda p, r: SPEEDUP * (0.95 + p / 60))
    verdict = analyse(document((PLAIN, even))).verdict
    assert verdict.pays is None
    assert verdict.speedup.low < 1 < verdict.speedup.high
    assert "makes no measurable difference: speedup 1.00 [0.95, 1.05]" in verdict.text
    assert verdict.reasons


def test_too_few_prompts_is_said_and_judged_no_further() -> None:
    verdict = analyse(document(categories=["chat"] * 3)).verdict
    assert verdict.pays is None
    assert verdict.text == "k = 2 measured a speedup of 1.41, with 3 prompts too few for an interval."


def test_nothing_speculative() -> None:
    verdict = analyse(document((PLAIN,))).verdict
    assert (verdict.pays, verdict.best) == (None, None)
    assert "no speculative arm" in verdict.text


def test_several_batches_profiles_and_engines() -> None:
    scripts = [
        PLAIN,
        K2,
        Script("k = 2 other", k=2, accepted=(0,), profile="other"),
        Script("plain packed", engine="packed", calls={1: 6.0}),
        Script("k = 2 packed", k=2, accepted=(0,), engine="packed"),
        Script("plain B=7", batch=7),
        Script("k = 2 B=7", k=2, accepted=(0,), batch=7),
    ]
    analysis = analyse(document(scripts))
    text = analysis.verdict.text
    assert text.startswith("k = 2 of small in eager at B = 1, the best of 4, pays: speedup 1.41")
    assert "At B = 1 k" not in text  # said already
    assert "At B = 7 k = 2 measured a speedup of 0.70, with 1 group of prompts too few for an interval." in text
    assert "Fastest at B = 1: plain packed with 128.0 tokens/s." in text
    assert analysis.arms[4].speedup.estimate == pytest.approx(96 / 276)


def test_needed_alpha() -> None:
    for alpha in (0.0, 0.3, 0.6):
        found = needed_alpha(alpha, {4: 9}, 1.2)
        assert constant_alpha_tau(found, 4) == pytest.approx(1.2 * constant_alpha_tau(alpha, 4))
    assert needed_alpha(0.5, {1: 9}, 1.5) is None
    assert needed_alpha(0.5, {1: 9}, 4 / 3) == pytest.approx(1)
    # Half of the rounds draft one token and half nothing: τ = 1 + α/2.
    assert needed_alpha(0.5, {0: 4, 1: 4}, 1.1) == pytest.approx(0.75)
    assert needed_alpha(0.5, {0: 4, 1: 4}, 1.25) is None


def test_pays_is_about_the_whole_interval() -> None:
    for values, judged in (([1.1] * 7, True), ([0.9] * 7, False), ([1.0] * 7, None), ([0.9, *[1.2] * 6], None)):
        assert pays(median_interval(values)) is judged
    assert pays(median_interval([2.0] * 4)) is None


def test_analysis_of_a_file_is_that_of_the_bench() -> None:
    bench = document(runs=3, ratios={"small": [0.5] * 12}, candidates=[1, 2, 4, 8])
    assert analyse(Bench.model_validate(json.loads(bench.model_dump_json()))) == analyse(bench)


def test_warm_ups_enter_nothing() -> None:
    analysis = analyse(document(runs=2, warmup={"plain": 100.0, "k = 2": 50.0}))
    assert analysis == analyse(document(runs=2))
