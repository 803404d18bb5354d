"""`specgen bench` as a user meets it: a tiny random pair, real processes; and SmolLM2 once."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specgen.bench import runner
from specgen.bench.runner import run_bench
from specgen.bench.subjects import encoded
from specgen.cli import app
from specgen.cli.bench import load_all, parse_batches, parse_ks, questions, time_left
from specgen.errors import UsageError
from specgen.results.bench import Bench, Divergence
from specgen.results.files import read_bench
from support.command import on_terminal, process, refused, write_pair

TINY = ["--profile", "pair.yaml", "--runs", "1", "--warmup", "0", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, draft, pair.yaml, a second profile of the same target, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    other = {
        "target": {"checkpoint": "./target"},
        "draft": {"kind": "ngram"},
        "decoding": {"k": 3},
    }
    (folder / "lookup.yaml").write_text(yaml.safe_dump(other))
    (folder / "lonely.yaml").write_text(yaml.safe_dump({"target": {"checkpoint": "./target"}}))
    (folder / "p.txt").write_text("a loaf of bacon")
    lines = [{"prompt": "dimi", "category": "chat"}, {"prompt": "a [bold]loaf", "category": "code"}, {"prompt": "ab"}]
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bench(folder: Path, *arguments: str, **options: Any) -> Any:
    return process(folder, "bench", *TINY, *arguments, **options)


@pytest.mark.parametrize(
    ("text", "ks"),
    [("4", [4]), ("1,2,4,8", [1, 2, 4, 8]), ("1-8", list(range(1, 9))), ("8, 1-3,2", [1, 2, 3, 8]), ("auto", None)],
)
def test_k_is_a_number_a_list_a_range_or_auto(text: str, ks: list[int] | None) -> None:
    assert parse_ks(text) == ks


@pytest.mark.parametrize("text", ["0", "65", "1-65", "-3", "3-1", "x", "1,", "", "1.5", "1--3", "²"])
def test_a_bad_k_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--k {text}:")):
        parse_ks(text)


def test_batch_sizes() -> None:
    assert parse_batches("8,1,4,4") == [1, 4, 8]
    for text in ("0", "257", "x", "1-4", ""):
        with pytest.raises(UsageError, match=f"--batch-size {text}:"):
            parse_batches(text)


def test_time_left_reads_well() -> None:
    assert [time_left(s) for s in (0.4, 59.4, 200, 3900)] == ["0 s", "59 s", "3 min 20 s", "1 h 5 min"]


def test_without_prompts_there_are_the_built_in_ones(pair: Path) -> None:
    assert len(questions([], None)) == 14
    names = [(name.rpartition("/")[2], category) for name, category, _ in questions([str(pair / "q.jsonl")], None)]
    assert names == [("q.jsonl:1", "chat"), ("q.jsonl:2", "code"), ("q.jsonl:3", None)]


def test_a_category_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "category": 3}\n')
    with pytest.raises(UsageError, match=r'x\.jsonl:1: "category" needs to be a text'):
        questions([str(tmp_path / "x.jsonl")], None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "0"], ["--k 0", "1 to 64"]),
        (["--budget", "0"], ["--budget 0", "above 0"]),
        (["--budget", "nan"], ["--budget nan"]),
        (["--batch-size", "1,x"], ["--batch-size 1,x"]),
        (["--json", "--csv"], ["only one of --json and --csv"]),
        (["-o", "table.txt"], ["-o table.txt", ".json, .csv or .md"]),
        (["-o", "nowhere/x.json"], ["no folder"]),
        (["-o", "target", "--json"], ["is a folder"]),
        (["p.txt", "-o", "p.txt", "--json"], ["-o p.txt: is an input"]),
        (["--engine", "steam"], ["--engine steam"]),
        (["--profile", "lonely.yaml"], ["lonely has no draft"]),
        (["nothing.txt"], ["nothing.txt: no such file"]),
        (["--lenience", "0.5"], ["--lenience means nothing in exact mode"]),
    ],
)
def test_bad_usage_is_told_before_anything_loads(
    pair: Path, arguments: list[str], words: list[str], here: Callable[..., Any]
) -> None:
    refused(here(pair, "bench", *TINY, *arguments), 2, *words)


def test_tables_on_stdout_and_json_in_a_file(pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench(pair, "q.jsonl", "--k", "1,2", "-o", str(file))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "k=2" in result.stdout
    assert "plain" in result.stdout
    stored = read_bench(file)
    assert [a.name for a in stored.arms] == ["plain", "k=1", "k=2"]
    assert [p.category for p in stored.prompts] == ["chat", "code", None]
    assert stored.design.max_new_tokens == 6
    assert stored.checkpoints.keys() == {"target", "draft"}


def test_json_csv_and_markdown_come_alone(pair: Path) -> None:
    assert json.loads(bench(pair, "p.txt", "--k", "2", "--json").stdout)["kind"] == "bench"
    rows = list(csv.reader(io.StringIO(bench(pair, "p.txt", "--k", "2", "--csv").stdout)))
    assert len(rows) > 2
    assert "|" in bench(pair, "p.txt", "--k", "2", "--markdown").stdout


def test_several_profiles_and_batches(pair: Path) -> None:
    result = bench(
        pair, "q.jsonl", "--profile", "lookup.yaml", "--k", "2", "--batch-size", "1,2", "--json", "--mode", "greedy"
    )
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert [a["name"] for a in data["arms"]] == [
        "plain B=1",
        "k=2 pair B=1",
        "k=2 lookup B=1",
        "plain B=2",
        "k=2 pair B=2",
        "k=2 lookup B=2",
    ]


def test_profiles_of_one_target_share_its_weights(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = [str(pair / "pair.yaml"), str(pair / "lookup.yaml")]
    one, two = load_all(names, [None], {"decoding.max_new_tokens": 4}, quiet=True)
    assert one.pair.target is two.pair.target
    assert one.pair.hold is two.pair.hold
    bench = run_bench([one, two], encoded([one, two], [("x", None, "abc")]), ks=[2], runs=1)
    assert {a.profile for a in bench.arms} == {"pair", "lookup"}


def test_several_profiles_of_one_name_are_refused(pair: Path, here: Callable[..., Any]) -> None:
    (pair / "twin").mkdir(exist_ok=True)
    (pair / "twin" / "pair.yaml").write_text((pair / "lookup.yaml").read_text().replace("./target", "../target"))
    result = here(pair, "bench", *TINY, "p.txt", "--profile", "twin/pair.yaml", "--k", "2")
    refused(result, 2, "profile pair is there twice")


def test_progress_is_for_terminals_and_quiet_is_quiet(pair: Path) -> None:
    arguments = ["bench", *TINY, "p.txt", "--k", "2"]
    for extra, shown in (([], True), (["--quiet"], False)):
        code, written = on_terminal(pair, [*arguments, *extra])
        assert code == 0
        assert (b" left" in written) is shown


def in_process(pair: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], *arguments: str) -> Any:
    """`specgen bench` with `change` made to what run_bench returns; it may raise."""
    monkeypatch.chdir(pair)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(runner, "run_bench", lambda *args, **options: change(run_bench(*args, **options)))
    return CliRunner().invoke(app.app, ["bench", *TINY, "p.txt", "--k", "2", *arguments])


@pytest.mark.parametrize("tie", [True, False])
def test_a_divergence_that_is_no_tie_fails(pair: Path, monkeypatch: pytest.MonkeyPatch, tie: bool) -> None:
    def diverging(bench: Bench) -> Bench:
        bench.divergences.append(
            Divergence(
                arm="k=2",
                prompt=0,
                run=0,
                position=3,
                plain_token=1,
                token=2,
                plain_margin=0.5,
                verify_margin=0.4,
                difference=1e-6,
                tie=tie,
            )
        )
        return bench

    result = in_process(pair, monkeypatch, diverging, "--mode", "greedy", "-q")
    assert result.exit_code == (0 if tie else 1), result.output
    said = (
        "specgen: k=2: p.txt, run 1: not the baseline's text from generated token 4 on, and no tie" in result.stderr
    )
    assert said is not tie
    assert "k=2" in result.stdout


def test_ctrl_c_shows_what_was_measured(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(bench: Bench) -> Bench:
        raise runner.Interrupted(bench)

    result = in_process(pair, monkeypatch, interrupted, "-o", "stopped.json")
    assert result.exit_code == 130
    assert "specgen: interrupted" in result.stderr
    assert "k=2" in result.stdout
    assert read_bench(pair / "stopped.json").design.runs_done == 1


def test_ctrl_c_before_a_whole_run_shows_nothing(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(bench: Bench) -> Bench:
        raise KeyboardInterrupt

    result = in_process(pair, monkeypatch, interrupted)
    assert result.exit_code == 130
    assert result.stdout == ""


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_is_benched_end_to_end(tmp_path: Path) -> None:
    """The default profile, k by prediction: measured beside predicted."""
    for name, text in (("a", "Name three rivers."), ("b", "Repeat: one two one two one two")):
        (tmp_path / f"{name}.txt").write_text(text)
    result = process(
        tmp_path,
        "bench",
        "a.txt",
        "b.txt",
        "--runs",
        "1",
        "--max-new-tokens",
        "8",
        "-o",
        "bench.json",
        SPECGEN_CACHE=os.environ.get("SPECGEN_CACHE", ""),
    )
    assert result.returncode == 0, result.stderr
    bench = read_bench(tmp_path / "bench.json")
    assert bench.design.auto
    assert 1 <= len(bench.design.k) <= 3
    assert all(len(row.tokens) == 8 for m in bench.measurements for row in m.rows)
    assert bench.costs[0].target_bytes > 100_000_000
    assert bench.costs[0].target_bytes_a_token == 2 * 30 * 3 * 64 * 4
    assert "predicted" in result.stdout
