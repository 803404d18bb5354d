"""`specgen simulate`: stored texts under other costs, against arithmetic by hand and an enumeration of all rounds."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specgen.analysis import simulate as simulate_module
from specgen.analysis import stored as stored_module
from specgen.analysis.prediction import predict
from specgen.cli import app
from specgen.decoding.eager import speculative, start
from specgen.decoding.self_check import SelfCheck, kept_ratio
from specgen.drafting.checkpoint import ModelDrafter
from specgen.errors import UsageError
from specgen.overlap import predict as predict_module
from specgen.overlap import score as score_module
from specgen.rounds.costs import CallCosts
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, prompt_digest
from specgen.settings import Mode, Sampling
from specgen.verification import law
from specgen.verification.law import coupled_acceptance
from specgen.verification.law import overlap as overlap_of
from specgen.verification.rules import RULES
from support import bench_documents
from support import stored_results as stored
from support.command import process, write_pair
from support.tiny import tiny_pair

FLAT = [1.0] * 17


def outcomes(
    ratios: Sequence[float | None], k: int, room: int, at: int = 0
) -> list[tuple[float, list[int], int, int]]:
    """Every way to generate the text from `at`: (probability, drafted by round, tested, accepted). For a draft that
    is silent only where the text says so."""
    if at >= len(ratios):
        return [(1.0, [], 0, 0)]
    depth = min(k, room - at - 1)
    for j in range(depth):
        if at + j < len(ratios) and ratios[at + j] is None:
            depth = j
            break
    ways = []
    reach, kept = 1.0, 0
    while kept < depth and at + kept < len(ratios):
        r = ratios[at + kept]
        assert r is not None
        for p, drafted, tested, accepted in outcomes(ratios, k, room, at + kept + 1):
            ways.append((reach * (1 - r) * p, [depth, *drafted], tested + kept + 1, accepted + kept))
        reach, kept = reach * r, kept + 1
    for p, drafted, tested, accepted in outcomes(ratios, k, room, at + kept + 1):
        ways.append((reach * p, [depth, *drafted], tested + kept, accepted + kept))
    return [way for way in ways if way[0] > 0]


def simulated(path: Path, **options: Any) -> list[simulate_module.Simulation]:
    return simulate_module.run(stored_module.load(path), **options)[0]


def invoked(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app.app, ["simulate", *arguments], input=stdin)


def test_two_tokens_by_hand(tmp_path: Path) -> None:
    # k = 1: round one drafts at token 0; kept (1/2), token 1 is its bonus; else token 1 has a call of its own.
    path = stored.write(tmp_path, stored.run([0.5, 1.0], limit=2))
    (found,) = simulated(path, c=0.25, verify=[1, 1.5], max_k=1)
    (p,) = found.predictions
    assert (p.rounds, p.tau, p.alpha, p.drafted) == (1.5, 2 / 1.5, 0.5, 1)
    assert p.predicted_speedup == pytest.approx(2 / (1.5 + 0.5 + 0.25), rel=1e-14)
    assert p.break_even_c == 0
    assert not found.pays
    assert "not even a free draft" in found.verdict
    (cheap,) = simulated(path, c=0.25, verify=[1, 1.2], max_k=1, other=0.01)
    assert cheap.best.predicted_speedup == pytest.approx(2 * 1.01 / (1.2 + 0.5 + 0.25 + 1.5 * 0.01), rel=1e-14)
    assert cheap.best.break_even_c == pytest.approx(2 * 1.01 - 1.2 - 0.5 - 1.5 * 0.01)
    assert cheap.verdict == f"pays: the best k is 1, predicted speedup {cheap.best.predicted_speedup:.3f}"
    (dear,) = simulated(path, c=0.5, verify=[1, 1.2], max_k=1)
    assert dear.verdict.endswith("it would with c below 0.3000 (at k = 1)")
    path = stored.write(tmp_path, stored.run([0.9, 0.8, 0.9, 0.4, 0.9, 0.9], limit=6))
    (many,) = simulated(path, c=3.0, verify=[1, 1.6, 1.7, 1.8, 1.9], max_k=4)
    by_k = {p.k: p.break_even_c or 0 for p in many.predictions}
    dearest = max(by_k, key=lambda k: by_k[k])
    assert dearest not in (1, 4)
    assert many.verdict.endswith(f"it would with c below {by_k[dearest]:.4f} (at k = {dearest})")


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [
        ([0.5, 0.9, 0.0, 1.0, 0.3, 0.7], 6),
        ([0.5, 0.9, 0.25, 1.0, 0.3], 40),  # ended early, by an end token
        ([0.0, 1.0, 1.0, 1.0], 4),
        ([1.0, None, 0.5], 3),
    ],
)
def test_every_number_is_that_of_an_enumeration_of_all_rounds(
    tmp_path: Path, ratios: list[float | None], limit: int
) -> None:
    verify = [1, 1.1, 1.3, 1.7, 1.75]
    (found,) = simulated(
        stored.write(tmp_path, stored.run(ratios, limit=limit)), c=0.1, verify=verify, max_k=4, other=0.05
    )
    for p in found.predictions:
        ways = outcomes(ratios, p.k, limit)
        assert math.fsum(w[0] for w in ways) == pytest.approx(1)

        def mean(f: Any, ways: Any = ways) -> float:
            return math.fsum(w[0] * f(*w[1:]) for w in ways)

        rounds = mean(lambda drafted, tested, accepted: len(drafted))
        assert p.rounds == pytest.approx(rounds)
        assert p.tau == pytest.approx(len(ratios) / rounds)
        assert sum(p.tested) == pytest.approx(mean(lambda drafted, tested, accepted: tested))
        assert sum(p.accepted) == pytest.approx(mean(lambda drafted, tested, accepted: accepted))
        if None in ratios:
            continue  # what is drafted behind a rejected token is then an upper bound
        seconds = mean(lambda d, tested, accepted: sum(verify[m] + 0.1 * m + 0.05 for m in d))
        assert p.predicted_speedup == pytest.approx(1.05 * len(ratios) / seconds)
        assert p.break_even_c is not None
        at_break_even = mean(lambda d, t, a, c=p.break_even_c: sum(verify[m] + c * m + 0.05 for m in d))
        assert at_break_even == pytest.approx(1.05 * len(ratios))


def test_texts_are_pooled_by_their_counts(tmp_path: Path) -> None:
    both = simulated(stored.write(tmp_path, stored.run([0.5, 1.0], [0.0] * 4, limit=10)), c=0.1, max_k=3)[0]
    one = simulated(stored.write(tmp_path, stored.run([0.5, 1.0], limit=10)), c=0.1, max_k=3)[0]
    other = simulated(stored.write(tmp_path, stored.run([0.0] * 4, limit=10)), c=0.1, max_k=3)[0]
    for p, x, y in zip(both.predictions, one.predictions, other.predictions, strict=True):
        assert p.rounds == pytest.approx(x.rounds + y.rounds)
        assert p.tau == pytest.approx(6 / (x.rounds + y.rounds))
    assert (both.texts, both.tokens) == (2, 6)


def test_the_best_k_is_the_fastest_and_of_equals_the_smallest(tmp_path: Path) -> None:
    path = stored.write(tmp_path, stored.run([1.0] * 60, limit=60))
    # All accepted and free: 60 / ceil(60 / (k + 1)) tokens a call; k = 7 (8 rounds) beats 5, 6 (10, 9), equals none.
    assert simulated(path, c=0.0)[0].best.k == 8  # 7 rounds
    assert simulated(path, c=0.0, max_k=7)[0].best.k == 7
    never = simulated(stored.write(tmp_path, stored.run([0.0] * 60, limit=60)), c=0.0)[0]
    assert (never.best.k, never.best.predicted_speedup, never.pays) == (1, 1.0, False)


def test_a_bench_gives_its_own_costs_and_texts_by_profile(tmp_path: Path) -> None:
    document = stored.scored_bench(
        {"one": [[0.5, 1.0], [1.0, 1.0]], "two": [[0.1, 0.1]]},
        costs=[stored.probe("one", {1: 2.0, 2: 3.0, 4: 4.0}, 0.5), stored.probe("two", {1: 2.0, 2: 2.0}, 0.1)],
        limit=2,
    )
    path = stored.write(tmp_path, document)
    one, two = simulated(path, max_k=1)
    assert (one.profile, one.costs.origin, one.costs.engine) == ("one", "the bench's own times", "eager")
    # one: 1.5 and 1 rounds for 2 tokens each, a drafted token each, calls 1.5 + 0.5 and 1.5; the median of the two
    assert one.best.predicted_speedup == pytest.approx((2 / 2.25 + 2 / 1.75) / 2)
    one, two = simulated(path, max_k=1, other=0.0)  # given a cost: the probe's, and still the median
    assert (one.costs.c, one.costs.verify) == (0.25, (1.0, 1.5, 1.75, 2.0))  # 3 tokens: between
    assert (two.costs.c, two.costs.verify) == (0.05, (1.0, 1.0))
    assert one.best.predicted_speedup == pytest.approx((2 / 2.25 + 2 / 1.75) / 2)
    assert [s.profile for s in simulated(path, max_k=1, profile="two")] == ["two"]
    with pytest.raises(UsageError, match=r"--profile three: not in .*result.json, which holds one, two"):
        simulated(path, profile="three")
    both, notes = simulate_module.run(stored_module.load(path), other=0.0)
    assert {len(s.predictions) for s in both} == {1}  # as far as both curves go
    assert "k up to 1: the costs go no further (--verify-cost)" in notes
    assert len(simulated(path, max_k=3, profile="one", other=0.0)[0].predictions) == 3


def test_beyond_what_was_measured_a_simulation_goes_on_along_the_line_and_says_so(tmp_path: Path) -> None:
    costs = [stored.probe("one", {1: 2.0, 2: 3.0, 4: 4.0}, 0.5)]
    path = stored.write(tmp_path, stored.scored_bench({"one": [[1.0] * 6]}, costs=costs, limit=6))
    said = "calls on more than 4 tokens were not measured: priced along the line through the two widest"
    for options in ({}, {"other": 0.0}):  # its own prediction; its probe
        found, notes = simulate_module.run(stored_module.load(path), max_k=5, **options)
        assert said in notes
        # One round of six tokens: T(6) = 4 + 2 · 1/2, and five draft steps; 12 s plainly.
        assert found[0].predictions[-1].predicted_speedup == pytest.approx(12 / (5 + 5 * 0.5))
        assert said not in simulate_module.run(stored_module.load(path), max_k=3, **options)[1]
    rows = [line.split() for line in invoked(str(path), "--max-k", "5", "--other", "0").stdout.splitlines()]
    assert ["5", "*", "6.000", "1.000", "2.500", "1.600"] in rows


def test_without_given_costs_a_bench_has_its_own_predictions_to_the_digit(tmp_path: Path) -> None:
    ratios = {"small": [0.5, 1.0, None, 0.25, 0.9, 1.0, 0.3, 0.8, 1.0, 1.0, 0.1, 0.7]}
    bench = bench_documents.document(runs=2, ratios=ratios, candidates=range(1, 5), mode="exact")
    for at, score in enumerate(bench.scores):  # texts of several kinds: their median is not their pool
        score.ratios = score.ratios[at % 5 :] + [0.9] * (at % 5)
    wanted = predict(bench, "small", "eager", 1)
    path = stored.write(tmp_path, bench.model_dump_json())
    found, notes = simulate_module.run(stored_module.load(path))
    assert [(p.k, p.tau, p.alpha, p.speedup) for p in wanted] == [
        (p.k, p.tau, p.alpha, p.predicted_speedup) for p in found[0].predictions
    ]
    assert [p.k for p in wanted] == [1, 2, 3, 4]
    assert stored_module.OWN in notes
    shown = invoked(str(path))
    assert "the bench's own times, engine eager" in shown.stdout
    assert f"{wanted[1].speedup:.3f}" in shown.stdout
    given, notes = simulate_module.run(stored_module.load(path), c=0.1)
    assert stored_module.OWN not in notes
    assert any("not the bench's own predictions" in n and "median over 7 prompts" in n for n in notes)
    assert given[0].costs.c == 0.1


@pytest.mark.parametrize("texts", [3, 4])
def test_given_costs_on_a_bench_take_the_median_over_its_prompts(tmp_path: Path, texts: int) -> None:
    ratios = [[0.1] * 6, [1.0] * 6, [0.6, 0.9] * 3, [0.3] * 6][:texts]
    path = stored.write(tmp_path, stored.scored_bench({"one": ratios}, limit=6))
    (found,) = simulated(path, c=0.3, other=0.1, max_k=3)
    alone = [
        simulated(stored.write(tmp_path, stored.run(r, limit=6), "r.json"), c=0.3, other=0.1, max_k=3)[0]
        for r in ratios
    ]
    for at, p in enumerate(found.predictions):
        assert p.predicted_speedup == pytest.approx(
            statistics.median(a.predictions[at].predicted_speedup for a in alone)
        )
        assert p.break_even_c is not None
        (there,) = simulated(path, c=max(0.0, p.break_even_c), other=0.1, max_k=3)
        if p.break_even_c > 0:
            assert there.predictions[at].predicted_speedup == pytest.approx(1)


def test_a_call_that_costs_less_than_a_single_token_one_is_noted(tmp_path: Path) -> None:
    path = stored.write(tmp_path, stored.run([0.5, 1.0], limit=2))
    said = "a call on 2 tokens costs 0.900 of one on a single token: noise, or a real effect of that machine"
    assert said in simulate_module.run(stored_module.load(path), c=0.1, verify=[1, 0.9, 0.95], max_k=2)[1]
    assert said not in simulate_module.run(stored_module.load(path), c=0.1, verify=[1, 1.0, 0.9], max_k=1)[1]
    costs = [stored.probe("one", {1: 2.0, 2: 1.8, 3: 2.0}, 0.5)]
    path = stored.write(tmp_path, stored.scored_bench({"one": [[0.5, 1.0]]}, costs=costs))
    for options in ({}, {"other": 0.0}):  # its own prediction; its probe
        assert said in simulate_module.run(stored_module.load(path), **options)[1]


def test_the_rest_of_a_round_is_charged_to_plain_decoding_too(tmp_path: Path) -> None:
    # Nothing accepted, nothing drafted beyond what is free: a round is a plain step, whatever the rest costs.
    path = stored.write(tmp_path, stored.run([0.0] * 4))
    for other in (0.0, 0.5, 10.0):
        (found,) = simulated(path, c=0.0, other=other, max_k=2)
        assert [p.predicted_speedup for p in found.predictions] == pytest.approx([1.0, 1.0])
    # Half a step of overhead each: fewer rounds save overhead as well, so that the draft may cost more.
    path = stored.write(tmp_path, stored.run([1.0] * 4, limit=4))
    bare, with_rest = (simulated(path, c=2.5, other=o, max_k=3)[0] for o in (0.0, 0.5))
    assert (bare.predictions[2].break_even_c, with_rest.predictions[2].break_even_c) == (1.0, 1.5)
    assert "not even a free draft" not in with_rest.verdict
    assert "rest of a round, speculative or plain" in " ".join(invoked("--help").stdout.replace("│", " ").split())


def test_a_bench_of_several_engines_is_shown_under_each(tmp_path: Path) -> None:
    costs = [stored.probe("one", {1: 2.0, 9: 2.0}, 0.5), stored.probe("one", {1: 1.0, 9: 9.0}, 0.5, "packed")]
    path = stored.write(tmp_path, stored.scored_bench({"one": [[0.5, 1.0]]}, costs=costs))
    found = simulated(path, other=0.0)
    assert [(s.costs.engine, s.costs.c) for s in found] == [("eager", 0.25), ("packed", 0.5)]
    assert len(simulated(path, c=0.1)) == 1
    own = simulated(path)
    assert [s.costs.engine for s in own] == ["eager", "packed"]
    for options in ({}, {"other": 0.0}):
        (packed,) = simulated(path, engine="packed", **options)
        assert packed.costs.engine == "packed"
    assert own[0].predictions != own[1].predictions
    with pytest.raises(UsageError, match=r"--engine graph: not in .*, which holds eager, packed"):
        simulated(path, engine="graph")


def test_the_limit_of_a_bench_is_its_max_new_tokens(tmp_path: Path) -> None:
    near, far = (
        simulated(stored.write(tmp_path, stored.scored_bench({"one": [[1.0] * 4]}, limit=n)), c=0.1, max_k=4)[0]
        for n in (4, 99)
    )
    assert near.predictions[3].drafted == 3  # room for three and the bonus
    assert far.predictions[3].drafted == 4


def test_a_run_gives_c_and_says_that_calls_are_taken_to_be_flat(tmp_path: Path) -> None:
    path = stored.write(tmp_path, stored.run([0.5], [0.5], [0.5], cs=(0.1, 0.4, 0.2)))
    found, notes = simulate_module.run(stored_module.load(path))
    assert (found[0].costs.c, found[0].costs.verify, len(found[0].predictions)) == (0.2, None, 8)
    assert stored_module.FREE in notes
    given, notes = simulate_module.run(stored_module.load(path), verify=[1, 2, 3], max_k=2)
    assert (given[0].costs.c, given[0].costs.verify) == (0.2, (1, 2, 3))
    assert given[0].costs.origin == "c: the run's, calls: given"
    assert stored_module.FREE not in notes
    with pytest.raises(UsageError, match=r"holds no cost of a draft step of pair: give --c"):
        simulated(stored.write(tmp_path, stored.run([0.5])))


def test_an_overlap_predicts_what_specgen_overlap_did(tmp_path: Path) -> None:
    ratios, verify = [[0.5, 1.0, None, 0.25, 0.9], [0.75] * 3], [1.0 + 0.1 * i for i in range(9)]
    scores = [
        score_module.scores_from_positions(
            {"token": [1] * len(r), "target_log_prob": [-1.0] * len(r), "ratio": r, "overlap": r}, 1.0
        )
        for r in ratios
    ]
    for own in (None, 5):
        path = stored.write(tmp_path, stored.overlap(*ratios, own=own, c=0.2, verify=verify))
        found, notes = simulate_module.run(stored_module.load(path))
        wanted = predict_module.predictions(
            scores, range(1, 9), CallCosts(dict(enumerate(verify, 1)), 0.2), limit=own
        )
        assert [(p.k, p.tau, p.alpha, p.predicted_speedup) for p in found[0].predictions] == [
            (p.k, p.tau, p.alpha, p.speedup) for p in wanted
        ]
        assert (stored_module.INDICATIVE in notes) == (own is None)
        assert any("proposes nothing at 1 of 8 tokens" in note for note in notes)


def without_check(**changes: Any) -> dict[str, Any]:
    document = stored.run([0.5])
    document["results"][0] |= {"check": None, **changes}
    return document


def in_mode(mode: str) -> dict[str, Any]:
    return stored.run([], sampling={**stored.SAMPLING, "mode": mode})


def with_ratio(value: float) -> dict[str, Any]:
    return stored.run([0.5, value])


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{not json", r"not JSON"),
        (json.dumps(stored.run([0.5]))[:-40], r"not JSON"),
        ("[]", r"no result of specgen"),
        (stored.run([0.5], kind="audit"), r"a result of specgen audit, where one of bench or overlap or run"),
        (stored.run([0.5], schema_version=99), r"schema version 99"),
        (stored.run([0.5], schema_version=1), r"before runs kept their ratios: run it again"),
        (without_check(), r"p0: made with --no-check.*run it again without"),
        (without_check(finish="interrupted"), r"p0: interrupted"),
        (without_check(plain=True), r"p0: decoded without a draft"),
        (in_mode("greedy"), r"mode greedy, whose check keeps no ratios: give a result of specgen bench or overlap"),
        (in_mode("lenient"), r"mode lenient, whose check keeps no ratios: run it in mode exact"),
        (stored.run([]), r"holds no generated token"),
        (stored.run(), r"holds no generated token"),
        (stored.run([None, None]), r"the draft of pair proposes nothing in these texts"),
        (with_ratio(1.5), r"not a whole run result: results.0.check.ratios.1: .*less than or equal to 1"),
        (with_ratio(math.nan), r"not a whole run result: results.0.check.ratios.1"),
        ({k: v for k, v in stored.run([0.5]).items() if k != "results"}, r"not a whole run result: results: "),
        (stored.overlap(), r"holds no scored token"),
        (stored.overlap([0.5], verify=()), r"not a whole overlap result: costs.verify"),
        (stored.scored_bench({}), r"holds no scored text: "),
        (stored.scored_bench({}, mode="typical"), r"no scored text \(mode typical: the text is not the target's\)"),
        (stored.scored_bench({"one": [[]]}), r"holds no scored token of profile one"),
        (stored.scored_bench({"one": [[1.5]]}), r"not a whole bench result: scores.0.ratios.0: "),
        (
            stored.scored_bench({"one": [[0.5]]}, costs=[stored.probe("one", {1: 1.0}, None)]),
            r"holds no cost of a draft step of one: give --c",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(tmp_path: Path, document: Any, says: str) -> None:
    path = stored.write(tmp_path, document)
    with pytest.raises(UsageError, match=says) as raised:
        simulated(path)
    assert str(raised.value).startswith(str(path))
    result = invoked(str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"specgen: {raised.value}\n"


def test_a_probe_of_single_token_calls_alone_prices_no_round(tmp_path: Path) -> None:
    costs = [stored.probe("one", {1: 1.0}, 0.1)]
    path = stored.write(tmp_path, stored.scored_bench({"one": [[0.5]]}, costs=costs))
    with pytest.raises(UsageError, match=r"costs of single-token calls only: give --verify-cost"):
        simulated(path, other=0.0)


def test_flags_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = str(stored.write(tmp_path, stored.run([0.5])))
    for flags, says in (
        (["--c", "-1"], "--c -1.0: needs a number, 0 or more"),
        (["--c", "nan"], "--c nan: needs a number, 0 or more"),
        (["--c", "0.1", "--other", "inf"], "--other inf: needs a number, 0 or more"),
        (["--c", "0.1", "--verify-cost", "1,1.1"], "holds 2 numbers; for k up to 8 it needs 9, or --max-k 1"),
        (["--c", "0.1", "--verify-cost", "2,3"], "the first of them 1"),
    ):
        result = invoked(path, *flags)
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr


def test_the_table_and_the_json_say_the_same(tmp_path: Path) -> None:
    path = str(stored.write(tmp_path, stored.run([0.5, 1.0], limit=2)))
    flags = ["--c", "0.05", "--verify-cost", "1,1.2", "--max-k", "1", "--other", "0.1"]
    shown = invoked(path, *flags)
    assert (shown.exit_code, shown.stderr) == (0, "")
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["1", "*", "1.333", "0.500", "1.200", "1.158"] in rows
    assert "pays: the best k is 1, predicted speedup 1.158" in shown.stdout
    assert "c = 0.0500, other = 0.1000 (given)" in shown.stdout
    document = json.loads(invoked(path, *flags, "--json").stdout)
    assert (document["schema_version"], document["kind"], document["source"]["kind"]) == (2, "simulate", "run")
    (found,) = document["simulations"]
    assert (found["best_k"], found["pays"], found["profile"]) == (1, True, "pair")
    assert found["predictions"][0]["predicted_speedup"] == pytest.approx(2.2 / (1.2 + 0.5 + 0.05 + 0.15))
    assert found["costs"] == {"c": 0.05, "verify": [1.0, 1.2], "other": 0.1, "origin": "given", "engine": None}


def test_several_profiles_are_shown_one_after_another_and_stdin_is_read(tmp_path: Path) -> None:
    text = json.dumps(stored.scored_bench({"one": [[0.5, 1.0]], "[red]two": [[0.1, 0.1]]}))
    shown = invoked("-", "--c", "0.1", "--max-k", "2", stdin=text)
    assert shown.exit_code == 0
    assert shown.stdout.index("one: 2 tokens of 1 text;") < shown.stdout.index("[red]two: 2 tokens")
    alone = invoked("-", "--c", "0.1", "--profile", "one", stdin=text)
    assert "two" not in alone.stdout


def test_no_torch_is_imported(tmp_path: Path) -> None:
    path = stored.write(tmp_path, stored.scored_bench({"one": [[0.5, 1.0]]}))
    code = (
        "import sys\nfrom specgen.cli.app import app\n"
        f"app(['simulate', {str(path)!r}, '--c', '0.1'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "predicted speedup" in done.stdout


def test_a_ratio_averages_to_the_probability_of_acceptance() -> None:
    torch.manual_seed(0)
    target, draft = torch.rand(2, 7, dtype=torch.float64)
    target[3], draft[4] = 0, 0
    target, draft = target / target.sum(), draft / draft.sum()
    for mode, wanted in ((Mode.EXACT, overlap_of), (Mode.COUPLED, coupled_acceptance)):
        total = sum(float(target[x]) * kept_ratio(mode, target, draft, x) for x in range(7))
        assert total == pytest.approx(float(wanted(target, draft)), rel=1e-12)
    both = law.coupled_joint(target.expand(7, 7), draft.expand(7, 7), range(7))
    for x in (0, 1, 2, 4, 5, 6):
        assert kept_ratio(Mode.COUPLED, target, draft, x) == pytest.approx(both[x] / float(target[x]))
    assert kept_ratio(Mode.EXACT, target, draft, 4) == kept_ratio(Mode.COUPLED, target, draft, 4) == 0
    assert kept_ratio(Mode.EXACT, target, draft, 3) == float(overlap_of(target, draft))  # not the target's own text


def test_a_check_keeps_the_ratio_of_every_committed_token() -> None:
    target, draft = tiny_pair()
    sampling = Sampling(k=2, max_new_tokens=12)
    chain, prompt = Processors.of(sampling), (1, 2, 1)
    drafter = ModelDrafter(draft, chain)
    start(target, drafter, prompt)
    uniforms = KeyedUniforms(0, prompt_digest(prompt))
    rounds = list(
        speculative(
            target,
            drafter,
            chain,
            prompt,
            k=2,
            max_new_tokens=12,
            uniforms=uniforms,
            ended=lambda token: None,
            rule=RULES[Mode.EXACT],
        )
    )
    check = SelfCheck(1e-6)
    check.add(target, drafter, chain, prompt, rounds)
    text = [*prompt, *(t for r in rounds for t in r.tokens)]
    logits = torch.cat([rows for _, rows in target.score(text, 3)])
    probs = chain(logits, text[:3], text[3:-1]).double()
    drafts = [row for _, rows in drafter.score(text, 3) for row in rows]
    wanted = [min(1.0, float(q.double()[x] / p[x])) for p, q, x in zip(probs, drafts, text[3:], strict=False)]
    assert len(wanted) == 12
    assert check.result().ratios == pytest.approx(tuple(wanted))
    assert len(set(wanted)) > 3
    plain = SelfCheck(1e-6)
    plain.add(target, None, chain, prompt, rounds)
    assert plain.result().ratios == (None,) * 12


def test_a_real_run_can_be_simulated(tmp_path: Path) -> None:
    write_pair(tmp_path)
    flags = ["run", "--profile", "pair.yaml", "--prompt", "a loaf", "--max-new-tokens", "20", "--json"]
    done = process(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert len(result["check"]["ratios"]) == len(result["tokens"]) == 20
    assert all(0 <= r <= 1 for r in result["check"]["ratios"])
    shown = process(tmp_path, "simulate", "-", "--c", "0.1", stdin=done.stdout)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "pair: 20 tokens of 1 text; c = 0.1000 (given)" in shown.stdout
    refused = process(tmp_path, "simulate", "-", stdin=process(tmp_path, *flags, "--no-check").stdout)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "made with --no-check" in refused.stderr
