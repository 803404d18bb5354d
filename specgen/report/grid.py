"""One grid of cells for the terminal, Markdown and CSV."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is drawn. The first `texts` columns hold words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    texts: int = 1


def drawn_table(grid: Grid) -> Table:
    table = Table(
        title=grid.title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=Text(grid.caption) if grid.caption else None,
        caption_justify="left",
    )
    for i, column in enumerate(grid.columns):
        table.add_column(Text(column), justify="left" if i < grid.texts else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table
