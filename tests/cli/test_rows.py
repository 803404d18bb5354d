"""Prompts with a token that the model has no row for, in every command that takes prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specgen.cli import app
from support.command import WORDS, write_model, write_tokenizer
from support.tiny import tiny_llama

LAST = len(WORDS) - 1  # of <end>, which the model lacks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a row less than its tokenizer has tokens, which also bans more than it has rows."""
    folder = tmp_path_factory.mktemp("rows")
    write_model(folder / "target", tiny_llama(vocab=LAST))
    write_tokenizer(folder / "target")
    config = {"suppress_tokens": [1, LAST, 999], "bad_words_ids": [[2], [LAST], [3, 999]]}
    (folder / "target" / "generation_config.json").write_text(json.dumps(config))
    settings = {"target": {"checkpoint": "./target", "dtype": "float32"}, "draft": {"kind": "ngram"}}
    (folder / "rows.yaml").write_text(yaml.safe_dump(settings))
    (folder / "fine.txt").write_text("abab")
    (folder / "end.txt").write_text("ab<end>ab")
    lines = [{"prompt": "abab"}, {"prompt": "ab<end>"}]
    (folder / "end.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SPECGEN_CACHE", str(folder / "cache"))
    return CliRunner().invoke(app.app, [*arguments, "--profile", "rows.yaml", "--device", "cpu"])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("end.txt", ["run", "fine.txt", "end.txt", "--max-new-tokens", "4"]),
        ("end.jsonl:2", ["run", "end.jsonl", "--max-new-tokens", "4"]),
        ("--prompt", ["run", "--prompt", "<end>", "--max-new-tokens", "4"]),
        ("end.txt", ["overlap", "fine.txt", "end.txt", "--c", "0.1"]),
        ("end.txt", ["overlap", "fine.txt", "end.txt", "--c", "0.1", "--own", "4"]),
        ("end.jsonl:2", ["bench", "end.jsonl", "--max-new-tokens", "4", "--runs", "1"]),
        ("end.txt", ["bench", "fine.txt", "end.txt", "--max-new-tokens", "4", "--runs", "1"]),
        ("end.txt", ["audit", "--prompts", "fine.txt", "--prompts", "end.txt", "--max-new-tokens", "4"]),
        ("end.jsonl:2", ["audit", "--prompts", "end.jsonl", "--max-new-tokens", "4"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_prompt_token_and_limit_are_named_before_anything_runs(
    name: str, arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a model was called")

    monkeypatch.setattr("specgen.models.causal.CausalLM.call", fails)
    result = invoke(folder, monkeypatch, *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("specgen: note: ")]
    assert line == (
        f"specgen: {name}: the prompt holds the token '<end>' with the id {LAST}, for which the target has no row: "
        f"its ids go from 0 to {LAST - 1}"
    )


def test_what_a_generation_config_bans_beyond_the_rows_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = invoke(folder, monkeypatch, "run", "fine.txt", "--max-new-tokens", "12", "--json", "-q")
    assert result.exit_code == 0, result.output
    tokens = json.loads(result.stdout)["results"][0]["tokens"]
    assert len(tokens) == 12
    assert not {*tokens} & {1, 2}


@pytest.mark.parametrize("flag", [["--ban", str(LAST)], ["--ban", "<end>"]], ids=str)
def test_a_ban_by_flag_has_to_be_a_row(flag: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(folder, monkeypatch, "run", "fine.txt", *flag)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"decoding.ban: no token has the id {LAST}; ids go from 0 to {LAST - 1}" in result.stderr
