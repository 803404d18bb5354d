"""`specgen bench`: does it pay, and at which k? `register(app)` adds it to a command line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.options import (
    Chat,
    Debug,
    Device,
    Dtype,
    Lenience,
    MinP,
    ModeName,
    Quiet,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    TypicalDelta,
    TypicalEpsilon,
    sampling_flags,
)
from specgen.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    guarded,
    moving,
    printed,
    quiet_loading,
    stderr_console,
    tell_notes,
)
from specgen.errors import SpecgenError, UsageError
from specgen.profiles.read import DEFAULT_PROFILE

if TYPE_CHECKING:
    from specgen.results.bench import Bench
    from specgen.session import Session


MOST_K = 64


MOST_BATCH = 256


SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown"}


def register(app: typer.Typer) -> None:
    app.command(
        "bench",
        epilog="The baseline is plain decoding of the same target in the same engine. All arms run interleaved over "
        "the same prompts, in random order; end tokens end nothing while timing. Without PROMPTS: 14 short ones of "
        "specgen's own, in 7 categories. Exit 1 also where a greedy text is not the baseline's and the difference is "
        "no tie.\n\nExamples:\n\n specgen bench\n\n specgen bench --k 1-8 --mode greedy --budget 300\n\n "
        "specgen bench questions.jsonl --k 2,4 --batch-size 1,4 -o bench.json\n\n "
        "specgen bench --profile a.yaml --profile b.yaml --engine eager,packed --markdown",
    )(bench)


def parse_ks(value: str) -> list[int] | None:
    """--k: 4, 1,2,4, 1-8, or a mixture, sorted; None for auto. Raises UsageError."""
    if value.strip().lower() == "auto":
        return None
    found: set[int] = set()
    for part in value.split(","):
        low, dash, high = part.strip().partition("-")
        if not _whole(low) or (dash and not _whole(high)):
            raise UsageError(f"--k {value}: needs auto, or whole numbers such as 4 or 1,2,4 or 1-8")
        first, last = int(low), int(high) if dash else int(low)
        if first > last:
            raise UsageError(f"--k {value}: {first}-{last} runs backwards; write {last}-{first}")
        if not 1 <= first <= last <= MOST_K:
            raise UsageError(f"--k {value}: k goes from 1 to {MOST_K} (plain decoding is timed in any case)")
        found |= set(range(first, last + 1))
    return sorted(found)


def parse_batches(value: str) -> list[int]:
    """--batch-size: 1, or 1,4,8; sorted. Raises UsageError."""
    parts = [part.strip() for part in value.split(",")]
    if not all(_whole(part) and 1 <= int(part) <= MOST_BATCH for part in parts):
        raise UsageError(f"--batch-size {value}: needs whole numbers from 1 to {MOST_BATCH}, such as 1 or 1,4,8")
    return sorted({int(part) for part in parts})


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def chosen_format(output: Path | None, flags: dict[str, bool]) -> str | None:
    """json, csv or markdown where one is wanted, by flag or by the suffix of -o; None for tables alone."""
    asked = [name for name, on in flags.items() if on]
    if len(asked) > 1:
        raise UsageError(f"give only one of {' and '.join('--' + name for name in asked)}")
    if output is None:
        return asked[0] if asked else None
    by_name = SUFFIXES.get(output.suffix.lower())
    if not asked and by_name is None:
        raise UsageError(f"-o {output}: name it .json, .csv or .md, or say which with --json, --csv or --markdown")
    if output.is_dir():
        raise UsageError(f"-o {output}: is a folder; name a file")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.absolute().parent}")
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise UsageError(f"-o {output}: cannot be written there")
    return asked[0] if asked else by_name


def questions(inputs: Sequence[str], prompt: str | None) -> list[tuple[str, str | None, str]]:
    """(name, category, text) of the prompts given; the built-in ones where none is."""
    from specgen.prompts.bench import PROMPTS
    from specgen.prompts.read import read_prompts

    if not inputs and prompt is None:
        return [(p.name, p.category, p.text) for p in PROMPTS]
    found = []
    for p in read_prompts(list(inputs), prompt):
        category = (p.record or {}).get("category")
        if category is not None and not (isinstance(category, str) and category.strip()):
            raise UsageError(f'{p.name}: "category" needs to be a text')
        found.append((p.name, category, p.text))
    return found


def load_all(
    profiles: Sequence[str], engines: Sequence[str | None], flags: dict[str, Any], *, quiet: bool
) -> list[Session]:
    """A session a profile and engine; what has one target under one engine shares its weights."""
    from specgen.profiles.read import load_profile

    wanted = [load_profile(name, {**flags, "engine": engine}) for engine in engines for name in profiles]
    for settings in wanted:
        if settings.draft is None:
            raise UsageError(f"profile {settings.name} has no draft: nothing to bench against plain decoding")
    with quiet_loading(quiet):
        from specgen.bench.subjects import check_sessions
        from specgen.session import load_session

        sessions: list[Session] = []
        for settings in wanted:
            share = next((s for s in sessions if s.profile.target == settings.target), None)
            sessions.append(load_session(settings, quiet=quiet, share=share))
        check_sessions(sessions)
    tell_notes([note for session in sessions for note in session.notes], quiet)
    return sessions


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float | None, float | None], None]]:
    """A bar with the time left on stderr, where that is a terminal.

    It is drawn between two generations and by no thread of its own, which would run beside what is timed.
    """
    console = stderr_console()
    if not moving(console, quiet):
        yield lambda what, done, left: None
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=1.0, left="")

        def tell(what: str, done: float | None, left: float | None) -> None:
            shown = "" if left is None else f"{time_left(left)} left"
            bar.update(task, description=what, completed=done or 0.0, left=shown, refresh=True)

        yield tell


def time_left(seconds: float) -> str:
    """12 s, 3 min 20 s, 1 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def show(bench: Bench, form: str | None, output: Path | None) -> None:
    """Tables on stdout, or one other form in their place; with -o that form goes to a file beside them."""
    from specgen.analysis.analyse import analyse
    from specgen.report.bench import csv, markdown, tables
    from specgen.results.document import json_text

    analysis = analyse(bench)

    def text(form: str | None) -> str:
        if form == "json":
            return json_text(bench)
        if form is None:
            return printed(tables(analysis, bench))
        made = csv(analysis, bench) if form == "csv" else markdown(analysis, bench)
        return made if made.endswith("\n") else made + "\n"

    failure = None
    if output is not None:
        try:
            output.write_bytes(text(form).encode("utf-8", "backslashreplace"))
        except OSError as error:
            failure = SpecgenError(f"cannot write -o {output}: {error.strerror}")
    sys.stdout.buffer.write(text(None if output is not None else form).encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()
    if failure is not None:
        raise failure


def divergences(bench: Bench) -> list[str]:
    """A line for each greedy text that is not the baseline's and whose first difference is no tie."""
    return [
        f"{d.arm}: {bench.prompts[d.prompt].name}, run {d.run + 1}: not the baseline's text from generated token "
        f"{d.position + 1} on, and no tie: margins {d.plain_margin:.3g} and {d.verify_margin:.3g}, the two calls "
        f"differ by {d.difference:.3g}"
        for d in bench.divergences
        if not d.tie
    ]


def bench(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPTS]...",
            show_default=False,
            help='Prompt files; - is stdin; a .jsonl line may have a "category". Without: a built-in set.',
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="A built-in profile's name, or a YAML file. Repeatable: drafts of one target.",
            show_default=DEFAULT_PROFILE,
        ),
    ] = None,
    k: Annotated[
        str, typer.Option(help="4, or 1,2,4,8, or 1-8; auto: the best k by prediction and its near neighbours.")
    ] = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Times every arm on every prompt.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Short generations of each arm before, not counted.")] = 1,
    mode: ModeName = None,
    batch_size: Annotated[str, typer.Option(help="Prompts at once: 1, or 1,4,8.")] = "1",
    engine: Annotated[
        str | None, typer.Option(help="auto, eager, packed or graph; or a few.", show_default="the profile's")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Leave out prompts, then runs, to keep to this time.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Every generation's length.")] = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    lenience: Lenience = None,
    typical_epsilon: TypicalEpsilon = None,
    typical_delta: TypicalDelta = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[int | None, typer.Option(help="Of the texts; each run has the next.", show_default="0")] = None,
    order_seed: Annotated[int, typer.Option(help="Of the order in which arms and prompts take turns.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    chat: Chat = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of tables.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of tables.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write that to a .json, .csv or .md file, and show the tables."
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Does it pay, and at which k? Speedup against plain decoding, measured, with what was predicted beside it."""
    with guarded(debug):
        ks, batches = parse_ks(k), parse_batches(batch_size)
        if budget is not None and not 0 < budget < float("inf"):
            raise UsageError(f"--budget {budget:g}: needs a number of seconds above 0")
        if output is not None and any(n != "-" and Path(n).resolve() == output.resolve() for n in inputs or []):
            raise UsageError(f"-o {output}: is an input; name another file")
        form = chosen_format(output, {"json": as_json, "csv": as_csv, "markdown": as_markdown})
        engines: list[str | None] = (
            list(dict.fromkeys(e.strip() for e in engine.split(","))) if engine is not None else [None]
        )
        asked = questions(inputs or [], prompt)
        flags = sampling_flags(
            mode=mode,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            lenience=lenience,
            typical_epsilon=typical_epsilon,
            typical_delta=typical_delta,
            repetition_penalty=repetition_penalty,
            seed=seed,
            chat=chat,
            device=device,
            dtype=dtype,
        )
        sessions = load_all(list(dict.fromkeys(profile or [DEFAULT_PROFILE])), engines, flags, quiet=quiet)

        from specgen.bench.runner import Interrupted, run_bench
        from specgen.bench.subjects import encoded

        prompts = encoded(sessions, asked)
        interrupted = False
        with _progress(quiet) as tell:
            try:
                found = run_bench(
                    sessions,
                    prompts,
                    ks=ks,
                    runs=runs,
                    warmup=warmup,
                    batch_sizes=batches,
                    budget=budget,
                    order_seed=order_seed,
                    progress=tell,
                )
            except Interrupted as stopped:
                found, interrupted = stopped.bench, True
        show(found, form, output)
        faults = divergences(found)
        for fault in faults:
            print(f"specgen: {fault}", file=sys.stderr)
        if interrupted:
            print("specgen: interrupted: shown is what was measured until then", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED)
        if faults:
            raise typer.Exit(EXIT_FAILED)
