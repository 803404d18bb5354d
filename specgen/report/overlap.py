"""`specgen overlap` → a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.overlap.analyse import Report, overlap_by_temperature

if TYPE_CHECKING:
    from rich.table import Table


def table(report: Report) -> Table:
    """One table, a section a question."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from specgen.overlap.failures import mean
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

    scores = [f.scores for f in report.found]
    named = [(f.name, [f.scores]) for f in report.found]
    together = [("all texts", scores)] if len(scores) > 1 else []
    temperatures = list(scores[0].overlaps)
    own = scores[0].temperature
    columns = ["text", "tokens", "proposed"]
    columns += ["greedy agreement" if t == 0 else f"T {t:g}" for t in temperatures]
    rows = []
    for name, some in [*named, *together]:
        n, proposed = sum(len(s.tokens) for s in some), sum(sum(s.proposes) for s in some)
        values = [number(mean([v for s in some for v in s.at(t)]), 3) for t in temperatures]
        rows.append([name, str(n), percent(proposed / n), *values])
    section("Mean overlap = acceptance at a position, by temperature (T)", columns, rows)

    bins = [f"{i / 10:.1f}–{(i + 1) / 10:.1f}" for i in range(10)]
    here = next(r for r in overlap_by_temperature(scores) if r["temperature"] == own)
    total = sum(here["histogram"])
    section(
        f"Where the overlap lies, at the profile's temperature ({own:g}{', greedy' if own == 0 else ''})",
        ["overlap", *bins],
        [
            ["positions", *map(str, here["histogram"])],
            ["share", *(percent(n / total if total else None) for n in here["histogram"])],
        ],
    )
    names = ["positions", "mean overlap", "of all rejections"]
    for title, first, groups in (
        ("Kinds of text, hardest first", "kind", report.kinds),
        ("Tokens with the lowest overlap (seen at least 3 times)", "token (id)", report.tokens),
    ):
        listed = [[g.name, str(g.count), number(g.overlap, 3), percent(g.lost)] for g in groups]
        section(title, [first, *names], listed or [["none", "-", "-", "-"]])

    best = best_k({p.k: p.speedup for p in report.overall})
    predicted = [
        [
            f"{p.k}{' *' if p.k == best and p.speedup > 1 else ''}",
            number(p.tau, 3),
            number(p.alpha, 3),
            number(report.costs.verify[p.k], 3),
            number(p.speedup, 3),
        ]
        for p in report.overall
    ]
    title = f"Expected block efficiency τ and predicted speedup (c = {report.costs.c:.4f}, {report.costs_from})"
    section(title, ["k", "τ", "α = accepted / tested", "cost of the target call", "predicted speedup"], predicted)
    advice = f"* the best k, {best}" if max(p.speedup for p in report.overall) > 1 else "no k is predicted to pay"
    for note in [f"{advice}; costs are of target and draft calls alone", *report.notes]:
        page.add_row(Text(note))
    return page
