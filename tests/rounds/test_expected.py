"""The recursion over a text, against enumeration of the loop and against simulation."""

from __future__ import annotations

import pytest

from specgen.decoding.eager import speculative, start
from specgen.drafting.checkpoint import ModelDrafter
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import best_k, constant_alpha_tau, expected_rounds
from specgen.rounds.record import ends_at
from specgen.sampling.processors import Processors
from support.doubles import TableModel, enumerate_law, random_table

PROMPT = [0]


def counts(k: int, length: int) -> dict[tuple, float]:
    """{(text, rounds, drafted, tested by position, accepted by position): probability} of the real loop."""
    target, draft = TableModel(random_table(3, 1)), TableModel(random_table(3, 2), "draft")
    processors = Processors([])

    def run(uniforms) -> tuple:
        drafter = ModelDrafter(draft, processors)
        start(target, drafter, PROMPT)
        rounds = list(
            speculative(
                target, drafter, processors, PROMPT, k=k, max_new_tokens=length, uniforms=uniforms, ended=ends_at([])
            )
        )
        text = tuple(t for r in rounds for t in r.tokens)
        tested = tuple(sum(r.tested > j for r in rounds) for j in range(k))
        accepted = tuple(sum(r.accepted > j for r in rounds) for j in range(k))
        return (text, len(rounds), sum(r.drafted for r in rounds), tested, accepted)

    return enumerate_law(run)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_text_alone_determines_the_expected_counts(k: int) -> None:
    length = 4
    law = counts(k, length)
    target, draft = TableModel(random_table(3, 1)), TableModel(random_table(3, 2))
    for text in {outcome[0] for outcome in law}:
        outcomes = {o: w for o, w in law.items() if o[0] == text}
        weight = sum(outcomes.values())
        ratios = []
        for i, token in enumerate(text):
            prefix = [*PROMPT, *text[:i]]
            t, d = (m.logits(prefix).softmax(-1)[token] for m in (target, draft))
            ratios.append(min(1.0, float(d / t)))
        expected = expected_rounds(ratios, k)

        def mean(part, outcomes=outcomes, weight=weight) -> float:
            return sum(w * part(o) for o, w in outcomes.items()) / weight

        assert expected.rounds == pytest.approx(mean(lambda o: o[1]), abs=1e-12)
        assert expected.drafted == pytest.approx(mean(lambda o: o[2]), abs=1e-12)
        for j in range(k):
            assert expected.tested[j] == pytest.approx(mean(lambda o, j=j: o[3][j]), abs=1e-12)
            assert expected.accepted[j] == pytest.approx(mean(lambda o, j=j: o[4][j]), abs=1e-12)


def test_sticky_acceptance_is_not_a_constant_alpha() -> None:
    """Stretches that are always and never accepted: the same α as a fair mixture, another τ."""
    ratios = ([1.0] * 20 + [0.0] * 20) * 50
    expected = expected_rounds(ratios, 4, limit=10**9)
    assert expected.alpha is not None
    assert constant_alpha_tau(expected.alpha, 4) - expected.tau > 0.05


def test_extremes() -> None:
    assert expected_rounds([0.0] * 10, 3).tau == 1
    assert expected_rounds([1.0] * 100, 4, limit=10**9).tau == 5
    assert expected_rounds([0.5] * 7, 0).rounds == 7
    assert expected_rounds([0.5] * 7, 0).alpha is None
    long = expected_rounds([0.7] * 20_000, 3, limit=10**9)
    assert long.tau == pytest.approx(constant_alpha_tau(0.7, 3), rel=1e-3)
    assert long.alpha == pytest.approx(0.7)
    assert constant_alpha_tau(1.0, 3) == 4
    for wrong in ({"ratios": [], "k": 1}, {"ratios": [0.5], "k": -1}):
        with pytest.raises(ValueError, match="needs k"):
            expected_rounds(**wrong)


def test_the_limit_shortens_the_last_rounds() -> None:
    assert expected_rounds([1.0] * 5, 4).drafted == 4
    assert expected_rounds([1.0] * 6, 4).rounds == 2
    assert expected_rounds([1.0] * 6, 4).drafted == 4


def test_predicted_speedup_is_the_textbook_form_for_constant_costs() -> None:
    alpha, c, k = 0.6, 0.1, 3
    expected = expected_rounds([alpha] * 50_000, k, limit=10**9)
    textbook = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))
    assert predicted_speedup(expected, CallCosts({1: 1.0}, c)) == pytest.approx(textbook, rel=1e-3)
    two = predicted_speedup(expected, CallCosts({1: 1.0}, c, plain_other=1.0))
    assert two == pytest.approx(2 * textbook, rel=1e-3)
    # No drafts and no widening: the rest of a round on both sides, and nothing is gained or lost.
    assert predicted_speedup(expected_rounds([0.0] * 9, 0), CallCosts({1: 1.0}, c, 0.3, 0.3)) == pytest.approx(1)
    assert best_k({1: 1.1, 2: 1.3, 4: 1.3}) == 2


def test_none_says_that_nothing_is_proposed() -> None:
    ratios = [0.5, None, 1.0, 0.25, None, 0.75]
    said = expected_rounds([r or 0.0 for r in ratios], 3, proposes=[r is not None for r in ratios])
    assert expected_rounds(ratios, 3) == said
    assert said != expected_rounds([r or 0.0 for r in ratios], 3)


def test_of_equal_speedups_the_smallest_k_is_best_whatever_their_order() -> None:
    assert best_k({4: 1.3, 2: 1.3, 8: 1.3, 1: 1.1}) == 2
    assert best_k({1: 1.0, 2: 1.0}) == best_k({2: 1.0, 1: 1.0}) == 1
    assert best_k({1: 0.7, 3: 0.9, 2: 0.9}) == 2
