"""The warm process: server.py SOCKET LATE,NAMES. A connection is a command; a child of this process runs it.

A connection brings eight bytes of length with up to three open files, then that much JSON; after it, every byte is a
signal's number, for the child. The answer is "exit CODE" or "signal NUMBER", or "fresh": the caller's environment
differs from this one's in more than the LATE names. A caller that goes away takes its child with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import selectors
import shutil
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

OWN = dict(os.environ)  # before imports that may add to it


@dataclass(eq=False)
class Command:
    connection: socket.socket
    pid: int = 0
    ended: int = -1  # read end of a pipe whose other end only the child holds


@dataclass
class Server:
    path: str
    late: frozenset[str]
    commands: list[Command] = field(default_factory=list)

    def serve(self) -> dict[str, Any]:
        """Never returns in this process; in a child, what it is to run."""
        own = self.early(OWN)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self.path)
        listening.listen(16)
        selector = selectors.DefaultSelector()
        selector.register(listening, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    self.stop()
                elif key.fileobj is listening:
                    connection, _ = listening.accept()
                    request, fds = receive(connection)
                    if self.early(request["environment"]) != own:
                        connection.sendall(b"fresh")
                        connection.close()
                    elif command := self.start(connection):
                        selector.register(connection, selectors.EVENT_READ, command)
                        selector.register(command.ended, selectors.EVENT_READ, command)
                    else:
                        for opened in [key.fileobj for key in selector.get_map().values() if key.fd > 2]:
                            os.close(opened) if isinstance(opened, int) else opened.close()
                        selector.close()
                        return {**request, "given": fds}
                    for fd in fds:
                        os.close(fd)
                elif key.fileobj == key.data.ended:
                    for opened in (key.data.ended, key.data.connection):
                        if opened in selector.get_map():
                            selector.unregister(opened)
                    self.reap(key.data)
                elif key.data in self.commands:
                    numbers = b""
                    with contextlib.suppress(ConnectionError):
                        numbers = key.data.connection.recv(64)
                    for number in numbers or [signal.SIGKILL]:
                        os.kill(key.data.pid, number)
                    if not numbers:
                        selector.unregister(key.data.connection)

    def early(self, environment: dict[str, str]) -> dict[str, str]:
        """What imports may have read of it."""
        return {k: v for k, v in environment.items() if k not in self.late}

    def start(self, connection: socket.socket) -> Command | None:
        """Forks; None in the child."""
        ended, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ended)
            connection.close()
            return None
        os.close(held)
        command = Command(connection, pid, ended)
        self.commands.append(command)
        return command

    def reap(self, command: Command) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(command.pid, 0)[1])
        with contextlib.suppress(OSError):
            command.connection.sendall(b"exit %d" % status if status >= 0 else b"signal %d" % -status)
        command.connection.close()
        os.close(command.ended)
        self.commands.remove(command)

    def stop(self) -> None:
        """The tests have ended."""
        for command in self.commands:
            os.kill(command.pid, signal.SIGKILL)
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)
        os._exit(0)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the files that came with it."""
    size, fds, _, _ = socket.recv_fds(connection, 8, 3)
    text, length = b"", int.from_bytes(size)
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), fds


def become(command: dict[str, Any]) -> None:
    """Gives this process what a fresh one would have been started with."""
    for fd in (0, 1, 2):
        if fd not in command["fds"]:
            os.close(fd)
    for fd, given in zip(command["fds"], command["given"], strict=True):
        os.dup2(given, fd)
        os.close(given)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.argv = ["specgen", *command["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if fd in command["fds"]:
            binary = io.open(fd, "rb" if fd == 0 else "wb", closefd=False)  # noqa: SIM115, UP020
            stream = io.TextIOWrapper(
                binary,
                encoding or "utf-8",
                "backslashreplace" if fd == 2 else errors or "strict",
                newline=None if fd == 0 else "\n",
                line_buffering=fd == 2 or os.isatty(fd),
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def import_all() -> None:
    """Everything of ours, and of others what a run of the tests' pair asks for by name."""
    import specgen

    for module in pkgutil.walk_packages(specgen.__path__, "specgen."):
        importlib.import_module(module.name)
    import torch
    import transformers

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    for name in ("LlamaForCausalLM", "AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast"):
        getattr(transformers, name)


def run() -> None:
    """The command to its end. Where nothing is left to be said, without taking apart what was only forked."""
    from specgen.cli.app import main

    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        with contextlib.suppress(OSError):  # the interpreter's to report, at its own end
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            os._exit(end.code or 0)
        raise


if __name__ == "__main__":
    import_all()
    gc.collect()
    gc.freeze()
    become(Server(sys.argv[1], frozenset(sys.argv[2].split(","))).serve())
    run()
