"""Result files, read whole: by the types that they were written with."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from specgen.errors import UsageError
from specgen.results.bench import Bench, contradictions
from specgen.results.document import Head

SCHEMA_VERSION = 2  # 1: run, overlap and audit of specgen 0.1; 2 adds bench, and pieces and ratios to run


READABLE = (1, 2)


def read(path: Path | str, kinds: Collection[str]) -> dict[str, Any]:
    """A result file's data. Raises UsageError, with what to do, for what is no result of these kinds, or of a
    schema version that this specgen does not read. `-` is stdin."""
    import sys

    name = str(path)
    try:
        text = sys.stdin.read() if name == "-" else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not UTF-8: not a result of specgen") from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{name}: not JSON: give what `specgen … --json` wrote") from None
    if not isinstance(data, dict) or "schema_version" not in data or "kind" not in data:
        raise UsageError(f"{name}: JSON, but no result of specgen (no schema_version, no kind)")
    wanted = " or ".join(sorted(kinds))
    if not isinstance(data["kind"], str) or data["kind"] not in kinds:
        raise UsageError(f"{name}: a result of specgen {data['kind']}, where one of {wanted} is needed")
    version = data["schema_version"]
    if version not in READABLE:
        raise UsageError(
            f"{name}: schema version {version}, and this specgen reads {READABLE[0]} to {READABLE[-1]}: "
            "read it with the specgen that wrote it, or measure again"
        )
    return data


def read_bench(path: Path | str) -> Bench:
    """A bench's result file, validated. Raises UsageError."""
    return parse_bench(read(path, {"bench"}), str(path))


def parse_bench(data: dict[str, Any], name: str) -> Bench:
    """Raises UsageError, in one sentence, for what no bench can have written: tables made of it would be false."""
    bench = parsed(Bench, data, name)
    for where, what in contradictions(bench):
        raise UsageError(f"{name}: not a whole bench result: {where}: {what}")
    return bench


_Whole = TypeVar("_Whole", bound=Head)


def parsed(model: type[_Whole], data: dict[str, Any], name: str) -> _Whole:
    """The typed document of what `read` gave. Raises UsageError, in one sentence, where it is not whole."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: not a whole {data['kind']} result: {where}: {first['msg']}") from None
