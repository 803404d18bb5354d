"""The rules as mathematics: the law that comes out of a position, acceptance, and drawing by cells."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specgen.rounds.record import Origin
from specgen.sampling.randomness import Stream, draw, gumbel_of, keyed_uniform
from specgen.settings import Mode
from specgen.verification.judge import HostDraws, verify
from specgen.verification.law import coupled_acceptance, coupled_joint, law, overlap, total_variation
from specgen.verification.rules import (
    RULES,
    Rule,
    accept_exact,
    accept_greedy,
    accept_typical,
    best_correction,
    residual,
)
from support.doubles import membership, raw_resample

EXACT, GREEDY = RULES[Mode.EXACT], RULES[Mode.GREEDY]


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def random_probs(seed: int, rows: int = 50, vocabulary: int = 7, zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, vocabulary, dtype=torch.float64, generator=generator) ** 3 + 1e-9
    gone = torch.rand(rows, vocabulary, dtype=torch.float64, generator=generator) < zeros
    gone[:, 0] &= ~gone.all(-1)
    return normalised(weights.masked_fill(gone, 0.0))


def pairs(kind: str) -> tuple[Tensor, Tensor]:
    if kind == "random":
        return random_probs(0), random_probs(1)
    if kind == "wide":
        return random_probs(0, 3, 50_000), random_probs(1, 3, 50_000)
    if kind == "zeros":
        return random_probs(2, zeros=0.4), random_probs(3, zeros=0.4)
    if kind == "identical":
        return random_probs(4), random_probs(4)
    if kind == "one-hot draft":
        return random_probs(5), torch.eye(7, dtype=torch.float64)[torch.arange(50) % 7]
    if kind == "one-hot target":
        return torch.eye(7, dtype=torch.float64)[torch.arange(50) % 7], random_probs(6)
    target, draft = random_probs(7), random_probs(8)
    target[:, :3], draft[:, 3:] = 0, 0  # disjoint
    return normalised(target), normalised(draft)


KINDS = ["random", "wide", "zeros", "identical", "one-hot draft", "one-hot target", "disjoint"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_exact_is_the_target(kind: str) -> None:
    target, draft = pairs(kind)
    assert float((law(EXACT, target, draft) - target).abs().max()) < 2e-15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [EXACT, GREEDY, raw_resample(), membership(2)], ids=lambda r: r.name)
def test_a_law_is_a_distribution(rule: Rule, kind: str) -> None:
    found = law(rule, *pairs(kind))
    assert bool((found >= 0).all())
    torch.testing.assert_close(found.sum(-1), torch.ones(len(found)).double())


@pytest.mark.parametrize("rule", [raw_resample(), membership(2), membership(3)], ids=lambda r: r.name)
@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot draft"])
def test_wrong_rules_have_a_bias(rule: Rule, kind: str) -> None:
    target, draft = pairs(kind)
    assert float(total_variation(law(rule, target, draft), target).mean()) > 0.02


def test_a_wrong_rules_law_by_hand() -> None:
    target, draft = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.8, 0.0, 0.2]).double()
    # kept: .5 of token 0. The other half is drawn from the target again.
    assert law(raw_resample(), target, draft).tolist() == pytest.approx([0.75, 0.25, 0.0])
    # top 1 (token 0): .8 kept, the rest from the target
    assert law(membership(1), target, draft).tolist() == pytest.approx([0.9, 0.1, 0.0])
    assert law(EXACT, target, draft).tolist() == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_overlap_total_variation_and_probability_of_acceptance(kind: str) -> None:
    target, draft = pairs(kind)
    beta = overlap(target, draft)
    torch.testing.assert_close(beta, 1 - total_variation(target, draft), rtol=0, atol=1e-13)
    torch.testing.assert_close(beta, (draft * accept_exact(target, draft)).sum(-1), rtol=0, atol=1e-13)
    torch.testing.assert_close(1 - beta, residual(target, draft).sum(-1), rtol=0, atol=1e-13)
    assert bool((beta <= 1 + 1e-13).all())
    assert bool((beta == 0).all()) == (kind == "disjoint")


def test_accept_is_the_ratio() -> None:
    target, draft = torch.tensor([0.1, 0.6, 0.3, 0.0]), torch.tensor([0.4, 0.3, 0.0, 0.3])
    assert accept_exact(target, draft).tolist() == pytest.approx([0.25, 1, 1, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_the_residual_has_no_mass_everything_is_accepted(dtype: torch.dtype) -> None:
    """The draft's row may sum to a little more than the target's: ratios below 1 and nothing to correct to."""
    target = torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]], dtype=dtype)
    draft = target.clone()
    draft[0, 0] += torch.finfo(dtype).eps
    assert float(target[0, 0] / draft[0, 0]) < 1
    a = accept_exact(target, draft)
    assert a.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert bool(torch.isfinite(law(EXACT, target, draft)).all())
    verdict = run(EXACT, target[[0, 0]], draft[:1], [0], {Stream.ACCEPT: [1 - 2**-53]})
    assert (verdict.accepted, verdict.origin) == (1, Origin.BONUS)


def test_best_correction_is_the_residual_for_exact() -> None:
    target, draft = pairs("zeros")
    a = accept_exact(target, draft)
    torch.testing.assert_close(best_correction(target, draft, a), residual(target, draft), rtol=0, atol=1e-16)


def test_greedy() -> None:
    target, draft = pairs("random")
    one_hot = torch.nn.functional.one_hot(target.argmax(-1), 7).double()
    assert torch.equal(accept_greedy(target, draft), one_hot)
    torch.testing.assert_close(law(GREEDY, one_hot, draft), one_hot)
    tied = torch.tensor([[0.4, 0.4, 0.2]])
    assert accept_greedy(tied, tied).tolist() == [[1, 0, 0]]  # the first of equals


class Scripted:
    """Uniforms from a list for each stream; remembers the keys."""

    def __init__(self, values: dict[Stream, list[float]]) -> None:
        self.values = {stream: list(v) for stream, v in values.items()}
        self.keys: list[tuple] = []

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor) -> float:
        self.keys.append((stream, position, round_index))
        return self.values[stream].pop(0)


class Seen(NamedTuple):
    accepted: int
    tested: int
    next_token: int
    origin: Origin


def judged(rule: Rule, target: Tensor, draft: Tensor, drafted: list[int], uniforms: Scripted) -> Seen:
    verdict = verify(rule, target, draft, torch.tensor(drafted, dtype=torch.int64), HostDraws(uniforms, 10, 3))
    accepted = int(verdict.accepted)
    rejected = accepted < len(drafted)
    return Seen(accepted, accepted + rejected, int(verdict.token), Origin.CORRECTION if rejected else Origin.BONUS)


def run(rule: Rule, target: Tensor, draft: Tensor, drafted: list[int], values: dict[Stream, list[float]]) -> Seen:
    values = {Stream.BONUS: [0.0], Stream.CORRECTION: [0.0]} | values
    return judged(rule, target, draft, drafted, Scripted(values))


TARGET = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5], [0.1, 0.8, 0.1]]).double()
DRAFT = torch.tensor([[0.4, 0.2, 0.4], [0.5, 0.5, 0.0]]).double()


@pytest.mark.parametrize(
    ("u", "accepted", "tested", "origin"),
    [
        ([0.49, 0.99], 2, 2, Origin.BONUS),
        ([0.5, 0.0], 0, 1, Origin.CORRECTION),  # a = .5: u < .5 is kept, u = .5 is not
        ([math.nextafter(0.5, 0), 0.0], 2, 2, Origin.BONUS),
    ],
)
def test_the_test_is_strict(u: list[float], accepted: int, tested: int, origin: Origin) -> None:
    verdict = run(EXACT, TARGET, DRAFT, [0, 1], {Stream.ACCEPT: u})
    assert (verdict.accepted, verdict.tested, verdict.origin) == (accepted, tested, origin)


def test_a_token_to_which_the_target_gives_nothing_is_rejected_even_at_zero() -> None:
    verdict = run(EXACT, TARGET, DRAFT, [1, 0], {Stream.ACCEPT: [0.0, 0.0]})
    assert (verdict.accepted, verdict.tested, verdict.origin) == (1, 2, Origin.CORRECTION)
    assert verdict.next_token == 2  # all that the residual of that position holds


def test_the_correction_is_drawn_from_the_residual_and_the_bonus_from_the_last_row() -> None:
    at = {
        u: run(EXACT, TARGET, DRAFT, [0, 1], {Stream.ACCEPT: [0.9], Stream.CORRECTION: [u]}).next_token
        for u in (0.0, 0.49, 0.51, 0.99)
    }
    assert at == {0.0: 1, 0.49: 1, 0.51: 2, 0.99: 2}  # residual (0, .1, .1)
    at = {
        u: run(EXACT, TARGET, DRAFT, [2, 1], {Stream.ACCEPT: [0.0, 0.0], Stream.BONUS: [u]}).next_token
        for u in (0.0, 0.11, 0.89, 0.91)
    }
    assert at == {0.0: 0, 0.11: 1, 0.89: 1, 0.91: 2}


def test_keys_of_a_round() -> None:
    uniforms = Scripted({Stream.ACCEPT: [0.0, 0.0], Stream.BONUS: [0.0], Stream.CORRECTION: [0.0]})
    judged(EXACT, TARGET, DRAFT, [2, 1], uniforms)
    assert uniforms.keys == [(Stream.ACCEPT, 10, 3), (Stream.ACCEPT, 11, 3), (Stream.BONUS, 12, 3)]
    uniforms = Scripted({Stream.ACCEPT: [0.0, 0.0], Stream.CORRECTION: [0.0]})
    judged(EXACT, TARGET, DRAFT, [1, 0], uniforms)
    assert uniforms.keys[-1] == (Stream.CORRECTION, 11, 3)


def test_nothing_drafted_is_a_bonus() -> None:
    verdict = run(EXACT, TARGET[:1], DRAFT[:0], [], {})
    assert (verdict.accepted, verdict.tested, verdict.next_token, verdict.origin) == (0, 0, 0, Origin.BONUS)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_greedy_verifies_by_argmax(u: float) -> None:
    """Whatever the uniforms."""
    every = {stream: [u] * 3 for stream in (Stream.ACCEPT, Stream.CORRECTION, Stream.BONUS)}
    one_hot = torch.eye(3, dtype=torch.float64)[[2, 1, 0]]
    verdict = run(GREEDY, one_hot, DRAFT, [2, 0], every)
    assert (verdict.accepted, verdict.tested) == (1, 2)
    assert (verdict.next_token, verdict.origin) == (1, Origin.CORRECTION)
    verdict = run(GREEDY, one_hot, DRAFT, [2, 1], every)
    assert (verdict.accepted, verdict.tested) == (2, 2)
    assert (verdict.next_token, verdict.origin) == (0, Origin.BONUS)


def drawn(weights: list[float], u: float, dtype: torch.dtype = torch.float64) -> int:
    return int(draw(torch.tensor(weights, dtype=dtype), Stream.BONUS, 0, 0, lambda *key: u))


LAST = 1 - 2**-53  # the largest uniform there is


def test_cells_are_half_open() -> None:
    weights = [0.25, 0.25, 0.5]  # exact in binary
    edges = {0.0: 0, math.nextafter(0.25, 0): 0, 0.25: 1, math.nextafter(0.5, 0): 1, 0.5: 2, LAST: 2}
    assert {u: drawn(weights, u) for u in edges} == edges


def test_a_cell_of_no_width_is_never_hit() -> None:
    weights = [0.0, 0.25, 0.0, 0.0, 0.75, 0.0, 0.0]
    assert {u: drawn(weights, u) for u in (0.0, 0.25, LAST)} == {0.0: 1, 0.25: 4, LAST: 4}
    assert drawn([0.0, 0.0, 5e-324], LAST) == 2
    assert drawn([0.0, 1e-30, 0.0], 0.0) == drawn([0.0, 1e-30, 0.0], LAST) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_edge_of_random_weights(dtype: torch.dtype) -> None:
    for row in random_probs(9, rows=40, vocabulary=60, zeros=0.7).to(dtype) * 0.37:
        edges = row.double().cumsum(-1)
        cuts = [0.0, LAST, *(edges / edges[-1]).tolist()]
        for u in {min(x, LAST) for c in cuts for x in (c, math.nextafter(c, 0), math.nextafter(c, 1))}:
            assert row[drawn(row.tolist(), u, dtype)] > 0


def test_weights_need_not_sum_to_one() -> None:
    assert [drawn([2.0, 6.0], u) for u in (0.24, 0.25, 0.9)] == [0, 1, 1]


def test_typical_keeps_what_is_above_its_bound_and_nothing_that_is_on_it() -> None:
    """Numbers that are exact in binary: a probability that equals the bound is not greater than it."""
    target = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]).double()
    assert accept_typical(0.25, 100.0)(target, target).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    below = math.nextafter(0.25, 0)
    assert accept_typical(below, 100.0)(target, target).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    # The entropy's side: a certain row has entropy 0, so that its bound is delta itself.
    assert accept_typical(1.0, 1.0)(target[1:], target[1:]).tolist() == [[0, 0, 0, 0]]
    assert accept_typical(1.0, math.nextafter(1.0, 0))(target[1:], target[1:]).tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_joint_law_by_its_definition(kind: str) -> None:
    """P(both draw x) of every x: 1 / Σ max, never more than either gives x, and in all the acceptance."""
    target, draft = (rows[:4, :60] for rows in pairs(kind))
    if kind == "wide":
        target, draft = normalised(target), normalised(draft)
    for t, d in zip(target, draft, strict=True):
        n = len(t)
        found = coupled_joint(t.expand(n, n), d.expand(n, n), range(n))
        for x in range(n):
            p, q = float(t[x]), float(d[x])
            wanted = (
                0.0
                if p == 0 or q == 0
                else 1 / sum(max(float(a) / p, float(b) / q) for a, b in zip(t, d, strict=True))
            )
            assert found[x] == pytest.approx(wanted, abs=1e-12)
            assert found[x] <= min(p, q) + 1e-12
        assert sum(found) == pytest.approx(float(coupled_acceptance(t[None], d[None])), abs=1e-10)


def test_coupled_joint_law_by_drawing() -> None:
    """What shared noise does, 200,000 times: within 4.5 standard errors at every token."""
    target, draft, n = random_probs(11, 1)[0], random_probs(12, 1)[0], 200_000
    u = keyed_uniform(3, 4, torch.arange(n)[:, None], torch.arange(len(target))[None])
    both = (target.log() + gumbel_of(u)).argmax(-1), (draft.log() + gumbel_of(u)).argmax(-1)
    joint = coupled_joint(target.expand(7, 7), draft.expand(7, 7), range(7))
    for x, p in enumerate(joint):
        seen = float(((both[0] == x) & (both[1] == x)).double().mean())
        assert abs(seen - p) <= 4.5 * math.sqrt(p * (1 - p) / n)
