"""`specgen profiles`: list, show, check and write them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.output import guarded
from specgen.errors import UsageError

profiles_app = typer.Typer(help="List, show, check and write profiles.", no_args_is_help=True)


@profiles_app.command("list")
def profiles_list() -> None:
    """The built-in profiles; those marked * are run by tests."""
    with guarded():
        from specgen.profiles.read import builtin_profiles, load_profile

        for name in builtin_profiles():
            profile = load_profile(name)
            print(f"{name:<16} {'*' if profile.tested else ' '} {profile.description}")


@profiles_app.command("show")
def profiles_show(name: Annotated[str, typer.Argument(help="A built-in name or a YAML file.")]) -> None:
    """A profile's settings merged with the defaults, as YAML."""
    with guarded():
        import yaml

        from specgen.profiles.effective import merged_settings
        from specgen.profiles.read import load_profile

        settings = merged_settings(load_profile(name))
        print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")


@profiles_app.command("check")
def profiles_check(path: Annotated[str, typer.Argument(help="A YAML file or a built-in name.")]) -> None:
    """Validate a profile without loading weights."""
    with guarded():
        from specgen.profiles.read import load_profile

        profile = load_profile(path)
        draft = profile.draft.kind if profile.draft is not None else "none"
        print(f"{path}: ok (target {profile.target.checkpoint}, draft {draft})")


@profiles_app.command("new")
def profiles_new(
    path: Annotated[Path | None, typer.Argument(help="Where to write it; stdout without.")] = None,
) -> None:
    """Write a commented profile to start from; never over an existing file."""
    with guarded():
        from specgen.profiles.template import new_profile_text

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


def register(app: typer.Typer) -> None:
    app.add_typer(profiles_app, name="profiles")
