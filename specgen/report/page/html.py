"""Fragments of HTML, escaped, and the page they make."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from specgen.rounds.record import Origin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


LETTERS = {Origin.ACCEPTED: "a", Origin.CORRECTION: "c", Origin.BONUS: "b", Origin.PLAIN: "p"}


_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # in HTML


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
    """What a page is made of. sections: (heading, HTML); figures: by the id of the element they are drawn in."""

    title: str
    kind: str
    lead: str
    sections: list[tuple[str, str]]
    figures: dict[str, Figure]
    views: list[View]


def text_html(value: object) -> str:
    """Escaped for HTML; what HTML may not hold (control characters, half surrogate pairs) shows as U+FFFD."""
    return html.escape(_FORBIDDEN.sub("\ufffd", str(value)))


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text_html(text)}</p>' if kind else f"<p>{text_html(text)}</p>"


def chart_html(name: str, caption: str) -> str:
    return (
        f'<figure><figcaption id="{name}-caption">{text_html(caption)}</figcaption>'
        f'<div class="chart" id="{name}" role="group" aria-labelledby="{name}-caption"></div></figure>'
    )


def table_html(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """The first column heads its row. Scrolls sideways on its own where it is too wide, with the keyboard too."""
    head = "".join(f'<th scope="col">{text_html(c)}</th>' for c in columns)
    body = "".join(
        f'<tr><th scope="row">{text_html(row[0])}</th>'
        + "".join(f"<td>{text_html(c)}</td>" for c in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{text_html(caption)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


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


def _json(data: Any) -> str:
    """JSON that may stand inside <script>: nothing in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _palette_css() -> str:
    from specgen.report.page.figures import PALETTE

    def variables(at: int) -> str:
        return "".join(f"--{name}:{colours[at]};" for name, colours in PALETTE.items())

    return f":root{{{variables(0)}}}\n@media (prefers-color-scheme: dark){{:root{{{variables(1)}}}}}\n"


def assembled(content: Content) -> str:
    from plotly.offline import get_plotlyjs

    from specgen.machine.environment import version
    from specgen.report.page.figures import PALETTE

    folder = resources.files("specgen.report.page")
    # The library holds control characters in string literals, where an escape is the same.
    plotly = _FORBIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", get_plotlyjs())
    script = folder.joinpath("script.js").read_text(encoding="utf-8")
    data = {
        "figures": {name: json.loads(figure.to_json()) for name, figure in content.figures.items()},
        "views": [vars(view) for view in content.views],
        "dark": dict(PALETTE.values()),
    }
    body = "".join(
        f"<section><h2>{text_html(heading)}</h2>{inner}</section>\n" for heading, inner in content.sections
    )
    parts = {
        "title": text_html(content.title),
        "kind": text_html(content.kind),
        "version": text_html(version()),
        "policy": f"default-src 'none'; script-src {_digest(plotly)} {_digest(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'",
        "style": _palette_css() + folder.joinpath("style.css").read_text(encoding="utf-8"),
        "lead": content.lead,
        "body": body,
        "data": _json(data),
        "plotly": plotly,
        "script": script,
    }
    template = folder.joinpath("template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
