"""A run's result → what stands on its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specgen.report.page.bench import counted_rounds, piece_of, positions_html, rates_of
from specgen.report.page.html import LETTERS, Content, View, chart_html, paragraph, table_html, text_html
from specgen.report.page.sections import contract_line, generation_sections, ms_text, settings_sections
from specgen.rounds.record import Committed, Origin, Round
from specgen.rounds.statistics import summarise

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def run_content(document: dict[str, Any]) -> Content:
    from specgen.report.page.figures import acceptance, histogram

    results = document["results"]
    rounds = [_rounds(result) for result in results]
    plain = all(result["plain"] for result in results)
    pooled = summarise([r for one in rounds for r in one], drafting=not plain)
    charts: dict[str, Figure] = {}
    sections = []
    if pooled.positions:
        charts["acceptance"] = acceptance([("all prompts" if len(results) > 1 else "run", pooled.positions)])
        charts["histogram"] = histogram([("run", counted_rounds(r.accepted for one in rounds for r in one))])
        for chart in charts.values():
            chart.update_layout(showlegend=False)
        sections.append(
            (
                "Acceptance",
                chart_html("acceptance", "Accepted / tested, by position in the round")
                + positions_html([("", p) for p in pooled.positions])
                + chart_html("histogram", "Tokens accepted in a round"),
            )
        )
    views = [_run_view(result, one) for result, one in zip(results, rounds, strict=True)]
    old = (
        ""
        if all("pieces" in result for result in results)
        else ("This file holds no text of the single tokens (an older specgen wrote it): they are shown by id.")
    )
    sections += generation_sections(views, charts, old)
    sections.append(("The run's check of itself", "".join(_check(result, len(results) > 1) for result in results)))
    settings = {name: document[name] for name in ("sampling", "dtype", "device", "profile", "checkpoints")}
    sections += settings_sections(settings, document["environment"])
    lead = paragraph(rates_of(pooled), "verdict") + paragraph(
        "No speedup is shown: a run is not measured against plain decoding (specgen bench does that)."
    )
    lead += (
        paragraph("plain decoding of the target, no draft") if plain else contract_line(document["sampling"]["mode"])
    )
    return Content(document["profile"]["name"] or "run", "run", lead, sections, charts, views)


def _rounds(result: dict[str, Any]) -> list[Round]:
    """A run's rounds out of its JSON."""
    return [
        Round(**{**r, "committed": tuple(Committed(**{**c, "origin": Origin(c["origin"])}) for c in r["committed"])})
        for r in result["rounds"]
    ]


def _run_view(result: dict[str, Any], rounds: Sequence[Round]) -> View:
    pieces = result.get("pieces") or [None] * len(result["tokens"])
    committed = [(c, r.index + 1, j) for r in rounds for j, c in enumerate(r.committed, 1)]
    tokens: list[list[Any]] = [
        [piece_of(piece, c.token), LETTERS[c.origin], c.overlap, n, j]
        for piece, (c, n, j) in zip(pieces, committed, strict=True)
    ]
    return View(
        "plain" if result["plain"] else "run",
        result["name"],
        result["prompt"],
        ms_text([r.draft_s for r in rounds]),
        ms_text([r.verify_s for r in rounds]),
        ms_text([r.other_s for r in rounds]),
        tokens,
    )


def _check(result: dict[str, Any], named: bool) -> str:
    heading = f"<h3>{text_html(result['name'])}</h3>" if named else ""
    check = result["check"]
    if check is None:
        return heading + paragraph("left out")
    marks = {True: "ok", False: "FAILED", None: "–"}
    rows = [
        [
            r["name"],
            marks[r["passed"]],
            "-" if r["value"] is None else f"{r['value']:.3g}",
            f"{r['bound']:.3g}",
            r["note"],
        ]
        for r in check["rows"]
    ]
    table = table_html("Self-check", ["check", "", "value", "bound", "what it sees"], rows, "noted") if rows else ""
    return heading + paragraph(check["verdict"]) + table
