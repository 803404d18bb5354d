"""The profile: a YAML file that names target, draft and settings, checked before anything heavy is imported.

Settings come in layers: defaults < the checkpoint's generation_config < the profile file < flags.
`load_profile` joins the last two, `resolve_sampling` all four. Every fault is a `UsageError` of one or two
lines that names the file and the dotted key, or the flag.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specgen.errors import UsageError
from specgen.profiles.effective import resolve_sampling
from specgen.profiles.messages import error_message, flag_name, shortened, shown_value
from specgen.profiles.schema import SHARED_FLAGS, Profile

DEFAULT_PROFILE = "smollm2"


# From file and flags to a Profile
def builtin_profiles() -> dict[str, Path]:
    """The profiles that come with the package, by name, sorted."""
    package = Path(__file__).resolve().parent.parent
    folder = package / "profiles_builtin"
    # Beside an installed package a folder `profiles` may be anybody's; a source tree has pyproject.toml too.
    if not folder.is_dir() and (package.parent / "pyproject.toml").is_file():
        folder = package.parent / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def load_profile(name_or_path: str, flags: Mapping[str, Any] | None = None) -> Profile:
    """Read and check a built-in profile or a file, with flags on top.

    `flags` go by dotted key ("decoding.k"); "device", "dtype" and "engine" alone set the target and a
    checkpoint draft. None and an empty list mean "not given". Raises `UsageError`.
    """
    source, path = _find(name_or_path)
    data = _parse(_read(source, path), source)
    data.setdefault("name", path.stem)
    _anchor_paths(data, path.parent)
    profile = _validated(data, source, {})
    given = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in (flags or {}).items()
        if value is not None and value not in ([], ())
    }
    if given:
        merged, origin = _merge(data, given)
        profile = _validated(merged, source, {key: (flag, given[flag]) for key, flag in origin.items()})
    # A contradiction between mode and settings is to show before any weight is loaded.
    resolve_sampling(profile, {})
    return profile


def _find(name: str) -> tuple[str, Path]:
    """What to call the profile in messages, and its file."""
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    builtins = builtin_profiles()
    if re.search(r"[/\\]", name) or path.suffix.lower() in (".yaml", ".yml"):
        return name, path
    if name in builtins:
        return name, builtins[name]
    if name and _is(Path.is_file, path):
        return name, path
    raise UsageError(
        f"no built-in profile {shown_value(name)}{_nearest(name)}; for a file give a path, such as ./my.yaml"
    )


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # too long, or a null character
        return False


def _nearest(name: str) -> str:
    """The built-in profiles to suggest for a name that is none; all of them where none is near."""
    names = list(builtin_profiles())
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; built in: {', '.join(names) or 'none'}"


def _read(source: str, path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"profile {source}: no such file{_nearest(path.stem)}") from None
    except IsADirectoryError:
        raise UsageError(f"profile {source}: a folder, not a file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"profile {source}: cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"profile {source}: not UTF-8: byte 0x{raw[error.start]:02x} in line {line}; save it as UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not when constructing: by then merge keys (<<) have been flattened into the same list.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


def _parse(text: str, source: str) -> dict[Any, Any]:
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = " ".join(str(error.problem or error.context).split())
        raise UsageError(f"profile {source}: bad YAML{where}: {what}") from None
    except RecursionError:
        raise UsageError(f"profile {source}: bad YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as 2024-99-99, no date
        raise UsageError(f"profile {source}: bad YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise UsageError(f"profile {source}: the file is empty; `specgen profiles new` writes one to start from")
    if not isinstance(data, dict):
        kind = {"list": "a list", "str": "a string"}.get(type(data).__name__, "a single value")
        raise UsageError(
            f"profile {source}: {kind} at the top; expected a mapping with target, draft, decoding, prompt"
        )
    return data


def _anchor_paths(data: dict[Any, Any], folder: Path) -> None:
    """Turn paths of checkpoints and tokenizers that exist beside the profile into full paths, in place."""
    sections = [data[name] for name in ("target", "draft") if isinstance(data.get(name), dict)]
    for section in sections:
        for key in ("checkpoint", "tokenizer"):
            value = section.get(key)
            if isinstance(value, str) and value and not value.startswith("package:"):
                path = folder / Path(value).expanduser() if value.startswith("~/") else folder / value
                kind = Path.is_file if path.suffix.lower() == ".gguf" else Path.is_dir
                if _is(kind, path):
                    section[key] = str(path.resolve())


def _merge(data: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's data with the flags on top, and for each dotted key set so, the flag's key as given."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    _switch_draft(merged, flags)
    origin = {key: key for key in flags if key not in SHARED_FLAGS}
    for key in SHARED_FLAGS:
        if key in flags:
            origin.setdefault(f"target.{key}", key)
            if _kind(merged) == "checkpoint":
                origin.setdefault(f"draft.{key}", key)
    for dotted, flag in origin.items():
        section, _, name = dotted.partition(".")
        if merged.get(section) is None:
            merged[section] = {}
        if not name or not isinstance(merged[section], dict):
            raise UsageError(f"{flag_name(flag)}: no such setting; a flag sets SECTION.KEY, such as decoding.k")
        if name == "checkpoint" and merged[section].get(name) != flags[flag]:
            # These belong to the checkpoint that the file names; to trust its code is not to trust another's.
            for tied in ("revision", "tokenizer", "trust_remote_code", "sha256", "bytes", "otherwise"):
                if f"{section}.{tied}" not in origin:
                    merged[section].pop(tied, None)
        merged[section][name] = flags[flag]
    return merged, origin


def _kind(data: Mapping[str, Any]) -> Any:
    draft = data.get("draft")
    return draft.get("kind") if isinstance(draft, dict) else None


def _switch_draft(merged: dict[str, Any], flags: Mapping[str, Any]) -> None:
    """Where flags ask for another kind of draft than the file has, start from an empty draft of that kind."""
    asked = {key.removeprefix("draft.") for key in flags if key.startswith("draft.")}
    has = _kind(merged)
    kind = flags.get("draft.kind") or ("checkpoint" if "checkpoint" in asked else has)
    if kind is None and asked & {"max_ngram", "min_ngram"}:
        kind = "ngram"
    if asked and kind is not None and kind != has:
        merged["draft"] = {"kind": kind}


def _validated(data: Mapping[Any, Any], source: str, given: Mapping[str, tuple[str, Any]]) -> Profile:
    """`given`: dotted key → (flag, value) where flags were merged in; empty when the file stands alone."""
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        raise UsageError(error_message(error, source, given)) from None
    profile._flags = frozenset(given)
    profile._source = source
    return profile


shortened.maxstring = shortened.maxother = 60
