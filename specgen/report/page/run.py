"""A run's result → what stands on its page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specgen.report.grid import Grid
from specgen.report.page.bench import counted_rounds, piece_of, rates_of
from specgen.report.page.content import LETTERS, Content, View
from specgen.report.page.sections import contract, generation, ms_text, positions_grid, settings_lists
from specgen.results.run import Result, Run
from specgen.rounds.statistics import summarise

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


OLD = "This file holds no text of the single tokens (an older specgen wrote it): they are shown by id."


def run_content(run: Run) -> Content:
    from specgen.report.page.figures import acceptance, histogram

    results = run.results
    rounds = [result.live_rounds for result in results]
    plain = all(result.plain for result in results)
    pooled = summarise([r for one in rounds for r in one], drafting=not plain)
    charts: dict[str, Figure] = {}
    if pooled.positions:
        charts["acceptance"] = acceptance([("all prompts" if len(results) > 1 else "run", pooled.positions)])
        charts["histogram"] = histogram([("run", counted_rounds(r.accepted for one in rounds for r in one))])
        for chart in charts.values():
            chart.update_layout(showlegend=False)
    views = [_run_view(result) for result in results]
    whole = all(result.pieces or not result.tokens for result in results)
    settings = {name: getattr(run, name) for name in ("sampling", "dtype", "device", "profile", "checkpoints")}
    said = {
        "rates": rates_of(pooled),
        "plain": plain,
        **contract(run.sampling["mode"]),
        "positions": positions_grid([("", p) for p in pooled.positions]) if pooled.positions else None,
        "shown": generation(views, charts, "" if whole else OLD),
        "checks": [_check(result) for result in results],
        **settings_lists(settings, run.environment),
    }
    return Content(run.profile.get("name") or "run", "run", said, charts, views)


def _run_view(result: Result) -> View:
    rounds, pieces = result.live_rounds, result.pieces or [None] * len(result.tokens)
    committed = [(c, r.index + 1, j) for r in rounds for j, c in enumerate(r.committed, 1)]
    tokens: list[list[Any]] = [
        [piece_of(piece, c.token), LETTERS[c.origin], c.overlap, n, j]
        for piece, (c, n, j) in zip(pieces, committed, strict=True)
    ]
    return View(
        "plain" if result.plain else "run",
        result.name,
        result.prompt,
        ms_text([r.draft_s for r in rounds]),
        ms_text([r.verify_s for r in rounds]),
        ms_text([r.other_s for r in rounds]),
        tokens,
    )


def _check(result: Result) -> dict[str, Any]:
    """One prompt's check: its name, its verdict, and its rows where it has any."""
    check = result.check
    if check is None:
        return {"name": result.name, "verdict": "left out", "grid": None}
    marks = {True: "ok", False: "FAILED", None: "–"}
    rows = tuple(
        (
            r.name,
            marks[r.passed],
            "-" if r.value is None else f"{r.value:.3g}",
            f"{r.bound:.3g}",
            r.note,
        )
        for r in check.rows
    )
    grid = Grid("Self-check", ("check", "", "value", "bound", "what it sees"), rows) if rows else None
    return {"name": result.name, "verdict": check.verdict, "grid": grid}
