"""`specgen compare` and `specgen simulate`: what stored results say, without a model. `register(app)` adds them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen import cli_options as options
from specgen.cli_plumbing import guarded, printed, tell_notes, write
from specgen.rounds import SpecgenError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from specgen.comparing import Comparison, Matched
    from specgen.simulating import Simulation, Stored
    from specgen.statistics import Interval


def register(app: typer.Typer) -> None:
    app.command(
        "compare",
        epilog="Arms are paired by kind, k and batch, prompts by their tokens. Refuses (exit 2) two results that "
        "differ in target, settings or machine, and says in what.\n\n--fail-below X exits with 1 where an arm's "
        "whole interval lies below X; where there are too few prompts for an interval, where its estimate does; and "
        "where an arm of a could not be compared, since b lacks it.\n\n"
        "Example:\n\n specgen compare before.json after.json --fail-below 0.95",
    )(compare)
    app.command(
        "simulate",
        epilog="Costs are in units of a single-token target call. Without --c they are the file's own, where it has "
        "them; a bench without given costs predicts as it did itself. --other is charged to a plain "
        "step too.\n\nExamples:\n\n specgen simulate bench.json --c 0.05 --verify-cost 1,1.05,1.1,1.15,1.2 "
        "--max-k 4\n\n specgen overlap notes.txt --json | specgen simulate - --c 0.1",
    )(simulate)


def _json(document: dict[str, Any]) -> str:
    from specgen.report import plain_data

    return json.dumps(plain_data(document), ensure_ascii=False, allow_nan=False) + "\n"


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Table:
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


# ---------------------------------------------------------------------------------------------------- compare


def interval(value: Interval | None, digits: int = 3) -> str:
    """An estimate with its interval, `1.20 [1.10, 1.30]`; a dash where there is none."""
    from specgen.report import number

    if value is None:
        return "-"
    estimate = number(value.estimate, digits)
    if value.low is None or value.high is None:
        return estimate
    return f"{estimate} [{number(value.low, digits)}, {number(value.high, digits)}]"


def compare_tables(comparison: Comparison) -> list[Any]:
    from rich.text import Text

    from specgen.report import number

    ratios = [[m.name, m.finding, str(m.ratio.n), interval(m.ratio)] for m in comparison.arms]
    sides = [
        [m.name, interval(m.a.speedup, 2), interval(m.b.speedup, 2), number(m.speedups, 3),
         number(m.a.alpha, 3), number(m.b.alpha, 3), number(m.a.tau, 3), number(m.b.tau, 3)]
        for m in comparison.arms
    ]  # fmt: skip
    parts: list[Any] = [
        Text(f"a: {comparison.a}"),
        Text(f"b: {comparison.b}"),
        _section(
            "Seconds a token, paired by prompt; above 1, b is faster",
            ["arm", "finding", "groups", "time a / time b"],
            ratios,
            left=2,
        ),
        _section(
            "Each against its own baseline",
            ["arm", "speedup a", "speedup b", "b / a", "α a", "α b", "τ a", "τ b"],
            sides,
        ),
    ]
    if comparison.differs:
        parts.append(_section("What differs", ["what", "a", "b"], comparison.differs, left=3))
    return [*parts, *map(Text, comparison.notes)]  # fmt: skip


def compare_document(comparison: Comparison, bound: float | None, failing: Sequence[Matched]) -> dict[str, Any]:
    from specgen.report import SCHEMA_VERSION, plain_data

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
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Is b faster than a? Two bench results, arm by arm, paired over the prompts that they share."""
    with guarded(debug):
        from specgen import comparing
        from specgen.results import read_bench

        if fail_below is not None and not 0 < fail_below < math.inf:
            raise UsageError(f"--fail-below {fail_below}: needs a number above 0, such as 0.95")
        if a == b == "-":
            raise UsageError("- (stdin) can be read only once")
        comparison = comparing.compare(read_bench(a), read_bench(b), names=(a, b))
        failing = comparison.failing(fail_below) if fail_below is not None else []
        if as_json:
            write(_json(compare_document(comparison, fail_below, failing)))
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


# --------------------------------------------------------------------------------------------------- simulate


def _costs_line(simulation: Simulation) -> str:
    costs = simulation.costs
    engine = f", engine {costs.engine}" if costs.engine else ""
    if costs.c is None:
        return f"{costs.origin}{engine}"
    text = f"c = {costs.c:.4f}" + (f", other = {costs.other:.4f}" if costs.other else "")
    return f"{text} ({costs.origin}{engine})"


def simulate_tables(found: Sequence[Simulation], notes: Sequence[str]) -> list[Any]:
    from rich.text import Text

    from specgen.report import number

    parts: list[Any] = []
    for s in found:
        verify = s.costs.verify
        rows = [
            [f"{p.k}{' *' if s.pays and p is s.best else ''}", number(p.tau, 3), number(p.alpha, 3),
             number(verify[p.k] if verify else None if s.costs.c is None else 1.0, 3),
             number(p.predicted_speedup, 3)]
            for p in s.predictions
        ]  # fmt: skip
        title = f"{s.profile}: {s.tokens} tokens of {s.texts} text{'s' * (s.texts != 1)}; {_costs_line(s)}"
        columns = ["k", "τ", "α = accepted / tested", "cost of the target call", "predicted speedup"]
        parts += [_section(title, columns, rows), Text(s.verdict)]
    return [*parts, *map(Text, notes)]


def simulate_document(stored: Stored, found: Sequence[Simulation], notes: Sequence[str]) -> dict[str, Any]:
    from specgen.report import SCHEMA_VERSION, plain_data

    kept = ("created", "sampling", "checkpoints", "dtype", "device", "environment")
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "simulate",
        "source": {
            "name": stored.name,
            "kind": stored.kind,
            **{key: stored.data[key] for key in kept if key in stored.data},
        },
        "simulations": [{**plain_data(s), "best_k": s.best.k, "pays": s.pays, "verdict": s.verdict} for s in found],
        "notes": list(notes),
    }


def simulate(
    result: Annotated[
        str, typer.Argument(metavar="RESULT.json", help="Of run, bench or overlap; - is stdin.", show_default=False)
    ],
    c: Annotated[
        float | None, typer.Option("--c", help="Cost of a draft step, in target steps.", show_default="the file's")
    ] = None,
    verify_cost: Annotated[
        str | None,
        typer.Option(
            metavar="1,A,B,…", help="Costs of target calls on 1, 2, 3, … tokens.",
            show_default="the file's; with --c: all 1",
        ),
    ] = None,
    other: Annotated[
        float | None,
        typer.Option(
            help="Cost of the rest of a round, speculative or plain, in target steps.", show_default="the file's or 0"
        ),
    ] = None,
    max_k: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Predict for k from 1 to this.", show_default="8, or as far as costs go"),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="One profile of a bench's several.", show_default="all of them")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="One engine of a bench's several.", show_default="all of them")
    ] = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:  # fmt: skip
    """The same texts under another machine's costs: τ, α and predicted speedup by k, without any model."""
    with guarded(debug):
        from specgen import simulating

        for flag, value in (("--c", c), ("--other", other)):
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{flag} {value}: needs a number, 0 or more")
        given = None if verify_cost is None else options.verify_costs(verify_cost, max_k or simulating.MAX_K)
        stored = simulating.load(result)
        found, notes = simulating.run(
            stored, c=c, verify=given, other=other, max_k=max_k, profile=profile, engine=engine
        )
        if as_json:
            write(_json(simulate_document(stored, found, notes)))
        else:
            write(printed(simulate_tables(found, notes)))
