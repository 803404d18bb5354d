"""The command line: parse, call, print, exit code. Heavy imports stay inside the commands."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from specgen import cli_audit, cli_bench, cli_overlap, cli_report, cli_results
from specgen import cli_options as options
from specgen.cli_origin import OriginText, legend, why_not
from specgen.cli_plumbing import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    cannot_write,
    guarded,
    load_quietly,
    stderr_console,
)
from specgen.cli_prompts import Prompt, read_prompts
from specgen.profiles import DEFAULT_PROFILE
from specgen.rounds import Mode, Round, SpecgenError, UsageError

if TYPE_CHECKING:
    from specgen.generation import Generation
    from specgen.loading import Session

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
profiles_app = typer.Typer(help="List, show, check and write profiles.", no_args_is_help=True)
cache_app = typer.Typer(help="The converted checkpoints in the user's cache folder.", no_args_is_help=True)
app.add_typer(profiles_app, name="profiles")
app.add_typer(cache_app, name="cache")
cli_overlap.register(app)
cli_audit.register(app)
cli_bench.register(app)
cli_results.register(app)
cli_report.register(app)


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


# ------------------------------------------------------------------------------------------------------ run


@dataclass
class Output:
    """Where a run's results go, and which of them are wanted."""

    json: bool
    stream: bool
    quiet: bool
    check: bool
    trace: TextIO | None
    headings: bool
    origins: bool = False
    report: bool = False
    results: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False

    def text(self, piece: str) -> None:
        """Model text goes out raw and flushed; bytes, so that neither a locale nor markup touches it.

        Half a surrogate pair, which a JSON line may hold, comes out as the escape it came in as.
        """
        if piece:
            sys.stdout.buffer.write(piece.encode("utf-8", "backslashreplace"))
            sys.stdout.buffer.flush()


def _trace_line(r: Round, name: str) -> str:
    from specgen.report import plain_data

    data = {"prompt": name, **plain_data(r), "other_s": r.other_s}
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def _write_trace(file: TextIO, line: str) -> None:
    try:
        print(line, file=file, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            file.close()  # what is buffered cannot be written either; closed here, it does not raise once more
        raise SpecgenError(f"cannot write --trace {file.name}: {error.strerror}") from None


def generate_one(session: Session, prompt: Prompt, output: Output, *, plain: bool, first: bool) -> None:
    """Generates from one prompt, streams its text, then its tables. Interrupted, it still shows what there is."""
    tokens = session.encode(prompt.text)
    generation = session.generate(tokens, plain=plain)
    as_text = not output.json and prompt.record is None
    if as_text and output.headings:
        output.text(f"{'' if first else chr(10)}==> {prompt.name} <==\n")
    source = OriginText(generation) if output.origins else generation
    interrupted = False
    written = ""
    limit = session.sampling.max_new_tokens
    try:
        for finished in counting(generation, prompt.name, limit, silent=(as_text and output.stream) or output.quiet):
            if as_text and output.stream:
                written += (piece := source.take())
                output.text(piece)
            if output.trace is not None:
                _write_trace(output.trace, _trace_line(finished, prompt.name))
    except KeyboardInterrupt:
        interrupted = True
    finally:  # also when the run fails: what was generated stays, and an error starts on a line of its own
        if as_text:
            rest = source.take(final=True)
            output.text(rest)
            if generation.rounds and not (written + rest).endswith("\n"):
                output.text("\n")
    finish_one(generation, prompt, output, interrupted=interrupted)


def counting(generation: Generation, name: str, limit: int, *, silent: bool) -> Iterator[Round]:
    """The generation's rounds; where no text shows how far it is, a line on a terminal does."""
    console = stderr_console()
    if silent or not console.is_terminal or console.color_system is None:
        yield from generation
        return
    from rich.markup import escape

    with console.status("") as status:
        for finished in generation:
            yield finished
            status.update(escape(f"{name}: {len(generation.tokens)} of at most {limit} tokens"))


def finish_one(generation: Generation, prompt: Prompt, output: Output, *, interrupted: bool) -> None:
    """After the text: the run's check of itself, the probe of c, the tables or the JSON; then passes Ctrl-C on."""
    from specgen import report

    check = cost = None
    try:
        if output.check and not interrupted and generation.rounds:
            check = generation.check()
        wanted = output.json or output.report or not output.quiet
        if not interrupted and wanted and prompt.record is None:
            cost = generation.probe_cost()
    except KeyboardInterrupt:
        interrupted = True
    output.failed |= check is not None and not check.passed
    if check is not None and not check.passed:
        print(f"specgen: {prompt.name}: the run's check of itself {check.verdict}", file=sys.stderr)
    if output.json or output.report:
        output.results.append(
            report.result_json(generation, check, cost, prompt=prompt.text, name=prompt.name, interrupted=interrupted)
        )
    if prompt.record is not None and not output.json:
        line = report.line_json(generation, check, record=prompt.record, interrupted=interrupted)
        output.text(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    elif not (output.json or output.quiet) and generation.rounds:
        print_tables(generation, check, cost, interrupted=interrupted)
    if interrupted:
        raise KeyboardInterrupt


def print_tables(generation: Generation, check: Any, cost: Any, *, interrupted: bool) -> None:
    from specgen import report

    console = stderr_console()
    statistics = generation.statistics
    console.print()
    if not generation.plain:
        console.print(report.rounds_table(generation.rounds))
        console.print(report.positions_table(statistics))
    console.print(report.latency_table(statistics, generation.prefill_s))
    console.print(report.summary(generation, check, cost, interrupted=interrupted))


@app.command(
    epilog="Modes: exact keeps the target's distribution; greedy its argmax; coupled the distribution and, with one "
    "seed, the text of plain decoding; lenient and typical are approximate, and print their bias.\n\n"
    "Examples:\n\n specgen run prompt.txt\n\n echo 'Why is the sky blue?' | specgen run - --mode greedy --k 8\n\n"
    " specgen run --prompt 'Say hi' --json | python -m json.tool\n\n specgen run questions.jsonl > answers.jsonl",
)
def run(
    ctx: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Prompt files; - is stdin; .jsonl gives JSON lines out.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    profile: options.ProfileName = DEFAULT_PROFILE,
    mode: Annotated[Mode | None, typer.Option(help="What is promised of the text; see below.")] = None,
    k: options.K = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Never more than this.", show_default="128")] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    lenience: options.Lenience = None,
    typical_epsilon: options.TypicalEpsilon = None,
    typical_delta: options.TypicalDelta = None,
    repetition_penalty: options.RepetitionPenalty = None,
    ban: options.Ban = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.", show_default="0")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    engine: options.Engine = None,
    chat: options.Chat = None,
    system: Annotated[str | None, typer.Option(help="The chat's system message.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without the draft.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="The run's check of itself; costs a prefill.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout instead of text and tables.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a JSON line a round to this file.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page of the run.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No tables, notes or progress.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is committed.")] = True,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="On a terminal: colour the text by who wrote it.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Generate speculatively: text on stdout, tables of rounds, acceptance and latency on stderr."""
    if not inputs and prompt is None:
        with contextlib.redirect_stdout(sys.stderr):  # with rich, typer prints help instead of returning it
            print(ctx.get_help())
        print("\nspecgen: no prompt: give a file, - for stdin, or --prompt TEXT", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    with guarded(debug):
        from specgen.profiles import load_profile

        if trace is not None and any(n != "-" and Path(n).resolve() == trace.resolve() for n in inputs or []):
            raise UsageError(f"--trace {trace}: is an input; name another file")
        if report is not None:
            from specgen.page import require_plotly

            require_plotly()
            cli_report.check_target(report, [*(inputs or []), *([str(trace)] if trace else [])], "--report")
        if plain and k is not None:
            raise UsageError("--k means nothing with --plain: there is no draft")
        if plain and mode is not None and mode.approximate:
            raise UsageError(f"--mode {mode} means nothing with --plain: there is no draft to verify")
        if show_origin and as_json:
            raise UsageError("--show-origin means nothing with --json: every round's tokens and origins stand there")
        prompts = read_prompts(inputs or [], prompt)
        if show_origin and prompts[0].record is not None:
            raise UsageError("--show-origin means nothing for .jsonl files: their answers come out as JSON lines")
        flags = options.sampling_flags(
            mode=mode, k=k, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, lenience=lenience, typical_epsilon=typical_epsilon, typical_delta=typical_delta,
            repetition_penalty=repetition_penalty, ban=ban, stop=stop, seed=seed, chat=chat, system=system,
            device=device, dtype=dtype, engine=engine,
        )  # fmt: skip
        settings = load_profile(profile, flags)
        with contextlib.ExitStack() as stack:
            trace_file = stack.enter_context(_opened(trace)) if trace is not None else None
            session = load_quietly(settings, plain=plain, quiet=quiet)
            for p in prompts:  # a prompt that is too long shows before the first is generated
                try:
                    session.encode(p.text)
                except UsageError as error:
                    raise UsageError(f"{p.name}: {error}") from None
            headings = len(prompts) > 1
            origins = show_origin and _origins_shown(plain=plain, quiet=quiet)
            output = Output(as_json, stream, quiet, check, trace_file, headings, origins, report is not None)
            try:
                for i, p in enumerate(prompts):
                    generate_one(session, p, output, plain=plain, first=i == 0)
            finally:
                document = _document(session, output) if output.results else {}
                if as_json and document:
                    output.text(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
                if report is not None and document:
                    cli_report.write_run(report, document)
        if output.failed:
            raise typer.Exit(EXIT_FAILED)


def _origins_shown(*, plain: bool, quiet: bool) -> bool:
    """Whether the text gets colours; says on stderr what they mean, or why there are none."""
    console = stderr_console()
    missing = "plain decoding has one writer" if plain else why_not()
    line = f"--show-origin: {missing}" if missing else legend(coloured=console.color_system is not None)
    if not quiet:
        print(f"specgen: note: {line}" if missing else line, file=sys.stderr)
    return missing is None


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}") from None


def _document(session: Session, output: Output) -> dict[str, Any]:
    from specgen.environment import describe
    from specgen.profiles import merged_settings
    from specgen.report import SCHEMA_VERSION, plain_data

    pair = session.pair
    target: Any = pair.target
    return plain_data(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "run",
            "profile": merged_settings(session.profile),
            "sampling": pair.sampling,
            "checkpoints": session.located,
            "dtype": str(pair.dtype).removeprefix("torch."),
            "device": str(target.device),
            "environment": describe(),
            "results": output.results,
        }
    )


# --------------------------------------------------------------------------------------------- small commands


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from specgen.environment import version as installed

        print(installed())
        raise typer.Exit()


@profiles_app.command("list")
def profiles_list() -> None:
    """The built-in profiles; those marked * are run by tests."""
    with guarded():
        from specgen.profiles import builtin_profiles, load_profile

        for name in builtin_profiles():
            profile = load_profile(name)
            print(f"{name:<16} {'*' if profile.tested else ' '} {profile.description}")


@profiles_app.command("show")
def profiles_show(name: Annotated[str, typer.Argument(help="A built-in name or a YAML file.")]) -> None:
    """A profile's settings merged with the defaults, as YAML."""
    with guarded():
        import yaml

        from specgen.profiles import load_profile, merged_settings

        settings = merged_settings(load_profile(name))
        print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")


@profiles_app.command("check")
def profiles_check(path: Annotated[str, typer.Argument(help="A YAML file or a built-in name.")]) -> None:
    """Validate a profile without loading weights."""
    with guarded():
        from specgen.profiles import load_profile

        profile = load_profile(path)
        draft = profile.draft.kind if profile.draft is not None else "none"
        print(f"{path}: ok (target {profile.target.checkpoint}, draft {draft})")


@profiles_app.command("new")
def profiles_new(
    path: Annotated[Path | None, typer.Argument(help="Where to write it; stdout without.")] = None,
) -> None:
    """Write a commented profile to start from; never over an existing file."""
    with guarded():
        from specgen.profiles import new_profile_text

        if path is None:
            print(new_profile_text(), end="")
            return
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(new_profile_text())
        except FileExistsError:
            raise UsageError(f"{path}: exists already; name another file") from None
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        print(f"wrote {path}; next: specgen profiles check {path}", file=sys.stderr)


@cache_app.command("list")
def cache_list() -> None:
    """The converted checkpoints, their sizes and the folder."""
    with guarded():
        from specgen.checkpoints import cache_entries, cache_folder

        entries = cache_entries()
        for entry in entries:
            print(f"{entry.name}  {entry.bytes / 1e6:.0f} MB  {entry.when}  from {entry.source}")
        print(f"{len(entries)} in {cache_folder()}", file=sys.stderr)


@cache_app.command("clear")
def cache_clear(name: Annotated[str | None, typer.Argument(help="One entry; all without.")] = None) -> None:
    """Remove converted checkpoints; they are converted again when needed."""
    with guarded():
        from specgen.checkpoints import clear_cache

        print(f"freed {clear_cache(name) / 1e6:.0f} MB", file=sys.stderr)
