"""Real caches of tiny random models: lengths, contents, interruptions; and the law of seeded runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from specgen.decoding.eager import autoregressive, speculative, start
from specgen.drafting.checkpoint import ModelDrafter
from specgen.errors import RunError, UsageError
from specgen.models import causal, protocol, ragged, static
from specgen.models.causal import CausalLM
from specgen.models.protocol import prefill
from specgen.rounds.record import ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, Stream, keyed_uniform
from specgen.settings import Sampling
from specgen.verification.law import law, total_variation
from specgen.verification.rules import Rule
from support import tiny
from support.doubles import TableModel, difference, enumerate_law, joint_law, random_table, raw_resample
from support.rounds import EXACT, rounds_of
from support.tiny import ARCHITECTURES, Memo, Recorder, noisy_copy, plain_logits, tiny_llama, tiny_pair

PROMPT = [5, 17, 3, 42, 8]


def recorders(name: str, scale: float = 0.3) -> tuple[Recorder, Recorder]:
    model = ARCHITECTURES[name](0)
    return Recorder(model, "target"), Recorder(noisy_copy(model, scale), "draft")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_lengths_and_contents_over_many_rounds(name: str) -> None:
    """For Gemma 3 most of this lies beyond its window of 8 tokens."""
    target, draft = recorders(name)
    s = Sampling(k=3, max_new_tokens=150, seed=1)
    kinds, text = set(), list(PROMPT)
    for finished in rounds_of(target, draft, PROMPT, s):
        text += finished.tokens
        kinds.add((finished.tested, finished.accepted))
        assert target.lengths == (len(text) - 1,)
        if finished.drafted:  # else the draft was not asked
            assert draft.lengths == (len(text) - 1 - (finished.accepted == finished.drafted),)
        assert target.content == text[:-1]
        assert draft.content == text[: draft.lengths[0]]
    assert finished.index >= 50
    assert {(1, 0), (2, 1), (3, 2), (3, 3)} <= kinds
    assert target.largest_error() < 1e-4
    assert draft.largest_error() < 1e-4


def test_a_cache_that_is_off_by_one_is_seen_by_this_comparison() -> None:
    """The same comparison with a roll-back that leaves one rejected token in the keys and values."""

    class Stale(Recorder):
        @torch.inference_mode()
        def rollback(self, counts: Any) -> None:
            (count,) = counts
            if count:  # the tensors go back too little and too much: lengths stay right
                for layer in self._cache.layers:
                    layer.keys.copy_(torch.roll(layer.keys, 1, -2))
            super().rollback(counts)

    model = tiny_llama()
    target, draft = Stale(model, "target"), Recorder(noisy_copy(model, 0.3), "draft")
    assert list(rounds_of(target, draft, PROMPT, Sampling(k=3, max_new_tokens=30, seed=1)))
    assert target.largest_error() > 1e-2
    assert draft.largest_error() < 1e-4


def test_a_cache_that_miscounts_is_an_error() -> None:
    target, draft = tiny_pair()
    rounds = rounds_of(target, draft, PROMPT, Sampling(max_new_tokens=30))
    next(rounds)
    target._cache.crop(-1)
    with pytest.raises(RunError, match="the target's cache holds"):
        next(rounds)


def test_rolling_back_more_than_there_is_or_a_negative_count() -> None:
    model, _ = tiny_pair()
    model.forward(torch.tensor([PROMPT]), 1)
    for count in (-1, 6):
        with pytest.raises(ValueError, match="cannot roll back"):
            model.rollback([count])
    assert model.lengths == (5,)
    model.rollback([5])
    assert model.lengths == (0,)
    torch.testing.assert_close(model.forward(torch.tensor([PROMPT]), 5)[0], plain_logits(model, PROMPT))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prefill_and_scoring_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(protocol, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(ragged, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(static, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(causal, "SCORE_CHUNK", 8)
    model, _ = tiny_pair(name)
    text = [(i * i + 3 * i) % 50 for i in range(75)]
    expected = plain_logits(model, text)
    prefill(model, text[:-1])
    assert model.lengths == (74,)
    torch.testing.assert_close(model.forward(torch.tensor([text[-1:]]), 1)[0], expected[-1:], atol=1e-4, rtol=0)
    for first in (1, 2, 17, 40, 68, 74):
        pieces = list(model.score(text, first))
        assert [i for i, _ in pieces] == list(range(first, 75, 8))
        scored = torch.cat([rows for _, rows in pieces])
        torch.testing.assert_close(scored, expected[first - 1 : -1], atol=1e-4, rtol=0)
    assert model.lengths == (75,)  # scoring disturbs no cache


@pytest.mark.parametrize("rounds_first", [1, 2, 7])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_left_early_the_caches_are_right_and_one_can_go_on(name: str, rounds_first: int) -> None:
    target, draft = recorders(name)
    s = Sampling(k=3, max_new_tokens=60)
    rounds = rounds_of(target, draft, PROMPT, s)
    text = [*PROMPT, *(t for r in itertools.islice(rounds, rounds_first) for t in r.tokens)]
    rounds.close()
    assert target.lengths == (len(text) - 1,)
    assert target.content == text[:-1]
    assert draft.content == text[: draft.lengths[0]]
    more = list(rounds_of(target, draft, text, s, fresh=False))
    assert sum(len(r.tokens) for r in more) == 60
    assert max(target.largest_error(), draft.largest_error()) < 1e-4


class Interrupt:
    """A hook that raises in the middle of the n-th call of one layer."""

    def __init__(self, layer: Any, error: BaseException) -> None:
        self.error, self.left = error, -1
        layer.register_forward_pre_hook(self)

    def __call__(self, *ignored: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")], ids=["interrupt", "error"])
@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_interrupted_inside_a_call_the_caches_are_right(
    name: str, depth: int, who: str, error: BaseException
) -> None:
    target, draft = recorders(name)
    hook = Interrupt((target if who == "target" else draft).model.model.layers[depth], error)
    s = Sampling(k=3, max_new_tokens=60)
    rounds = rounds_of(target, draft, PROMPT, s)
    text = [*PROMPT, *(t for r in itertools.islice(rounds, 5) for t in r.tokens)]
    hook.left = 1 if who == "target" else 2  # the draft's second token of a round
    with pytest.raises(type(error)):
        next(rounds)
    assert target.lengths == (len(text) - 1,)
    assert len(text) - 2 <= draft.lengths[0] <= len(text) - 1
    more = list(rounds_of(target, draft, text, s, fresh=False))
    assert sum(len(r.tokens) for r in more) == 60
    assert max(target.largest_error(), draft.largest_error()) < 1e-4


def test_out_of_memory_is_an_error_of_one_line_and_leaves_the_caches_right() -> None:
    target, draft = recorders("llama")
    hook = Interrupt(target.model.model.layers[1], torch.OutOfMemoryError("CUDA out of memory"))
    rounds = rounds_of(target, draft, PROMPT, Sampling(max_new_tokens=60))
    text = [*PROMPT, *next(rounds).tokens]
    hook.left = 1
    with pytest.raises(RunError, match="out of memory in a call of the target on"):
        next(rounds)
    assert target.lengths == (len(text) - 1,)


def test_a_recurrent_model_is_refused_when_it_is_built() -> None:
    with pytest.raises(
        UsageError, match=r"the draft .MambaForCausalLM. (keeps a recurrent state|takes no key-value cache)"
    ):
        CausalLM(tiny.tiny_mamba(), "draft")


def test_a_model_without_a_cache_is_refused() -> None:
    class Bare(torch.nn.Module):
        device, config = torch.device("cpu"), tiny_llama().config

        def get_input_embeddings(self) -> Any:
            return torch.nn.Embedding(3, 2)

        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    with pytest.raises(UsageError, match="takes no key-value cache"):
        CausalLM(Bare(), "target")


class Broken(TableModel):
    """One row of logits is not finite: the one for `position`."""

    def __init__(self, role: str, position: int, value: float) -> None:
        super().__init__(random_table(3, 5), role)
        self.position, self.value = position, value

    def logits(self, prefix: Any) -> Tensor:
        row = super().logits(prefix).clone()
        if len(prefix) == self.position:
            row[1] = self.value
        return row


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_logits_that_are_not_finite_name_model_and_position(who: str, value: float) -> None:
    sound, broken = TableModel(random_table(3, 5)), Broken(who, 9, value)
    target, draft = (broken, sound) if who == "target" else (sound, broken)
    sound.role = "draft" if who == "target" else "target"
    text = [0, 1, 2]
    with pytest.raises(RunError, match=rf"the {who} produced logits that are not finite .* position 9;"):
        text.extend(
            t for r in rounds_of(target, draft, [0, 1, 2], Sampling(k=2, max_new_tokens=20)) for t in r.tokens
        )
    assert len(text) <= 9
    assert target.tokens == text[:-1]
    assert draft.tokens == text[: len(draft.tokens)]


def test_plain_decoding_names_them_too() -> None:
    target = Broken("target", 9, float("nan"))
    start(target, None, [0, 1, 2])
    rounds = autoregressive(
        target,
        Processors.of(Sampling()),
        [0, 1, 2],
        max_new_tokens=20,
        uniforms=KeyedUniforms(0, 0),
        ended=ends_at(()),
    )
    with pytest.raises(RunError, match=r"the target produced .* position 9;"):
        list(rounds)


def llama_law(target: CausalLM, draft: CausalLM, s: Sampling, prompt: list[int]) -> dict:
    def run(uniforms: Any) -> tuple[int, ...]:
        processors = Processors.of(s)
        drafter = ModelDrafter(draft, processors)
        start(target, drafter, prompt)
        rounds = speculative(
            target,
            drafter,
            processors,
            prompt,
            k=s.k,
            max_new_tokens=s.max_new_tokens,
            uniforms=uniforms,
            ended=ends_at(s.end_tokens),
        )
        return tuple(t for r in rounds for t in r.tokens)

    return enumerate_law(run)


def expected_law(target: CausalLM, s: Sampling, prompt: list[int]) -> dict:
    return joint_law(lambda text: plain_logits(target, text)[-1], prompt, s.max_new_tokens, s)


def test_enumeration_through_real_caches() -> None:
    model = tiny_llama(0, layers=1, hidden=16, vocab=5, dtype=torch.float64)
    target, draft = CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.5), "draft")
    s = Sampling(k=2, max_new_tokens=3, temperature=1.3, top_k=4)
    found = llama_law(target, draft, s, [1, 4, 2])
    assert difference(found, expected_law(target, s, [1, 4, 2])) < 1e-10
    assert difference(found, expected_law(draft, s, [1, 4, 2])) > 1e-3


@pytest.mark.parametrize("size", [3, 6])
def test_a_draft_with_another_number_of_embeddings(size: int) -> None:
    target = CausalLM(tiny_llama(0, layers=1, hidden=16, vocab=4, dtype=torch.float64), "target")
    draft = CausalLM(tiny_llama(1, layers=1, hidden=16, vocab=size, dtype=torch.float64), "draft", vocabulary=4)
    s = Sampling(k=2, max_new_tokens=3)
    assert draft.forward(torch.tensor([[3, 1]]), 2).shape == (1, 2, 4)
    assert difference(llama_law(target, draft, s, [3, 1]), expected_law(target, s, [3, 1])) < 1e-10


def test_a_smaller_draft_gives_nothing_to_what_it_lacks_and_reads_it_as_zero() -> None:
    draft = CausalLM(tiny_llama(1, vocab=40), "draft", vocabulary=50)
    logits = draft.forward(torch.tensor([[45, 1]]), 2)[0]
    assert torch.equal(logits.softmax(-1)[:, 40:], torch.zeros(2, 10))
    torch.testing.assert_close(logits[:, :40], plain_logits(draft, [0, 1]))
    target = CausalLM(tiny_llama(0), "target")
    rounds = list(rounds_of(target, draft, [*PROMPT, 49], Sampling(max_new_tokens=80)))
    assert any(t >= 40 for r in rounds for t in r.tokens)
    assert all(t < 40 for r in rounds for t in r.tokens[: r.accepted])


RUNS = 13_000
LEVEL = 1e-4  # of each statistical test below; seeds are fixed


@pytest.fixture(scope="module")
def memo_pair() -> tuple[Memo, Memo]:
    model = tiny_llama(3, vocab=12)
    return Memo(CausalLM(model, "target")), Memo(CausalLM(noisy_copy(model, 0.4), "draft"))


def first_tokens(pair: tuple[Memo, Memo], rule: Rule = EXACT) -> Tensor:
    target, draft = pair
    counts = torch.zeros(12, dtype=torch.float64)
    for seed in range(RUNS):
        rounds = rounds_of(target, draft, [1, 7, 4], Sampling(k=2, max_new_tokens=4, seed=seed), rule=rule)
        counts[next(rounds).tokens[0]] += 1
    return counts


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Chi-square, with cells of few expected counts put together."""
    expected = probs * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if expected[-1] < 1e-9:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


def first_laws(pair: tuple[Memo, Memo]) -> tuple[Tensor, Tensor]:
    target, draft = (m.logits([1, 7, 4]).double().softmax(-1) for m in pair)
    return target, draft


def test_chi_square_of_the_first_token(memo_pair: tuple[Memo, Memo]) -> None:
    target, draft = first_laws(memo_pair)
    assert float(total_variation(target, draft)) > 0.1
    counts = first_tokens(memo_pair)
    assert p_value(counts, target) > LEVEL
    # The test has the power that it is for: a law .03 away is told apart, in whichever direction.
    for token in range(3):
        other = target + (torch.eye(12)[token].double() - target) * 0.03 / (1 - target[token])
        assert float(total_variation(other, target)) == pytest.approx(0.03)
        assert p_value(counts, other / other.sum()) < LEVEL


def test_chi_square_sees_a_wrong_rule(memo_pair: tuple[Memo, Memo]) -> None:
    target, draft = first_laws(memo_pair)
    wrong = law(raw_resample(), target, draft)
    assert float(total_variation(wrong, target)) > 0.03
    counts = first_tokens(memo_pair, raw_resample())
    assert p_value(counts, target) < LEVEL
    assert p_value(counts, wrong) > LEVEL


def transforms(rule: Rule) -> list[float]:
    """Randomised probability integral transforms of all tokens of some generations, by fresh distributions.

    Tokens are ordered by draft/target, so that leaning to the draft pushes the transforms to one end.
    """
    target, draft = tiny_pair(scale=0.4)
    values: list[float] = []
    for seed in range(25):
        prompt = [seed, 3, 2 * seed]
        rounds = rounds_of(target, draft, prompt, Sampling(k=3, max_new_tokens=40, seed=seed), rule=rule)
        text = [*prompt, *(t for r in rounds for t in r.tokens)]
        p, q = (plain_logits(m, text)[:-1].double().softmax(-1) for m in (target, draft))
        for i in range(3, len(text)):
            ratio = q[i - 1] / p[i - 1]
            mine = text[i]
            below = float(p[i - 1][ratio < ratio[mine]].sum())
            v = float(keyed_uniform(seed, 123, Stream.CHECK, i, 0))
            values.append(below + v * float(p[i - 1, mine]))
    return values


def test_transforms_of_whole_generations_are_uniform() -> None:
    values = transforms(EXACT)
    assert len(values) == 1000
    assert stats.kstest(values, "uniform").pvalue > LEVEL
    lagged = stats.pearsonr(values[:-1], values[1:])
    assert lagged.pvalue > LEVEL


def test_transforms_see_a_wrong_rule() -> None:
    assert stats.kstest(transforms(raw_resample()), "uniform").pvalue < LEVEL
