"""`specgen run`: text on stdout, tables on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from specgen.cli.colours import OriginText, legend, why_not
from specgen.cli.options import (
    Ban,
    Chat,
    Debug,
    Device,
    Dtype,
    Engine,
    K,
    Lenience,
    MinP,
    ProfileName,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    TypicalDelta,
    TypicalEpsilon,
    sampling_flags,
)
from specgen.cli.output import EXIT_FAILED, EXIT_USAGE, guarded, load_quietly, stderr_console, tell_notes
from specgen.cli.report import check_target, write_run
from specgen.errors import SpecgenError, UsageError
from specgen.profiles.read import DEFAULT_PROFILE
from specgen.prompts.read import Prompt, read_prompts
from specgen.rounds.record import Round
from specgen.settings import Mode

if TYPE_CHECKING:
    from specgen.decoding.generation import Generation
    from specgen.results.run import Result
    from specgen.session import Session


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
    results: list[Result] = field(default_factory=list)
    failed: bool = False

    def text(self, piece: str) -> None:
        """Model text goes out raw and flushed; bytes, so that neither a locale nor markup touches it.

        Half a surrogate pair, which a JSON line may hold, comes out as the escape it came in as.
        """
        if piece:
            sys.stdout.buffer.write(piece.encode("utf-8", "backslashreplace"))
            sys.stdout.buffer.flush()


def _trace_line(r: Round, name: str) -> str:
    from specgen.results.run import Round as Stored

    data = {"prompt": name, **Stored.of(r).model_dump(mode="json"), "other_s": r.other_s}
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
    from specgen.decoding.result import result_of
    from specgen.report.run import answer, tables
    from specgen.results.document import plain_data

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
    result = result_of(generation, check, cost, prompt=prompt.text, name=prompt.name, interrupted=interrupted)
    sampling = plain_data(generation.pair.sampling)
    if output.json or output.report:
        output.results.append(result)
    if prompt.record is not None and not output.json:
        line = answer(result, sampling, prompt.record)
        output.text(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    elif not (output.json or output.quiet) and result.rounds:
        console = stderr_console()
        console.print()
        for table in tables(result, sampling):
            console.print(table)
    if interrupted:
        raise KeyboardInterrupt


def run(
    ctx: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help='Prompt files; - is stdin; .jsonl gives its lines out again, with the answer under "specgen".',
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    profile: ProfileName = DEFAULT_PROFILE,
    mode: Annotated[Mode | None, typer.Option(help="What is promised of the text; see below.")] = None,
    k: K = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Never more than this.", show_default="128")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    lenience: Lenience = None,
    typical_epsilon: TypicalEpsilon = None,
    typical_delta: TypicalDelta = None,
    repetition_penalty: RepetitionPenalty = None,
    ban: Ban = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.", show_default="0")] = None,
    device: Device = None,
    dtype: Dtype = None,
    engine: Engine = None,
    chat: Chat = None,
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
    debug: Debug = False,
) -> None:
    """Generate speculatively: text on stdout, tables of rounds, acceptance and latency on stderr."""
    if not inputs and prompt is None:
        with contextlib.redirect_stdout(sys.stderr):  # with rich, typer prints help instead of returning it
            print(ctx.get_help())
        print("\nspecgen: no prompt: give a file, - for stdin, or --prompt TEXT", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    with guarded(debug):
        from specgen.profiles.read import load_profile

        if trace is not None and any(n != "-" and Path(n).resolve() == trace.resolve() for n in inputs or []):
            raise UsageError(f"--trace {trace}: is an input; name another file")
        if report is not None:
            from specgen.report.page import require_libraries

            require_libraries()
            check_target(report, [*(inputs or []), *([str(trace)] if trace else [])], "--report")
        if plain and k is not None:
            raise UsageError("--k means nothing with --plain: there is no draft")
        if plain and mode is not None and mode.approximate:
            raise UsageError(f"--mode {mode} means nothing with --plain: there is no draft to verify")
        if show_origin and as_json:
            raise UsageError("--show-origin means nothing with --json: every round's tokens and origins stand there")
        prompts = read_prompts(inputs or [], prompt, answers=not as_json)
        if show_origin and prompts[0].record is not None:
            raise UsageError("--show-origin means nothing for .jsonl files: their answers come out as JSON lines")
        flags = sampling_flags(
            mode=mode,
            k=k,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            lenience=lenience,
            typical_epsilon=typical_epsilon,
            typical_delta=typical_delta,
            repetition_penalty=repetition_penalty,
            ban=ban,
            stop=stop,
            seed=seed,
            chat=chat,
            system=system,
            device=device,
            dtype=dtype,
            engine=engine,
        )
        settings = load_profile(profile, flags)
        with contextlib.ExitStack() as stack:
            trace_file = stack.enter_context(_opened(trace)) if trace is not None else None
            session = load_quietly(settings, plain=plain, quiet=quiet)
            for p in prompts:  # a prompt that is too long shows before the first is generated
                try:
                    tell_notes(session.notes_of(p.text, session.encode(p.text)), quiet)
                except UsageError as error:
                    raise UsageError(f"{p.name}: {error}") from None
            headings = len(prompts) > 1
            origins = show_origin and _origins_shown(plain=plain, quiet=quiet)
            output = Output(as_json, stream, quiet, check, trace_file, headings, origins, report is not None)
            try:
                for i, p in enumerate(prompts):
                    generate_one(session, p, output, plain=plain, first=i == 0)
            finally:
                if output.results:
                    _write_document(session, output, report)
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


def _write_document(session: Session, output: Output, report: Path | None) -> None:
    """The run's JSON on stdout, and its page, where they are wanted."""
    from specgen.results.document import json_text
    from specgen.results.run import Run
    from specgen.session import head

    document = Run.model_validate({**head(session), "kind": "run", "results": output.results})
    if output.json:
        output.text(json_text(document))
    if report is not None:
        write_run(report, document)


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Modes: exact keeps the target's distribution; greedy its argmax; coupled the distribution and, with "
        "one seed, the text of plain decoding; lenient and typical are approximate, and print their bias.\n\n"
        "Examples:\n\n specgen run prompt.txt\n\n echo 'Why is the sky blue?' | specgen run - --mode greedy --k 8\n\n"
        " specgen run --prompt 'Say hi' --json | python -m json.tool\n\n specgen run questions.jsonl > answers.jsonl",
    )(run)
