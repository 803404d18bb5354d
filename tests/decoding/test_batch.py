"""Batches: every row is its single run, whoever its neighbours are; and faults that this must catch."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from specgen.decoding import loop
from specgen.decoding.batch import BatchGeneration
from specgen.decoding.eager import Eager
from specgen.decoding.generation import Generation
from specgen.decoding.loop import Step
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import CheckpointRows, ModelDrafter
from specgen.drafting.drafter import Drafter, EachRow, Row, RowsDrafter
from specgen.drafting.ngram import NgramDrafter
from specgen.errors import RunError, UsageError
from specgen.models import protocol
from specgen.models import ragged as ragged_module
from specgen.models.caches import Rows
from specgen.models.causal import CausalLM
from specgen.models.protocol import padded
from specgen.models.ragged import RaggedLM
from specgen.rounds.record import Finish, Round, ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, prompt_digest
from specgen.settings import Mode, Sampling
from specgen.verification.rules import RULES
from support.doubles import Enumerating, TableModel, difference, enumerate_law, joint_law, mutant, random_table
from support.tiny import ARCHITECTURES, build, noisy_copy, plain_logits, tiny_gemma3, tiny_gpt2, tiny_llama

FULL_ATTENTION = ["llama", "gpt2", "opt", "gpt_neox", "qwen3"]
LENGTHS = [1, 40, 5, 17, 2, 33, 9, 24]
PROMPTS = [[(7 * i * i + 3 * i + 11 * n) % 50 for i in range(n)] for n in LENGTHS]
REPEATING = [([4, 9, 1, 30, 2] * 8)[:n] for n in LENGTHS]
GREEDY: dict[str, Any] = {"mode": Mode.GREEDY, "temperature": None}
MODES: dict[str, dict[str, Any]] = {
    "exact": {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2},
    "greedy": GREEDY,
    "coupled": {"mode": Mode.COUPLED},
    "lenient": {"mode": Mode.LENIENT},
    "typical": {"mode": Mode.TYPICAL},
}


def pair_of(target: CausalLM, draft: CausalLM | None, s: Sampling, *, kind: str = "checkpoint", **more: Any) -> Pair:
    processors = Processors.of(s)
    drafter: Drafter | None = None
    if kind == "ngram":
        drafter = NgramDrafter(target.vocabulary)
    elif draft is not None:
        drafter = ModelDrafter(draft, processors)
    return Pair(target, drafter, processors, s, None, torch.float32, more.get("clock", lambda: 0.0))


def tiny_models(name: str) -> tuple[CausalLM, CausalLM]:
    model = ARCHITECTURES[name](0)
    return CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.2), "draft")


@pytest.fixture(scope="module")
def llamas() -> tuple[CausalLM, CausalLM]:
    return tiny_models("llama")


def alone(pair: Pair, prompt: Sequence[int], seed: int, **options: Any) -> Generation:
    single = Pair(
        pair.target,
        pair.drafter,
        pair.processors,
        Sampling(**{**{f: getattr(pair.sampling, f) for f in pair.sampling.__slots__}, "seed": seed}),
        None,
        pair.dtype,
        pair.clock,
    )
    return Generation(single, prompt, **options).run()


def counts(rounds: Sequence[Round]) -> list[tuple]:
    """All of a row's rounds that is not a floating-point number."""
    return [
        (r.index, r.drafted, r.tested, r.accepted, r.tokens, [c.origin for c in r.committed], r.finish)
        for r in rounds
    ]


def differing(pair: Pair, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any) -> list[int]:
    """The rows of a batch that are not their single runs."""
    batch = BatchGeneration(pair, prompts, seeds=seeds, **options).run()
    singles = [alone(pair, p, s, **options) for p, s in zip(prompts, seeds, strict=True)]
    return [b for b, g in enumerate(singles) if counts(g.rounds) != counts(batch.rows_rounds[b])]


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", ["checkpoint", "ngram", "plain"])
@pytest.mark.parametrize("mode", ["exact", "greedy", "coupled"])
def test_rows_are_their_single_runs(llamas: Any, mode: str, kind: str, batch: int) -> None:
    """Rounds and tokens; some rows end early, the others at the limit."""
    ends = (1, 8) if mode == "greedy" else (8,)
    s = Sampling(k=3, max_new_tokens=30, end_tokens=ends, **MODES[mode])
    pair = pair_of(*llamas, s, kind=kind)
    prompts = (REPEATING if kind == "ngram" else PROMPTS)[:batch]
    seeds = [5 + b for b in range(batch)]
    done = BatchGeneration(pair, prompts, seeds=seeds, plain=kind == "plain").run()
    for b, prompt in enumerate(prompts):
        single = alone(pair, prompt, seeds[b], plain=kind == "plain")
        assert counts(done.rows_rounds[b]) == counts(single.rounds)
        assert (done.tokens[b], done.finish[b]) == (single.tokens, single.finish)
        for mine, theirs in zip(done.rows_rounds[b], single.rounds, strict=True):
            assert mine.overlaps == pytest.approx(theirs.overlaps, abs=1e-5)
            assert not mine.impossible
    if batch == 8:
        assert set(done.finish) == {Finish.END, Finish.LENGTH}
        assert len({len(rounds) for rounds in done.rows_rounds}) > 2
        if kind == "checkpoint" or (kind, mode) == ("ngram", "greedy"):
            assert len({r.accepted for rounds in done.rows_rounds for r in rounds}) > 1


@pytest.mark.parametrize("mode", ["exact", "greedy"])
@pytest.mark.parametrize("kind", ["checkpoint", "ngram", "plain"])
@pytest.mark.parametrize("name", FULL_ATTENTION[1:])
def test_rows_are_their_single_runs_in_other_architectures(name: str, kind: str, mode: str) -> None:
    s = Sampling(k=3, max_new_tokens=20, end_tokens=(3,), **MODES[mode])
    pair = pair_of(*tiny_models(name), s, kind=kind)
    prompts = REPEATING[:5] if kind == "ngram" else PROMPTS[:5]
    assert differing(pair, prompts, range(5), plain=kind == "plain") == []


@pytest.mark.parametrize("mode", ["lenient", "typical"])
def test_approximate_modes_too(llamas: Any, mode: str) -> None:
    s = Sampling(k=3, max_new_tokens=20, **MODES[mode])
    pair = pair_of(*llamas, s)
    assert differing(pair, PROMPTS[:5], range(5)) == []
    assert BatchGeneration(pair, PROMPTS[:2]).run().rows_rounds[0][0].biases


def test_many_seeds(llamas: Any) -> None:
    pair = pair_of(*llamas, Sampling(k=4, max_new_tokens=16, end_tokens=(3, 8)))
    for seed in range(0, 25, 5):
        assert differing(pair, PROMPTS[2:7], range(seed, seed + 5)) == []


@pytest.mark.parametrize("k", [1, 2, 9])
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_limits_are_never_overshot_and_k_shrinks_row_by_row(llamas: Any, k: int, n: int) -> None:
    pair = pair_of(*llamas, Sampling(k=k, max_new_tokens=n))
    assert differing(pair, PROMPTS[:4], range(4)) == []
    batch = BatchGeneration(pair, PROMPTS[:4]).run()
    assert [len(t) for t in batch.tokens] == [n] * 4
    assert batch.finish == [Finish.LENGTH] * 4
    for rounds in batch.rows_rounds:
        left = n
        for r in rounds:
            assert r.drafted == min(k, left - 1)
            left -= len(r.tokens)


def test_without_seeds_every_row_has_the_pairs(llamas: Any) -> None:
    pair = pair_of(*llamas, Sampling(k=3, max_new_tokens=15, seed=7))
    batch = BatchGeneration(pair, [PROMPTS[2], PROMPTS[2], PROMPTS[3]]).run()
    assert batch.tokens[0] == batch.tokens[1] == alone(pair, PROMPTS[2], 7).tokens
    assert batch.tokens[2] == alone(pair, PROMPTS[3], 7).tokens


def test_ends_can_be_ignored(llamas: Any) -> None:
    s = Sampling(k=3, max_new_tokens=25, end_tokens=tuple(range(25)), stop=("1",))
    pair = pair_of(*llamas, s)
    assert all(len(t) < 25 for t in BatchGeneration(pair, PROMPTS[:3]).run().tokens)
    free = BatchGeneration(pair, PROMPTS[:3], ignore_ends=True).run()
    assert [len(t) for t in free.tokens] == [25] * 3
    assert differing(pair, PROMPTS[:3], range(3), ignore_ends=True) == []


@pytest.mark.parametrize("kind", ["checkpoint", "ngram"])
def test_a_row_does_not_depend_on_its_neighbours_or_their_order(llamas: Any, kind: str) -> None:
    s = Sampling(k=3, max_new_tokens=20, end_tokens=(3, 8), **MODES["exact"])
    pair = pair_of(*llamas, s, kind=kind)
    prompts = REPEATING if kind == "ngram" else PROMPTS
    known: dict[int, list[tuple]] = {}
    for shuffle in range(6):
        chosen = random.Random(shuffle).sample(range(8), 2 + shuffle % 5)
        batch = BatchGeneration(pair, [prompts[i] for i in chosen], seeds=chosen).run()
        for b, i in enumerate(chosen):
            assert counts(batch.rows_rounds[b]) == known.setdefault(i, counts(batch.rows_rounds[b]))
    assert len(known) == 8


def test_finished_rows_leave_and_the_others_go_on(llamas: Any) -> None:
    s = Sampling(k=3, max_new_tokens=30, end_tokens=(3, 8))
    pair = pair_of(*llamas, s)
    batch = BatchGeneration(pair, PROMPTS, seeds=range(5, 13))
    left = set(range(8))
    for index, step in enumerate(batch):
        assert (step.index, step.rows, set(step.rounds)) == (index, len(left), left)
        assert {r.index for r in step.rounds.values()} == {index}
        assert step.width == 1 + max(r.drafted for r in step.rounds.values())
        left -= {number for number, r in step.rounds.items() if r.finish is not None}
        if left:
            assert len(batch._executor.target.lengths) == len(left)
    assert not left
    assert max(map(len, batch.rows_rounds)) == index + 1


def test_a_single_run_under_way_is_not_disturbed(llamas: Any) -> None:
    """The batch has caches of its own."""
    pair = pair_of(*llamas, Sampling(k=3, max_new_tokens=30))
    expected = Generation(pair, PROMPTS[2]).run().tokens
    generation = Generation(pair, PROMPTS[2])
    rounds = iter(generation)
    next(rounds)
    BatchGeneration(pair, PROMPTS[:3]).run()
    list(rounds)
    assert generation.tokens == expected


def test_a_lookup_under_way_is_not_disturbed(llamas: Any) -> None:
    pair = pair_of(*llamas, Sampling(k=3, max_new_tokens=20), kind="ngram")
    expected = counts(Generation(pair, REPEATING[1]).run().rounds)
    generation = Generation(pair, REPEATING[1])
    rounds = iter(generation)
    next(rounds)
    BatchGeneration(pair, REPEATING[2:5]).run()
    list(rounds)
    assert counts(generation.rounds) == expected


class RowsRecorder(RaggedLM):
    """Keeps every row of logits that means something, with the text that it followed, as the cache had it."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        super().start(prompts)
        self.content = [list(p[:-1]) for p in prompts]
        self.seen: list[tuple[tuple[int, ...], Tensor]] = []

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        logits = super().forward(tokens, counts)
        for row, n, content, scored in zip(tokens.tolist(), counts, self.content, logits, strict=True):
            for i in range(n):
                content.append(row[i])
                self.seen.append((tuple(content), scored[i]))
        assert self.lengths == tuple(map(len, self.content))
        return logits

    def rollback(self, counts: Sequence[int]) -> None:
        super().rollback(counts)
        for content, n in zip(self.content, counts, strict=True):
            del content[len(content) - n :]

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.content = [self.content[b] for b in rows]

    def largest_error(self) -> float:
        """The largest difference to logits recomputed without a cache, over every row ever returned."""
        known: dict[tuple[int, ...], Tensor] = {}
        for text, _ in sorted(self.seen, key=lambda r: -len(r[0])):
            if text not in known:
                logits = plain_logits(self.model, text)
                known.update({text[: i + 1]: logits[i] for i in range(len(text))})
        return max(float((known[text] - row).abs().max()) for text, row in self.seen)


def rows_of(prompts: Sequence[Sequence[int]], s: Sampling) -> list[Row]:
    return [
        Row(b, list(p), len(p) + s.max_new_tokens, KeyedUniforms(s.seed + b, prompt_digest(p)), ends_at(s.end_tokens))
        for b, p in enumerate(prompts)
    ]


def recorded(llamas: Any, prompts: Sequence[Sequence[int]], s: Sampling) -> tuple[Any, Any, list[Row], Any]:
    target, draft = (RowsRecorder(model) for model in llamas)
    drafter, processors = CheckpointRows(draft, Processors.of(s)), Processors.of(s)
    executor, rows = Eager(target, drafter, processors, RULES[s.mode]), rows_of(prompts, s)
    executor.start(prompts)
    return target, draft, rows, loop.steps(executor, rows, k=s.k, clock=lambda: 0.0)


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_cache_contents_over_many_steps(name: str) -> None:
    """Past the first capacity of 256 slots, which the longest row reaches first."""
    s = Sampling(k=3, max_new_tokens=230, end_tokens=(3,), seed=3)
    target, draft, rows, steps = recorded(tiny_models(name), PROMPTS[:5], s)
    live = list(rows)
    kinds = set()
    for step in steps:
        kinds |= {(r.tested, r.accepted) for r in step.rounds.values()}
        live = [rows[number] for number, r in step.rounds.items() if r.finish is None]
        if not live:
            break
        assert target.content == [row.tokens[:-1] for row in live]
        assert draft.content == [row.tokens[: len(c)] for row, c in zip(live, draft.content, strict=True)]
        assert all(len(row.tokens) - len(c) in (1, 2) for row, c in zip(live, draft.content, strict=True))
    assert {(1, 0), (2, 1), (3, 2), (3, 3)} <= kinds
    assert target.largest_error() < 1e-4
    assert draft.largest_error() < 1e-4


def test_a_prompt_is_cached_bit_for_bit_as_by_its_single_run(llamas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (protocol, ragged_module):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    model = llamas[0]
    ragged = RaggedLM(model)
    ragged.start(PROMPTS)
    assert ragged.lengths == tuple(n - 1 for n in LENGTHS)
    for b, prompt in enumerate(PROMPTS):
        model.reset()
        protocol.prefill(model, prompt[:-1])
        for mine, theirs in zip(ragged._cache.layers, model._cache.layers, strict=True):
            if len(prompt) > 1:
                assert torch.equal(mine._buffers[0][b, :, : len(prompt) - 1], theirs.keys[0])
                assert torch.equal(mine._buffers[1][b, :, : len(prompt) - 1], theirs.values[0])


def test_rolling_back_row_by_row(llamas: Any) -> None:
    model = RaggedLM(llamas[0])
    model.start([[1], [2]])
    model.forward(torch.tensor([[1, 2, 3, 4, 5], [7, 8, 9, 0, 0]]), [5, 3])
    for counts_ in ([6, 0], [0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="cannot roll back"):
            model.rollback(counts_)
    model.rollback([1, 2])
    assert model.lengths == (4, 1)
    logits = model.forward(torch.tensor([[6, 0], [10, 11]]), [1, 2])
    torch.testing.assert_close(logits[0, 0], plain_logits(llamas[0], [1, 2, 3, 4, 6])[-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[1], plain_logits(llamas[0], [7, 10, 11])[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")], ids=["interrupt", "error"])
@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("depth", [0, 1])
def test_interrupted_inside_a_call_the_caches_are_right(depth: int, who: str, error: BaseException) -> None:
    """And what is committed is whole steps: one can go on from there."""
    pair = tiny_models("llama")
    s = Sampling(k=3, max_new_tokens=40)
    target, draft, rows, steps = recorded(pair, PROMPTS[:4], s)
    left = -1

    def hook(*ignored: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error

    (target if who == "target" else draft).model.model.model.layers[depth].register_forward_pre_hook(hook)
    done = list(itertools.islice(steps, 5))
    left = 1 if who == "target" else 2  # the draft's second token of a step
    with pytest.raises(type(error)):
        next(steps)
    for b, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=False)):
        assert row.tokens == [*prompt, *(t for step in done for t in step.rounds[b].tokens)]
        assert target.lengths[b] == len(row.tokens) - 1
        assert len(row.tokens) - 2 <= draft.lengths[b] <= len(row.tokens) - 1
    processors = Processors.of(s)
    list(loop.steps(Eager(target, CheckpointRows(draft, processors), processors), rows, k=3))
    assert [len(row.tokens) - len(p) for row, p in zip(rows, PROMPTS, strict=False)] == [40] * 4
    assert max(target.largest_error(), draft.largest_error()) < 1e-4


def test_padding_may_lie_beyond_the_last_position() -> None:
    """One row is at the end of the model's positions while another still brings k + 1 tokens."""
    config = tf.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=24, bos_token_id=None, eos_token_id=None
    )
    model = build(config, 0)
    pair = pair_of(CausalLM(model, "target"), CausalLM(noisy_copy(model), "draft"), Sampling(k=8, max_new_tokens=12))
    prompts = [PROMPTS[3][:12], PROMPTS[4], PROMPTS[0]]
    assert differing(pair, prompts, range(3)) == []


def test_tokens_that_only_the_other_side_has(llamas: Any) -> None:
    model = RaggedLM(CausalLM(llamas[0].model, "draft", vocabulary=60))
    model.start([[1, 55], [2]])
    logits = model.forward(*padded([[55, 3], [4]]))
    assert logits.shape == (2, 2, 60)
    assert (logits[..., 50:] == torch.finfo(torch.float32).min).all()


class RowTables:
    """`TableModel` for several rows."""

    def __init__(self, table: Tensor, role: str = "target", model: Any = TableModel) -> None:
        self.role, self.vocabulary, self.context = role, table.shape[-1], None
        self.new = lambda: model(table, role)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(m.lengths[0] for m in self.models)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.models = [self.new() for _ in prompts]
        for m, prompt in zip(self.models, prompts, strict=True):
            m.tokens = list(prompt[:-1])

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows that mean nothing are NaN: nobody may look at them."""
        logits = torch.full((*tokens.shape, self.vocabulary), torch.nan, dtype=torch.float64)
        for b, n in enumerate(counts):
            if n:
                logits[b, :n] = self.models[b].forward(tokens[b : b + 1, :n], n)[0]
        return logits

    def rollback(self, counts: Sequence[int]) -> None:
        for m, n in zip(self.models, counts, strict=True):
            m.rollback([n])

    def keep(self, rows: Sequence[int]) -> None:
        self.models = [self.models[b] for b in rows]


def table_steps(
    target: Any,
    drafter: RowsDrafter | None,
    prompts: Sequence[Sequence[int]],
    s: Sampling,
    uniforms: Sequence[Any],
    clock: Any = lambda: 0.0,
) -> Any:
    rows = [
        Row(b, list(p), len(p) + s.max_new_tokens, u, ends_at(s.end_tokens), f" (prompt {b + 1} of the batch)")
        for b, (p, u) in enumerate(zip(prompts, uniforms, strict=True))
    ]
    executor = Eager(target, drafter, Processors.of(s), RULES[s.mode])
    executor.start(prompts)
    return loop.steps(executor, rows, k=s.k, clock=clock)


@pytest.mark.parametrize("options", [{}, {"end_tokens": (1,)}, {"repetition_penalty": 1.7}], ids=str)
@pytest.mark.parametrize("kind", ["checkpoint", "ngram", "plain"])
@pytest.mark.parametrize("which", [0, 1])
def test_the_law_of_one_row_beside_another(which: int, kind: str, options: dict[str, Any]) -> None:
    """One row's outcomes are enumerated while the other's script stands: the law is the target's, the other's text
    always the same."""
    s = Sampling(k=2, max_new_tokens=3, **options)
    target, draft = RowTables(random_table(3, 1)), RowTables(random_table(3, 2), "draft")
    prompts = [[0, 2, 1], [1, 2, 0, 1, 2]] if which == 0 else [[1, 2, 0, 1, 2], [0, 2, 1]]
    others: set[tuple[int, ...]] = set()

    def run(u: Enumerating) -> tuple[int, ...]:
        drafter: RowsDrafter | None = None
        if kind == "checkpoint":
            drafter = CheckpointRows(draft, Processors.of(s))
        elif kind == "ngram":
            drafter = EachRow([NgramDrafter(3, dtype=torch.float64) for _ in prompts])
        script = KeyedUniforms(4, 0)
        uniforms = [u, script] if which == 0 else [script, u]
        texts: list[tuple[int, ...]] = [(), ()]
        for step in table_steps(target, drafter, prompts, s, uniforms):
            for number, finished in step.rounds.items():
                texts[number] += finished.tokens
        others.add(texts[1 - which])
        return texts[which]

    law = enumerate_law(run)
    expected = joint_law(TableModel(random_table(3, 1)).logits, prompts[which], 3, s)
    assert difference(law, expected) < 1e-12
    assert len(others) == 1


def test_times_of_a_step_come_from_the_clock() -> None:
    ticks = itertools.count()
    table = random_table(4, 1)
    s = Sampling(k=2, max_new_tokens=6)
    drafter = CheckpointRows(RowTables(table, "draft"), Processors.of(s))
    uniforms = [KeyedUniforms(b, 0) for b in range(3)]
    done: list[Step] = list(table_steps(RowTables(table), drafter, [[1]] * 3, s, uniforms, lambda: next(ticks)))
    assert [(x.draft_s, x.verify_s, x.rollback_s, x.total_s, x.width, x.rows) for x in done] == [
        (1, 1, 1, 4, 3, 3)
    ] * 2
    for r in (r for step in done for r in step.rounds.values()):
        assert (r.draft_s, r.verify_s, r.rollback_s, r.total_s) == (1, 1, 1, 4)
    ticks = itertools.count()
    (plain, *_) = table_steps(RowTables(table), None, [[1]] * 3, s, uniforms, lambda: next(ticks))
    assert (plain.draft_s, plain.verify_s, plain.rollback_s, plain.total_s, plain.width) == (0, 1, 1, 3, 1)


class Broken(TableModel):
    """The row of logits behind the text 0 1 2 0 is not finite."""

    def logits(self, prefix: Any) -> Tensor:
        row = super().logits(prefix).clone()
        return row * torch.nan if list(prefix) == [0, 1, 2, 0] else row


@pytest.mark.parametrize("who", ["target", "draft"])
def test_logits_that_are_not_finite_name_model_prompt_and_position(who: str) -> None:
    table = random_table(3, 5)
    s = Sampling(k=2, max_new_tokens=4)
    target = RowTables(table, "target", Broken if who == "target" else TableModel)
    draft = RowTables(table, "draft", Broken if who == "draft" else TableModel)
    uniforms = [KeyedUniforms(b, 0) for b in range(2)]
    with pytest.raises(RunError, match=rf"the {who} \(prompt 2 of the batch\) produced .* for position 4;"):
        list(table_steps(target, CheckpointRows(draft, Processors.of(s)), [[1], [0, 1, 2, 0]], s, uniforms))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_sliding_layers_are_refused(llamas: Any, role: str) -> None:
    sliding = CausalLM(tiny_gemma3(), role)
    target, draft = (sliding, llamas[1]) if role == "target" else (llamas[0], sliding)
    wanted = rf"the {role} \(Gemma3ForCausalLM\) has sliding .* a batch needs full attention in every layer: run with"
    with pytest.raises(UsageError, match=wanted):
        BatchGeneration(pair_of(target, draft, Sampling()), PROMPTS[:2])


@pytest.mark.parametrize(
    "config",
    [
        tf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2),
        tf.FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True),
    ],
    ids=["bloom", "falcon"],
)
def test_positions_that_cannot_be_given_are_refused(config: Any) -> None:
    with pytest.raises(UsageError, match=r"the target .(Bloom|Falcon)ForCausalLM. cannot be told the positions"):
        RaggedLM(CausalLM(build(config, 0), "target"))


def test_a_drafter_for_one_row_and_a_target_for_one_row_are_refused(llamas: Any) -> None:
    s = Sampling()
    table = TableModel(random_table(50, 1), "draft")
    with pytest.raises(UsageError, match="the draft decodes one prompt at a time"):
        BatchGeneration(pair_of(llamas[0], table, s), PROMPTS[:2])  # type: ignore[arg-type]
    table.role = "target"
    with pytest.raises(UsageError, match="the target decodes one prompt at a time"):
        BatchGeneration(pair_of(table, llamas[1], s), PROMPTS[:2])  # type: ignore[arg-type]


def test_prompts_and_seeds_must_fit(llamas: Any) -> None:
    pair = pair_of(*llamas, Sampling(max_new_tokens=2))
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="every prompt a token"):
            BatchGeneration(pair, prompts)
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        BatchGeneration(pair, PROMPTS[:2], seeds=[1])
    batch = BatchGeneration(pair, PROMPTS[:2]).run()
    with pytest.raises(RuntimeError, match="has been run"):
        batch.run()


def test_out_of_memory_says_what_to_do() -> None:
    target, draft = tiny_models("llama")

    def hook(module: Any, arguments: tuple) -> None:
        if arguments[0].shape[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    target.model.model.layers[1].register_forward_pre_hook(hook)
    batch = BatchGeneration(pair_of(target, draft, Sampling(k=3, max_new_tokens=9)), PROMPTS[1:3])
    with pytest.raises(RunError, match=r"target on 2 times 4 tokens after 39 cached ones.*a smaller --batch-size"):
        batch.run()
    assert batch.finish == [None, None]


SEEDS = range(20, 25)


def seen(llamas: Any, kind: str = "checkpoint") -> bool:
    """Whether the rows are no longer their single runs."""
    s = Sampling(k=3, max_new_tokens=16, end_tokens=(3, 8))
    return bool(differing(pair_of(*llamas, s, kind=kind), PROMPTS[2:7], SEEDS))


def test_nothing_is_seen_where_nothing_is_wrong(llamas: Any) -> None:
    assert not seen(llamas)
    assert not seen(llamas, "ngram")


@pytest.mark.parametrize("wrong", ["< self.slots", "<= 1 + self.slots", "<= self.slots[:1]"])
def test_fault_mask(llamas: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(Rows, "mask", mutant(Rows.mask, "<= self.slots", wrong))
    assert seen(llamas)


def seen_or_broken(*arguments: Any) -> bool:
    """The same; a fault may also make a call impossible."""
    try:
        return seen(*arguments)
    except (ValueError, IndexError, RuntimeError):
        return True


@pytest.mark.parametrize(
    ("method", "right", "wrong"),
    [
        ("forward", "slots, 0)", "slots[:1], 0)"),
        ("forward", "slots, 0)", "slots + n - 1, 0)"),
        ("forward", "zip(self._lengths, counts,", "zip(self._lengths, [n] * len(counts),"),
        ("rollback", "self._set([length - count for", "self._set([length - min(counts) for"),
        ("keep", "layer.keep(kept)", "layer.keep(kept - 1)"),
        ("start", "self._set([len(p) - 1 for", "self._set([longest for"),
    ],
    ids=[
        "positions shared",
        "positions shifted",
        "padding counted",
        "one roll-back for all",
        "wrong rows kept",
        "lengths shared",
    ],
)
def test_fault_in_the_cache(
    llamas: Any, monkeypatch: pytest.MonkeyPatch, method: str, right: str, wrong: str
) -> None:
    broken = mutant(inspect.unwrap(getattr(RaggedLM, method)), right, wrong)
    monkeypatch.setattr(RaggedLM, method, broken)
    assert seen_or_broken(llamas)


def test_fault_loop_keeps_a_token_too_many(llamas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(Eager.roll_back, "(len(row.tokens) - 1)", "len(row.tokens)")
    monkeypatch.setattr(Eager, "roll_back", wrong)
    assert seen_or_broken(llamas)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self.seeds[number]", "self.seeds[0]"),
        ("prompt_digest(prompt)", "prompt_digest(self.prompts[0])"),
    ],
)
def test_fault_shared_seed(llamas: Any, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    monkeypatch.setattr(BatchGeneration, "_row", mutant(BatchGeneration._row, right, wrong))
    assert seen(llamas)


def test_fault_prompt_lookups_share_their_text(llamas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(Drafter.for_rows, "copy.copy(self)", "self")
    monkeypatch.setattr(Drafter, "for_rows", wrong)
    assert seen_or_broken(llamas, "ngram")


def test_fault_last_padded_token_scored(llamas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(CheckpointRows.propose, "logits[b, len(feed) - 1 : len(feed)]", "logits[b, -1:]")
    monkeypatch.setattr(CheckpointRows, "propose", wrong)
    assert seen(llamas)


def test_a_row_one_slot_from_its_neighbour_sees_a_stale_cache(llamas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of logits with a cache-free pass sees what texts might not: a mask that shows one slot more."""
    monkeypatch.setattr(Rows, "mask", mutant(Rows.mask, "<= self.slots", "<= 1 + self.slots"))
    target, draft, _, steps = recorded(llamas, PROMPTS[:3], Sampling(k=3, max_new_tokens=10))
    list(steps)
    assert min(target.largest_error(), draft.largest_error()) > 1e-2


def test_gpt2_needs_its_positions() -> None:
    """Learned positions leave no doubt: the same rows, each with its own."""
    model = RaggedLM(CausalLM(tiny_gpt2(), "target"))
    model.start(PROMPTS[:4])
    logits = model.forward(*padded([[p[-1], 1, 2][: 1 + b % 3] for b, p in enumerate(PROMPTS[:4])]))
    for b, prompt in enumerate(PROMPTS[:4]):
        n = 1 + b % 3
        expected = plain_logits(model.model, [*prompt[:-1], *[prompt[-1], 1, 2][:n]])[-n:]
        torch.testing.assert_close(logits[b, :n], expected, atol=1e-5, rtol=1e-5)


def test_a_llama_of_another_dtype_masks_in_its_own() -> None:
    model = RaggedLM(CausalLM(tiny_llama(dtype=torch.bfloat16), "target"))
    model.start(PROMPTS[:2])
    assert model.forward(*padded([[1, 2], [3]])).isfinite().all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_longest_row_is_refused(kind: str) -> None:
    model = tiny_llama()
    more = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **more}
    with pytest.raises(UsageError, match="changes its rotary embedding with the longest row"):
        RaggedLM(CausalLM(model, "target"))
