"""`specgen simulate`: a stored result's texts under other costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.options import AsJson, Debug, verify_costs
from specgen.cli.output import guarded, print_json, printed, write
from specgen.errors import UsageError
from specgen.report.simulate import simulate_tables

if TYPE_CHECKING:
    from specgen.analysis.simulate import Simulation
    from specgen.analysis.stored import Stored


def simulate_document(stored: Stored, found: Sequence[Simulation], notes: Sequence[str]) -> dict[str, Any]:
    from specgen.results.document import plain_data
    from specgen.results.files import SCHEMA_VERSION

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
            metavar="1,A,B,…",
            help="Costs of target calls on 1, 2, 3, … tokens.",
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
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The same texts under another machine's costs: τ, α and predicted speedup by k, without any model."""
    with guarded(debug):
        from specgen.analysis.simulate import MAX_K, run
        from specgen.analysis.stored import load

        for flag, value in (("--c", c), ("--other", other)):
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{flag} {value}: needs a number, 0 or more")
        given = None if verify_cost is None else verify_costs(verify_cost, max_k or MAX_K)
        stored = load(result)
        found, notes = run(stored, c=c, verify=given, other=other, max_k=max_k, profile=profile, engine=engine)
        if as_json:
            write(print_json(simulate_document(stored, found, notes)))
        else:
            write(printed(simulate_tables(found, notes)))


def register(app: typer.Typer) -> None:
    app.command(
        "simulate",
        epilog="Costs are in units of a single-token target call. Without --c they are the file's own, where it has "
        "them; a bench without given costs predicts as it did itself. --other is charged to a plain "
        "step too.\n\nExamples:\n\n specgen simulate bench.json --c 0.05 --verify-cost 1,1.05,1.1,1.15,1.2 "
        "--max-k 4\n\n specgen overlap notes.txt --json | specgen simulate - --c 0.1",
    )(simulate)
