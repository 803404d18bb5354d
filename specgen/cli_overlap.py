"""`specgen overlap`: is this draft worth it? Text in, one table out. `register(app)` adds it to a command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen import cli_options as options
from specgen.cli_plumbing import guarded, load_quietly, moving, printed, stderr_console, write
from specgen.cli_prompts import read_prompts
from specgen.profiles import DEFAULT_PROFILE
from specgen.rounds import Mode, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from specgen.cli_prompts import Prompt
    from specgen.loading import Session
    from specgen.overlap import Costs, Group, Prediction, TextScores

INDICATIVE = (
    "the target did not write this text: τ, α by k and speedup are only indicative, and too high where the target "
    "finds the text unlikely (--own N lets the target write)"
)
OWN = "text that the target wrote itself: τ and α by k are what generation shows, on average"


def register(app: typer.Typer) -> None:
    app.command(
        "overlap",
        epilog="Temperatures are tried under the profile's other settings; 0 is greedy. Needs no GPU and runs no "
        "speculation.\n\nExamples:\n\n specgen overlap notes.txt\n\n specgen overlap --own 200 prompt.txt --c 0.1\n\n"
        " specgen overlap a.txt b.txt --json > overlap.json",
    )(overlap)


# ------------------------------------------------------------------------------------------------ what was found


@dataclass(frozen=True)
class Found:
    """One text's scores with what its tokens read. limit: max_new_tokens of the run that it is, if it is one."""

    name: str
    scores: TextScores
    pieces: list[str]
    before: list[str]  # the piece before each
    text: list[int]  # with what precedes the scored tokens


@dataclass(frozen=True)
class Report:
    """All that is shown. by_text: predictions a text, in the order of `found`; overall: of all together."""

    found: list[Found]
    costs: Costs
    costs_from: str
    by_text: list[list[Prediction]]
    overall: list[Prediction]
    kinds: list[Group]
    tokens: list[Group]
    own: int | None
    notes: list[str]


def text_tokens(session: Session, prompt: Prompt) -> list[int]:
    """The text as it stands, as the target's tokens. Raises UsageError where there is nothing to score."""
    tokens = list(session.pair.tokenizer(prompt.text).input_ids)
    if len(tokens) < 2:
        raise UsageError(
            f"{prompt.name}: holds {len(tokens)} token{'s' * (len(tokens) != 1)}: needs at least 2, since the first "
            "has nothing before it"
        )
    return tokens


def own_text(session: Session, prompt: Prompt) -> tuple[list[int], int]:
    """The prompt and behind it what the target writes, decoded plainly; and where that begins."""
    try:
        tokens = session.encode(prompt.text)
    except UsageError as error:
        raise UsageError(f"{prompt.name}: {error}".replace("--max-new-tokens", "--own")) from None
    generation = session.generate(tokens, plain=True).run()
    return [*tokens, *generation.tokens], len(tokens)


def analyse(
    session: Session, prompts: Sequence[Prompt], *, own: int | None, max_k: int, costs: Costs | None = None,
    verify_cost: Sequence[float] | None = None, progress: Callable[[str], None] = lambda line: None,
) -> Report:  # fmt: skip
    """Scores every text and predicts. costs: given; otherwise measured, but for verify_cost where that is given."""
    from specgen import overlap as room

    pair = session.pair
    assert pair.drafter is not None
    texts = [(p.name, text_tokens(session, p), 1) for p in prompts] if own is None else []
    for p in prompts if own is not None else ():
        progress(f"{p.name}: writing {own} tokens")
        texts.append((p.name, *own_text(session, p)))
    found = []
    for name, tokens, first in texts:
        n = len(tokens) - first

        def tell(done: int, name: str = name, n: int = n) -> None:
            progress(f"{name}: {done} of {n} tokens scored")

        scores = room.score_text(
            pair.target, pair.drafter, pair.processors, pair.sampling, tokens, first,
            context=session.context, progress=tell,
        )  # fmt: skip
        read = room.pieces(pair.tokenizer, tokens, first - 1)
        found.append(Found(name, scores, read[1:], read[:-1], tokens))
    costs_from = "given"
    if costs is None:
        progress("measuring the cost of calls")
        try:
            costs = room.measure_costs(pair, found[0].text, max_k, context=session.context)
        except ValueError as error:
            raise UsageError(f"{error}: use a smaller --max-k, or give --c") from None
        costs_from = "measured here"
        if verify_cost is not None:
            costs = dataclasses.replace(costs, verify=tuple(verify_cost))
            costs_from = "measured here, calls as given"
    ks = range(1, max_k + 1)

    def predicted(scores: list[TextScores]) -> list[Prediction]:
        return room.predictions(scores, ks, draft_cost=costs.c, verify_cost=costs.verify, limit=own)

    kinds, tokens_by_name = _failures(found)
    return Report(
        found, costs, costs_from, [predicted([f.scores]) for f in found], predicted([f.scores for f in found]),
        kinds, tokens_by_name, own, _notes(session, found, own),
    )  # fmt: skip


def _failures(found: Sequence[Found]) -> tuple[list[Group], list[Group]]:
    """Kinds of text and single tokens by overlap, over all texts, where there is a proposal."""
    from specgen.overlap import groups, kind_of, worst

    kinds: list[str] = []
    names: list[str] = []
    overlaps: list[float] = []
    for f in found:
        rows = zip(f.scores.tokens, f.pieces, f.before, f.scores.overlap, f.scores.proposes, strict=True)
        for token, piece, before, value, proposed in rows:
            if proposed:
                kinds.append(kind_of(piece, before))
                names.append(f"{piece!r} ({token})")
                overlaps.append(value)
    return groups(kinds, overlaps), worst(groups(names, overlaps))


def _notes(session: Session, found: Sequence[Found], own: int | None) -> list[str]:
    notes = [INDICATIVE if own is None else OWN]
    mode = session.sampling.mode
    if mode not in (Mode.EXACT, Mode.GREEDY):
        notes.append(f"the profile's mode is {mode.value}: what is shown is acceptance in mode exact")
    total = sum(len(f.scores.tokens) for f in found)
    if silent := sum(f.scores.proposes.count(False) for f in found):
        notes.append(
            f"the draft proposes nothing at {silent} of {total} tokens: overlaps are means over the others, a round "
            "ends its draft there, and what is drafted behind a rejected token is taken to be all that k allows"
        )
    if impossible := sum(f.scores.impossible for f in found):
        notes.append(
            f"{impossible} of {total} tokens have probability 0 under the target's settings; the overlap stands in "
            "for their ratio"
        )
    for f in found:
        if f.scores.windows > 1:
            notes.append(
                f"{f.name}: longer than the context of {session.context} tokens: {f.scores.windows} windows with "
                "half overlap, each token scored once"
            )
    return notes


# ------------------------------------------------------------------------------------------------------- JSON


def _by_temperature(scores: Sequence[TextScores]) -> list[dict[str, Any]]:
    from specgen.overlap import deciles, histogram, mean

    rows = []
    for t in scores[0].overlaps:
        values = [v for s in scores for v in s.at(t)]
        rows.append(
            {"temperature": t, "overlap": mean(values), "histogram": histogram(values), "deciles": deciles(values)}
        )
    return rows


def document(session: Session, report: Report) -> dict[str, Any]:
    """Everything in numbers, with the positions from which all of it can be computed again."""
    from specgen.environment import describe
    from specgen.profiles import merged_settings
    from specgen.report import SCHEMA_VERSION, plain_data

    def summary(scores: list[TextScores], predicted: list[Prediction]) -> dict[str, Any]:
        rows = _by_temperature(scores)
        return {
            "tokens": sum(len(s.tokens) for s in scores),
            "proposed": sum(sum(s.proposes) for s in scores),
            "greedy_agreement": next(r["overlap"] for r in rows if r["temperature"] == 0),
            "temperatures": rows,
            "predictions": predicted,
        }

    target: Any = session.pair.target
    texts = [
        {
            "name": f.name,
            **summary([f.scores], predicted),
            "windows": f.scores.windows,
            "impossible": f.scores.impossible,
            "positions": f.scores.positions(),
        }
        for f, predicted in zip(report.found, report.by_text, strict=True)
    ]
    return plain_data(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "overlap",
            "profile": merged_settings(session.profile),
            "sampling": session.sampling,
            "temperature": report.found[0].scores.temperature,
            "own": report.own,
            "checkpoints": session.located,
            "dtype": str(session.pair.dtype).removeprefix("torch."),
            "device": str(getattr(target, "device", "cpu")),
            "environment": describe(),
            "costs": {"from": report.costs_from, **plain_data(report.costs)},
            "notes": report.notes,
            "results": texts,
            "overall": {
                **summary([f.scores for f in report.found], report.overall),
                "kinds": report.kinds,
                "worst_tokens": report.tokens,
            },
        }
    )


# ------------------------------------------------------------------------------------------------------ table


def table(report: Report) -> Table:
    """One table, a section a question."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from specgen.overlap import mean
    from specgen.report import number, percent
    from specgen.theory import best_k

    page = Table(title="Overlap", box=None, show_header=False, title_justify="left", pad_edge=False, padding=0)
    page.add_column()

    def section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        inner = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for i, column in enumerate(columns):
            inner.add_column(Text(column), justify="left" if i == 0 else "right", overflow="fold")
        for row in rows:
            inner.add_row(*map(Text, row))
        page.add_row(inner)

    scores = [f.scores for f in report.found]
    named = [(f.name, [f.scores]) for f in report.found]
    together = [("all texts", scores)] if len(scores) > 1 else []
    temperatures = list(scores[0].overlaps)
    own = scores[0].temperature
    columns = ["text", "tokens", "proposed"]
    columns += ["greedy agreement" if t == 0 else f"T {t:g}" for t in temperatures]
    rows = []
    for name, some in [*named, *together]:
        n, proposed = sum(len(s.tokens) for s in some), sum(sum(s.proposes) for s in some)
        values = [number(mean([v for s in some for v in s.at(t)]), 3) for t in temperatures]
        rows.append([name, str(n), percent(proposed / n), *values])
    section("Mean overlap = acceptance at a position, by temperature (T)", columns, rows)

    bins = [f"{i / 10:.1f}–{(i + 1) / 10:.1f}" for i in range(10)]
    here = next(r for r in _by_temperature(scores) if r["temperature"] == own)
    total = sum(here["histogram"])
    section(
        f"Where the overlap lies, at the profile's temperature ({own:g}{', greedy' if own == 0 else ''})",
        ["overlap", *bins],
        [
            ["positions", *map(str, here["histogram"])],
            ["share", *(percent(n / total if total else None) for n in here["histogram"])],
        ],
    )
    names = ["positions", "mean overlap", "of all rejections"]
    for title, first, groups in (
        ("Kinds of text, hardest first", "kind", report.kinds),
        ("Tokens with the lowest overlap (seen at least 3 times)", "token (id)", report.tokens),
    ):
        listed = [[g.name, str(g.count), number(g.overlap, 3), percent(g.lost)] for g in groups]
        section(title, [first, *names], listed or [["none", "-", "-", "-"]])

    best = best_k({p.k: p.speedup for p in report.overall})
    predicted = [
        [f"{p.k}{' *' if p.k == best and p.speedup > 1 else ''}", number(p.tau, 3), number(p.alpha, 3),
         number(report.costs.verify[p.k], 3), number(p.speedup, 3)]
        for p in report.overall
    ]  # fmt: skip
    title = f"Expected block efficiency τ and predicted speedup (c = {report.costs.c:.4f}, {report.costs_from})"
    section(title, ["k", "τ", "α = accepted / tested", "cost of the target call", "predicted speedup"], predicted)
    advice = f"* the best k, {best}" if max(p.speedup for p in report.overall) > 1 else "no k is predicted to pay"
    for note in [f"{advice}; costs are of target and draft calls alone", *report.notes]:
        page.add_row(Text(note))
    return page


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that changes, where that is a terminal."""
    from rich.markup import escape

    console = stderr_console()
    if not moving(console, quiet):
        yield lambda line: None
        return
    with console.status("scoring…") as status:
        yield lambda line: status.update(escape(line))


# ---------------------------------------------------------------------------------------------------- command


def overlap(
    texts: Annotated[list[str], typer.Argument(metavar="TEXTFILE...", help="Texts; - is stdin.", show_default=False)],
    profile: options.ProfileName = DEFAULT_PROFILE,
    own: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take each text as a prompt and score N tokens of "
                                 "the target's own behind it."),
    ] = None,
    c: Annotated[
        float | None, typer.Option("--c", help="Cost of a draft step, in target steps.", show_default="measured here")
    ] = None,
    verify_cost: Annotated[
        str | None, typer.Option(metavar="1,A,B,…", help="Costs of target calls on 1, 2, 3, … tokens.",
                                 show_default="measured here; with --c: all 1"),
    ] = None,
    max_k: Annotated[int, typer.Option(min=1, max=64, help="Predict for k from 1 to this.")] = 16,
    draft: Annotated[str | None, typer.Option(help="Another draft checkpoint than the profile's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the text that --own writes.", show_default="0")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    engine: options.Engine = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="With --own: use the chat template, or the bare text.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, with every position.")] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:  # fmt: skip
    """Is this draft worth it? Acceptance, block efficiency and speedup to expect, from text alone."""
    with guarded(debug):
        from specgen.profiles import load_profile

        if c is not None and not 0 <= c < float("inf"):
            raise UsageError(f"--c {c}: needs a number, 0 or more")
        given = options.verify_costs(verify_cost, max_k) if verify_cost is not None else None
        if chat and own is None:
            raise UsageError("--chat means nothing without --own: a text is scored as it stands")
        prompts = read_prompts(texts, None)
        flags = options.sampling_flags(
            max_new_tokens=own, seed=seed, device=device, dtype=dtype, engine=engine, draft=draft, chat=chat
        )
        settings = load_profile(profile, flags)
        if settings.draft is None:
            raise UsageError(f"profile {settings.name} has no draft: name one with --draft")

        session = load_quietly(settings, plain=False, quiet=quiet)
        from specgen.overlap import Costs

        costs = None if c is None else Costs(c, tuple(given or [1.0] * (max_k + 1)))
        with _progress(quiet) as progress:
            report = analyse(
                session, prompts, own=own, max_k=max_k, costs=costs, verify_cost=given, progress=progress
            )
        if as_json:
            out = json.dumps(document(session, report), ensure_ascii=False, allow_nan=False) + "\n"
        else:
            out = printed([table(report)])
        write(out)
