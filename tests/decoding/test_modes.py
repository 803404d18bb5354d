"""coupled, lenient and typical: their laws, their acceptance, and what a run in them says of itself."""

from __future__ import annotations

import math

import pytest
import torch

from specgen.decoding.eager import autoregressive, speculative, start
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.ngram import NgramDrafter
from specgen.errors import UsageError
from specgen.profiles.effective import resolve_sampling
from specgen.profiles.read import load_profile
from specgen.rounds.record import ends_at
from specgen.rounds.statistics import summarise
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, draw, keyed_uniform, prompt_digest
from specgen.settings import Mode, Sampling
from specgen.verification.law import coupled_acceptance, expected_acceptance, law, overlap, total_variation
from specgen.verification.rules import RULES, Rule, accept_exact, accept_lenient, accept_typical, residual, rule_for
from support.doubles import TableModel, enumerate_law, random_table

PROMPT = [0, 1]


def distributions(n: int, vocabulary: int, seed: int, scale: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, vocabulary, dtype=torch.float64, generator=generator) * scale).softmax(-1)


def spiked(n: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs with zeros on either side, equal pairs and disjoint ones among them."""
    target, draft = distributions(n, vocabulary, 1), distributions(n, vocabulary, 2)
    target[0, 1] = draft[1, 2] = 0
    draft[2] = target[2]
    target[3, ::2], draft[3, 1::2] = 0, 0
    return target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)


def test_coupled_acceptance_is_the_sum_over_all_pairs_and_within_its_bounds() -> None:
    target, draft = spiked(50, 6)
    found = coupled_acceptance(target, draft)
    for t, d, value in zip(target.tolist(), draft.tolist(), found.tolist(), strict=True):
        pairs = [1 / sum(max(t[y] / t[x], d[y] / d[x]) for y in range(6)) for x in range(6) if t[x] > 0 and d[x] > 0]
        assert value == pytest.approx(sum(pairs), abs=1e-12)
    tv = total_variation(target, draft)
    assert (found >= (1 - tv) / (1 + tv) - 1e-12).all()
    assert (found <= 1 - tv + 1e-12).all()


@pytest.mark.slow
def test_coupled_draws_have_the_target_s_law_and_agree_as_often_as_predicted() -> None:
    """10^6 draws a pair: each deviation stays within 4.5 standard errors (42 comparisons, one in 3,500 false)."""
    n = 1_000_000
    target, draft = spiked(6, 6)
    noise = keyed_uniform(5, 6, SharedNoise._STREAM, torch.arange(n)[:, None], torch.arange(6)[None])
    gumbel = -(-(noise + 2.0**-54).log()).log()
    for t, d in zip(target, draft, strict=True):
        own, drafted = (t.log() + gumbel).argmax(-1), (d.log() + gumbel).argmax(-1)
        seen = torch.bincount(own, minlength=6) / n
        for got, want in zip(seen.tolist(), t.tolist(), strict=True):
            assert abs(got - want) <= 4.5 * math.sqrt(want * (1 - want) / n)
        agree, predicted = float((own == drafted).double().mean()), float(coupled_acceptance(t[None], d[None]))
        assert abs(agree - predicted) <= 4.5 * math.sqrt(max(predicted * (1 - predicted), 0) / n) + 1e-12


def test_shared_noise_is_a_function_of_seed_digest_and_position_alone() -> None:
    weights = distributions(1, 5, 3)[0]
    one, other = SharedNoise(1, 2), SharedNoise(1, 2)
    assert torch.equal(one.gumbel(7, weights), other.gumbel(7, weights))
    assert not torch.equal(one.gumbel(7, weights), one.gumbel(8, weights))
    assert not torch.equal(one.gumbel(7, weights), SharedNoise(2, 2).gumbel(7, weights))
    expected = int((weights.log() + one.gumbel(7, weights)).argmax())
    for stream, round_index in ((1, 0), (3, 5)):
        assert int(draw(weights, stream, 7, round_index, one)) == expected


def texts(mode: Mode, k: int, drafter_kind: str, seed: int, *, length: int = 24) -> tuple[list[int], list]:
    target, draft = TableModel(random_table(7, 11)), TableModel(random_table(7, 12), "draft")
    processors = Processors.of(Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1))
    source = SharedNoise if mode is Mode.COUPLED else KeyedUniforms
    uniforms = source(seed, prompt_digest(PROMPT))
    if drafter_kind == "plain":
        start(target, None, PROMPT)
        rounds = list(
            autoregressive(target, processors, PROMPT, max_new_tokens=length, uniforms=uniforms, ended=ends_at([]))
        )
    else:
        drafter = NgramDrafter(7, dtype=torch.float64) if drafter_kind == "ngram" else ModelDrafter(draft, processors)
        start(target, drafter, PROMPT)
        rounds = list(
            speculative(
                target,
                drafter,
                processors,
                PROMPT,
                k=k,
                max_new_tokens=length,
                uniforms=uniforms,
                ended=ends_at([]),
                rule=RULES[mode],
            )
        )
    return [t for r in rounds for t in r.tokens], rounds


@pytest.mark.parametrize("seed", range(5))
def test_coupled_text_does_not_depend_on_draft_or_k(seed: int) -> None:
    plain, _ = texts(Mode.COUPLED, 0, "plain", seed)
    accepted = 0
    for kind in ("model", "ngram"):
        for k in (1, 2, 4, 8):
            text, rounds = texts(Mode.COUPLED, k, kind, seed)
            assert text == plain
            accepted += sum(r.accepted for r in rounds)
    assert accepted > 0
    assert texts(Mode.EXACT, 4, "model", seed)[0] != plain  # the equality is not a matter of course


def test_lenient_of_one_is_exact_and_less_is_biased_toward_the_draft() -> None:
    target, draft = spiked(40, 6)
    assert torch.equal(accept_lenient(1.0)(target, draft), accept_exact(target, draft))
    rule = Rule("lenient", accept_lenient(0.5))
    out = law(rule, target, draft)
    assert torch.allclose(out.sum(-1), torch.ones(40, dtype=torch.float64))
    bias = total_variation(out, target)
    assert float(bias.max()) > 0.05
    assert (total_variation(out, draft) <= total_variation(target, draft) + 1e-12).all()
    # The correction that follows from a is the residual, and no other does better (design: .197 < .213 < .240).
    a = rule.accept(target, draft)
    where = (draft * a).sum(-1) < 1 - 1e-9
    best = rule.correction(target, draft, a)
    assert torch.allclose(best[where], residual(target, draft)[where])
    for other in (lambda t, d, a: (t - 0.5 * d).clamp(min=0), lambda t, d, a: t):
        assert float(bias.mean()) < float(
            total_variation(law(Rule("x", rule.accept, other), target, draft), target).mean()
        )
    with pytest.raises(ValueError, match="lenience"):
        accept_lenient(0)


def test_typical_is_medusa_s_criterion_by_hand() -> None:
    target = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.06, 0.04]], dtype=torch.float64)
    draft = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    entropy = [-sum(p * math.log(p) for p in row) for row in target.tolist()]
    for epsilon, delta in ((0.3, 0.09), (0.05, 10.0)):
        a = accept_typical(epsilon, delta)(target, draft)
        for row, kept, h in zip(target.tolist(), a.tolist(), entropy, strict=True):
            assert kept == [float(p > min(epsilon, delta * math.exp(-h))) for p in row]


@pytest.mark.parametrize(
    "sampling", [Sampling(mode=Mode.LENIENT, lenience=0.4), Sampling(mode=Mode.TYPICAL, typical_epsilon=0.05)]
)
def test_the_loop_s_first_token_has_the_law_that_is_printed_as_biased(sampling: Sampling) -> None:
    """The enumerated law of the loop at a tested position is `law`, not the target; its bias is recorded."""
    target, draft = TableModel(random_table(4, 25)), TableModel(random_table(4, 26), "draft")
    processors, rule = Processors([]), rule_for(sampling)
    recorded = []

    def run(uniforms) -> tuple:
        drafter = ModelDrafter(draft, processors)
        start(target, drafter, PROMPT)
        rounds = list(
            speculative(
                target,
                drafter,
                processors,
                PROMPT,
                k=1,
                max_new_tokens=2,
                uniforms=uniforms,
                ended=ends_at([]),
                rule=rule,
            )
        )
        recorded.append(rounds[0])
        return rounds[0].tokens[:1]

    t, d = target.logits(PROMPT).softmax(-1), draft.logits(PROMPT).softmax(-1)
    expected, seen = law(rule, t, d), enumerate_law(run)
    for token in range(4):
        assert seen.get((token,), 0.0) == pytest.approx(float(expected[token]), abs=1e-12)
    bias = float(total_variation(expected, t))
    assert bias > 1e-3
    for r in recorded:
        assert r.biases == pytest.approx((bias,))
        assert r.expected == pytest.approx((float(expected_acceptance(rule, t, d)),))
    stats = summarise(recorded[:1])
    assert stats.mean_bias == stats.worst_bias == pytest.approx(bias)
    assert stats.predicted_alpha == pytest.approx(float((d * rule.accept(t, d)).sum()))


def test_predicted_alpha_of_coupled_is_its_own_and_not_the_overlap() -> None:
    _, rounds = texts(Mode.COUPLED, 2, "model", 0)
    for r in rounds:
        assert len(r.expected) == r.tested
        assert all(e <= o + 1e-12 for e, o in zip(r.expected, r.overlaps, strict=True))
    assert any(e < o - 1e-3 for r in rounds for e, o in zip(r.expected, r.overlaps, strict=True))
    assert overlap(*spiked(4, 6)).shape == (4,)


def test_settings_of_the_modes() -> None:
    profile = load_profile("smollm2", {"decoding.mode": "lenient", "decoding.lenience": 0.7})
    sampling = resolve_sampling(profile, {})
    assert (sampling.mode, sampling.lenience, sampling.sources["lenience"]) == (Mode.LENIENT, 0.7, "flag")
    with pytest.raises(UsageError, match="--lenience means nothing in exact mode"):
        load_profile("smollm2", {"decoding.lenience": 0.7})
    with pytest.raises(UsageError, match="--typical-delta means nothing in lenient mode"):
        load_profile("smollm2", {"decoding.mode": "lenient", "decoding.typical_delta": 0.1})
    with pytest.raises(UsageError, match="--lenience"):
        load_profile("smollm2", {"decoding.mode": "lenient", "decoding.lenience": 1.5})
    assert rule_for(Sampling(mode=Mode.TYPICAL)).name == "typical"


@pytest.mark.parametrize("mode", ["coupled", "lenient", "typical"])
def test_temperature_zero_and_a_mode_that_draws_contradict_each_other(mode: str) -> None:
    with pytest.raises(UsageError, match=f"mode {mode} draws"):
        load_profile("smollm2", {"decoding.mode": mode, "decoding.temperature": 0})
