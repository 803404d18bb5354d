"""Result files edited or cut short: refused in one sentence, never a traceback and never a table of nonsense."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specgen.cli import app
from specgen.errors import UsageError
from specgen.results.files import parse_bench, parsed, read
from specgen.results.run import Run
from support import bench_documents
from support import stored_results as stored
from support.pages import bench_document, run_document

Edit = Callable[[dict[str, Any]], object]


def setting(path: str, value: Any) -> Edit:
    """measurements.3.rows.0.width = value; the last part may be a new key."""

    def edit(document: dict[str, Any]) -> None:
        *parts, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        at: Any = document
        for part in parts:
            at = at[part]
        at[last] = value

    return edit


def dropping(path: str) -> Edit:
    """The last entry of a column left out."""

    def edit(document: dict[str, Any]) -> None:
        at: Any = document
        for part in path.split("."):
            at = at[int(part) if part.isdigit() else part]
        at.pop()

    return edit


def refused(result: Any, path: Path, kind: str) -> str:
    """The sentence behind the file's name; asserts that it is one line, exit 2 and nothing else."""
    head = f"specgen: {path}: not a whole {kind} result: "
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith(head)
    assert result.stderr.count("\n") == 1
    assert "Error" not in result.stderr
    return str(result.stderr.removeprefix(head).rstrip("\n"))


# Measurement 1 is of k = 1: rounds of 1, 1, … drafted that keep 1, 0, …; row 0 of it is prompt 0's.
ROW, STEPS = "measurements.1.rows.0", "measurements.1.steps"
BENCHES: list[tuple[Edit, str]] = [
    (dropping(f"{ROW}.committed"), f"{ROW}: columns of unequal length: "),
    (dropping(f"{ROW}.tokens"), f"{ROW}: tokens has 11 entries, where 12 were committed"),
    (dropping(f"{ROW}.overlaps"), f"{ROW}: overlaps has "),
    (setting(f"{ROW}.biases", [0.1]), f"{ROW}: biases has 1 entries"),
    (setting(f"{ROW}.expected", [0.1]), f"{ROW}: expected has 1 entries"),
    (dropping(f"{STEPS}.width"), f"{STEPS}: columns of unequal length: draft_s 8, "),
    (setting("arms.1.baseline", "nope"), "arms.1.baseline: nope is no plain arm of the file"),
    (setting("arms.1.baseline", "k = 2"), "arms.1.baseline: k = 2 is no plain arm of the file"),
    (setting("arms.2.name", "k = 1"), "arms: 2 are named k = 1"),
    (setting("arms.1.profile", "nope"), "arms.1.profile: nope is none of the file's profiles"),
    (setting("costs.0.profile", "nope"), "costs.0.profile: nope is none of the file's profiles"),
    (setting("scores.0.profile", "nope"), "scores.0.profile: nope is none of the file's profiles"),
    (setting("arms.1.k", 0), "arms.1: k is 0 for a plain arm, and at least 1 for a speculative one"),
    (setting("arms.0.k", 2), "arms.0: k is 0 for a plain arm"),
    (setting("arms.1.mode", "zz"), "arms.1.mode: "),
    (setting("sampling", {}), "sampling: its mode is none of exact, greedy, coupled"),
    (setting("sampling.mode", "zz"), "sampling: its mode is none of exact"),
    (setting("sampling.mode", ["exact"]), "sampling: its mode is none of exact"),
    (setting("sampling.temperature", math.nan), "sampling: holds a number that is not finite"),
    (setting("environment.load_average", "busy"), "environment.load_average: "),
    (setting("environment.threads", {}), "environment.threads: "),
    (setting("environment_after.load_average", []), "environment_after.load_average: "),
    (setting(f"{STEPS}.total_s.0", math.nan), f"{STEPS}.total_s.0: "),
    (setting(f"{STEPS}.total_s.0", math.inf), f"{STEPS}.total_s.0: "),
    (setting(f"{STEPS}.total_s.0", -1.0), f"{STEPS}.total_s.0: "),
    (setting(f"{STEPS}.total_s", [0.0] * 8), f"{STEPS}: no decoding time"),
    (setting(f"{STEPS}.verify_s", [0.0] * 8), f"{STEPS}.verify_s: a target call that took no time"),
    (
        setting(
            "measurements.1.steps", {c: [] for c in ("draft_s", "verify_s", "rollback_s", "total_s", "width", "rows")}
        ),
        f"{STEPS}: no decoding time",
    ),
    (setting("measurements.1.rows", []), "measurements.1.rows: "),
    (setting("measurements.1.first_s", -1), "measurements.1.first_s: "),
    (setting(f"{ROW}.accepted.0", 5), f"{ROW}: round 0: 1 drafted, 1 tested and 5 accepted cannot be"),
    (setting(f"{ROW}.tested.0", 2), f"{ROW}: round 0: 1 drafted, 2 tested and 1 accepted cannot be"),
    (setting(f"{ROW}.accepted.0", -1), f"{ROW}.accepted.0: "),
    (setting(f"{ROW}.committed.0", 4), f"{ROW}: round 0: 4 committed of 1 accepted cannot be"),
    (setting(f"{ROW}.overlaps.0", 2.5), f"{ROW}.overlaps.0: "),
    (setting(f"{ROW}.drafted.0", 2), "measurements.1: a round that drafted more than the 1 of its arm"),
    (setting("arms.1.k", 10**6), "arms.1.k: "),
    (setting(f"{STEPS}.width.0", 10**30), f"{STEPS}.width.0: "),
    (setting(f"{ROW}.prompt", 99), "measurements.1: names no known arm and prompt"),
    (setting("measurements.1.arm", "nope"), "measurements.1: names no known arm and prompt"),
    (setting("scores.0.ratios.0", 7), "scores.0.ratios.0: "),
    (setting("scores.0.ratios.0", -0.5), "scores.0.ratios.0: "),
    (setting("scores.0.prompt", 99), "scores.0.prompt: there is no prompt 99"),
    (setting("costs.0.target_s", {"1": 0.0}), "costs.0.target_s: a call that took no time"),
    (setting("costs.0.target_s", {"0": 1.0}), "costs.0.target_s.0"),
    (setting("costs.0.draft_s", "slow"), "costs.0.draft_s: "),
    (setting("design.candidates", [-1]), "design.candidates.0: "),
    (setting("design.max_new_tokens", 0), "design.max_new_tokens: "),
    (setting("measurements", []), "measurements: no timed measurement"),
    (lambda d: [m.update(run=-1) for m in d["measurements"]], "measurements: no timed measurement"),
    (
        setting(
            "divergences",
            [
                {
                    "arm": "nope",
                    "prompt": 0,
                    "run": 0,
                    "position": 1,
                    "plain_token": 1,
                    "token": 2,
                    "plain_margin": 1.0,
                    "verify_margin": 1.0,
                    "difference": 0.0,
                    "tie": False,
                }
            ],
        ),
        "divergences.0: names no known arm and prompt",
    ),
]


@pytest.mark.parametrize(("edit", "says"), BENCHES, ids=[f"{i} {says[:50]}" for i, (_, says) in enumerate(BENCHES)])
def test_an_edited_bench_is_refused_in_one_sentence(tmp_path: Path, edit: Edit, says: str) -> None:
    document = copy.deepcopy(bench_document())
    edit(document)
    path = stored.write(tmp_path, document)
    assert refused(CliRunner().invoke(app.app, ["report", str(path), "-o", "-"]), path, "bench").startswith(says)
    with pytest.raises(UsageError, match="not a whole bench result"):
        parse_bench(document, "x")


def test_whole_benches_are_read() -> None:
    """Of every mode and batch that the scripts know; and what rounding and an end token may do."""
    for bench in (
        bench_documents.document(),
        bench_documents.document(warmup={"plain": 2.0}, runs=2, mode="typical"),
        bench_documents.document(
            [
                bench_documents.Script("plain", batch=3),
                bench_documents.Script("k = 4", k=4, accepted=(4, 1), batch=3, bias=0.25),
            ]
        ),
    ):
        assert parse_bench(json.loads(bench.model_dump_json()), "x") == bench
    document = bench_document()
    row = document["measurements"][1]["rows"][0]
    row["overlaps"][0] = 1 + 1e-7
    document["scores"][0]["ratios"][0] = 1 + 1e-7
    parse_bench(document, "x")
    # Cut by an end behind the first of two accepted: that one committed, what follows it neither tested nor drawn.
    cut = document["measurements"][3]  # k = 4
    cut["rows"][0].update(
        tokens=[1], drafted=[4], tested=[1], accepted=[1], committed=[1], overlaps=[0.5], finish="end"
    )
    cut["steps"] = {name: column[:1] for name, column in cut["steps"].items()}
    parse_bench(document, "x")


ROUND = "results.0.rounds.0"
RUNS: list[tuple[Edit, str]] = [
    (setting("results", {}), "results: "),
    (setting("results.0", 5), "results.0: "),
    (setting("results.0.rounds", None), "results.0.rounds: "),
    (setting(f"{ROUND}.drafted", "two"), f"{ROUND}.drafted: "),
    (setting(f"{ROUND}.accepted", 9), f"{ROUND}: 2 drafted, 2 tested, 9 accepted and 2 overlaps cannot be"),
    (setting(f"{ROUND}.total_s", math.nan), f"{ROUND}.total_s: "),
    (setting(f"{ROUND}.total_s", -1), f"{ROUND}.total_s: "),
    (setting(f"{ROUND}.overlaps", 3), f"{ROUND}.overlaps: "),
    (setting(f"{ROUND}.committed.0.origin", "nobody"), f"{ROUND}.committed.0.origin: "),
    (setting(f"{ROUND}.committed.0.overlap", 2.5), f"{ROUND}.committed.0.overlap: "),
    (setting(f"{ROUND}.committed.0.more", 1), f"{ROUND}.committed.0.more: "),
    (setting(f"{ROUND}.finish", "nowhere"), f"{ROUND}.finish: "),
    (dropping("results.0.tokens"), "results.0: 3 tokens and 4 pieces, where 4 were committed"),
    (dropping("results.0.pieces"), "results.0: 4 tokens and 3 pieces, where 4 were committed"),
    (setting("results.0.check", []), "results.0.check: "),
    (setting("results.0.check.rows.0.bound", None), "results.0.check.rows.0.bound: "),
    (setting("results.0.check.rows.0.passed", "perhaps"), "results.0.check.rows.0.passed: "),
    (setting("sampling", []), "sampling: "),
    (setting("sampling.mode", None), "sampling: its mode is none of exact"),
    (setting("profile", None), "profile: "),
    (setting("environment", "here"), "environment: "),
]


@pytest.mark.parametrize(("edit", "says"), RUNS, ids=[f"{i} {says[:50]}" for i, (_, says) in enumerate(RUNS)])
def test_an_edited_run_is_refused_in_one_sentence(tmp_path: Path, edit: Edit, says: str) -> None:
    document = copy.deepcopy(run_document())
    parsed(Run, document, "x")
    edit(document)
    path = stored.write(tmp_path, document)
    assert refused(CliRunner().invoke(app.app, ["report", str(path), "-o", "-"]), path, "run").startswith(says)


@pytest.mark.parametrize("kind", [[], {}, None, 3])
def test_a_kind_that_is_no_word_is_refused(tmp_path: Path, kind: Any) -> None:
    path = stored.write(tmp_path, {"schema_version": 2, "kind": kind})
    with pytest.raises(UsageError, match="where one of bench is needed"):
        read(path, {"bench"})
