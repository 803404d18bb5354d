"""What every command stands on: exit codes, errors as one line, consoles, results on stdout, a quiet loading."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from specgen.errors import SpecgenError

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.session import Session


EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_READER_GONE = 1, 2, 130, 141


def forget_stdout() -> None:
    """Python flushes stdout at exit; where that cannot succeed it would print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cannot_write(error: OSError) -> None:
    print(f"specgen: cannot write to {error.filename or 'stdout'}: {error.strerror}", file=sys.stderr)
    forget_stdout()


@contextlib.contextmanager
def guarded(debug: bool = False) -> Iterator[None]:
    """Turns what can go wrong into one or two lines on stderr and the documented exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        raise typer.Exit(EXIT_READER_GONE) from None
    except SpecgenError as error:
        if debug:
            traceback.print_exc()
        print(f"specgen: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print("specgen: interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            cannot_write(error)
            raise typer.Exit(EXIT_FAILED) from None
        what = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        print(f"specgen: {type(error).__name__}: {what} (--debug shows where)", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None


def stderr_console() -> Console:
    from rich.console import Console

    width = None if sys.stderr.isatty() or "COLUMNS" in os.environ else 110
    # With NO_COLOR rich leaves colours out and still writes bold and italics; here it means no escape codes at all.
    return Console(
        stderr=True, width=width, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto"
    )


def moving(console: Console, quiet: bool) -> bool:
    """Whether something that moves may be shown on it."""
    return bool(console.is_terminal and console.color_system is not None and not quiet)


def printed(parts: Sequence[Any]) -> str:
    """Tables and lines as text, for a pipe that may be closed early and for a terminal alike."""
    from rich.console import Console

    # Where stdout is no terminal, wide enough for every row: rich would fold at 80.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    console = Console(width=width, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "".join(line.rstrip() + "\n" for line in capture.get().split("\n")[:-1])


def write(text: str) -> None:
    """A result on stdout, whatever the locale; half a surrogate pair as the escape it came in as."""
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def quiet_loading(quiet: bool) -> Iterator[None]:
    """While models load: a spinner where stderr is a terminal, and silence from transformers."""
    console = stderr_console()
    with contextlib.ExitStack() as stack:
        if moving(console, quiet):
            from specgen.checkpoints.progress import around

            stack.enter_context(around(stack.enter_context(console.status("loading…"))))
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        yield


def tell_notes(notes: Sequence[str], quiet: bool) -> None:
    """What the user should know of what was loaded, once each."""
    for note in () if quiet else dict.fromkeys(notes):
        print(f"specgen: note: {note}", file=sys.stderr)


def load_quietly(profile: Any, *, plain: bool, quiet: bool) -> Session:
    """Loads the pair, and says what the user should know of it."""
    with quiet_loading(quiet):
        from specgen.session import load_session

        session = load_session(profile, plain=plain, quiet=quiet)
    tell_notes(session.notes, quiet)
    return session


def print_json(document: dict[str, Any]) -> str:
    from specgen.results.document import plain_data

    return json.dumps(plain_data(document), ensure_ascii=False, allow_nan=False) + "\n"
