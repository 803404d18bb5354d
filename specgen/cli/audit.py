"""`specgen audit`: parse, load, check, print. Heavy imports stay inside the command."""

from __future__ import annotations

import contextlib
import json
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
from specgen.cli.output import EXIT_FAILED, guarded, load_quietly, moving, stderr_console
from specgen.errors import UsageError
from specgen.profiles.read import DEFAULT_PROFILE
from specgen.prompts.audit import PROMPTS
from specgen.prompts.read import Prompt, read_prompts
from specgen.report.audit import findings_table
from specgen.settings import PROMISES, Mode

if TYPE_CHECKING:
    from specgen.audit.auditor import Auditor
    from specgen.audit.control import Control
    from specgen.audit.findings import AuditResult
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
        failed = _audit(session, asked, seeds=seeds, budget=budget, control=control, as_json=as_json, quiet=quiet)
        if failed:
            raise typer.Exit(EXIT_FAILED)


def _audit(
    session: Session, asked: list[Prompt], *, seeds: int, budget: float, control: bool, as_json: bool, quiet: bool
) -> bool:
    """Audits, prints, and says whether it failed."""
    from specgen.audit import control as controls
    from specgen.audit.auditor import Auditor

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

        auditor = Auditor(session.pair, prompts, seeds=seeds, budget=budget, progress=progress)
        results: AuditResult | list[Control] = controls.control(auditor) if control else auditor.run()
    if as_json:
        document = _document(session, auditor, [p.text for p in asked], results)
        print(json.dumps(document, ensure_ascii=False, allow_nan=False))
    else:
        _print(auditor, results)
    if isinstance(results, list):
        return not all(c.caught for c in results)
    return not results.passed


def _print(auditor: Auditor, results: AuditResult | list[Control]) -> None:
    from rich.text import Text

    console = _stdout_console()
    if isinstance(results, list):
        for c in results:
            console.print(findings_table(c.result, f"Control: the rule {c.rule}, which is wrong on purpose"))
            caught = f"caught by {', '.join(c.result.failed)}" if c.caught else "NOT CAUGHT"
            console.print(Text(f"{c.rule}: {caught}\n"))
        return
    mode = auditor.sampling.mode
    console.print(findings_table(results, f"Audit of mode {mode.value}: {PROMISES[mode].partition(';')[0]}"))
    console.print(Text(results.verdict))
    if results.no_time:
        console.print(Text(f"not checked, for want of time: {', '.join(results.no_time)} (give a larger --budget)"))


def _stdout_console() -> Any:
    import os

    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 110
    return Console(width=width, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")


def _document(
    session: Session, auditor: Auditor, texts: list[str], results: AuditResult | list[Control]
) -> dict[str, Any]:
    from specgen.machine.environment import describe
    from specgen.profiles.effective import merged_settings
    from specgen.results.document import plain_data
    from specgen.results.files import SCHEMA_VERSION

    pair = session.pair
    target: Any = pair.target
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "audit",
        "profile": merged_settings(session.profile),
        "sampling": pair.sampling,
        "promise": PROMISES[pair.sampling.mode],
        "checkpoints": session.located,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "device": str(target.device),
        "environment": describe(),
        "prompts": texts,
        "seeds": auditor.seeds,
        "budget_s": auditor.budget,
    }
    if isinstance(results, list):
        document["control"] = [{"rule": c.rule, "caught": c.caught, **_findings(c.result)} for c in results]
        document["passed"] = all(c.caught for c in results)
    else:
        document |= _findings(results)
    return plain_data(document)


def _findings(result: AuditResult) -> dict[str, Any]:
    from specgen.results.document import plain_data

    return {
        "passed": result.passed,
        "verdict": result.verdict,
        "failed": result.failed,
        "no_time": result.no_time,
        "findings": [{**plain_data(f), "meaning": f.meaning} for f in result.findings],
    }


def register(app: typer.Typer) -> None:
    """Adds the command to the program."""
    app.command(
        epilog="A pass is 'no fault seen in n positions', no certificate; more seeds, prompts and time see more.\n\n"
        "Examples:\n\n specgen audit --prove\n\n specgen audit --mode coupled --seeds 8 --budget 600\n\n"
        " specgen audit --control"
    )(audit)
