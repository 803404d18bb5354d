"""One T(w): of widths measured, between them and beyond; and what everything that predicts makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from specgen.analysis.prediction import View, probed
from specgen.analysis.stored import load
from specgen.overlap.predict import UnitCosts
from specgen.rounds.costs import CallCosts, break_even_draft, plain_time, predicted_speedup, speculative_time
from specgen.rounds.expected import expected_rounds
from support import stored_results as stored
from support.bench_documents import COSTS, MS, PLAIN, document


def test_between_known_widths_the_line_goes_up_and_down() -> None:
    """float32 as torch runs it: 2 to 4 rows cost more than 5."""
    costs = CallCosts({5: 80, 1: 60, 3: 140, 9: 92})
    assert [costs.call(w) for w in range(1, 10)] == [60, 100, 140, 110, 80, 83, 86, 89, 92]


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ({1: 10, 5: 10, 9: 18}, [20, 22, 24]),  # the last two, not the first and the last
        ({1: 10, 5: 20, 9: 18}, [18, 18, 18]),  # never below the last
        ({1: 10, 8: 9, 9: 9}, [9, 9, 9]),
        ({9: 7}, [7, 7, 7]),  # a single width: flat
    ],
)
def test_beyond_the_widest_on_along_the_last_line_but_never_down(target: dict[int, float], wanted: list) -> None:
    costs = CallCosts(target)
    assert costs.widest == 9
    assert [costs.call(w) for w in (10, 11, 12)] == wanted


def test_below_the_narrowest_it_is_flat() -> None:
    assert [CallCosts({2: 5.0, 4: 9.0}).call(w) for w in (1, 2, 3)] == [5, 5, 7]


@pytest.mark.parametrize(
    "wrong", [{"target": {}}, {"target": {0: 1.0}}, {"target": {1: -1.0}}, {"target": {1: 1.0}, "draft": math.nan}]
)
def test_what_is_no_cost_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"needs the cost|costs are numbers"):
        CallCosts(**wrong)


def test_a_speedup_has_no_unit() -> None:
    seconds = CallCosts({1: 4.0, 2: 5.0, 3: 8.0}, draft=0.5, other=0.25, plain_other=0.125)
    calls = seconds.with_first()
    assert calls == CallCosts({1: 1.0, 2: 1.25, 3: 2.0}, draft=0.125, other=0.0625, plain_other=0.03125)
    assert calls.with_first(4.0) == seconds
    # Two tokens accepted and a bonus, then a correction: 3 + 1 + (one token is left) 1.
    e = expected_rounds([1.0, 1.0, 0.0, 0.0, 1.0], 2)
    assert e.lengths == (1, 1, 1)
    assert plain_time(e, seconds) == 5 * 4.125
    assert speculative_time(e, seconds) == 4 + 5 + 8 + 3 * 0.25 + 3 * 0.5
    assert predicted_speedup(e, calls) == predicted_speedup(e, seconds) == plain_time(e, seconds) / 19.25
    with pytest.raises(ValueError, match="took no time"):
        CallCosts({1: 0.0, 2: 1.0}).with_first()


def test_at_the_break_even_draft_nothing_is_gained() -> None:
    e, costs = expected_rounds([0.9] * 20, 3), CallCosts({1: 1.0, 4: 1.25}, other=0.0625, plain_other=0.0625)
    draft = break_even_draft(e, costs)
    assert draft is not None
    assert predicted_speedup(e, CallCosts(costs.target, draft, costs.other, costs.plain_other)) == pytest.approx(1)
    assert break_even_draft(expected_rounds([0.9] * 4, 0), costs) is None


def test_everything_that_predicts_has_one_curve(tmp_path: Path) -> None:
    """Beyond the widest, a bench went on along the line from end to end, an overlap flat, and simulate refused."""
    target = {1: 7 * MS, 2: 8 * MS, 3: 9 * MS, 5: 14 * MS}
    wanted = [1, 8 / 7, 9 / 7, 11.5 / 7, 2, 16.5 / 7, 19 / 7, 21.5 / 7]
    bench = document((PLAIN,), ratios={"small": [0.5] * 12})
    prices = View(bench).prices("small", "eager", 1)  # T(1) is measured, twice the probe's
    (draft,) = load(stored.write(tmp_path, bench.model_dump_json())).drafts
    curves = {
        "bench": lambda w: (prices.call(w) or 0.0) / (14 * MS),
        "auto": probed(COSTS).with_first().call,
        "simulate": draft.costs[0].calls.call,
        "overlap": UnitCosts.measured(CallCosts(target, 2 * MS), 4).calls.call,
    }
    for name, call in curves.items():
        assert [call(w) for w in range(1, 9)] == pytest.approx(wanted), name
