"""What an audit's file holds → tables and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specgen.results.audit import Audit, ControlAudit, Findings

if TYPE_CHECKING:
    from rich.table import Table


STYLES = {"pass": "green", "FAIL": "bold red"}


def parts(document: Audit | ControlAudit) -> list[Any]:
    """All that is printed of it."""
    from rich.text import Text

    if isinstance(document, ControlAudit):
        found: list[Any] = []
        for c in document.control:
            found.append(findings_table(c, f"Control: the rule {c.rule}, which is wrong on purpose"))
            caught = f"caught by {', '.join(c.failed)}" if c.caught else "NOT CAUGHT"
            found.append(Text(f"{c.rule}: {caught}\n"))
        return found
    title = f"Audit of mode {document.sampling['mode']}: {document.promise.partition(';')[0]}"
    found = [findings_table(document, title), Text(document.verdict)]
    if document.no_time:
        found.append(Text(f"not checked, for want of time: {', '.join(document.no_time)} (give a larger --budget)"))
    return found


def findings_table(result: Findings, title: str) -> Table:
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
        verdict = Text(f.status, style=STYLES.get(f.status, ""))
        table.add_row(Text(f.name), Text(measured), Text(f.bound), verdict, Text(f.meaning))
    return table
