"""A simulation → tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specgen.report.compare import section_table

if TYPE_CHECKING:
    from specgen.analysis.simulate import Simulation


def _costs_line(simulation: Simulation) -> str:
    costs = simulation.costs
    engine = f", engine {costs.engine}" if costs.engine else ""
    if costs.c is None:
        return f"{costs.origin}{engine}"
    text = f"c = {costs.c:.4f}" + (f", other = {costs.other:.4f}" if costs.other else "")
    return f"{text} ({costs.origin}{engine})"


def simulate_tables(found: Sequence[Simulation], notes: Sequence[str]) -> list[Any]:
    from rich.text import Text

    from specgen.report.numbers import number

    parts: list[Any] = []
    for s in found:
        calls = None if s.costs.c is None else s.costs.calls
        rows = [
            [
                f"{p.k}{' *' if s.pays and p is s.best else ''}",
                number(p.tau, 3),
                number(p.alpha, 3),
                number(None if calls is None else calls.call(p.k + 1), 3),
                number(p.predicted_speedup, 3),
            ]
            for p in s.predictions
        ]
        title = f"{s.profile}: {s.tokens} tokens of {s.texts} text{'s' * (s.texts != 1)}; {_costs_line(s)}"
        columns = ["k", "τ", "α = accepted / tested", "cost of the target call", "predicted speedup"]
        parts += [section_table(title, columns, rows), Text(s.verdict)]
    return [*parts, *map(Text, notes)]
