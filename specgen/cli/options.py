"""Options that several commands share, and what they set in a profile."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specgen.errors import UsageError
from specgen.settings import Mode

# Of every command that loads a pair. `Mode` itself is not among them: run's help points to its own epilog.
ProfileName = Annotated[str, typer.Option(help="A built-in profile's name, or a YAML file.")]


Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]


Dtype = Annotated[str | None, typer.Option(help="auto, float64, float32, bfloat16 or float16.")]


Engine = Annotated[
    str | None, typer.Option(help="How model calls are executed: auto, eager, packed (CPU), graph (CUDA).")
]


Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks for errors.")]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes or progress.")]


AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of a table.")]


Chat = Annotated[bool | None, typer.Option("--chat/--raw", help="Use the chat template, or the bare text.")]


# Of decoding, each with the name of its setting.
ModeName = Annotated[Mode | None, typer.Option(help="What is promised of the text.")]


K = Annotated[int | None, typer.Option(help="Tokens drafted in a round.", show_default="4")]


Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the checkpoint's, else 1")]


TopK = Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0: all.")]


TopP = Annotated[float | None, typer.Option(help="Keep the smallest set with this probability.")]


MinP = Annotated[float | None, typer.Option(help="Drop what is less probable than this times the best.")]


Lenience = Annotated[float | None, typer.Option(help="Of mode lenient; 1 is exact.", show_default="0.5")]


TypicalEpsilon = Annotated[float | None, typer.Option(help="Of mode typical.", show_default="0.3")]


TypicalDelta = Annotated[float | None, typer.Option(help="Of mode typical.", show_default="0.09")]


RepetitionPenalty = Annotated[float | None, typer.Option(help="Of tokens already in the text; 1: none.")]


Ban = Annotated[list[str] | None, typer.Option(help="Never draw this token: a number is its id. Repeatable.")]


# What is not decoding.NAME.
_KEYS = {
    "device": "device",
    "dtype": "dtype",
    "engine": "engine",
    "draft": "draft.checkpoint",
    "chat": "prompt.template",
    "system": "prompt.system",
}


def sampling_flags(**options: Any) -> dict[str, Any]:
    """A command's options by dotted key, as `load_profile` takes them; None and an empty list: not given.

    `sampling_flags(k=2, chat=True)` is {"decoding.k": 2, "prompt.template": "chat"}. Names are those of the
    settings, but for draft (a checkpoint), chat (bool) and system.
    """
    if "ban" in options:
        options["ban"] = options["ban"] or []
    if options.get("chat") is not None:
        options["chat"] = "chat" if options["chat"] else "raw"
    return {_KEYS.get(name, f"decoding.{name}"): value for name, value in options.items()}


def verify_costs(value: str, max_k: int) -> list[float]:
    """--verify-cost: the costs of calls on 1, 2, … tokens in units of the first, which is 1."""
    try:
        costs = [float(part) for part in value.split(",")]
    except ValueError:
        raise UsageError(f"--verify-cost {value}: needs numbers with commas between, such as 1,1.1,1.2") from None
    if not all(0 < cost < float("inf") for cost in costs) or costs[0] != 1:
        raise UsageError(f"--verify-cost {value}: needs numbers above 0, the first of them 1 (a single-token call)")
    if len(costs) < max_k + 1:
        raise UsageError(
            f"--verify-cost {value}: holds {len(costs)} numbers; for k up to {max_k} it needs {max_k + 1}, "
            f"or --max-k {len(costs) - 1}"
        )
    return costs
