"""A comparison of two results → tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from specgen.analysis.compare import Comparison
    from specgen.analysis.intervals import Interval


def section_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Table:
    """A table in the house's form; the first `left` columns are words, the others numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        found.add_column(Text(column), justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def interval(value: Interval | None, digits: int = 3) -> str:
    """An estimate with its interval, `1.20 [1.10, 1.30]`; a dash where there is none."""
    from specgen.report.numbers import number

    if value is None:
        return "-"
    estimate = number(value.estimate, digits)
    if value.low is None or value.high is None:
        return estimate
    return f"{estimate} [{number(value.low, digits)}, {number(value.high, digits)}]"


def compare_tables(comparison: Comparison) -> list[Any]:
    from rich.text import Text

    from specgen.report.numbers import number

    ratios = [[m.name, m.finding, str(m.ratio.n), interval(m.ratio)] for m in comparison.arms]
    sides = [
        [
            m.name,
            interval(m.a.speedup, 2),
            interval(m.b.speedup, 2),
            number(m.speedups, 3),
            number(m.a.alpha, 3),
            number(m.b.alpha, 3),
            number(m.a.tau, 3),
            number(m.b.tau, 3),
        ]
        for m in comparison.arms
    ]
    parts: list[Any] = [
        Text(f"a: {comparison.a}"),
        Text(f"b: {comparison.b}"),
        section_table(
            "Seconds a token, paired by prompt; above 1, b is faster",
            ["arm", "finding", "groups", "time a / time b"],
            ratios,
            left=2,
        ),
        section_table(
            "Each against its own baseline",
            ["arm", "speedup a", "speedup b", "b / a", "α a", "α b", "τ a", "τ b"],
            sides,
        ),
    ]
    if comparison.differs:
        parts.append(section_table("What differs", ["what", "a", "b"], comparison.differs, left=3))
    return [*parts, *map(Text, comparison.notes)]
