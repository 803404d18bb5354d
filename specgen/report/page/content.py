"""What a page is made of, before it is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specgen.rounds.record import Origin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


LETTERS = {Origin.ACCEPTED: "a", Origin.CORRECTION: "c", Origin.BONUS: "b", Origin.PLAIN: "p"}


@dataclass(frozen=True)
class View:
    """One generation: whose it is, its rounds in milliseconds, its tokens.

    tokens: [text, first letter of the origin, overlap or None, round, place in the round], the last two from 1.
    """

    arm: str
    prompt: str
    text: str
    draft: list[float]
    verify: list[float]
    other: list[float]
    tokens: list[list[Any]]


@dataclass(frozen=True)
class Content:
    """kind: whose template lays it out, with `said` as its variables; figures: by the id of the element they are
    drawn in."""

    title: str
    kind: str
    said: dict[str, Any]
    figures: dict[str, Figure]
    views: list[View]
