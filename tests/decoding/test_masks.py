"""A head that rules a token out by a bias of −inf is no fault; a processor that leaves no token is one, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specgen.audit.auditor import Auditor
from specgen.audit.findings import Status
from specgen.decoding.batch import BatchGeneration
from specgen.decoding.captured.capture import call_directly
from specgen.decoding.captured.fits import loop_for
from specgen.decoding.generation import Generation
from specgen.decoding.loop import rounds_of, steps
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Row
from specgen.errors import RunError
from specgen.machine.clocks import untimed
from specgen.models import packed
from specgen.models.causal import CausalLM
from specgen.models.engines import prepare
from specgen.overlap.score import score_text
from specgen.rounds.record import ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, prompt_digest
from specgen.settings import Mode, Sampling
from support.doubles import TableModel, random_table
from support.tiny import noisy_copy, tiny_llama

PROMPT = (3, 1, 4, 1, 5)
RULED_OUT = (7, 30)
GREEDY: dict[str, Any] = {"mode": Mode.GREEDY, "temperature": None}


def with_bias(model: Any, tokens: Sequence[int], value: float) -> Any:
    """The same model with a bias on its head."""
    model = copy.deepcopy(model)
    bias = torch.zeros(model.lm_head.out_features)
    bias[list(tokens)] = value
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def pair_of(sampling: Sampling, value: float = 0.0, tokens: Sequence[int] = RULED_OUT, only: str = "both") -> Pair:
    """A llama and a noisy copy of it, the heads of both or of one with that bias on these tokens."""
    model = tiny_llama(vocab=40)
    sides = {"target": model, "draft": noisy_copy(model, 0.2)}
    sides = {role: with_bias(m, tokens, value if only in ("both", role) else 0.0) for role, m in sides.items()}
    target, draft = (CausalLM(m, role) for role, m in sides.items())
    processors = Processors.of(sampling)
    return Pair(target, ModelDrafter(draft, processors), processors, sampling, None, torch.float32, untimed)


def eager(pair: Pair, *, plain: bool = False) -> tuple[int, ...]:
    return Generation(pair, PROMPT, plain=plain).run().tokens


def plainly(pair: Pair) -> tuple[int, ...]:
    return eager(pair, plain=True)


def batched(pair: Pair) -> tuple[int, ...]:
    return BatchGeneration(pair, [PROMPT, PROMPT[:3]]).run().tokens[0]


def batched_plainly(pair: Pair) -> tuple[int, ...]:
    return BatchGeneration(pair, [PROMPT, PROMPT[:3]], plain=True).run().tokens[0]


def captured(pair: Pair, *, plain: bool = False) -> tuple[int, ...]:
    s = pair.sampling
    loop = loop_for(pair, plain=plain, capture=call_directly)
    loop.prepare(len(PROMPT), s.max_new_tokens)
    loop.start([PROMPT])
    uniforms = (SharedNoise if s.mode is Mode.COUPLED else KeyedUniforms)(s.seed, prompt_digest(PROMPT))
    row = Row(0, list(PROMPT), len(PROMPT) + s.max_new_tokens, uniforms, ends_at([]))
    loop.begin([row])
    rounds = rounds_of(steps(loop, [row], k=loop.k, clock=untimed))
    return tuple(t for r in rounds for t in r.tokens)


WAYS = [eager, plainly, batched, batched_plainly, captured]
PLAIN = (plainly, batched_plainly)
BATCHED = (batched, batched_plainly)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings", [GREEDY, {}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}, {"mode": Mode.COUPLED}], ids=str
)
def test_a_bias_of_minus_infinity_is_a_ban(way: Callable[[Pair], tuple[int, ...]], settings: dict[str, Any]) -> None:
    s = Sampling(k=3, max_new_tokens=24, **settings)
    tokens = tuple({*way(pair_of(s))})[:2]
    banned = way(pair_of(replace(s, ban=tokens)))
    assert way(pair_of(s, -torch.inf, tokens)) == banned
    assert not {*banned} & {*tokens}


@pytest.mark.parametrize("only", ["target", "draft"])
def test_where_one_side_rules_out_what_the_other_does_not(only: str) -> None:
    s = Sampling(k=3, max_new_tokens=40)
    pair = pair_of(s, -torch.inf, only=only)
    generation = Generation(pair, PROMPT).run()
    assert captured(pair) == generation.tokens == batched(pair)
    assert bool({*generation.tokens} & {*RULED_OUT}) is (only == "draft")
    assert generation.check().passed


def test_greedy_text_is_that_of_generate() -> None:
    pair = pair_of(Sampling(k=3, max_new_tokens=24, **GREEDY), -torch.inf)
    wanted = pair.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)  # type: ignore[attr-defined]
    assert list(eager(pair)) == wanted[0, len(PROMPT) :].tolist()


def test_the_checks_do_not_take_a_mask_for_a_fault() -> None:
    """The run's check of itself, the audit's of the caches, the trial of packed linears, a scored text."""
    pair = pair_of(Sampling(k=3, max_new_tokens=24), -torch.inf)
    assert pair.drafter is not None
    caches = Auditor(pair, [PROMPT], seeds=1).run(["caches"])["caches"]
    assert caches.status is Status.PASS
    assert caches.value is not None
    assert 0 <= caches.value < 1e-3
    generation = Generation(pair, PROMPT).run()
    check = generation.check()
    assert check.passed
    assert all(row.value is None or row.value == row.value for row in check.rows)
    text = [*PROMPT, *generation.tokens]
    scored = score_text(pair.target, pair.drafter, pair.processors, pair.sampling, text, 1)
    assert all(0 <= value <= 1 + 1e-6 for value in scored.overlap)


@pytest.mark.skipif(not packed.packs(torch.float32), reason="this torch packs no linears on this CPU")
def test_packed_linears_keep_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "WORTH", 1)
    model = with_bias(tiny_llama(vocab=40, hidden=64), RULED_OUT, -torch.inf)
    before = model(input_ids=torch.tensor([PROMPT])).logits
    assert prepare(model, "packed") == "packed"
    after = model(input_ids=torch.tensor([PROMPT])).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    assert bool((after[..., list(RULED_OUT)] == -torch.inf).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("only", ["target", "draft"])
def test_other_infinities_are_faults(way: Callable[[Pair], Any], value: float, only: str) -> None:
    """Also on a token that is banned, and where all that is left of a row is −inf."""
    if way in PLAIN and only == "draft":
        return
    for s in (Sampling(k=3), Sampling(k=3, ban=RULED_OUT), Sampling(k=3, **GREEDY)):
        with pytest.raises(RunError, match=rf"the {only}.* produced logits that are not finite .* position 5;"):
            way(pair_of(s, value, only=only))
    if way is captured:
        return  # no static cache is made for a model that says nothing
    with pytest.raises(RunError, match=rf"the {only}.* produced logits that are not finite .* position 5;"):
        way(pair_of(Sampling(k=3), -torch.inf, range(40), only=only))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", [GREEDY, {}], ids=str)
@pytest.mark.parametrize("only", ["target", "draft"])
def test_a_ban_of_all_that_the_head_leaves(way: Callable[[Pair], Any], settings: dict[str, Any], only: str) -> None:
    if way in PLAIN and only == "draft":
        return
    pair = pair_of(Sampling(k=3, ban=(0, 1, 2), **settings), -torch.inf, range(3, 40), only)
    with pytest.raises(RunError, match=rf"the {only}.* has no token left to draw for position 5: ban rules out") as e:
        way(pair)
    assert ("(prompt 1 of the batch)" in str(e.value)) is (way in BATCHED)


def test_the_position_of_a_drafted_token_that_cannot_be_drawn() -> None:
    """In the middle of a proposal, and of a teacher-forced text."""

    class Narrow(TableModel):
        def logits(self, prefix: Sequence[int]) -> torch.Tensor:
            row = super().logits(prefix).clone()
            if len(prefix) == 6:
                row[1:] = -torch.inf
            return row

    drafter = ModelDrafter(Narrow(random_table(4, 1), "draft"), Processors.of(Sampling(ban=(0,))))
    drafter.start([1, 2, 3, 1])
    for run in (
        lambda: drafter.propose([1, 2, 3, 1], 4, 0, KeyedUniforms(0, 0)),
        lambda: list(drafter.score([1, 2, 3, 1, 2, 3, 1, 2], 4)),
    ):
        with pytest.raises(RunError, match=r"the draft has no token left to draw for position 6: ban rules out"):
            run()


@pytest.mark.parametrize("way", [eager, plainly, batched, batched_plainly])
@pytest.mark.parametrize("settings", [GREEDY, {}, {"mode": Mode.COUPLED}], ids=str)
def test_a_processor_that_leaves_no_token_is_named_with_side_and_position(
    way: Callable[[Pair], Any], settings: dict[str, Any]
) -> None:
    """Three tokens, none of which may come twice: the text ends behind the third, whatever the law."""
    model = tiny_llama(vocab=3)
    for ban, limit in (((), 3), ((1,), 2)):
        s = Sampling(k=2, max_new_tokens=9, no_repeat_ngram_size=1, ban=ban, **settings)
        processors = Processors.of(s)
        target, draft = CausalLM(model, "target"), CausalLM(noisy_copy(model), "draft")
        pair = Pair(target, ModelDrafter(draft, processors), processors, s, None, torch.float32, untimed)
        plain = way in PLAIN
        side, setting = ("target" if plain else "(target|draft)"), ("ban" if ban else "no_repeat_ngram_size")
        run = BatchGeneration(pair, [[0], [2]], plain=plain) if way in BATCHED else Generation(pair, [0], plain=plain)
        with pytest.raises(RunError, match=rf"the {side}.* no token left .* position {limit}: {setting} rules out"):
            run.run()
