"""A warm `specgen`: a process that has imported everything and forks a child a command, which saves its imports.

`command()` is a program that behaves as the real one does: its child has the caller's arguments, folder, environment
and standard streams (closed ones too), gets its signals, and its exit code is the caller's. Where the environment
differs in what imports may have read, it becomes the real command itself. One warm process a test process.
"""

from __future__ import annotations

import functools
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SPECGEN = str(Path(sys.executable).with_name("specgen"))
HERE = Path(__file__).resolve().parent
# Read when they are used, never by an import: a child may have its own.
LATE = (
    "COLUMNS",
    "LC_CTYPE",  # Python's own doing, where the locale is C
    "NO_COLOR",
    "OLDPWD",
    "PATH",
    "PWD",
    "PYTEST_CURRENT_TEST",
    "PYTHONIOENCODING",
    "SHLVL",
    "SPECGEN_CACHE",
    "TERM",
    "_",
)


@functools.cache
def folder() -> Path:
    """Where the command, its socket and an empty hub cache lie; short, since a socket's path may have 100 bytes."""
    return Path(tempfile.mkdtemp(prefix="specgen-"))


def bin_folder() -> Path:
    return folder() / "bin"


_running: list[subprocess.Popen[bytes]] = []  # the warm process, and with it the pipe that keeps it


def command(environment: dict[str, str]) -> str:
    """The program's path. The first call starts the warm process, in that environment but for what is read late.

    The process ends when this one does, by whatever way: its stdin is closed then.
    """
    client = bin_folder() / "specgen"
    if not client.is_file():
        path = str(folder() / "socket")
        server = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "server.py"), path, ",".join(LATE)],
            cwd=folder(),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the warm process does not start"
        _running.append(server)
        client.parent.mkdir()
        words = [sys.executable, "-IS", str(HERE / "client.py"), path, SPECGEN]
        client.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        client.chmod(0o755)
    return str(client)
