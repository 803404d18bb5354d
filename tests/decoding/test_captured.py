"""The captured loop, proven without capture: the very step functions that CUDA graphs are made of, only called."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.decoding.captured import capture, fits
from specgen.decoding.captured import loop as loop_module
from specgen.decoding.captured.capture import call_directly
from specgen.decoding.captured.fits import loop_for, why_not
from specgen.decoding.captured.loop import GraphLoop
from specgen.decoding.eager import autoregressive, speculative, start
from specgen.decoding.generation import Generation
from specgen.decoding.loop import rounds_of, steps
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Row
from specgen.drafting.ngram import NgramDrafter
from specgen.errors import CaptureError, RunError
from specgen.machine.clocks import Mark, clock_for, untimed
from specgen.models import static
from specgen.models.causal import CausalLM
from specgen.models.static import tier
from specgen.rounds.record import Ended, Finish, Origin, Round, ends_at
from specgen.sampling.device import DeviceUniforms
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, Stream
from specgen.settings import Mode, Sampling
from specgen.verification.rules import rule_for
from support import tiny
from support.doubles import Enumerating, StopsEarly, difference, enumerate_law, joint_law, raw_resample

PROMPT = (3, 1, 4, 1, 5)
GREEDY = Sampling(mode=Mode.GREEDY, temperature=None)


def pair_of(
    name: str = "llama", sampling: Sampling | None = None, *, scale: float = 0.3, device: str = "cpu", **options: Any
) -> Pair:
    """scale: how far the draft is from the target; 0 is the target itself."""
    sampling = sampling or Sampling()
    model = tiny.ARCHITECTURES[name](0, **options).to(device)
    target, draft = CausalLM(model, "target"), CausalLM(tiny.noisy_copy(model, scale), "draft") if scale else None
    draft = draft or CausalLM(model, "draft")
    processors = Processors.of(sampling, device)
    return Pair(target, ModelDrafter(draft, processors), processors, sampling, None, model.dtype, untimed)


def uniforms_of(sampling: Sampling, seed: int) -> KeyedUniforms:
    return (SharedNoise if sampling.mode is Mode.COUPLED else KeyedUniforms)(seed, -7)


def eager(
    pair: Pair, prompt: Sequence[int], new: int, seed: int = 0, ended: Ended | None = None, *, plain: bool = False
) -> list[Round]:
    uniforms, ended = uniforms_of(pair.sampling, seed), ended or ends_at([])
    start(pair.target, None if plain else pair.drafter, prompt)
    if plain:
        return list(
            autoregressive(
                pair.target,
                pair.processors,
                prompt,
                max_new_tokens=new,
                uniforms=uniforms,
                ended=ended,
                clock=untimed,
            )
        )
    assert pair.drafter is not None
    return list(
        speculative(
            pair.target,
            pair.drafter,
            pair.processors,
            prompt,
            k=pair.sampling.k,
            max_new_tokens=new,
            uniforms=uniforms,
            ended=ended,
            rule=rule_for(pair.sampling),
            clock=untimed,
        )
    )


def captured(
    pair: Pair,
    prompt: Sequence[int],
    new: int,
    seed: int = 0,
    ended: Ended | None = None,
    *,
    plain: bool = False,
    capture: capture.Capture | None = call_directly,
) -> list[Round]:
    loop = loop_for(pair, plain=plain, capture=capture)
    loop.prepare(len(prompt), new)
    loop.start([prompt])
    return list(rounds_by(loop, prompt, new, uniforms_of(pair.sampling, seed), ended or ends_at([])))


def rounds_by(
    loop: GraphLoop, prompt: Sequence[int], new: int, uniforms: Any, ended: Ended, clock: Any = untimed
) -> Iterator[Round]:
    """One text by the captured loop, once it has taken in the prompt."""
    row = Row(0, list(prompt), len(prompt) + new, uniforms, ended)
    loop.begin([row])
    return rounds_of(steps(loop, [row], k=loop.k, clock=clock))


def assert_same(got: list[Round], wanted: list[Round], bound: float = 1e-5) -> None:
    """Every field of every round: what is counted exactly, what is computed within a bound on rounding."""
    assert [r.tokens for r in got] == [r.tokens for r in wanted]
    close = lambda x: pytest.approx(x, abs=bound, rel=bound)  # noqa: E731
    for a, b in zip(got, wanted, strict=True):
        counted = ("index", "drafted", "tested", "accepted", "impossible", "finish", "total_s")
        assert [getattr(a, name) for name in counted] == [getattr(b, name) for name in counted]
        assert [c.origin for c in a.committed] == [c.origin for c in b.committed]
        assert [c.support for c in a.committed] == [c.support for c in b.committed]
        assert [c.log_prob for c in a.committed] == close([c.log_prob for c in b.committed])
        assert [c.entropy for c in a.committed] == close([c.entropy for c in b.committed])
        assert [c.overlap is None for c in a.committed] == [c.overlap is None for c in b.committed]
        for name in ("overlaps", "expected", "biases"):
            assert getattr(a, name) == close(getattr(b, name)), name
        for c, d in zip(a.committed, b.committed, strict=True):
            assert c.overlap is None or c.overlap == close(d.overlap)


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("mode", ["exact", "greedy"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_the_captured_loop_is_the_eager_one(name: str, mode: str, k: int) -> None:
    sampling = replace(Sampling() if mode == "exact" else GREEDY, k=k)
    pair = pair_of(name, sampling)
    seen = set()
    for seed in range(4 if mode == "exact" else 1):
        rounds = captured(pair, PROMPT, 30, seed)
        assert_same(rounds, eager(pair, PROMPT, 30, seed))
        seen |= {c.origin for r in rounds for c in r.committed}
    assert seen == {Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS}


@pytest.mark.parametrize("name", ["opt", "gpt_neox"])
def test_other_architectures(name: str) -> None:
    pair = pair_of(name)
    assert_same(captured(pair, PROMPT, 30), eager(pair, PROMPT, 30))


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY, Sampling(temperature=0.7, top_p=0.8)])
def test_plain_decoding(sampling: Sampling) -> None:
    pair = pair_of("llama", sampling)
    for seed in range(3):
        rounds = captured(pair, PROMPT, 25, seed, plain=True)
        assert_same(rounds, eager(pair, PROMPT, 25, seed, plain=True))
        assert {c.origin for r in rounds for c in r.committed} == {Origin.PLAIN}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"ban": (0, 7, 9, 30)},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "ban": (2, 3)},
    ],
)
def test_processors(settings: dict) -> None:
    pair = pair_of("llama", Sampling(k=3, **settings))
    for seed in range(3):
        rounds = captured(pair, PROMPT, 25, seed)
        assert_same(rounds, eager(pair, PROMPT, 25, seed))
        assert not {t for r in rounds for t in r.tokens} & set(settings.get("ban", ()))


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.LENIENT, Mode.TYPICAL])
def test_the_other_modes(mode: Mode) -> None:
    pair = pair_of("llama", Sampling(mode=mode, k=3))
    for seed in range(4):
        assert_same(captured(pair, PROMPT, 25, seed), eager(pair, PROMPT, 25, seed))


@pytest.mark.parametrize("mode", ["exact", "greedy"])
def test_the_target_as_its_own_draft_keeps_everything(mode: str) -> None:
    """So that every round but the last feeds the draft two tokens."""
    pair = pair_of("llama", replace(Sampling() if mode == "exact" else GREEDY, k=3), scale=0)
    for seed in range(4):
        rounds = captured(pair, PROMPT, 30, seed)
        assert_same(rounds, eager(pair, PROMPT, 30, seed))
        assert all(r.accepted == r.drafted for r in rounds)


@pytest.mark.parametrize("sampling", [Sampling(k=3), Sampling(k=3, temperature=0.6), replace(GREEDY, k=4)])
def test_prompt_lookup_proposes_on_the_host_and_is_verified_by_graphs(sampling: Sampling) -> None:
    pair = replace(pair_of("llama", sampling), drafter=NgramDrafter(50))
    drafted = set()
    for seed in range(4):
        rounds = captured(pair, PROMPT * 3, 40, seed)
        assert_same(rounds, eager(pair, PROMPT * 3, 40, seed))
        drafted |= {r.drafted for r in rounds}
    assert {0, 3} <= drafted
    loop = loop_for(pair, capture=call_directly)
    assert list(loop.probes(PROMPT, [1, 3])) == ["1", "3"]


def test_float64_agrees_too() -> None:
    pair = pair_of("llama", Sampling(k=3), dtype=torch.float64)
    assert_same(captured(pair, PROMPT, 30), eager(pair, PROMPT, 30))


@pytest.mark.parametrize("new", [1, 2, 3, 4, 7])
def test_short_texts_and_a_prompt_of_one_token(new: int) -> None:
    pair = pair_of("gpt2", Sampling(k=4))
    for prompt in ((7,), (7, 8)):
        for seed in range(4):
            rounds = captured(pair, prompt, new, seed)
            assert_same(rounds, eager(pair, prompt, new, seed))
            assert sum(len(r.tokens) for r in rounds) == new
            assert_same(captured(pair, prompt, new, seed, plain=True), eager(pair, prompt, new, seed, plain=True))


def test_a_text_up_to_the_last_position_that_the_model_has() -> None:
    """The last round's call is k + 1 tokens wide all the same, and gpt2 has no embedding behind its last position."""
    pair = pair_of("gpt2", Sampling(k=4))
    prompt = [t % 50 for t in range(500)]
    assert_same(captured(pair, prompt, 12), eager(pair, prompt, 12))


@pytest.mark.parametrize("mode", ["exact", "greedy"])
def test_ends_inside_blocks(mode: str) -> None:
    """Every token of a text in turn ends it, as an end token and as a host-side condition such as a stop string's."""
    pair = pair_of("llama", replace(Sampling() if mode == "exact" else GREEDY, k=4), scale=0.1)
    tokens = [t for r in eager(pair, PROMPT, 24) for t in r.tokens]
    cut = 0
    for token in dict.fromkeys(tokens):
        for finish in (Finish.END, Finish.STOP):
            ended = lambda t, token=token, finish=finish: finish if t == token else None  # noqa: E731
            rounds = captured(pair, PROMPT, 24, ended=ended)
            assert_same(rounds, eager(pair, PROMPT, 24, ended=ended))
            cut += len(rounds[-1].tokens) <= rounds[-1].accepted
    assert cut >= 4


def test_texts_after_one_another_leave_nothing_behind() -> None:
    pair = pair_of("llama", Sampling(k=3))
    first = captured(pair, PROMPT, 40, 1)
    long = captured(pair, (9, 8, 7, 6, 5, 4, 3, 2), 60, 2, ends_at([first[2].tokens[0]]))
    assert_same(captured(pair, PROMPT, 40, 1), first)
    assert_same(captured(pair, (9, 8, 7, 6, 5, 4, 3, 2), 60, 2, ends_at([first[2].tokens[0]])), long)
    assert len(pair.hold.captured["loops"]) == 1


def test_a_text_that_was_left_early_does_not_disturb_the_next() -> None:
    pair = pair_of("llama", Sampling(k=3))
    loop = loop_for(pair, capture=call_directly)
    loop.start([(4, 5, 6)])
    assert len(list(itertools.islice(rounds_by(loop, (4, 5, 6), 50, KeyedUniforms(5, 5), ends_at([])), 3))) == 3
    assert_same(captured(pair, PROMPT, 20), eager(pair, PROMPT, 20))


def test_tiers() -> None:
    assert [tier(n) for n in (1, 256, 257, 513, 4096, 4097, 8192, 8193)] == [
        256,
        256,
        512,
        1024,
        4096,
        5120,
        8192,
        10240,
    ]


@pytest.mark.parametrize("ahead", [2048, 0])
def test_a_text_that_grows_through_tiers(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the whole text from the start, and with buffers that move in the middle of it."""
    monkeypatch.setattr(static, "FIRST_TIER", 16)
    monkeypatch.setattr(loop_module, "AHEAD", ahead)
    monkeypatch.setattr(static, "AHEAD", ahead)
    monkeypatch.setattr(static.StaticCache, "agrees", lambda self: True)  # it needs 24 slots
    pair = pair_of("llama", Sampling(k=3))
    wanted = eager(pair, PROMPT, 70)
    assert_same(captured(pair, PROMPT, 70), wanted)
    loop = loop_for(pair, capture=call_directly)
    assert loop.target.capacity == 128
    assert loop.target.version == (3 if ahead == 0 else 1)
    assert_same(captured(pair, PROMPT, 70), wanted)
    assert {extent for _, extent in loop._steps} == {0, 16, 32, 64, 128}


def test_a_long_prompt_is_taken_in_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "PREFILL_CHUNK", 7)
    pair = pair_of("qwen3", Sampling(k=2))
    prompt = [t * 11 % 50 for t in range(300)]
    assert_same(captured(pair, prompt, 12), eager(pair, prompt, 12))


def test_loops_are_told_apart_and_do_not_pile_up() -> None:
    pair = pair_of("llama", Sampling(k=2))
    other = replace(pair, sampling=Sampling(k=3, seed=9))
    assert loop_for(pair) is loop_for(replace(pair, sampling=Sampling(k=2, seed=8)))
    assert loop_for(pair) is not loop_for(other)
    assert loop_for(pair) is not loop_for(pair, plain=True)
    assert loop_for(pair).target is loop_for(other).target
    kept = loop_for(pair)
    for k in range(4, 4 + fits.LOOPS_KEPT):
        loop_for(replace(pair, sampling=Sampling(k=k)))
    assert len(pair.hold.captured["loops"]) == fits.LOOPS_KEPT
    assert loop_for(pair) is not kept


def test_loops_share_a_cache_whose_buffers_move(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", Sampling(k=2))
    wanted = captured(pair, PROMPT, 20)
    steps = dict(loop_for(pair, capture=call_directly)._steps)
    captured(replace(pair, sampling=Sampling(k=3)), [1] * 300, 5)
    assert_same(captured(pair, PROMPT, 20), wanted)
    again = loop_for(pair, capture=call_directly)._steps
    assert all(again[key] is not steps[key] for key in steps if key[0] != "judge")


READS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "cpu", "nonzero")


class Watched:
    """Captures nothing; while a step runs, whatever would read a tensor raises, and so does a new tensor of data."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def replay(self) -> None:
        with nothing_read():
            self.step()


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a step read a tensor, or sent one to the device")


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        for name in ("tensor", "unique", "masked_select", "equal", "allclose"):
            patch.setattr(torch, name, refuse)
        yield


def test_the_watch_bites() -> None:
    with pytest.raises(AssertionError, match="a step read"), nothing_read():
        bool(torch.ones(1))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(k=3, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, ban=(1, 2)),
        replace(GREEDY, k=2),
        Sampling(mode=Mode.COUPLED, k=2),
        Sampling(mode=Mode.LENIENT, k=2),
        Sampling(mode=Mode.TYPICAL, k=2),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_no_step_reads_and_a_round_is_read_once(sampling: Sampling, plain: bool) -> None:
    pair = pair_of("llama", sampling)
    wanted = eager(pair, PROMPT, 12, plain=plain)
    loop = loop_for(pair, plain=plain, capture=lambda step, undo: Watched(step))
    loop.prepare(len(PROMPT), 12)
    loop.start([PROMPT])
    rounds = rounds_by(loop, PROMPT, 12, uniforms_of(sampling, 0), ends_at([]))
    got, reads = [], 0

    def counted(self: Tensor) -> Any:
        nonlocal reads
        reads += 1
        return original(self)

    original = torch.Tensor.tolist
    for _ in wanted:
        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, counted if name == "tolist" else refuse)
            got.append(next(rounds))
    assert [r.tokens for r in got] == [r.tokens for r in wanted]
    assert reads == len(wanted)


def test_what_steps_write_stays_where_it_is() -> None:
    """A graph replays addresses: no step may put another tensor in the place of one that is read later."""
    pair = pair_of("llama", Sampling(k=3))
    captured(pair, PROMPT, 10)
    loop = loop_for(pair, capture=call_directly)
    before = {name: (t, t.data_ptr()) for name, t in vars(loop).items() if isinstance(t, Tensor)}
    assert len(before) >= 10
    captured(pair, PROMPT, 40, 3)
    for name, (tensor, place) in before.items():
        assert getattr(loop, name) is tensor, name
        assert tensor.data_ptr() == place, name


def test_capturing_happens_between_rounds_and_leaves_no_trace() -> None:
    """As on CUDA: the step is run for warming up, undone, and the caches it wrote to are none the worse."""

    def warm(step: Callable[[], None], undo: Callable[[], None]) -> capture.Captured:
        for _ in range(2):
            step()
            undo()
        return call_directly(step, undo)

    pair = pair_of("llama", Sampling(k=3))
    assert_same(captured(pair, PROMPT, 300, capture=warm), eager(pair, PROMPT, 300))


def test_the_device_has_the_same_uniforms() -> None:
    host, device = KeyedUniforms((1 << 64) - 3, 1 << 63), DeviceUniforms(torch.device("cpu"))
    device.take(host)
    positions = torch.arange(5, 40)
    for stream in Stream:
        got = device(stream, positions, torch.tensor([3]), positions)
        assert got.tolist() == [host(stream, int(p), 3) for p in positions]


@dataclass
class OnTheHost:
    """Stands in for `DeviceUniforms`: asks another source, and for acceptance only as far as it matters."""

    source: Enumerating

    def __call__(self, stream: Any, position: Tensor, round_index: Tensor, edges: Tensor) -> Tensor:
        if stream is not Stream.ACCEPT:
            u = self.source(Stream(int(stream)), int(position), int(round_index), edges)
            return torch.tensor([u], dtype=torch.float64)
        drawn, going = [], True
        for p, a in zip(position.tolist(), edges.tolist(), strict=True):
            cells = torch.tensor([a, 1.0], dtype=torch.float64)
            drawn.append(self.source(stream, p, int(round_index), cells) if going else 1.0)
            going = going and drawn[-1] < a
        return torch.tensor(drawn, dtype=torch.float64)

    def either(self, condition: Tensor, yes: Stream, no: Stream) -> Tensor:
        return torch.tensor(int(yes if condition else no))


def enumerated(pair: Pair, new: int, *, plain: bool = False) -> dict:
    loop = loop_for(pair, plain=plain, capture=call_directly)
    loop.prepare(2, new)
    loop.start([(1, 2)])

    def text(uniforms: Enumerating) -> tuple[int, ...]:
        rounds = rounds_by(loop, (1, 2), new, OnTheHost(uniforms), ends_at([0]))
        return tuple(t for r in rounds for t in r.tokens)

    return enumerate_law(text)


def small_pair(sampling: Sampling) -> Pair:
    return pair_of("llama", sampling, scale=0.8, hidden=16, vocab=3, layers=1, dtype=torch.float64)


@pytest.mark.parametrize(("k", "new"), [(1, 3), (2, 3)])
def test_the_law_of_the_captured_loop_is_the_targets(k: int, new: int) -> None:
    """Every leaf of the tree of outcomes, ends and the last rounds' shorter drafts among them."""
    sampling = Sampling(k=k, temperature=0.7, end_tokens=(0,))
    pair = small_pair(sampling)
    law = enumerated(pair, new)
    logits = lambda prefix: tiny.plain_logits(pair.target, tuple(prefix))[-1]  # noqa: E731
    wanted = joint_law(logits, (1, 2), new, sampling)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert difference(law, wanted) < 1e-12
    assert difference(enumerated(pair, new, plain=True), wanted) < 1e-12


def test_the_enumeration_sees_a_correction_from_the_target() -> None:
    sampling = Sampling(k=1)
    pair = small_pair(sampling)
    loop_for(pair, capture=call_directly).rule = raw_resample()
    logits = lambda prefix: tiny.plain_logits(pair.target, tuple(prefix))[-1]  # noqa: E731
    wanted = joint_law(logits, (1, 2), 2, replace(sampling, end_tokens=(0,)))
    assert difference(enumerated(pair, 2), wanted) > 1e-3


def test_what_reads_the_text_is_left_to_the_eager_loop() -> None:
    for settings in ({"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": ((1, 2),)}):
        reason = why_not(pair_of("llama", Sampling(**settings)))
        assert reason is not None
        assert "\n" not in reason
        assert "reads the text so far" in reason


def test_other_reasons() -> None:
    pair = pair_of("llama")
    assert why_not(pair) is None
    assert "full attention" in str(why_not(pair_of("gemma3")))
    assert "stands in" in str(why_not(replace(pair, rule=raw_resample())))
    with pytest.raises(CaptureError, match="full attention"):
        loop_for(pair_of("gemma3"))


def test_a_drafter_that_is_no_plain_chain_proposes_on_the_host() -> None:
    """Its own draws are its own business: only what it proposes is verified by graphs."""
    pair = pair_of("llama", Sampling(k=4))
    assert pair.drafter is not None
    assert pair.drafter.model is not None
    early = replace(pair, drafter=StopsEarly(pair.drafter.model, pair.processors))
    rounds = captured(early, PROMPT, 30, 3)
    assert_same(rounds, eager(early, PROMPT, 30, 3))
    assert {r.drafted for r in rounds[:-1]} > {1}


def test_a_model_that_ignores_its_positions_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama")
    forward = pair.target.model.forward
    monkeypatch.setattr(pair.target.model, "forward", lambda *args, position_ids=None, **more: forward(*args, **more))
    assert "other logits" in str(why_not(pair))


def test_a_rotary_embedding_that_changes_with_length_is_not_captured() -> None:
    pair = pair_of("llama")
    pair.target.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rotary" in str(why_not(pair))


def test_logits_that_are_not_finite_stop_the_run() -> None:
    for side, role in (("target", "target"), ("draft", "draft")):
        pair = pair_of("llama", Sampling(k=3))
        captured(pair, PROMPT, 5)
        assert isinstance(pair.drafter, ModelDrafter)
        model = pair.target if side == "target" else pair.drafter.model
        with torch.no_grad():
            model.model.lm_head.weight[3] = torch.nan  # type: ignore[attr-defined]
        with pytest.raises(RunError, match=f"the {role} produced logits .* position 5"):
            captured(pair, PROMPT, 5)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_the_position_of_what_is_not_finite(side: str) -> None:
    """A token whose embedding is broken spoils what follows it, in the middle of a round."""
    pair = pair_of("llama", Sampling(k=4), scale=0)
    token = next(t for r in eager(pair, PROMPT, 9) for t in r.tokens if t not in PROMPT)
    assert isinstance(pair.drafter, ModelDrafter)
    model = pair.target if side == "target" else pair.drafter.model
    model.model = copy.deepcopy(model.model)
    embedding = model.model.model.embed_tokens.weight
    good = embedding.detach().clone()
    with torch.no_grad():
        embedding[token] = torch.nan
    messages = []
    for run in (eager, captured):
        with pytest.raises(RunError) as raised:
            run(pair, PROMPT, 9)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert f"the {side} produced" in messages[0]
    assert side == "target" or "position 5" not in messages[0]
    with torch.no_grad():
        embedding.copy_(good)
    assert_same(captured(pair, PROMPT, 30), eager(pair, PROMPT, 30))


class Bytes:
    """A tokenizer of sorts."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(chr(65 + t) for t in tokens)


def test_a_generation_takes_the_engine_of_its_target() -> None:
    pair = replace(pair_of("llama", Sampling(k=3, max_new_tokens=20)), tokenizer=Bytes())
    wanted = Generation(pair, PROMPT, timed=False).run()
    assert wanted.engine_note is None
    pair.target.engine = "graph"
    times = iter(range(10_000))
    pair = replace(pair, clock=lambda: float(next(times)))
    got = Generation(pair, PROMPT, timed=False).run()
    assert_same(got.rounds, wanted.rounds)
    assert pair.target.lengths == (0,)  # the eager cache took no part
    assert got.check().passed == wanted.check().passed
    assert got.probe_cost() == {"target_s": 1, "draft_s": 1, "c": 1}
    plain = Generation(pair, PROMPT, plain=True, timed=False).run()
    pair.target.engine = "eager"
    assert_same(plain.rounds, Generation(pair, PROMPT, plain=True, timed=False).run().rounds)


def test_a_generation_that_cannot_be_captured_says_why_and_runs_eagerly() -> None:
    pair = replace(pair_of("llama", Sampling(max_new_tokens=9, repetition_penalty=1.2)), tokenizer=Bytes())
    wanted = Generation(pair, PROMPT).run()
    pair.target.engine = "graph"
    got = Generation(pair, PROMPT).run()
    assert got.tokens == wanted.tokens
    assert "RepetitionPenalty" in str(got.engine_note)


def test_a_capture_that_fails_leaves_the_text_to_the_eager_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Any, undo: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(capture, "capture_for", lambda device: fails)
    monkeypatch.setattr(fits, "capture_for", lambda device: fails)
    pair = replace(pair_of("llama", Sampling(max_new_tokens=9)), tokenizer=Bytes())
    wanted = Generation(pair, PROMPT).run()
    pair.target.engine = "graph"
    got = Generation(pair, PROMPT).run()
    assert got.tokens == wanted.tokens
    assert "not permitted" in str(got.engine_note)
    assert "\n" not in str(got.engine_note)
    assert Generation(pair, PROMPT).run().engine_note == got.engine_note


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_an_untimed_generation_reads_no_clock(engine: str) -> None:
    def clock() -> float:
        raise AssertionError("the clock was read")

    pair = replace(pair_of("llama", Sampling(max_new_tokens=9)), tokenizer=Bytes(), clock=clock)
    pair.target.engine = engine
    generation = Generation(pair, PROMPT, timed=False).run()
    assert len(generation.tokens) == 9
    assert {r.total_s for r in generation.rounds} == {0.0}
    with pytest.raises(AssertionError, match="the clock"):
        Generation(pair, PROMPT).run()


def test_rounds_are_timed_by_differences_of_marks() -> None:
    """A clock whose readings can only be subtracted, as a device's events."""

    class Reading:
        def __init__(self, at: int) -> None:
            self.at = at

        def __sub__(self, other: Reading) -> float:
            return float(self.at - other.at)

    pair = pair_of("llama", Sampling(k=3))
    for run in ("eager", "graph"):
        times = iter(range(10_000))
        clock: Any = lambda times=times: Reading(next(times))  # noqa: E731
        arguments: dict[str, Any] = {"max_new_tokens": 12, "uniforms": KeyedUniforms(0, 0), "ended": ends_at([])}
        if run == "eager":
            start(pair.target, pair.drafter, PROMPT)
            assert pair.drafter is not None
            rounds = list(
                speculative(pair.target, pair.drafter, pair.processors, PROMPT, k=3, clock=clock, **arguments)
            )
        else:
            loop = loop_for(pair, capture=call_directly)
            loop.start([PROMPT])
            rounds = list(rounds_by(loop, PROMPT, 12, KeyedUniforms(0, 0), ends_at([]), clock))
        assert {(r.draft_s, r.verify_s) for r in rounds if r.drafted} == {(1.0, 1.0)}
        assert all(r.total_s >= 3 for r in rounds)


class FakeEvent:
    def __init__(self, at: float) -> None:
        self.at, self.waits = at, 0

    def synchronize(self) -> None:
        self.waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at - self.at) * 1000


def test_marks_behave_as_seconds() -> None:
    early, late = (Mark(FakeEvent(at)) for at in (1.0, 3.5))  # type: ignore[arg-type]
    assert late - early == 2.5
    assert early < late
    assert late >= early
    assert early + 2.0 < late < 3.0 + early
    assert (early + 1.0) - early == 1.0
    assert not late < late


def test_probes_are_the_loops_own_calls() -> None:
    pair = pair_of("llama", Sampling(k=4))
    probes = loop_for(pair, capture=call_directly).probes(PROMPT, [1, 3, 5])
    assert list(probes) == ["draft", "1", "3", "5"]
    for probe in probes.values():
        probe()
        probe()
    assert_same(captured(pair, PROMPT, 12), eager(pair, PROMPT, 12))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(k=3),
        replace(GREEDY, k=4),
        Sampling(k=4, temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, ban=(1,)),
        Sampling(mode=Mode.COUPLED, k=3),
        Sampling(mode=Mode.LENIENT, k=3),
        Sampling(mode=Mode.TYPICAL, k=3),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_graphs_give_what_the_eager_loop_gives(name: str, sampling: Sampling) -> None:
    pair = pair_of(name, sampling, device="cuda")
    for seed in range(3):
        for plain in (False, True):
            got = captured(pair, PROMPT, 300, seed, plain=plain, capture=None)
            assert_same(got, eager(pair, PROMPT, 300, seed, plain=plain), 2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_rounds_are_timed_and_allocate_nothing_new() -> None:
    pair = replace(
        pair_of("llama", Sampling(k=3, max_new_tokens=100), device="cuda"),
        tokenizer=Bytes(),
        clock=clock_for(torch.device("cuda")),
    )
    pair.target.engine = "graph"
    first = Generation(pair, PROMPT).run()
    before = torch.cuda.memory_allocated()
    second = Generation(pair, PROMPT).run()
    assert torch.cuda.memory_allocated() == before
    assert second.tokens == first.tokens
    assert second.engine_note is None
    assert all(0 < r.verify_s < r.total_s for r in second.rounds)
