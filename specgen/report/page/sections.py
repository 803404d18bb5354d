"""Sections that pages of several kinds share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specgen.report.page.html import View, chart_html, flattened, paragraph, text_html
from specgen.settings import PROMISES, Mode

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


SHOWN_LINES = 6  # in one chart; more arms than this cannot be told apart


def ms_text(seconds: Sequence[float]) -> list[float]:
    return [round(s * 1000, 4) for s in seconds]


def contract_line(mode: str) -> str:
    promise = PROMISES[Mode(mode)] if mode in set(Mode) else "unknown to this specgen"
    return f'<p class="contract"><strong>{text_html(mode)}</strong>: {text_html(promise)}</p>'


def warnings_html(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f"<li>{text_html(w)}</li>" for w in warnings)
    return f'<section class="warnings" aria-label="Warnings"><h2>Warnings</h2><ul>{items}</ul></section>'


def generation_sections(views: Sequence[View], charts: dict[str, Figure], note: str) -> list[tuple[str, str]]:
    """One generation, chosen by arm and prompt: its rounds and its text, filled in by the page's script."""
    from specgen.report.page.figures import timeline

    if not views:
        return []
    charts["timeline"] = timeline(views[0].draft, views[0].verify, views[0].other)
    arms = list(dict.fromkeys(v.arm for v in views))
    prompts = list(dict.fromkeys(v.prompt for v in views))

    def chooser(name: str, label: str, options: Sequence[str]) -> str:
        listed = "".join(f'<option value="{text_html(o)}">{text_html(o)}</option>' for o in options)
        hidden = " hidden" if len(options) < 2 else ""
        return f'<label{hidden}>{label} <select id="{name}">{listed}</select></label>'

    legend = "".join(
        f'<li><span class="t {letter}">{text_html(word)}</span> {text_html(meaning)}</li>'
        for letter, word, meaning in (
            ("a", "accepted", "drafted, and kept"),
            ("c", "correction", "drawn at the first rejection"),
            ("b", "bonus", "drawn after all drafted tokens were kept"),
            ("p", "plain", "decoded without a draft"),
        )
        if any(token[1] == letter for view in views for token in view.tokens)
    )
    return [
        (
            "One generation",
            (paragraph(note) if note else "")
            + f'<p class="choose">{chooser("arm", "arm", arms)} {chooser("prompt", "prompt", prompts)}</p>'
            + chart_html("timeline", "Where each round's time goes")
            + "<h3>Text, by who wrote it</h3>"
            + '<details><summary>The prompt</summary><pre id="prompt-text"></pre></details>'
            + f'<ul class="legend">{legend}</ul>'
            + '<div id="text" class="text" role="listbox" aria-label="Tokens; arrow keys move"></div>'
            + '<p id="token" class="token">Hover, tap or focus a token for its overlap.</p>',
        )
    ]


def settings_sections(settings: dict[str, Any], environment: dict[str, Any]) -> list[tuple[str, str]]:
    def listed(data: dict[str, Any]) -> str:
        pairs = "".join(f"<dt>{text_html(k)}</dt><dd>{text_html(v)}</dd>" for k, v in flattened(data))
        return f"<dl>{pairs}</dl>"

    return [
        (
            "Settings and environment",
            f"<details><summary>Settings</summary>{listed(settings)}</details>"
            f"<details><summary>Environment</summary>{listed(environment)}</details>",
        )
    ]
