"""`specgen cache`: the fetched and the converted checkpoints."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specgen.cli.output import guarded

cache_app = typer.Typer(
    help="The fetched and converted checkpoints in the user's cache folder.", no_args_is_help=True
)


@cache_app.command("list")
def cache_list() -> None:
    """The fetched and converted checkpoints, their sizes and the folder."""
    with guarded():
        from specgen.checkpoints.located import cache_folder
        from specgen.checkpoints.store import cache_entries

        entries = cache_entries()
        for entry in entries:
            print(f"{entry.name}  {entry.bytes / 1e6:.0f} MB  {entry.when}  from {entry.source}")
        print(f"{len(entries)} in {cache_folder().parent}", file=sys.stderr)


@cache_app.command("clear")
def cache_clear(name: Annotated[str | None, typer.Argument(help="One entry; all without.")] = None) -> None:
    """Remove fetched and converted checkpoints; they are fetched or converted again when needed."""
    with guarded():
        from specgen.checkpoints.store import clear_cache

        print(f"freed {clear_cache(name) / 1e6:.0f} MB", file=sys.stderr)


def register(app: typer.Typer) -> None:
    app.add_typer(cache_app, name="cache")
