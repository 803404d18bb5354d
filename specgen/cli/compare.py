"""`specgen compare`: two results, paired."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.options import AsJson, Debug
from specgen.cli.output import guarded, print_json, printed, tell_notes, write
from specgen.errors import SpecgenError, UsageError
from specgen.report.compare import compare_tables, interval

if TYPE_CHECKING:
    from specgen.analysis.compare import Comparison, Matched


def register(app: typer.Typer) -> None:
    app.command(
        "compare",
        epilog="Arms are paired by kind, k and batch, prompts by their tokens. Refuses (exit 2) two results that "
        "differ in target, settings or machine, and says in what.\n\n--fail-below X exits with 1 where an arm's "
        "whole interval lies below X; where there are too few prompts for an interval, where its estimate does; and "
        "where an arm of a could not be compared, since b lacks it.\n\n"
        "Example:\n\n specgen compare before.json after.json --fail-below 0.95",
    )(compare)


def compare_document(comparison: Comparison, bound: float | None, failing: Sequence[Matched]) -> dict[str, Any]:
    from specgen.results.document import plain_data
    from specgen.results.files import SCHEMA_VERSION

    arms = [
        {
            **plain_data(m),
            "name": m.name,
            "finding": m.finding,
            "groups": [{"label": n, "ratio": r} for n, r in m.groups],
        }
        for m in comparison.arms
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "compare",
        "a": comparison.a,
        "b": comparison.b,
        "arms": arms,
        "differs": [{"what": what, "a": a, "b": b} for what, a, b in comparison.differs],
        "notes": comparison.notes,
        "fail_below": bound,
        "failing": [m.name for m in failing],
        "missing": list(comparison.missing),
    }


def compare(
    a: Annotated[str, typer.Argument(metavar="A.json", help="A bench's result; - is stdin.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B.json", help="Another, of the same target.", show_default=False)],
    fail_below: Annotated[
        float | None,
        typer.Option(metavar="X", help="Exit 1 where an arm of b is surely slower than X times a's speed."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Is b faster than a? Two bench results, arm by arm, paired over the prompts that they share."""
    with guarded(debug):
        from specgen.analysis.compare import compare
        from specgen.results.files import read_bench

        if fail_below is not None and not 0 < fail_below < math.inf:
            raise UsageError(f"--fail-below {fail_below}: needs a number above 0, such as 0.95")
        if a == b == "-":
            raise UsageError("- (stdin) can be read only once")
        comparison = compare(read_bench(a), read_bench(b), names=(a, b))
        failing = comparison.failing(fail_below) if fail_below is not None else []
        if as_json:
            write(print_json(compare_document(comparison, fail_below, failing)))
        else:
            write(printed(compare_tables(comparison)))
        faults = []
        if failing:
            arms = "; ".join(f"{m.name}: {interval(m.ratio)}" for m in failing)
            faults.append(f"{b} is slower than {fail_below:g} of {a}'s speed: {arms}")
        if comparison.missing:
            lacking = f"arms of {a} that {b} lacks, and that were not compared: {', '.join(comparison.missing)}"
            if fail_below is None:
                tell_notes([lacking], quiet=False)
            else:
                faults.append(lacking)
        if faults:
            raise SpecgenError("; ".join(faults))
