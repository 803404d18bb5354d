"""An audit's findings → a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from specgen.audit.findings import AuditResult


STYLES = {"pass": "green", "FAIL": "bold red"}


def findings_table(result: AuditResult, title: str) -> Table:
    """A row a check: what was measured, the bound, the verdict, and what a failure would mean."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("measured", overflow="fold", ratio=7)
    table.add_column("bound", overflow="fold", ratio=2)
    table.add_column("verdict", overflow="fold", ratio=2)
    table.add_column("a failure would mean", overflow="fold", ratio=5)
    for f in result.findings:
        measured = "\n".join([f.measured, *f.notes])
        verdict = Text(f.status.value, style=STYLES.get(f.status.value, ""))
        table.add_row(Text(f.name), Text(measured), Text(f.bound), verdict, Text(f.meaning))
    return table
