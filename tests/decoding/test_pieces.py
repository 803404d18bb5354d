"""What single tokens read, wherever it is shown: a character of several stands at the token that completes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specgen.bench.runner import _pieces
from specgen.cli.app import app
from specgen.cli.colours import OriginText
from specgen.decoding.text import pieces
from specgen.results.bench import Prompt, Row
from specgen.session import load
from support.chains import END, byte_tokenizer, write_chain

WRITTEN = ["", "", "", "🙂", "a", "b"]
SMILE = "🙂".encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes 🙂ab behind >."""
    folder = tmp_path_factory.mktemp("emoji")
    write_chain(folder, [ord(">"), *"🙂ab".encode()])
    return folder


def specgen(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, [*arguments, "--profile", "chain.yaml"])
    assert done.exit_code == 0, done.output
    return done.stdout


def shown(page: str) -> list[list[Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return list(json.loads(found[1])["views"][0]["tokens"])


RUN = ("run", "--prompt", ">", "--raw", "--mode", "greedy", "-q")


def test_in_a_run_s_file_and_on_its_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(specgen(folder, monkeypatch, *RUN, "--json", "--report", "run.html"))
    result = document["results"][0]
    assert result["tokens"] == [*"🙂ab".encode(), END]
    assert result["pieces"] == [*WRITTEN, "<end>"]
    assert [t[0] for t in shown((folder / "run.html").read_text())] == result["pieces"]


def test_as_in_the_text_coloured_by_origin(folder: Path) -> None:
    session = load(str(folder / "chain.yaml"))
    generation = session.generate(list(b">"))
    coloured = OriginText(generation)
    for _ in generation:
        pass
    assert "🙂" in coloured.take(final=True)
    tokens = [*generation.prompt, *generation.tokens]
    assert pieces(session.pair.tokenizer, tokens, 1)[:6] == WRITTEN


def test_in_a_bench_s_file_and_on_its_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "q.jsonl").write_text('{"prompt": ">"}\n')
    options = ["--mode", "greedy", "--k", "2", "--runs", "1", "--max-new-tokens", "6", "--raw", "--json"]
    document = json.loads(specgen(folder, monkeypatch, "bench", "q.jsonl", *options))
    texts = {int(token): text for token, text in document["pieces"].items()}
    assert [texts[b] for b in SMILE] == ["", "", "", "🙂"]
    (folder / "bench.json").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["report", "bench.json", "-o", "bench.html"])
    assert done.exit_code == 0
    assert [t[0] for t in shown((folder / "bench.html").read_text())] == WRITTEN


def test_a_row_of_a_bench_notes_what_reads_otherwise() -> None:
    prompt = Prompt(name="p", category=None, text=">", tokens=[ord(">")])
    tokens = [*SMILE, *"😂é".encode()]  # both end in the same byte
    counts = [1] * len(tokens)
    row = Row(
        prompt=0,
        seed=0,
        tokens=tokens,
        finish=None,
        drafted=[0] * len(tokens),
        tested=[0] * len(tokens),
        accepted=[0] * len(tokens),
        committed=counts,
        overlaps=[],
    )
    texts = _pieces(byte_tokenizer(), [prompt], [row])
    assert (texts[SMILE[-1]], row.pieces) == ("🙂", {7: "😂"})
    read = [row.pieces.get(at, texts[token]) for at, token in enumerate(tokens)]
    assert read == ["", "", "", "🙂", "", "", "", "😂", "", "é"]
    assert Row.model_validate_json(row.model_dump_json()) == row


def test_in_the_lists_of_overlap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "text.txt").write_text("x😂y." * 4)
    printed = json.loads(specgen(folder, monkeypatch, "overlap", "text.txt", "--c", "0.1", "--json"))
    names = {group["name"] for group in printed["overall"]["worst_tokens"]}
    assert f"'😂' ({SMILE[-1]})" in names
    assert not [name for name in names if "\ufffd" in name]


def test_a_character_that_the_prompt_began_is_whole_where_it_ends() -> None:
    tokens = [*b"a", *SMILE, *b"b"]
    for first in range(1, 5):
        assert pieces(byte_tokenizer(), tokens, first) == [""] * (4 - first) + ["🙂", "b"]
    assert pieces(byte_tokenizer(), tokens, 5) == ["b"]


def test_what_is_never_completed_loses_nothing() -> None:
    assert pieces(byte_tokenizer(), [*b"a", *SMILE[:2]], 0) == ["a", "", "\ufffd"]
    assert pieces(byte_tokenizer(), [*b"a", SMILE[0], *b"bc"], 0) == ["a", "", "\ufffdb", "c"]
    assert pieces(byte_tokenizer(), [], 0) == []
    assert pieces(byte_tokenizer(), [*SMILE[1:], *b"b"], 3) == ["b"]
