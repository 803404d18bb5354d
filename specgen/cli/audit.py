"""`specgen audit`: parse, load, check, print. Heavy imports stay inside the command."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.options import (
    AsJson,
    Ban,
    Debug,
    Device,
    Dtype,
    Engine,
    K,
    Lenience,
    MinP,
    ModeName,
    ProfileName,
    Quiet,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    TypicalDelta,
    TypicalEpsilon,
    sampling_flags,
)
from specgen.cli.output import EXIT_FAILED, guarded, load_quietly, moving, stderr_console, tell_notes, write
from specgen.errors import UsageError
from specgen.profiles.read import DEFAULT_PROFILE
from specgen.prompts.audit import PROMPTS
from specgen.prompts.read import Prompt, read_prompts
from specgen.report.audit import parts
from specgen.results.document import json_text
from specgen.settings import PROMISES, Mode

if TYPE_CHECKING:
    from specgen.audit.findings import AuditResult
    from specgen.results.audit import Audit, ControlAudit
    from specgen.session import Session


MAX_NEW_TOKENS = 48


def audit(
    profile: ProfileName = DEFAULT_PROFILE,
    mode: ModeName = None,
    k: K = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", show_default="a few of its own", help="Prompt file; .jsonl holds many. Repeatable."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds a prompt, pooled.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = MAX_NEW_TOKENS,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    lenience: Lenience = None,
    typical_epsilon: TypicalEpsilon = None,
    typical_delta: TypicalDelta = None,
    repetition_penalty: RepetitionPenalty = None,
    ban: Ban = None,
    seed: Annotated[int | None, typer.Option(help="The first seed.", show_default="0")] = None,
    device: Device = None,
    dtype: Dtype = None,
    engine: Engine = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that decode together, as in a batch.")] = 1,
    prove: Annotated[bool, typer.Option("--prove", help="float32, whatever the profile says.")] = False,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds, loading apart. What finds no time is reported so, not as passed.")
    ] = 120.0,
    control: Annotated[
        bool,
        typer.Option(
            "--control", help="Audit two rules that are wrong on purpose instead: 0 if both are caught, else 1."
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check that a pair, its rule and this machine keep the target's distribution: one table, exit code 1 if not."""
    with guarded(debug):
        from specgen.profiles.read import load_profile

        if prove and dtype not in (None, "float32"):
            raise UsageError(f"--prove runs in float32: leave --dtype {dtype} out")
        own = [Prompt(f"built-in prompt {n}", text) for n, text in enumerate(PROMPTS, 1)]
        asked = read_prompts(prompts, None) if prompts else own
        flags = sampling_flags(
            mode=mode,
            k=k,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            lenience=lenience,
            typical_epsilon=typical_epsilon,
            typical_delta=typical_delta,
            repetition_penalty=repetition_penalty,
            ban=ban,
            seed=seed,
            device=device,
            dtype="float32" if prove else dtype,
            engine=engine,
        )
        settings = load_profile(profile, flags)
        if settings.draft is None:
            raise UsageError(f"profile {profile} has no draft: there is nothing to audit")
        session = load_quietly(settings, plain=False, quiet=quiet)
        if control and session.sampling.mode is not Mode.EXACT:
            raise UsageError(f"--control is for mode exact, not {session.sampling.mode.value}")
        document = _audited(
            session, asked, seeds=seeds, budget=budget, batch=batch_size, control=control, quiet=quiet
        )
        if as_json:
            write(json_text(document))
        else:
            _print(document)
        if not document.passed:
            raise typer.Exit(EXIT_FAILED)


def _audited(
    session: Session, asked: list[Prompt], *, seeds: int, budget: float, batch: int, control: bool, quiet: bool
) -> Audit | ControlAudit:
    from specgen.audit import control as controls
    from specgen.audit.auditor import Auditor
    from specgen.results.audit import Audit, ControlAudit
    from specgen.session import head

    prompts = []
    for p in asked:
        try:
            prompts.append(session.encode(p.text))
        except UsageError as error:
            raise UsageError(f"{p.name}: {error}") from None
    console = stderr_console()
    with console.status("audit…") if moving(console, quiet) else contextlib.nullcontext() as status:

        def progress(name: str) -> None:
            if status is not None:
                status.update(f"audit: {name}…")

        auditor = Auditor(session.pair, prompts, seeds=seeds, budget=budget, batch=batch, progress=progress)
        results = controls.control(auditor) if control else auditor.run()
    if auditor.engine_note is not None:
        tell_notes([auditor.engine_note], quiet)
    common = {
        **head(session),
        "kind": "audit",
        "promise": PROMISES[session.sampling.mode],
        "prompts": [p.text for p in asked],
        "seeds": seeds,
        "budget_s": budget,
        "batch_size": batch,
        "engine": auditor.engine,
    }
    if isinstance(results, list):
        found = [{"rule": c.rule, "caught": c.caught, **_findings(c.result)} for c in results]
        return ControlAudit.model_validate({**common, "control": found, "passed": all(c.caught for c in results)})
    return Audit.model_validate({**common, **_findings(results)})


def _findings(result: AuditResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("passed", "verdict", "failed", "no_time", "findings")}


def _print(document: Audit | ControlAudit) -> None:
    import os

    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 110
    console = Console(width=width, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    for part in parts(document):
        console.print(part)


def register(app: typer.Typer) -> None:
    """Adds the command to the program."""
    app.command(
        epilog="A pass is 'no fault seen in n positions', no certificate; more seeds, prompts and time see more.\n\n"
        "Examples:\n\n specgen audit --prove\n\n specgen audit --mode coupled --seeds 8 --budget 600\n\n"
        " specgen audit --control"
    )(audit)
