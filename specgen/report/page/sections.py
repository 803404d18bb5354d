"""What pages of several kinds say alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specgen.report.grid import Grid
from specgen.report.numbers import number
from specgen.report.page.content import View
from specgen.settings import PROMISES, Mode

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


SHOWN_LINES = 6  # in one chart; more arms than this cannot be told apart


def ms_text(seconds: Sequence[float]) -> list[float]:
    return [round(s * 1000, 4) for s in seconds]


def contract(mode: str) -> dict[str, str]:
    """The mode, and what it promises."""
    return {"mode": mode, "promise": PROMISES[Mode(mode)] if mode in set(Mode) else "unknown to this specgen"}


def positions_grid(rows: Sequence[tuple[str, Any]]) -> Grid:
    """rows: (arm or nothing, PositionRow or PositionRate)."""
    arms = any(arm for arm, _ in rows)
    return Grid(
        "Acceptance by position",
        (*(["arm"] if arms else []), "position", "tested", "accepted", "rate", "mean overlap"),
        tuple(
            (
                *([arm] if arms else []),
                *map(str, (p.position, p.tested, p.accepted)),
                number(p.rate, 3),
                number(p.overlap, 3),
            )
            for arm, p in rows
        ),
    )


def generation(views: Sequence[View], charts: dict[str, Figure], note: str) -> dict[str, Any] | None:
    """What the section of one generation offers: arms, prompts, and the writers that occur. None where there is no
    view; adds its chart."""
    from specgen.report.page.figures import timeline

    if not views:
        return None
    charts["timeline"] = timeline(views[0].draft, views[0].verify, views[0].other)
    letters = {token[1] for view in views for token in view.tokens}
    writers = (
        ("a", "accepted", "drafted, and kept"),
        ("c", "correction", "drawn at the first rejection"),
        ("b", "bonus", "drawn after all drafted tokens were kept"),
        ("p", "plain", "decoded without a draft"),
    )
    return {
        "note": note,
        "arms": list(dict.fromkeys(v.arm for v in views)),
        "prompts": list(dict.fromkeys(v.prompt for v in views)),
        "writers": [writer for writer in writers if writer[0] in letters],
    }


def settings_lists(settings: dict[str, Any], environment: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    return {"settings": flattened(settings), "environment": flattened(environment)}


def flattened(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """{"a": {"b": 1}} → [("a.b", "1")]; what is empty or off is left out."""
    if isinstance(data, dict):
        return [
            pair
            for key, value in data.items()
            for pair in flattened(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if data is None or data in ([], ""):
        return []
    return [(prefix, data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))]
