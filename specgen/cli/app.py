"""The command line: parse, call, print, exit code. Heavy imports stay inside the commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from specgen.cli import audit, bench, cache, compare, overlap, profiles, report, run, simulate
from specgen.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, cannot_write

app = typer.Typer(
    name="specgen",
    help="Run and profile speculative generation: a cheap draft proposes, the target checks, the text stays the "
    "target's. Start with: specgen run prompt.txt",
    epilog="Exit codes: 0 done; 1 the run or a check failed; 2 bad usage, profile or pair; 130 interrupted; "
    "141 the reader of stdout went away.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (overlap, audit, bench, compare, simulate, report, run, profiles, cache):
    command.register(app)


def main() -> None:
    """The entry point: what can go wrong outside a command is no traceback either."""
    if sys.stderr is None:  # closed by the caller (2>&-): as good as /dev/null
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("specgen: stdout is closed: there is nowhere to write to", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    try:
        app()
    except KeyboardInterrupt:
        print("specgen: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        cannot_write(error)
        sys.exit(EXIT_FAILED)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from specgen.machine.environment import version as installed

        print(installed(), flush=True)  # here, where a full disk is still an error that can be told
        raise typer.Exit()
