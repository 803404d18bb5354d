"""`specgen report`: a stored result as one HTML page. `register(app)` adds it to a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli.options import Debug
from specgen.cli.output import guarded
from specgen.errors import SpecgenError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specgen.results.run import Run


def register(app: typer.Typer) -> None:
    app.command(
        "report",
        epilog="Takes what specgen bench --json and specgen run --json wrote. The page loads nothing from elsewhere, "
        "so it can be mailed or archived as it is.\n\nExamples:\n\n specgen report bench.json\n\n "
        "specgen run prompt.txt --json | specgen report - -o run.html",
    )(report)


def report(
    result: Annotated[str, typer.Argument(metavar="RESULT", help="A result's JSON file; - is stdin.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to; - is stdout.", show_default="RESULT with .html"
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """One self-contained HTML page of a bench or a run: charts, settings, and the text by who wrote it."""
    with guarded(debug):
        from specgen.report.page import KINDS, page, require_libraries
        from specgen.results.files import read

        require_libraries()
        if output is None:
            output = "-" if result == "-" else str(Path(result).with_suffix(".html"))
        if output != "-":
            check_target(Path(output), [result], "-o")
        text = page(read(result, KINDS), result)
        if output == "-":
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
        else:
            write_page(Path(output), text)


def check_target(path: Path, inputs: Iterable[str], option: str) -> None:
    """Raises UsageError where a page cannot go: an input, a folder, or into a folder that is not there."""
    if any(name != "-" and Path(name).resolve() == path.resolve() for name in inputs):
        raise UsageError(f"{option} {path}: is an input; name another file")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")


def write_page(path: Path, text: str) -> None:
    """Writes it and says so on stderr. Raises SpecgenError where it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecgenError(f"cannot write {path}: {error.strerror}") from None
    print(f"specgen: wrote {path} ({len(text.encode()) / 1e6:.1f} MB)", file=sys.stderr)


def write_run(path: Path, document: Run) -> None:
    """The page of one run (`specgen run --report`)."""
    from specgen.report.page import page

    write_page(path, page(document.model_dump(mode="json")))
