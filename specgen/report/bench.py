"""A bench's analysis → rich tables, Markdown, CSV. Every number is computed in `analysis.py`; here it is laid out."""

from __future__ import annotations

import csv as csv_module
import io

from rich.table import Table
from rich.text import Text

from specgen.analysis.intervals import interval_text
from specgen.analysis.prediction import LEAST_STEPS
from specgen.analysis.tables import Analysis, ArmRow, CostRow
from specgen.analysis.verdict import ends_text
from specgen.report.grid import Grid, drawn_table
from specgen.report.numbers import milliseconds, number, percent
from specgen.results.bench import Bench, Divergence
from specgen.settings import PROMISES, Mode

_ARM_COLUMNS = (
    "name",
    "kind",
    "profile",
    "k",
    "engine",
    "batch",
    "alpha",
    "predicted_alpha",
    "tau",
    "draft_s",
    "verify_s",
    "other_s",
    "tokens_per_second",
    "seconds_per_token",
    "first_s",
    "prefill_s",
    "draft_share",
    "verify_share",
    "other_share",
    "mean_bias",
    "predicted",
    "ratio",
)


def tables(analysis: Analysis, bench: Bench) -> list[Table | Text]:
    """What a person reads: the tables, then the lines (identical texts, warnings, verdict, mode), in this order."""
    return [*map(drawn_table, grids(analysis, bench)), *map(Text, lines(analysis, bench))]


def markdown(analysis: Analysis, bench: Bench) -> str:
    """The same as Markdown."""
    parts = []
    for grid in grids(analysis, bench):
        marks = ["---" if i < grid.texts else "---:" for i in range(len(grid.columns))]
        cells = [[column.replace("\n", " ") for column in grid.columns], marks, *grid.rows]
        shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        caption = f"\n\n{grid.caption}" if grid.caption else ""
        parts.append(f"### {grid.title}\n\n" + "\n".join(shown) + caption)
    parts.append("\n".join(f"- {line}" for line in lines(analysis, bench)))
    return "\n\n".join(parts) + "\n"


def csv(analysis: Analysis, bench: Bench) -> str:
    """One row an arm, every number in full (seconds, shares of 1); an empty cell where there is none."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    interval = ("speedup", "speedup_low", "speedup_high", "speedup_coverage", "speedup_n")
    writer.writerow(
        [
            *_ARM_COLUMNS,
            *interval,
            "c",
            "bytes_per_token",
            "bandwidth",
            "bandwidth_share",
            "identical",
            "identical_of",
        ]
    )
    for row, cost in zip(analysis.arms, analysis.costs, strict=True):
        s = row.speedup
        values = [getattr(row, name) for name in _ARM_COLUMNS]
        values += [s.estimate, s.low, s.high, s.coverage, s.n] if s else [None] * 5
        values += [cost.c, cost.bytes_per_token, cost.bandwidth, cost.bandwidth_share]
        writer.writerow([*values, *analysis.identical.get(row.name, (None, None))])
    return out.getvalue()


def grids(analysis: Analysis, bench: Bench) -> list[Grid]:
    """The tables that have anything to show."""
    built = (
        speedup_grid(analysis, bench),
        positions_grid(analysis),
        calls_grid(analysis),
        cost_grid(analysis),
        categories_grid(analysis),
        prediction_grid(analysis, bench),
    )
    return [grid for grid in built if grid.rows]


def speedup_grid(analysis: Analysis, bench: Bench) -> Grid:
    columns = (
        "arm",
        "α",
        "τ",
        "draft\nms/token",
        "verify\nms",
        "other\nms",
        "tokens\n/s",
        "first\ntoken ms",
        "speedup",
        "predicted\nspeedup",
        "ratio",
    )
    rows = tuple(_speedup_cells(row) for row in analysis.arms)
    return Grid("Speedup", columns, rows, _speedup_caption(analysis, bench))


def _speedup_cells(row: ArmRow) -> tuple[str, ...]:
    return (
        row.name,
        number(row.alpha, 3),
        number(row.tau),
        _ms(row.draft_s),
        _ms(row.verify_s),
        _ms(row.other_s),
        number(row.tokens_per_second, 1),
        _ms(row.first_s),
        interval_text(row.speedup),
        number(row.predicted),
        number(row.ratio),
    )


def _speedup_caption(analysis: Analysis, bench: Bench) -> str:
    design = bench.design
    size = f"{_some(len(bench.prompts), 'prompt')} × {_some(design.runs_done, 'run')}"
    text = (
        f"{size} × {_some(design.max_new_tokens, 'token')}, {bench.dtype} on {bench.device}. Medians; verify and "
        "other per round; first token: the prefill and the first round; ratio: speedup / predicted speedup. A "
        "speedup is the median of paired ratios: two tokens/s do not divide to it."
    )
    if analysis.passed_end[0]:
        text += (
            f" {ends_text(*analysis.passed_end)}, since nothing ends a text while timing: all numbers are up to it."
        )
    found = {row.speedup.n: row.speedup for row in analysis.arms if row.speedup is not None}
    for n, speedup in sorted(found.items()):
        unit = "prompt" if {row.batch for row in analysis.arms if row.speedup == speedup} == {1} else "group"
        if speedup.coverage is None:
            text += f" Speedup: median over {_some(n, unit)}, too few prompts for an interval."
        else:
            text += f" Speedup: median over {_some(n, unit)} [{speedup.coverage:.1%} interval]."
    return text


def positions_grid(analysis: Analysis) -> Grid:
    columns = ("arm", "position", "drafted", "tested", "accepted", "rate if tested", "cumulative", "mean overlap")
    rows = tuple(
        (
            p.arm,
            str(p.position),
            str(p.drafted),
            str(p.tested),
            str(p.accepted),
            number(p.rate, 3),
            number(p.cumulative, 3),
            number(p.overlap, 3),
        )
        for p in analysis.positions
    )
    caption = "Rate if tested: accepted / tested. Cumulative: accepted / rounds that drafted anything."
    return Grid("Acceptance by position", columns, rows, caption)


def calls_grid(analysis: Analysis) -> Grid:
    """The verify-width curve of each profile and engine, as probed, beside the prices of the widest arm."""
    widest: dict[tuple[str, str], CostRow] = {}
    for cost in analysis.costs:
        key = (cost.profile, cost.engine)
        if key not in widest or len(cost.priced) > len(widest[key].priced):
            widest[key] = cost
    rows = tuple(
        (profile, engine, str(w), _ms(cost.widths.get(w)), number(cost.relative.get(w)), _ms(cost.priced.get(w)))
        for (profile, engine), cost in widest.items()
        for w in sorted({*cost.widths, *cost.priced})
    )
    columns = ("profile", "engine", "tokens in the call", "probed ms", "T(w)/T(1)", "in this bench ms")
    caption = (
        f"In this bench: the median of its own calls on so many tokens; where there were fewer than {LEAST_STEPS}, "
        "the probe scaled to the bench's T(1); between widths known and beyond the last, straight lines."
    )
    return Grid("Cost of a target call", columns, rows, caption, texts=2)


def cost_grid(analysis: Analysis) -> Grid:
    columns = ("arm", "c", "draft", "verify", "other", "read MB/token", "read GB/s", "of copy bandwidth")
    rows = tuple(
        (
            cost.arm,
            number(cost.c, 3),
            percent(cost.draft_share),
            percent(cost.verify_share),
            percent(cost.other_share),
            _scaled(cost.bytes_per_token, 1e6),
            _scaled(cost.bandwidth, 1e9),
            percent(cost.bandwidth_share),
        )
        for cost in analysis.costs
    )
    caption = (
        "c: a draft step / a single-token target call. Draft, verify, other: shares of the decoding time. Read: "
        "weights and cache per committed token, target and draft, and the same a second."
    )
    return Grid("Cost", columns, rows, caption)


def categories_grid(analysis: Analysis) -> Grid:
    rows = tuple(
        (c.category, c.arm, str(c.prompts), number(c.alpha, 3), number(c.tau), interval_text(c.speedup))
        for c in analysis.categories
    )
    small = any(c.speedup is not None and c.speedup.coverage is None for c in analysis.categories)
    caption = "Without brackets: too few prompts for an interval." if small else ""
    return Grid("By category", ("category", "arm", "prompts", "α", "τ", "speedup"), rows, caption, texts=2)


def prediction_grid(analysis: Analysis, bench: Bench) -> Grid:
    """Every k predicted, where more were than measured."""
    measured = {(r.profile, r.engine, r.batch, r.k): r.speedup for r in analysis.arms if r.kind != "plain"}
    keys = [(p.profile, p.engine, p.batch, p.k) for p in analysis.predictions]
    rows = tuple(
        (
            p.profile,
            p.engine,
            str(p.batch),
            str(p.k),
            number(p.alpha, 3),
            number(p.tau),
            number(p.speedup),
            interval_text(measured.get(key)),
        )
        for key, p in zip(keys, analysis.predictions, strict=True)
    )
    columns = ("profile", "engine", "B", "k", "α", "τ", "predicted speedup", "speedup")
    texts = len({(s.prompt, s.run) for s in bench.scores if s.ratios})
    ended = ", each up to its end," if any(s.end is not None and s.end < len(s.ratios) for s in bench.scores) else ","
    caption = (
        f"From {texts} text{'' if texts == 1 else 's'} of the baseline{ended} teacher-forced, and the measured costs."
    )
    return Grid("Prediction by k", columns, rows if set(keys) > set(measured) else (), caption, texts=2)


def lines(analysis: Analysis, bench: Bench) -> list[str]:
    """Below the tables: identical texts, divergences, bias, warnings, the verdict, the mode and its promise."""
    result = [f"{arm}: identical {same}/{of}" for arm, (same, of) in analysis.identical.items()]
    result += [_divergence(d, bench) for d in bench.divergences]
    result += [
        f"{row.name}: bias {number(row.mean_bias, 4)}, mean total variation from the target's distribution"
        for row in analysis.arms
        if row.mean_bias is not None
    ]
    result += [f"note: {note}" for note in bench.notes]
    result += [f"warning: {warning}" for warning in analysis.warnings]
    result.append(f"verdict: {analysis.verdict.text}")
    mode = Mode(bench.sampling["mode"])
    return [*result, f"mode: {mode.value}: {PROMISES[mode]}"]


def _divergence(d: Divergence, bench: Bench) -> str:
    cause = "a tie broken by arithmetic" if d.tie else "NOT explained by arithmetic"
    return (
        f"{d.arm}: {bench.prompts[d.prompt].name}, run {d.run}, differs from position {d.position}: token {d.token} "
        f"for {d.plain_token}; top-2 margin {d.plain_margin:.3g} in the plain call, {d.verify_margin:.3g} in the "
        f"verifying call, which differ by {d.difference:.3g}: {cause}"
    )


def _some(n: int, unit: str) -> str:
    return f"{n} {unit}{'' if n == 1 else 's'}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def _scaled(value: float | None, unit: float) -> str:
    return number(None if value is None else value / unit, 2)
