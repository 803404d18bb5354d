"""The loop: greedy against transformers, seeds, ends, limits, streamed text, prompt lookup, and the statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from specgen.decoding.eager import autoregressive, speculative, start
from specgen.decoding.text import TextStream
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.models.causal import CausalLM
from specgen.rounds.record import Committed, Ended, Finish, Origin, Round, ends_at
from specgen.rounds.statistics import PositionRate, Spread, summarise
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, Stream, prompt_digest
from specgen.settings import Mode, Sampling
from specgen.verification.rules import RULES, Rule
from support.doubles import TableModel, random_table
from support.tiny import Recorder, noisy_copy, plain_logits, tiny_llama

NEAR_TIE = 1e-4  # nats between the first two, below which two kinds of call may disagree


def rounds_of(
    target: Any,
    drafter: Drafter | None,
    prompt: Sequence[int],
    s: Sampling,
    *,
    ended: Ended | None = None,
    clock: Any = None,
) -> Iterator[Round]:
    start(target, drafter, prompt)
    options: dict[str, Any] = {
        "max_new_tokens": s.max_new_tokens,
        "uniforms": KeyedUniforms(s.seed, prompt_digest(prompt)),
        "ended": ended or ends_at(s.end_tokens),
    }
    if clock is not None:
        options["clock"] = clock
    processors = Processors.of(s)
    if drafter is None:
        return autoregressive(target, processors, prompt, **options)
    return speculative(target, drafter, processors, prompt, k=s.k, rule=RULES[s.mode], **options)


def text_of(rounds: Iterator[Round]) -> list[int]:
    return [t for r in rounds for t in r.tokens]


def margin(target: CausalLM, text: list[int], s: Sampling) -> float:
    """What is between the target's two best tokens after text, in processed logits."""
    scores = Processors.of(s).scores(plain_logits(target, text)[-1:], text)[0]
    first, second = scores.topk(2).values.tolist()
    return first - second


def compare_greedy(target: CausalLM, prompt: list[int], mine: list[int], theirs: list[int], s: Sampling) -> str:
    """`equal`, `near tie` (from where they differ the target all but hesitates) or `fault`."""
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a != b:
            return "near tie" if margin(target, [*prompt, *theirs[:i]], s) < NEAR_TIE else "fault"
    return "equal"


def transformers_greedy(target: CausalLM, prompt: list[int], s: Sampling) -> list[int]:
    ids = torch.tensor([prompt])
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=s.max_new_tokens,
        repetition_penalty=s.repetition_penalty,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


PROMPTS = {"one token": [7], "short": [5, 17, 3, 42, 8], "repetitive": [4, 9, 1, 30, 2] * 8, "long": list(range(40))}


@pytest.fixture(scope="module")
def llamas() -> tuple[CausalLM, CausalLM]:
    model = tiny_llama(2)
    return CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.15), "draft")


def drafter_of(kind: str, draft: CausalLM, s: Sampling) -> Drafter:
    return NgramDrafter(50) if kind == "ngram" else ModelDrafter(draft, Processors.of(s))


@pytest.mark.parametrize("penalty", [None, 1.3])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("kind", ["checkpoint", "ngram"])
def test_greedy_is_transformers_greedy(
    llamas: tuple[CausalLM, CausalLM], kind: str, prompt: list[int], penalty: float | None
) -> None:
    target, draft = llamas
    accepted = 0
    for k in (1, 2, 4, 8):
        s = Sampling(mode=Mode.GREEDY, temperature=None, k=k, max_new_tokens=40, repetition_penalty=penalty)
        theirs = transformers_greedy(target, prompt, s)
        rounds = list(rounds_of(target, drafter_of(kind, draft, s), prompt, s))
        accepted += sum(r.accepted for r in rounds)
        assert compare_greedy(target, prompt, text_of(iter(rounds)), theirs, s) in ("equal", "near tie")
        assert text_of(rounds_of(target, None, prompt, s)) == theirs
    assert accepted > 0


def test_the_comparison_tells_a_fault_from_a_near_tie(llamas: tuple[CausalLM, CausalLM]) -> None:
    target, _ = llamas
    s = Sampling(mode=Mode.GREEDY, temperature=None, max_new_tokens=10)
    prompt = PROMPTS["short"]
    theirs = transformers_greedy(target, prompt, s)
    wrong = [*theirs[:6], (theirs[6] + 1) % 50, *theirs[7:]]
    assert compare_greedy(target, prompt, theirs, theirs, s) == "equal"
    assert compare_greedy(target, prompt, wrong, theirs, s) == "fault"
    tied = tiny_llama(2)
    with torch.no_grad():  # the best token and its neighbour get the same row: a tie wherever that token is best
        tied.lm_head.weight[wrong[6]] = tied.lm_head.weight[theirs[6]]
    target = CausalLM(tied, "target")
    prefix = [*prompt, *theirs[:6]]
    assert margin(target, prefix, s) < NEAR_TIE
    assert compare_greedy(target, prefix, [wrong[6]], [theirs[6]], s) == "near tie"


def test_greedy_records_what_happened() -> None:
    target, draft = TableModel(random_table(6, 1)), TableModel(random_table(6, 2), "draft")
    s = Sampling(mode=Mode.GREEDY, temperature=None, k=3, max_new_tokens=30)
    rounds = list(rounds_of(target, ModelDrafter(draft, Processors.of(s)), [1, 2], s))
    assert not any(r.impossible for r in rounds)
    for finished in rounds:
        origins = [c.origin for c in finished.committed]
        assert origins[: finished.accepted] == [Origin.ACCEPTED] * finished.accepted
        last = Origin.CORRECTION if finished.tested > finished.accepted else Origin.BONUS
        assert origins[finished.accepted :] == [last]
        assert all(o in (0.0, 1.0) for o in finished.overlaps)
        assert [o == 1 for o in finished.overlaps] == [j < finished.accepted for j in range(finished.tested)]
        assert all((c.support, c.entropy, c.log_prob) == (1, 0, 0) for c in finished.committed)


def table_pair(vocabulary: int = 8, noise: float = 0.7) -> tuple[TableModel, TableModel]:
    table = random_table(vocabulary, 1)
    return TableModel(table), TableModel(table + noise * random_table(vocabulary, 2), "draft")


def sampled(s: Sampling, prompt: Sequence[int] = (1, 2, 3)) -> list[int]:
    target, draft = table_pair()
    return text_of(rounds_of(target, ModelDrafter(draft, Processors.of(s)), list(prompt), s))


def test_same_seed_same_text() -> None:
    s = Sampling(k=3, max_new_tokens=60, seed=5)
    assert sampled(s) == sampled(s)
    assert sampled(s) != sampled(Sampling(k=3, max_new_tokens=60, seed=6))
    assert sampled(s, (1, 2, 3)) != sampled(s, (2, 2, 3))  # the last two tokens, all the tables see, are the same


def test_same_seed_same_text_and_records_through_real_caches(llamas: tuple[CausalLM, CausalLM]) -> None:
    target, draft = llamas
    s = Sampling(k=3, max_new_tokens=40, seed=5)

    def once() -> list[Round]:
        drafter = ModelDrafter(draft, Processors.of(s))
        return list(rounds_of(target, drafter, PROMPTS["short"], s, clock=lambda: 0.0))

    assert once() == once()


def test_the_draft_of_one_prompt_does_not_disturb_another() -> None:
    """One pair of models runs a text between; with another k, another draft, or plainly."""
    s = Sampling(k=3, max_new_tokens=30, seed=5)
    alone = sampled(s, (4, 5))
    for k, draft_seed in itertools.product((1, 2, 7), (3, 4)):
        target, draft = table_pair()
        between = ModelDrafter(TableModel(random_table(8, draft_seed), "draft"), Processors.of(s))
        text_of(rounds_of(target, between, [1, 2, 3], Sampling(k=k, max_new_tokens=11, seed=5)))
        assert text_of(rounds_of(target, ModelDrafter(draft, Processors.of(s)), [4, 5], s)) == alone


def test_every_uniform_has_a_key_of_its_own() -> None:
    keys: list[tuple] = []

    class Listening(KeyedUniforms):
        def __call__(self, stream: Stream, position: int, round_index: int, edges: Any = None) -> float:
            keys.append((stream, position, round_index))
            return super().__call__(stream, position, round_index, edges)

    target, draft = table_pair()
    s = Sampling(k=4, max_new_tokens=80)
    drafter = ModelDrafter(draft, Processors.of(s))
    start(target, drafter, [1, 2])
    rounds = list(
        speculative(
            target,
            drafter,
            Processors.of(s),
            [1, 2],
            k=4,
            max_new_tokens=80,
            uniforms=Listening(1, 2),
            ended=ends_at(()),
        )
    )
    assert len(keys) == len(set(keys))
    assert {stream for stream, *_ in keys} == {Stream.DRAFT, Stream.ACCEPT, Stream.CORRECTION, Stream.BONUS}
    assert {index for *_, index in keys} == set(range(len(rounds)))


def test_the_draft_too_is_processed_with_what_it_has_drafted() -> None:
    """At each position: the committed prefix and the drafted tokens before it, as the target will be."""
    table = random_table(12, 1)
    target, draft = TableModel(table), TableModel(table, "draft")
    s = Sampling(k=5, max_new_tokens=12, repetition_penalty=1.5)
    processors = Processors.of(s)
    drafter, prefix = ModelDrafter(draft, processors), [1, 2]
    start(target, drafter, prefix)
    proposal = drafter.propose(prefix, 5, 0, KeyedUniforms(0, 0))
    text = [*prefix, *proposal.tokens]
    for j in range(5):
        before = text[: 2 + j]
        assert torch.equal(proposal.probs[j], processors(draft.logits(before)[None], before)[0])
    # So one model as both sides agrees with itself, penalty or not.
    rounds = list(rounds_of(target, drafter, prefix, s))
    assert all(o == pytest.approx(1) for r in rounds for o in r.overlaps)
    assert [r.accepted for r in rounds] == [r.drafted for r in rounds]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("kind", ["checkpoint", "ngram"])
def test_never_more_than_max_new_tokens(kind: str, k: int, n: int) -> None:
    target, draft = table_pair(3)
    s = Sampling(k=k, max_new_tokens=n)
    prompt = [1, 2, 1, 2, 1]
    drafter: Drafter = NgramDrafter(3, dtype=torch.float64)
    if kind == "checkpoint":
        drafter = ModelDrafter(draft, Processors.of(s))
    rounds = list(rounds_of(target, drafter, prompt, s))
    assert len(text_of(iter(rounds))) == n
    assert [r.finish for r in rounds] == [None] * (len(rounds) - 1) + [Finish.LENGTH]
    left = n
    for finished in rounds:
        assert finished.drafted <= min(k, left - 1)
        if kind == "checkpoint":
            assert finished.drafted == min(k, left - 1)
        left -= len(finished.tokens)


def test_plain_decoding_stops_at_the_limit_and_at_an_end() -> None:
    target, _ = table_pair(3)
    rounds = list(rounds_of(target, None, [1, 2], Sampling(max_new_tokens=5)))
    assert [(r.drafted, r.tested, r.accepted, len(r.tokens)) for r in rounds] == [(0, 0, 0, 1)] * 5
    assert [r.index for r in rounds] == list(range(5))
    assert rounds[-1].finish is Finish.LENGTH
    end = rounds[2].tokens[0]
    cut = list(rounds_of(target, None, [1, 2], Sampling(max_new_tokens=5, end_tokens=(end,))))
    assert cut[-1].finish is Finish.END
    assert text_of(iter(cut))[-1] == end
    assert len(cut) <= 3


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no token"):
        start(table_pair()[0], None, [])


def chain(vocabulary: int = 10) -> TableModel:
    """After token t comes (t + 1) mod vocabulary, all but surely."""
    table = torch.zeros(vocabulary + 1, vocabulary, dtype=torch.float64)
    for t in range(vocabulary):
        table[t + 1, (t + 1) % vocabulary] = 60
    return TableModel(table, memory=1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(k=6, max_new_tokens=50, end_tokens=(4,)),
        Sampling(mode=Mode.GREEDY, temperature=None, k=6, max_new_tokens=50, end_tokens=(4,)),
    ],
)
def test_an_end_token_in_the_middle_of_an_accepted_block(sampling: Sampling) -> None:
    target, draft = chain(), chain()
    told: list[int] = []

    def ended(token: int) -> Finish | None:
        told.append(token)
        return Finish.END if token == 4 else None

    (only,) = rounds_of(target, ModelDrafter(draft, Processors.of(sampling)), [1], sampling, ended=ended)
    assert only.tokens == (2, 3, 4)
    assert (only.drafted, only.tested, only.accepted, only.finish) == (6, 3, 3, Finish.END)
    assert [c.origin for c in only.committed] == [Origin.ACCEPTED] * 3
    assert len(only.overlaps) == 3
    assert told == [2, 3, 4]  # nothing behind the end was even shown
    assert target.tokens == [1, 2, 3]
    assert draft.tokens == [1, 2, 3]


@pytest.mark.parametrize(("k", "origin"), [(2, Origin.BONUS), (3, Origin.ACCEPTED)])
def test_an_end_token_that_is_the_last_of_a_round(k: int, origin: Origin) -> None:
    target, draft = chain(), chain()
    s = Sampling(k=k, max_new_tokens=50, end_tokens=(4,))
    (only,) = rounds_of(target, ModelDrafter(draft, Processors.of(s)), [1], s)
    assert only.tokens == (2, 3, 4)
    assert (only.committed[-1].origin, only.finish) == (origin, Finish.END)
    assert (only.tested, only.accepted) == (min(k, 3), min(k, 3))


def test_the_end_wins_over_the_limit() -> None:
    target, draft = chain(), chain()
    s = Sampling(k=2, max_new_tokens=3, end_tokens=(4,))
    (only,) = rounds_of(target, ModelDrafter(draft, Processors.of(s)), [1], s)
    assert only.finish is Finish.END


def test_events_that_cannot_be_are_recorded() -> None:
    """A rule that rejects what the target likes better, corrects to what it likes less, and keeps what it forbids."""
    never = Rule("never", lambda t, d: torch.zeros_like(t), lambda t, d, a: d)
    always = Rule("always", lambda t, d: torch.ones_like(t))
    s = Sampling(k=2, max_new_tokens=6)
    target, draft = TableModel(random_table(3, 1)), TableModel(random_table(3, 2), "draft")
    target.table[:, 0] = torch.finfo(torch.float64).min
    found: dict[str, str] = {}
    for rule in (never, always):
        drafter = ModelDrafter(draft, Processors.of(s))
        words: list[str] = []
        for seed in range(10):
            start(target, drafter, [1])
            rounds = speculative(
                target,
                drafter,
                Processors.of(s),
                [1],
                k=2,
                max_new_tokens=6,
                rule=rule,
                uniforms=KeyedUniforms(seed, 0),
                ended=ends_at(()),
            )
            words += [event for r in rounds for event in r.impossible]
        found[rule.name] = " ".join(words)
    assert "rejected token" in found["never"]
    assert "the target gives no less than the draft" in found["never"]
    assert "the target gives no more than the draft" in found["never"]
    assert "committed token 0, to which the target gives 0" in found["always"]


def test_times_of_a_round_come_from_the_clock() -> None:
    ticks = itertools.count()
    target, draft = chain(), chain()
    s = Sampling(k=2, max_new_tokens=6)
    rounds = list(rounds_of(target, ModelDrafter(draft, Processors.of(s)), [1], s, clock=lambda: next(ticks)))
    assert [(r.draft_s, r.verify_s, r.rollback_s, r.total_s, r.other_s) for r in rounds] == [(1, 1, 1, 4, 2)] * 2


def test_what_is_kept_of_a_committed_token() -> None:
    target, draft = table_pair(5)
    s = Sampling(k=3, max_new_tokens=40, top_k=3)
    prompt = [1, 2]
    text, processors = list(prompt), Processors.of(s)
    for finished in rounds_of(target, ModelDrafter(draft, processors), prompt, s):
        for i, kept in enumerate(finished.committed):
            p, q = (processors(m.logits(text)[None], text)[0] for m in (target, draft))
            assert kept.log_prob == pytest.approx(math.log(float(p[kept.token])))
            assert kept.entropy == pytest.approx(float(-(p[p > 0] * p[p > 0].log()).sum()))
            assert kept.support == 3
            if i < finished.tested:
                assert kept.overlap == finished.overlaps[i] == pytest.approx(float(torch.minimum(p, q).sum()))
            else:
                assert kept.overlap is None
            text.append(kept.token)


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: id 0 … 255 in the order of the byte alphabet, then a special end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(token_models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def streamed(tokenizer: Any, text: str, **options: Any) -> tuple[list[str], Finish | None, TextStream]:
    """What is handed out after each byte, up to the end, and at last."""
    stream = TextStream(tokenizer, **options)
    pieces, finish = [], None
    for token in ids(tokenizer, text):
        finish = stream(token)
        pieces.append(stream.take())
        if finish is not None:
            break
    pieces.append(stream.take(final=True))
    return pieces, finish, stream


def test_text_comes_as_it_is_decoded(byte_tokenizer: Any) -> None:
    text = "Hello,  world.\n\tnext [x] é"
    pieces, finish, stream = streamed(byte_tokenizer, text)
    assert "".join(pieces) == text == stream.text
    assert finish is None
    assert pieces[:5] == list("Hello")


@pytest.mark.parametrize("text", ["é", "€uro", "a🙂b", "日本語", "🇫🇷 x"])
def test_incomplete_utf8_is_held_back(byte_tokenizer: Any, text: str) -> None:
    pieces, _, _ = streamed(byte_tokenizer, text)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert [p for p in pieces if p] == list(text)
    assert len(pieces) == len(text.encode()) + 1


def test_bytes_that_never_become_a_character_come_out_at_the_end(byte_tokenizer: Any) -> None:
    stream = TextStream(byte_tokenizer)
    for token in ids(byte_tokenizer, "ok €")[:-1]:
        stream(token)
    assert stream.take() == "ok "
    assert stream.take() == ""
    last = stream.take(final=True)
    assert last
    assert set(last) == {"\ufffd"}
    assert stream.take(final=True) == ""


def test_a_stop_string_is_found_token_by_token_and_never_shown(byte_tokenizer: Any) -> None:
    pieces, finish, stream = streamed(byte_tokenizer, "one END two", stop=("END",))
    assert finish is Finish.STOP
    assert "".join(pieces) == "one " == stream.text
    assert len(pieces) == len("one END") + 1  # ended with the D
    assert pieces[-4:] == ["", "", "", ""]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none(byte_tokenizer: Any) -> None:
    pieces, finish, _ = streamed(byte_tokenizer, "x ENx EN", stop=("END",))
    assert finish is None
    assert pieces == ["x", " ", "", "", "ENx", " ", "", "", "EN"]


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("aab", ("ab",), "a"),
        ("aaab", ("aab",), "a"),
        ("abcd", ("bcd", "cd"), "a"),
        ("xyz", ("z", "yz"), "x"),
        ("a\n\nb", ("\n\n",), "a"),
        ("a€b", ("€",), "a"),
        ("END", ("END",), ""),
        ("EEND", ("END", "ENE"), "E"),
    ],
)
def test_stop_strings(byte_tokenizer: Any, text: str, stop: tuple[str, ...], shown: str) -> None:
    pieces, finish, _ = streamed(byte_tokenizer, text, stop=stop)
    assert finish is Finish.STOP
    assert "".join(pieces) == shown


def test_an_end_token_gives_no_text(byte_tokenizer: Any) -> None:
    end = byte_tokenizer.eos_token_id
    stream = TextStream(byte_tokenizer, end_tokens=(end,))
    assert [stream(t) for t in [*ids(byte_tokenizer, "hi"), end]] == [None, None, Finish.END]
    assert stream.take(final=True) == "hi"


def test_a_special_token_in_between_is_left_out(byte_tokenizer: Any) -> None:
    stream = TextStream(byte_tokenizer)
    for token in [*ids(byte_tokenizer, "a"), byte_tokenizer.eos_token_id, *ids(byte_tokenizer, "b")]:
        assert stream(token) is None
    assert stream.take(final=True) == "ab"


def test_without_a_tokenizer_the_ids_are_the_text() -> None:
    stream = TextStream(None, end_tokens=(9,))
    assert [stream(t) for t in (1, 22, 9)] == [None, None, Finish.END]
    assert stream.take(final=True) == "1 22 "


class Reciting:
    """A model that recites a text, whatever came before."""

    def __new__(cls, text: list[int], role: str, vocabulary: int = 260) -> Any:
        class Model(TableModel):
            def logits(self, prefix: Sequence[int]) -> torch.Tensor:
                row = torch.zeros(vocabulary, dtype=torch.float64)
                row[text[len(prefix) % len(text)]] = 60
                return row

        return Model(torch.zeros(1, vocabulary), role)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.GREEDY])
def test_a_stop_string_within_a_block_and_across_two(byte_tokenizer: Any, k: int, mode: Mode) -> None:
    text = ids(byte_tokenizer, "_alpha STOP beta")
    target, draft = Reciting(text, "target"), Reciting(text, "draft")
    s = Sampling(mode=mode, temperature=1.0 if mode is Mode.EXACT else None, k=k, max_new_tokens=50)
    stream = TextStream(byte_tokenizer, stop=("STOP",))
    shown, rounds = [], []
    for finished in rounds_of(target, ModelDrafter(draft, Processors.of(s)), text[:1], s, ended=stream):
        rounds.append(finished)
        shown.append(stream.take())
    shown.append(stream.take(final=True))
    assert "".join(shown) == "alpha "
    assert text_of(iter(rounds)) == text[1 : len("_alpha STOP")]
    assert rounds[-1].finish is Finish.STOP
    assert target.lengths == (len("_alpha STOP") - 1,)
    last = rounds[-1]
    assert last.accepted == last.tested == min(len(last.tokens), last.drafted)


def proposed(prefix: list[int], k: int = 4, **options: Any) -> tuple[int, ...]:
    drafter = NgramDrafter(50, **options)
    drafter.start(prefix)
    proposal = drafter.propose(prefix, k, 0, KeyedUniforms(0, 0))
    assert proposal.probs.shape == (len(proposal.tokens), 50)
    assert proposal.probs.argmax(-1).tolist() == list(proposal.tokens)
    assert proposal.probs.sum(-1).tolist() == [1.0] * len(proposal.tokens)
    return proposal.tokens


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], (3, 4, 9, 1)),
        ([1, 2, 7, 1, 2, 8, 1, 2], (8, 1, 2, 8)),  # the latest of two
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], (7, 6, 1, 2)),  # the longer match, though the shorter is later
        ([1, 2, 3, 4], ()),
        ([1], ()),
        ([1, 1], (1, 1, 1, 1)),
        ([9, 4, 7, 9], (4, 7, 9, 4)),
    ],
)
def test_lookup_takes_the_latest_longest_match(prefix: list[int], expected: tuple[int, ...]) -> None:
    assert proposed(prefix) == expected
    assert proposed(prefix, 2) == expected[:2]
    assert proposed(prefix, 0) == ()


def test_lookup_sizes() -> None:
    prefix = [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]
    assert proposed(prefix, 1, max_ngram=2) == (8,)
    assert proposed(prefix, 1, max_ngram=3) == (7,)
    assert proposed([9, 4, 7, 9], 1, min_ngram=2) == ()


def naive_lookup(text: list[int]) -> int | None:
    for n in (3, 2, 1):
        for at in range(len(text) - n - 1, -1, -1):
            if text[at : at + n] == text[-n:]:
                return text[at + n]
    return None


@pytest.mark.parametrize("seed", range(5))
def test_lookup_index_after_rollbacks_equals_a_fresh_one(seed: int) -> None:
    """Through rounds of proposing, rejecting and committing; against a plain search too."""
    draws = torch.randint(4, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = draws[:6]
    drafter = NgramDrafter(4)
    drafter.start(text)
    for i in range(6, 100):
        proposal = drafter.propose(text, 5, 0, KeyedUniforms(0, 0))
        grown = list(text)
        for token in proposal.tokens:
            assert token == naive_lookup(grown)
            grown.append(token)
        assert len(proposal.tokens) == 5 or naive_lookup(grown) is None
        kept = draws[i + 100] % (len(proposal.tokens) + 1)
        text = [*text, *proposal.tokens[:kept], draws[i]]
        drafter.rollback(max(0, drafter.cached - (len(text) - 1)))
        fresh = NgramDrafter(4)
        fresh.start([*text[: drafter.cached], 0])
        assert {g: f for g, f in drafter._followers.items() if f} == fresh._followers
        assert drafter._tokens == fresh._tokens == text[: drafter.cached]


def test_lookup_scores_as_it_proposes() -> None:
    text = [1, 2, 3, 1, 2, 3, 3, 1, 2, 2, 1, 2, 3]
    drafter = NgramDrafter(5)
    scored = dict(drafter.score(text, 4))
    assert list(scored) == list(range(4, len(text)))
    for i, (row,) in scored.items():
        expected = naive_lookup(text[:i])
        assert (None if row is None else int(row.argmax())) == expected
    assert drafter.cached == 0  # nothing of it is kept


def test_a_text_in_which_nothing_repeats_is_decoded_without_proposals() -> None:
    target = chain()
    s = Sampling(k=3, max_new_tokens=6)
    rounds = list(rounds_of(target, NgramDrafter(10, dtype=torch.float64), [1], s))
    assert text_of(iter(rounds)) == [2, 3, 4, 5, 6, 7]
    assert [(r.drafted, r.tested, r.accepted) for r in rounds] == [(0, 0, 0)] * 6
    assert {c.origin for r in rounds for c in r.committed} == {Origin.BONUS}
    assert summarise(rounds).nothing_proposed == 5  # the last had no room to draft


def hand_round(
    index: int,
    drafted: int,
    accepted: int,
    overlaps: tuple[float, ...],
    times: tuple[float, ...],
    finish: Finish | None = None,
    committed: int | None = None,
) -> Round:
    n = accepted + 1 if committed is None else committed
    tokens = tuple(Committed(t, Origin.ACCEPTED, -1.0, 1.0, 5, None) for t in range(n))
    draft_s, verify_s, rollback_s, total_s = times
    return Round(
        index,
        drafted,
        len(overlaps),
        accepted,
        tokens,
        overlaps,
        draft_s=draft_s,
        verify_s=verify_s,
        rollback_s=rollback_s,
        total_s=total_s,
        finish=finish,
    )


HAND = [
    hand_round(0, 3, 1, (0.5, 0.25), (0.3, 1.0, 0.1, 2.0)),
    hand_round(1, 3, 3, (0.75, 0.5, 1.0), (0.6, 1.0, 0.2, 2.0)),
    hand_round(2, 0, 0, (), (0.0, 0.5, 0.0, 1.0)),
    hand_round(3, 2, 2, (0.5, 0.5), (0.6, 2.0, 0.1, 3.0), Finish.END, committed=2),
]


def test_every_number_of_hand_written_rounds() -> None:
    s = summarise(HAND)
    assert (s.rounds, s.drafted, s.tested, s.accepted, s.committed) == (4, 8, 7, 6, 9)
    assert s.nothing_proposed == 1
    assert s.alpha == 6 / 7
    assert s.tau == 9 / 4
    assert s.accepted_fraction == 6 / 8
    assert s.predicted_alpha == pytest.approx(4 / 7)
    assert s.decode_s == 8
    assert s.tokens_per_second == 9 / 8
    assert s.positions == (
        PositionRate(1, 3, 3, 3, pytest.approx(1.75 / 3)),
        PositionRate(2, 3, 3, 2, pytest.approx(1.25 / 3)),
        PositionRate(3, 2, 1, 1, 1.0),
    )
    assert [p.rate for p in s.positions] == [1, 2 / 3, 1]
    assert s.draft_per_token == Spread(3, pytest.approx(0.2), pytest.approx(0.28), pytest.approx(1.5 / 8))
    assert s.verify == Spread(4, 1.0, pytest.approx(1.7), 4.5 / 8)
    assert s.rollback == Spread(4, pytest.approx(0.1), pytest.approx(0.17), pytest.approx(0.4 / 8))
    # 2 − .3 − 1, 2 − .6 − 1, 1 − .5, 3 − .6 − 2
    assert s.other == Spread(4, pytest.approx(0.45), pytest.approx(0.64), pytest.approx(2.0 / 8))
    shares = [x.share for x in (s.draft_per_token, s.verify, s.other)]
    assert sum(x for x in shares if x is not None) == pytest.approx(1)  # roll-back is a part of other


def test_statistics_without_drafts_and_without_rounds() -> None:
    plain = summarise(HAND[2:3], drafting=False)
    assert (plain.alpha, plain.predicted_alpha, plain.accepted_fraction, plain.positions) == (None,) * 3 + ((),)
    assert (plain.tau, plain.nothing_proposed, plain.draft_per_token.n) == (1, 0, 0)
    none = summarise([])
    assert (none.rounds, none.tau, none.tokens_per_second, none.verify.n) == (0, None, None, 0)
    last = summarise([hand_round(0, 0, 0, (), (0.0, 1.0, 0.0, 1.0), Finish.LENGTH)])
    assert last.nothing_proposed == 0
    assert summarise([hand_round(0, 0, 0, (), (0.0, 1.0, 0.0, 1.0), Finish.END)]).nothing_proposed == 1


def test_acceptance_does_not_fall_as_k_grows_where_the_draft_is_equally_good() -> None:
    """accepted/drafted does: positions behind a rejection were never tested."""
    rates, fractions = [], []
    for k in (1, 3, 6):
        table, other = random_table(6, 1, rows=1), random_table(6, 2, rows=1)
        target, draft = TableModel(table), TableModel(table + 0.8 * other, "draft")
        s = Sampling(k=k, max_new_tokens=600)
        stats = summarise(list(rounds_of(target, ModelDrafter(draft, Processors.of(s)), [1], s)))
        rates.append(stats.alpha)
        fractions.append(stats.accepted_fraction)
        assert stats.alpha == pytest.approx(stats.predicted_alpha, abs=0.09)
    assert max(rates) - min(rates) < 0.12
    assert fractions[0] - fractions[2] > 0.15


def test_recorders_agree_that_the_draft_sees_what_was_committed(llamas: tuple[CausalLM, CausalLM]) -> None:
    """After a full block the draft is fed two tokens: the one it had drafted last, and the bonus."""
    target, same = Recorder(llamas[0].model, "target"), Recorder(llamas[0].model, "draft")
    s = Sampling(mode=Mode.GREEDY, temperature=None, k=3, max_new_tokens=21)
    text, rounds = list(PROMPTS["short"]), []
    for finished in rounds_of(target, ModelDrafter(same, Processors.of(s)), text, s):
        text += finished.tokens
        rounds.append(finished)
        assert same.content == text[: len(same.content)]
    # 4 tokens a round: every round is a full block, so its cache is right; the last has room for one token.
    assert [(r.drafted, r.accepted) for r in rounds] == 5 * [(3, 3)] + [(0, 0)]
