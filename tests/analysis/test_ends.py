"""Texts that go on behind their end while timing: what counts, what is said, and the numbers by hand.

k = 2 accepts (2, 0) in turn: 3 + 1 + 3 + 1 + 3 + 1 tokens, five rounds of 24 units and one of 16; a plain step is 16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.analysis import simulate as simulate_module
from specgen.analysis.analyse import analyse
from specgen.analysis.columns import ended_rounds, passed_end, rounds_of, rounds_to_end
from specgen.analysis.compare import compare
from specgen.analysis.prediction import View, predict
from specgen.analysis.stored import load
from specgen.errors import UsageError
from specgen.report.bench import grids, lines
from specgen.report.page.bench import _accepted_counts
from specgen.results.bench import Bench
from specgen.results.files import parse_bench
from specgen.rounds.expected import expected_rounds, pooled
from support.bench_documents import K2, MS, PLAIN, Script, document

SEVEN = range(7)


def ended(ends: Mapping[int, int], *scripts: Script, **options: Any) -> Bench:
    return document([replace(s, ends=ends) for s in scripts or (PLAIN, K2)], **options)


@pytest.mark.parametrize(
    ("end", "counts"),  # drafted, tested, accepted, committed
    [
        (1, [(2, 1, 1, 1)]),  # inside what was accepted: what is behind it was never tested
        (2, [(2, 2, 2, 2)]),
        (3, [(2, 2, 2, 3)]),  # the bonus
        (4, [(2, 2, 2, 3), (2, 1, 0, 1)]),  # a correction
        (5, [(2, 2, 2, 3), (2, 1, 0, 1), (2, 1, 1, 1)]),
        (12, None),
        (None, None),
    ],
)
def test_the_round_that_holds_the_end_is_cut_as_a_run_would_have(end: int | None, counts: list | None) -> None:
    row = ended({} if end is None else {0: end}).timed("k = 2")[0].rows[0]
    assert passed_end(row) is (counts is not None)
    found = ended_rounds(row)
    if counts is None:
        assert found == rounds_of(row)
        return
    assert [(r.drafted, r.tested, r.accepted, len(r.committed)) for r in found] == counts
    assert all(len(r.overlaps) == r.tested for r in found)
    assert len(found) == rounds_to_end(row)


def test_rates_times_and_speedup_are_up_to_the_end() -> None:
    """All texts end with their fourth token: two rounds of 24 units against four steps of 16, not 136 against 192."""
    analysis = analyse(ended(dict.fromkeys(SEVEN, 4)))
    plain, k2 = analysis.arms
    assert analysis.passed_end == (7, 7)  # one text a prompt: both arms wrote it
    assert (k2.alpha, k2.tau) == (2 / 3, 2)
    assert (plain.seconds_per_token, k2.seconds_per_token) == (16 * MS, 12 * MS)
    assert k2.speedup is not None
    assert k2.speedup.estimate == k2.speedup.low == pytest.approx(64 / 48)
    assert (k2.draft_share, k2.verify_share) == (pytest.approx(4 / 24), pytest.approx(18 / 24))
    assert [(p.tested, p.accepted) for p in analysis.positions] == [(14, 7), (7, 7)]
    assert [c.speedup.estimate for c in analysis.categories if c.speedup] == pytest.approx([64 / 48] * 2)
    # Four calls behind 4, 5, 6 and 7 cached tokens.
    assert analysis.costs[0].bytes_per_token == (4 * 1_000_000 + (4 + 5 + 6 + 7) * 1000) / 4
    assert analysis.costs[1].priced == {1: 14 * MS, 2: 16 * MS, 3: 18 * MS}  # of all that was timed


def test_what_only_pays_behind_the_end_does_not_pay() -> None:
    """Nothing is accepted up to the fourth token, everything behind it."""
    late = Script("k = 2", k=2, accepted=(0, 0, 0, 0, 2, 2, 2))
    bench = ended(dict.fromkeys(SEVEN, 4), PLAIN, late)
    verdict = analyse(bench).verdict
    assert verdict.pays is False
    assert "does not pay here: speedup 0.67 [0.67, 0.67]" in verdict.text
    # Four rounds of 24 units for a token each, two of them for three, and one of 20 for the last two.
    whole = analyse(ended({}, PLAIN, late)).arms[1].speedup
    assert whole is not None
    assert whole.estimate == pytest.approx(192 / 164)
    said = "7 of 7 texts passed their end: α, τ and speedup are up to it; behind it too, the speedup of k = 2 is "
    assert verdict.text.endswith(f"{said}{whole.estimate:.2f}.")
    assert "passed" not in analyse(ended({}, PLAIN, late)).verdict.text


def test_it_is_said_in_the_caption_and_how_many_of_how_many() -> None:
    bench = ended({0: 4, 3: 5, 5: 12})  # prompt 5 ends with its last token and passes nothing
    analysis = analyse(bench)
    said = "2 of 7 texts passed their end"
    assert analysis.passed_end == (2, 7)
    assert (
        f"{said}, since nothing ends a text while timing: all numbers are up to it."
        in grids(analysis, bench)[0].caption
    )
    assert any(line.startswith("verdict: ") and said in line for line in lines(analysis, bench))
    quiet = document()
    assert "passed" not in str(grids(analyse(quiet), quiet)) + str(lines(analyse(quiet), quiet))


def test_predictions_are_of_the_texts_up_to_their_ends() -> None:
    ratios = [0.0, 0.0, 0.0, 0.0] + [1.0] * 8
    bench = ended({p: 4 + p for p in SEVEN}, ratios={"small": ratios}, candidates=[1, 2, 4])
    for p in predict(bench, "small", "eager", 1):
        wanted = pooled([expected_rounds(ratios[: 4 + i], p.k, limit=12) for i in SEVEN])
        assert (p.tau, p.alpha) == (pytest.approx(wanted.tau), pytest.approx(wanted.alpha))
    assert "each up to its end" in str(grids(analyse(bench), bench))


def test_greedy_texts_with_ends_predict_the_counts_themselves() -> None:
    """The prediction equals the measurement with ends as without, and nothing warns."""
    bench = ended({p: 4 + p % 3 for p in SEVEN}, ratios={"small": [1.0, 1.0, 1.0, 0.0] * 3})
    analysis = analyse(bench)
    k2 = analysis.arms[1]
    assert analysis.predictions[0].tau == pytest.approx(k2.tau)
    assert k2.ratio == pytest.approx(1.0)
    assert not [w for w in analysis.warnings if "predicted" in w]


def test_a_batch_is_timed_until_its_last_rows_end() -> None:
    """Rows that end with token 4 and 8 of one group: two and four rounds, so four steps for twelve tokens; plainly
    eight for twelve."""
    scripts = (Script("plain B=2", batch=2), Script("k=2 B=2", k=2, accepted=(2, 0), batch=2))
    bench = ended({0: 4, 1: 8}, *scripts, categories=[None, None], ratios={"small": [1.0, 1.0, 1.0, 0.0] * 3})
    plain, k2 = analyse(bench).arms
    assert (plain.seconds_per_token, k2.seconds_per_token) == (8 * 16 * MS / 12, 4 * 24 * MS / 12)
    assert k2.tau == 12 / 6
    assert k2.speedup is not None
    assert k2.speedup.estimate == k2.predicted == pytest.approx(128 / 96)


def test_a_batchs_slowest_row_need_not_be_its_longest() -> None:
    """Nothing accepted of five tokens, everything of nine: five steps, and nine plainly."""
    scripts = (Script("plain", batch=2), Script("k=2", k=2, accepted={0: (0,), 1: (2,)}, batch=2))
    bench = ended({0: 5, 1: 9}, *scripts, categories=[None, None], ratios={"small": [1.0] * 12})
    bench.scores[0].ratios = [0.0] * 12
    k2 = analyse(bench).arms[1]
    assert k2.speedup is not None
    assert (k2.speedup.estimate, k2.predicted) == (pytest.approx(1.2), pytest.approx(1.2))  # 9 · 16 / (5 · 24)


def test_reasons_are_of_the_rounds_up_to_the_end() -> None:
    silent = ended(dict.fromkeys(SEVEN, 4), PLAIN, Script("k = 2", k=2, drafts=(0,), other=4.0))
    assert "no proposal in any of 28 rounds that had room" in analyse(silent).verdict.text
    # Calls up to the end are faster than those behind it, and so priced too high; that plain decoding slows down
    # behind it, by more, explains nothing.
    bench = ended(dict.fromkeys(SEVEN, 4), ratios={"small": [1.0, 1.0, 1.0, 0.0] * 3})
    for m in bench.timed("k = 2"):
        for i in range(2):
            m.steps.verify_s[i] -= 8 * MS
            m.steps.total_s[i] -= 8 * MS
    for m in bench.timed("plain"):
        for i in range(7, 12):
            m.steps.total_s[i] += 400 * MS
            m.steps.verify_s[i] += 400 * MS
    (warning,) = (w for w in analyse(bench).warnings if "predicted" in w)
    assert "a call on 3 tokens took 9.77 ms on average and was priced at 17.58 ms" in warning


def test_a_simulation_and_the_page_count_up_to_the_end(tmp_path: Path) -> None:
    bench = ended(dict.fromkeys(SEVEN, 4), ratios={"small": [0.0] * 4 + [1.0] * 8}, candidates=[2])
    path = tmp_path / "bench.json"
    path.write_text(bench.model_dump_json())
    for options in ({}, {"c": 0.1}):
        (found,), notes = simulate_module.run(load(path), max_k=2, **options)
        assert (found.tokens, found.predictions[1].alpha, found.predictions[1].tau) == (28, 0, 1)
        assert any(note.startswith("7 of 7 texts passed their end") for note in notes)
    assert _accepted_counts(bench, "k = 2") == {0: 7, 1: 0, 2: 7}


def test_a_comparison_counts_up_to_the_end_and_says_so() -> None:
    old, new = document(), ended(dict.fromkeys(SEVEN, 4))
    found = compare(old, new)
    assert "b: 7 of 7 texts passed their end: its numbers are up to it" in found.notes
    assert not any(note.startswith("a:") for note in found.notes)
    speculative = found.arms[1]
    assert (speculative.a.alpha, speculative.b.alpha, speculative.b.tau) == (6 / 8, 2 / 3, 2)
    assert speculative.b.speedup.estimate == pytest.approx(64 / 48)


def test_a_file_without_ends_is_read_and_one_with_impossible_ends_is_not() -> None:
    data = json.loads(ended({0: 4}, ratios={"small": [0.5] * 12}).model_dump_json())
    older = json.loads(json.dumps(data))
    for row in (row for m in older["measurements"] for row in m["rows"]):
        row.pop("end")
    for score in older["scores"]:
        score.pop("end")
    assert analyse(parse_bench(older, "x")).passed_end == (0, 7)
    assert parse_bench(data, "x").scores[0].end == 4
    for place in (data["scores"][0], data["measurements"][0]["rows"][0]):
        place["end"] = 13
        with pytest.raises(UsageError, match="an end at token 13 of 12 cannot be"):
            parse_bench(data, "x")
        place["end"] = 4


def test_what_calls_cost_is_of_all_that_was_timed() -> None:
    """Two rounds a prompt before the end; a single prompt has too few of them for a price."""
    bench = ended({0: 4}, categories=["chat"], costs=())
    prices = View(bench).prices("small", "eager", 1)
    assert (prices.call(1), prices.call(3), prices.draft(2)) == (14 * MS, 18 * MS, 2 * MS)
