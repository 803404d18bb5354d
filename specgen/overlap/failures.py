"""Where a draft fails: histograms, groups of tokens, the worst ones."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10  # of the distribution of overlap over positions


MIN_COUNT = 3  # a token seen less often is not listed among the worst


WORST_TOKENS = 10


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def histogram(overlaps: Sequence[float]) -> list[int]:
    """Positions with an overlap in [0, .1), [.1, .2), … [.9, 1]. Rounding may carry an overlap over 1."""
    return [int(n) for n in np.histogram(np.clip(overlaps, 0, 1), bins=BINS, range=(0, 1))[0]]


def deciles(overlaps: Sequence[float]) -> list[float]:
    """The overlap that 10 %, 20 %, … 90 % of the positions lie below."""
    return [float(q) for q in np.quantile(overlaps, np.arange(1, 10) / 10)] if overlaps else []


@dataclass(frozen=True, slots=True)
class Group:
    """Positions that have something in common. lost: their share of all rejections, Σ (1 − overlap)."""

    name: str
    count: int
    overlap: float
    lost: float


def groups(names: Sequence[str], overlaps: Sequence[float]) -> list[Group]:
    """Positions by name, the lowest mean overlap first; names: [n], overlaps: [n]."""
    by_name: dict[str, list[float]] = {}
    for name, value in zip(names, overlaps, strict=True):
        by_name.setdefault(name, []).append(value)
    missing = math.fsum(1 - v for v in overlaps)
    found = [
        Group(name, len(v), math.fsum(v) / len(v), math.fsum(1 - x for x in v) / missing if missing > 0 else 0.0)
        for name, v in by_name.items()
    ]
    return sorted(found, key=lambda g: (g.overlap, -g.count, g.name))


def worst(found: Sequence[Group], *, min_count: int = MIN_COUNT, most: int = WORST_TOKENS) -> list[Group]:
    """The groups with the lowest overlap among those that were seen often enough and that ever fail."""
    return [g for g in found if g.count >= min_count and g.overlap < 1][:most]


KINDS = ("word start", "word continuation", "digits", "punctuation", "whitespace", "other")


def kind_of(piece: str, before: str) -> str:
    """The kind of a token by its decoded text; before: the text of the one before it."""
    core = piece.strip()
    if not core:
        return "whitespace" if piece else "other"
    if core.isdigit():
        return "digits"
    if all(unicodedata.category(c)[0] in "PS" and c != "\ufffd" for c in core):
        return "punctuation"
    if not any(c.isalpha() for c in core):
        return "other"
    continues = core[0].isalpha() and not piece[0].isspace() and before[-1:].isalpha()
    return "word continuation" if continues else "word start"
