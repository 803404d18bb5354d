"""The warm command of the tests is the real one: what the other files show of it would be worth nothing otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import warm
from support.command import environment, on_terminal, process, write_pair


def both(folder: Path, line: str, **extra: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of a shell's line with `specgen` the warm command, and with the real."""
    found = []
    env = environment(folder, **extra)
    for command in (warm.command(env), warm.SPECGEN):
        path = os.pathsep.join((str(Path(command).parent), env["PATH"]))
        done: Any = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=env | {"PATH": path}, stdin=subprocess.DEVNULL, capture_output=True
        )
        found.append((done.returncode, done.stdout.decode(), done.stderr.decode()))
    return found


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("specgen --version", 0),
        ("specgen --version >/dev/full", 1),
        ("specgen profiles list 2>&-", 0),
        ("specgen --version >&-", 2),
        ("specgen run - <&-", 2),
        ("specgen run --prompt $'a\\xe9'", 2),
        ("echo ' ' | specgen run -", 2),
        ("specgen nothing '' 'a b'", 2),
        ("cd / && specgen run etc", 2),
        ("specgen profiles show smollm2 | head -c1; echo ${PIPESTATUS[0]}", 0),
    ],
)
def test_it_says_and_returns_what_the_real_one_does(tmp_path: Path, line: str, code: int) -> None:
    ours, theirs = both(tmp_path, line)
    assert ours == theirs
    assert ours[0] == code


@pytest.mark.parametrize(
    "extra", [{"COLUMNS": "60", "TERM": "dumb"}, {"PYTHONIOENCODING": "ascii:replace", "COLUMNS": "70"}]
)
def test_what_is_read_late_is_the_callers(tmp_path: Path, extra: dict[str, str]) -> None:
    ours, theirs = both(tmp_path, "specgen run --help", **extra)
    assert ours == theirs
    assert max(map(len, ours[1].splitlines())) <= int(extra["COLUMNS"])


def test_what_imports_have_read_makes_it_the_real_one(tmp_path: Path) -> None:
    """Only an interpreter that starts tells of its imports."""
    assert "import time:" not in process(tmp_path, "--version").stderr
    assert "import time:" in process(tmp_path, "--version", PYTHONPROFILEIMPORTTIME="1").stderr


def test_a_terminal_is_one(tmp_path: Path) -> None:
    assert b"\x1b[" in on_terminal(tmp_path, ["--help"])[1]
    assert b"\x1b[" not in on_terminal(tmp_path, ["--help"], NO_COLOR="1", TERM="dumb")[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(tmp_path: Path, number: signal.Signals) -> None:
    """A text under way ends, and the pipe it writes into with it."""
    write_pair(tmp_path)
    env = environment(tmp_path)
    words = [warm.command(env), "run", "--prompt", "a", "--profile", "pair.yaml", "--max-new-tokens", "20000"]
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 1)
        child.send_signal(number)
        child.communicate(timeout=60)
        assert child.returncode == -number
