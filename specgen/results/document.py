"""Records → plain JSON data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


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
