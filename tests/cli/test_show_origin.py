"""`specgen run --show-origin`: colours by who wrote a token; nothing of the model's own gets out of them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specgen.cli.colours import SGR, OriginText, paint
from specgen.rounds.record import Committed, Origin, Round
from specgen.settings import Sampling
from support.command import N, on_terminal, process, refused, run, write_pair

A, C, B = Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    (folder / "p.txt").write_text("a loaf of bacon")
    return folder


class Pieces:
    """A tokenizer whose tokens are bytes: texts that end inside a character are incomplete, as in real ones."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, tokens: list[int], **_: Any) -> str:
        return b"".join(self.pieces[t] for t in tokens).decode("utf-8", "replace")


class Fake:
    """A generation whose tokens 0, 1, … come in the rounds given, each token with its origin."""

    def __init__(self, pieces: list[bytes], stop: tuple[str, ...] = ()) -> None:
        self.pair = SimpleNamespace(tokenizer=Pieces(*pieces), sampling=Sampling(stop=stop))
        self.rounds: list[Round] = []
        self.count = 0

    def commit(self, *origins: Origin) -> None:
        committed = tuple(Committed(self.count + i, o, 0.0, 0.0, 1, None) for i, o in enumerate(origins))
        self.count += len(origins)
        self.rounds.append(Round(len(self.rounds), len(origins), len(origins), 0, committed))


def spans(text: str) -> list[tuple[str, str]]:
    """(SGR code, text) of what is coloured, ("", text) of what is not. Nothing else may hold an escape."""
    found = []
    for code, coloured, bare in re.findall(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m|([^\x1b]+)", text):
        found.append((code, coloured) if coloured else ("", bare))
    assert "".join(f"\x1b[{c}m{t}\x1b[0m" if c else t for c, t in found) == text
    return found


def test_each_token_in_the_colour_of_its_origin_round_by_round() -> None:
    fake = Fake([b"ab", b"cd", b"ef", b"gh"])
    source = OriginText(fake)  # type: ignore[arg-type]
    fake.commit(A, C)
    assert spans(source.take()) == [(SGR[A], "ab"), (SGR[C], "cd")]
    assert source.take() == ""
    fake.commit(A, B)
    assert spans(source.take()) == [(SGR[A], "ef"), (SGR[B], "gh")]
    assert source.take(final=True) == ""


def test_text_held_back_for_a_stop_string_keeps_its_writer() -> None:
    fake = Fake([b"a", b"x", b"y", b"x", b"yz", b"q"], stop=("xyz",))
    source = OriginText(fake)  # type: ignore[arg-type]
    fake.commit(A, C)
    assert spans(source.take()) == [(SGR[A], "a")]  # x may begin the stop string
    fake.commit(A, B)
    assert spans(source.take()) == [(SGR[C], "x"), (SGR[A], "y")]
    fake.commit(A)
    assert source.take(final=True) == ""  # x and yz were the stop string


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it() -> None:
    smile = "😀".encode()
    fake = Fake([b"a", smile[:2], smile[2:3], smile[3:], b"\xc3"])
    source = OriginText(fake)  # type: ignore[arg-type]
    fake.commit(A, A)
    assert spans(source.take()) == [(SGR[A], "a")]
    fake.commit(C)
    assert source.take() == ""
    fake.commit(B)
    assert spans(source.take()) == [(SGR[B], "😀")]
    fake.commit(A)
    assert source.take() == ""
    assert spans(source.take(final=True)) == [(SGR[A], "�")]


def test_plain_decoding_has_no_colour() -> None:
    fake = Fake([b"a\n", b"b"])
    source = OriginText(fake)  # type: ignore[arg-type]
    fake.commit(Origin.PLAIN, Origin.PLAIN)
    assert source.take() == "a\nb"


def test_a_line_ends_without_colour() -> None:
    assert paint("ab\n\ncd\n", A) == f"\x1b[{SGR[A]}mab\x1b[0m\n\n\x1b[{SGR[A]}mcd\x1b[0m\n"


def test_no_control_character_of_the_models_comes_through() -> None:
    everything = "".join(map(chr, range(0x2500)))
    inside = paint(everything, A).removeprefix(f"\x1b[{SGR[A]}m").replace(f"\x1b[0m\n\x1b[{SGR[A]}m", "\n")
    inside = inside.removesuffix("\x1b[0m")
    assert {c for c in inside if unicodedata.category(c) == "Cc"} == {"\t", "\n"}
    assert len(inside) == len(everything)
    assert "␛[0m" in paint("\x1b[0mx", C)


ARGUMENTS = ["run", "p.txt", "--profile", "pair.yaml", "--max-new-tokens", str(N), "--show-origin", "--no-check"]
CODES = {f"\x1b[{code}m".encode() for code in SGR.values()}


def without_codes(text: bytes) -> str:
    return re.sub(rb"\x1b\[[\d;]*m", b"", text).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("arguments", [[], ["--no-stream"]], ids=["streamed", "at once"])
def test_on_a_terminal(pair: Path, arguments: list[str]) -> None:
    plain = process(pair, *[a for a in ARGUMENTS if a != "--show-origin"])
    code, written = on_terminal(pair, [*ARGUMENTS, "--quiet", *arguments])
    assert code == 0
    assert without_codes(written) == plain.stdout
    assert all(c in written for c in CODES)
    code, written = on_terminal(pair, [*ARGUMENTS, *arguments])
    assert "who wrote a token: accepted (green), correction (red, underlined), bonus (cyan)" in without_codes(written)


@pytest.mark.parametrize(
    ("extra", "why"), [({"NO_COLOR": "1"}, "NO_COLOR is set"), ({"TERM": "dumb"}, "TERM is dumb")], ids=str
)
def test_forbidden_colours(pair: Path, extra: dict[str, str], why: str) -> None:
    _, written = on_terminal(pair, ARGUMENTS, **extra)
    assert b"\x1b" not in written
    assert f"specgen: note: --show-origin: {why}".encode() in written


def test_in_a_pipe_the_text_stays_raw_and_one_note_says_why(pair: Path) -> None:
    plain = run(pair, "p.txt", "--no-check")
    result = run(pair, "p.txt", "--no-check", "--show-origin")
    assert (result.returncode, result.stdout) == (0, plain.stdout)
    assert result.stderr.count("--show-origin") == 1
    assert "specgen: note: --show-origin: colours need a terminal as stdout" in result.stderr
    assert run(pair, "p.txt", "--no-check", "--show-origin", "-q").stderr == ""


def test_plain(pair: Path) -> None:
    code, written = on_terminal(pair, [*ARGUMENTS, "--plain", "-q"])
    assert code == 0
    assert not any(c in written for c in CODES)


def test_with_json_it_means_nothing(pair: Path, here: Callable[..., Any]) -> None:
    options = ["--profile", "pair.yaml", "--show-origin"]
    refused(here(pair, "run", "p.txt", *options, "--json"), 2, "--show-origin means nothing with --json")
    (pair / "p.jsonl").write_text('{"prompt": "a"}\n')
    refused(here(pair, "run", "p.jsonl", *options), 2, "--show-origin means nothing for .jsonl")
