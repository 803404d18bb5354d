"""`specgen overlap` → a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.results.overlap import Overlap

if TYPE_CHECKING:
    from rich.table import Table


def table(document: Overlap) -> Table:
    """One table, a section a question."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from specgen.report.numbers import number, percent
    from specgen.rounds.expected import best_k

    page = Table(title="Overlap", box=None, show_header=False, title_justify="left", pad_edge=False, padding=0)
    page.add_column()

    def section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        inner = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for i, column in enumerate(columns):
            inner.add_column(Text(column), justify="left" if i == 0 else "right", overflow="fold")
        for row in rows:
            inner.add_row(*map(Text, row))
        page.add_row(inner)

    overall, costs, own = document.overall, document.costs, document.temperature
    named = [(text.name, text) for text in document.results]
    together = [("all texts", overall)] if len(named) > 1 else []
    columns = ["text", "tokens", "proposed"]
    columns += ["greedy agreement" if t.temperature == 0 else f"T {t.temperature:g}" for t in overall.temperatures]
    rows = [
        [name, str(s.tokens), percent(s.proposed / s.tokens), *(number(t.overlap, 3) for t in s.temperatures)]
        for name, s in [*named, *together]
    ]
    section("Mean overlap = acceptance at a position, by temperature (T)", columns, rows)

    bins = [f"{i / 10:.1f}–{(i + 1) / 10:.1f}" for i in range(10)]
    histogram = next(t.histogram for t in overall.temperatures if t.temperature == own)
    total = sum(histogram)
    section(
        f"Where the overlap lies, at the profile's temperature ({own:g}{', greedy' if own == 0 else ''})",
        ["overlap", *bins],
        [
            ["positions", *map(str, histogram)],
            ["share", *(percent(n / total if total else None) for n in histogram)],
        ],
    )
    names = ["positions", "mean overlap", "of all rejections"]
    for title, first, groups in (
        ("Kinds of text, hardest first", "kind", overall.kinds),
        ("Tokens with the lowest overlap (seen at least 3 times)", "token (id)", overall.worst_tokens),
    ):
        listed = [[g.name, str(g.count), number(g.overlap, 3), percent(g.lost)] for g in groups]
        section(title, [first, *names], listed or [["none", "-", "-", "-"]])

    best = best_k({p.k: p.speedup for p in overall.predictions})
    predicted = [
        [
            f"{p.k}{' *' if p.k == best and p.speedup > 1 else ''}",
            number(p.tau, 3),
            number(p.alpha, 3),
            number(costs.verify[p.k], 3),
            number(p.speedup, 3),
        ]
        for p in overall.predictions
    ]
    title = f"Expected block efficiency τ and predicted speedup (c = {costs.c:.4f}, {costs.origin})"
    section(title, ["k", "τ", "α = accepted / tested", "cost of the target call", "predicted speedup"], predicted)
    advice = (
        f"* the best k, {best}" if max(p.speedup for p in overall.predictions) > 1 else "no k is predicted to pay"
    )
    for note in [f"{advice}; costs are of target and draft calls alone", *document.notes]:
        page.add_row(Text(note))
    return page
