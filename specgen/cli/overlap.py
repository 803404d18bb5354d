"""`specgen overlap`: is this draft worth it? Text in, one table out. `register(app)` adds it to a command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from specgen.cli.options import Debug, Device, Dtype, Engine, ProfileName, Quiet, sampling_flags, verify_costs
from specgen.cli.output import guarded, load_quietly, moving, printed, stderr_console, write
from specgen.errors import UsageError
from specgen.overlap.analyse import analyse
from specgen.profiles.read import DEFAULT_PROFILE
from specgen.prompts.read import read_prompts
from specgen.report.overlap import table
from specgen.results.document import json_text


def register(app: typer.Typer) -> None:
    app.command(
        "overlap",
        epilog="Temperatures are tried under the profile's other settings; 0 is greedy. Needs no GPU and runs no "
        "speculation.\n\nExamples:\n\n specgen overlap notes.txt\n\n specgen overlap --own 200 prompt.txt --c 0.1\n\n"
        " specgen overlap a.txt b.txt --json > overlap.json",
    )(overlap)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that changes, where that is a terminal."""
    from rich.markup import escape

    console = stderr_console()
    if not moving(console, quiet):
        yield lambda line: None
        return
    with console.status("scoring…") as status:
        yield lambda line: status.update(escape(line))


def overlap(
    texts: Annotated[list[str], typer.Argument(metavar="TEXTFILE...", help="Texts; - is stdin.", show_default=False)],
    profile: ProfileName = DEFAULT_PROFILE,
    own: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Take each text as a prompt and score N tokens of the target's own behind it."
        ),
    ] = None,
    c: Annotated[
        float | None, typer.Option("--c", help="Cost of a draft step, in target steps.", show_default="measured here")
    ] = None,
    verify_cost: Annotated[
        str | None,
        typer.Option(
            metavar="1,A,B,…",
            help="Costs of target calls on 1, 2, 3, … tokens.",
            show_default="measured here; with --c: all 1",
        ),
    ] = None,
    max_k: Annotated[int, typer.Option(min=1, max=64, help="Predict for k from 1 to this.")] = 16,
    draft: Annotated[str | None, typer.Option(help="Another draft checkpoint than the profile's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the text that --own writes.", show_default="0")] = None,
    device: Device = None,
    dtype: Dtype = None,
    engine: Engine = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="With --own: use the chat template, or the bare text.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, with every position.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Is this draft worth it? Acceptance, block efficiency and speedup to expect, from text alone."""
    with guarded(debug):
        from specgen.profiles.read import load_profile

        if c is not None and not 0 <= c < float("inf"):
            raise UsageError(f"--c {c}: needs a number, 0 or more")
        given = verify_costs(verify_cost, max_k) if verify_cost is not None else None
        if chat and own is None:
            raise UsageError("--chat means nothing without --own: a text is scored as it stands")
        prompts = read_prompts(texts, None)
        flags = sampling_flags(
            max_new_tokens=own, seed=seed, device=device, dtype=dtype, engine=engine, draft=draft, chat=chat
        )
        settings = load_profile(profile, flags)
        if settings.draft is None:
            raise UsageError(f"profile {settings.name} has no draft: name one with --draft")

        session = load_quietly(settings, plain=False, quiet=quiet)
        from specgen.overlap.predict import UnitCosts

        costs = None if c is None else UnitCosts(c, tuple(given or [1.0] * (max_k + 1)))
        with _progress(quiet) as progress:
            document = analyse(
                session, prompts, own=own, max_k=max_k, costs=costs, verify_cost=given, progress=progress
            )
        write(json_text(document) if as_json else printed([table(document)]))
