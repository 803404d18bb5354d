"""How numbers are written in tables."""

from __future__ import annotations

import math


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def milliseconds(seconds: float) -> str:
    return number(seconds * 1000, 2 if seconds < 0.01 else 1)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
