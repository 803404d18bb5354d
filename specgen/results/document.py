"""The head that every stored file begins with; records → plain JSON data."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from specgen.results.fields import Environment, Free, Record, Settings


class Head(Record):
    """What a file of any kind says of itself. sampling: the effective settings. checkpoints: where each side's is,
    and its revision. environment: versions, machine, threads and load, git state."""

    schema_version: int
    kind: str
    sampling: Settings
    checkpoints: Free
    dtype: str
    device: str
    environment: Environment


def json_text(document: Head) -> str:
    """The file's one line."""
    data = document.model_dump(mode="json", by_alias=True)
    return json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"


def plain_data(value: Any) -> Any:
    """Dataclasses, tuples and enums → what JSON holds; numbers that JSON lacks (NaN, ∞) → null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain_data(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return str(value)
    return value
