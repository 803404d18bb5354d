"""Stop strings over special tokens and over held text, against transformers' own criterion."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import StopStringCriteria

from specgen.decoding.text import TextStream
from specgen.rounds.record import Finish

EXTRA = [
    b"STOP\xe2",
    b"ST",
    b"TOP",
    b"\x82\xacS",
    b" ab",
]  # ids 256 on: tokens of several bytes, some of half a letter
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    letters = bytes_to_unicode()
    words = [*(bytes([b]) for b in range(256)), *EXTRA]
    vocabulary = {"".join(letters[b] for b in word): i for i, word in enumerate(words)}
    inner = Tokenizer(token_models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def token_ids(tokenizer: Any, *parts: bytes | str) -> list[int]:
    """bytes: a token of EXTRA, or a token a byte; a text is a special token."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, str):
            found.append(tokenizer.convert_tokens_to_ids(part))
        else:
            found += [256 + EXTRA.index(part)] if part in EXTRA else list(part)
    return found


def streamed(stream: TextStream, tokens: list[int]) -> tuple[list[str], Finish | None, int]:
    """What is handed out after each token and at last; how the text ended, and after how many tokens."""
    pieces: list[str] = []
    finish = None
    for token in tokens:
        finish = stream(token)
        pieces.append(stream.take())
        if finish is not None:
            break
    return [*pieces, stream.take(final=True)], finish, len(pieces)


@pytest.mark.parametrize(
    ("parts", "stop", "shown", "used"),
    [
        ([b"ab", "<|im_end|>", b"cd"], ["<|im_end|>"], "ab", 3),
        ([b"ab", "<|im_end|>", b"cd"], ["b<|im_end|>"], "a", 3),
        ([b"ab", "<|im_end|>", b"cd"], ["<|im_end|>c"], "ab", 4),
        ([b"ab", "<|im_end|>", b"cd"], ["b<|im_end|>c"], "a", 4),
        ([b"ab", "<|im_end|>", b"cd"], ["im_end"], "ab", 3),
        ([b"ab", "<|im_end|>", b"cd"], ["bc"], "abcd", 5),  # not in the text: a token stands between
        ([b"ab", "<|im_end|>", b"cd"], [">cd", "cd", "|>c"], "ab", 4),
        ([b"a", "<s>", "</s>", b"b"], ["<s></s>"], "a", 3),
        ([b"a", "<s>", b"b", "</s>", b"c"], ["b</s>", "<s>b</s>"], "a", 4),  # the one that begins first
        ([b"cd", b"STOP\xe2", b"\xe3\xe4"], ["STOP"], "cd", 3),
        ([b"cd", b"STOP\xe2", b"\x82\xac", b"x"], ["STOP"], "cd", 3),
        ([b"cd", b"STOP\xe2", b"\x82\xac", b"x"], ["P\u20ac"], "cdSTO", 5),
        ([b"cd", b"STOP\xe2", b"\x82\xac", b"x"], ["OP", "STOP", "cdS"], "", 3),
        ([b"c\xe2", b"\x82\xacS", b"TOP"], ["STOP"], "c\u20ac", 4),
        ([b"\xf0\x9f\x99", b"STOP\xe2", b"x"], ["STOP"], "\ufffd", 4),  # half a character in front stays one
        ([b"a\xe2", "<|im_end|>", b"b"], ["<|im_end|>"], "a\ufffd", 3),
        ([b"x", "<s>", b" ab", b"STOP\xe2"], ["bS"], "x a", 4),
    ],
    ids=lambda value: None if isinstance(value, list) and isinstance(value[0], bytes) else str(value),
)
def test_where_a_text_stops(tokenizer: Any, parts: Any, stop: list[str], shown: str, used: int) -> None:
    tokens = token_ids(tokenizer, *parts)
    stream = TextStream(tokenizer, stop=stop)
    pieces, finish, n = streamed(stream, tokens)
    assert ("".join(pieces), stream.text, n) == (shown, shown, used)
    assert finish == (None if stop == ["bc"] else Finish.STOP)
    assert by_transformers(tokenizer, tokens, stop) == (n if finish else None)
    assert stream.take(final=True) == ""


def by_transformers(tokenizer: Any, tokens: list[int], stop: list[str]) -> int | None:
    """After how many tokens `generate(stop_strings=…)` ends; None: it does not."""
    criterion = StopStringCriteria(tokenizer, stop)
    for n in range(1, len(tokens) + 1):
        if bool(criterion(torch.tensor([tokens[:n]]), torch.empty(0))[0]):
            return n
    return None


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_ends_where_generate_ends(tokenizer: Any, seed: int) -> None:
    """Texts of letters, halves of letters and special tokens, with up to three stop strings at once."""
    drawn = random.Random(seed)
    alphabet = token_ids(tokenizer, b"abS", b"\xe2\x82\xac", *EXTRA, *SPECIAL)
    fragments = ["a", "b", "S", "ST", "TOP", " ab", "\u20ac", *SPECIAL, "end", "|>", "s>"]
    ended = 0
    for _ in range(60):
        tokens = drawn.choices(alphabet, k=14)
        stop = ["".join(drawn.choices(fragments, k=drawn.randint(1, 3))) for _ in range(drawn.randint(1, 3))]
        stream = TextStream(tokenizer, stop=stop)
        pieces, finish, n = streamed(stream, tokens)
        ended += finish is Finish.STOP
        assert (n if finish else None) == by_transformers(tokenizer, tokens, stop), (tokens, stop)
        assert "".join(pieces) == stream.text
        assert not any(word in stream.text for word in SPECIAL)
        if finish and not broken(tokenizer, tokens[:n]):
            assert stream.text == in_front(tokenizer, tokens[:n], stop), (tokens[:n], stop)
    assert 10 < ended < 60


def broken(tokenizer: Any, tokens: list[int]) -> bool:
    """Whether there is half a character in front of the last token."""
    return "\ufffd" in tokenizer.decode(tokens[:-1], clean_up_tokenization_spaces=False)


def in_front(tokenizer: Any, tokens: list[int], stop: list[str]) -> str:
    """The text without special tokens that lies before the stop string which begins first."""
    whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    front = whole[: min(at for s in stop if (at := whole.find(s)) >= 0)]
    runs = itertools.groupby(tokens, lambda token: token >= 256 + len(EXTRA))
    text = ""
    for special, run in runs:
        piece = tokenizer.decode(list(run), clean_up_tokenization_spaces=False)
        text += "" if special else front[: len(piece)]
        front = front[len(piece) :]
    return text


def test_an_end_token_may_complete_a_stop_string(tokenizer: Any) -> None:
    """It is the end token that ends the text; what the stop string covers is not shown."""
    ends = token_ids(tokenizer, "</s>")
    stream = TextStream(tokenizer, ends, ["b</s>"])
    pieces, finish, _ = streamed(stream, token_ids(tokenizer, b"ab", "</s>"))
    assert (finish, "".join(pieces)) == (Finish.END, "a")
    stream = TextStream(tokenizer, ends, ["</s>"])
    assert streamed(stream, token_ids(tokenizer, b"ab", "</s>"))[1] is Finish.END
    assert stream.text == "ab"
    stream = TextStream(tokenizer, token_ids(tokenizer, b"."), ["b."])  # an end token that is not a special one
    assert streamed(stream, token_ids(tokenizer, b"ab."))[1] is Finish.END
    assert stream.text == "a"


def test_what_lies_behind_a_stop_string_is_not_taken_in(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=["STOP"])
    found = [stream(token) for token in token_ids(tokenizer, b"a", b"STOP\xe2", b"\x82\xac", b"c")]
    assert found == [None, *[Finish.STOP] * 4]
    assert stream.take(final=True) == stream.text == "a"


def test_only_what_may_be_a_stop_string_is_held_back(tokenizer: Any) -> None:
    """A special token that begins one holds back the letters before it only where they belong to it."""
    stream = TextStream(tokenizer, stop=["b</s>c", "</s>d"])
    pieces, finish, _ = streamed(stream, token_ids(tokenizer, b"ab", "</s>", b"xa", "</s>", b"e"))
    assert finish is None
    assert pieces == ["a", "", "", "bx", "a", "", "e", ""]
    stream = TextStream(tokenizer, stop=["xabZ", "b</s>c"])
    pieces, _, _ = streamed(stream, token_ids(tokenizer, b"xab", "</s>", b"e"))
    assert pieces == ["", "", "", "xa", "be", ""]
