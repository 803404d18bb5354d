"""A bench's result → what stands on its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specgen.report.grid import Grid
from specgen.report.numbers import milliseconds, number
from specgen.report.page.content import LETTERS, Content, View
from specgen.report.page.sections import (
    SHOWN_LINES,
    contract,
    generation,
    ms_text,
    positions_grid,
    settings_lists,
)
from specgen.rounds.record import Origin
from specgen.rounds.statistics import Statistics

if TYPE_CHECKING:
    from specgen.analysis.tables import Analysis, ArmRow
    from specgen.results.bench import Bench, Row


def bench_content(document: dict[str, Any], name: str) -> Content:
    from specgen.analysis.analyse import analyse
    from specgen.report.page.figures import acceptance, categories, histogram, speedup
    from specgen.results.files import parse_bench

    bench = parse_bench(document, name)
    found = analyse(bench)
    speculative = [row for row in found.arms if row.kind == "speculative"]
    drawn = _shown(speculative, found.verdict.best)
    lines = {row.name: [p for p in found.positions if p.arm == row.name] for row in drawn}
    by_category = [
        (row.name, [(c.category, c.speedup) for c in found.categories if c.arm == row.name and c.speedup is not None])
        for row in drawn
    ]
    left_out = f"{len(drawn)} of {len(speculative)} arms are drawn; the table has them all."
    charts = {
        "speedup": speedup(*_lines_by_k(found)),
        "acceptance": acceptance([(name, rows) for name, rows in lines.items() if rows]),
        "histogram": histogram([(row.name, _accepted_counts(bench, row.name)) for row in drawn]),
    }
    with_rows = [line for line in by_category if line[1]]
    if with_rows:
        charts["categories"] = categories(with_rows)
    views = _bench_views(bench, found.verdict.best)
    settings = {
        "created": bench.created,
        "design": bench.design.model_dump(),
        "sampling": bench.sampling,
        "dtype": bench.dtype,
        "device": bench.device,
        "profiles": bench.profiles,
        "checkpoints": bench.checkpoints,
    }
    said = {
        "verdict": found.verdict,
        **contract(str(bench.sampling.get("mode"))),
        "warnings": [*found.warnings, *bench.notes],
        "arms": _arms_grid(found),
        "left_out": left_out if len(drawn) < len(speculative) else "",
        "positions": positions_grid([(p.arm, p) for p in found.positions]),
        "by_category": bool(with_rows),
        "shown": generation(views, charts, "Of the first timed run."),
        **settings_lists(settings, bench.environment),
    }
    return Content(", ".join(bench.profiles), "bench", said, charts, views)


def rates_of(s: Statistics) -> str:
    speed = f"{number(s.tokens_per_second)} tokens/s ({s.committed} tokens, prefill apart)"
    if not s.tested:
        return speed
    return (
        f"α {number(s.alpha, 3)} = {s.accepted} accepted / {s.tested} tested; τ {number(s.tau, 3)} = {s.committed} "
        f"committed / {s.rounds} target calls; {speed}"
    )


def _shown(rows: Sequence[ArmRow], best: str | None) -> list[ArmRow]:
    """As many arms as one chart can tell apart, the best among them, in their order."""
    first = [row for row in rows if row.name == best]
    chosen = {row.name for row in [*first, *(row for row in rows if row.name != best)][:SHOWN_LINES]}
    return [row for row in rows if row.name in chosen]


def _lines_by_k(found: Analysis) -> tuple[list[Any], list[Any]]:
    """Measured and predicted points of `figures.speedup`, a line for each profile, engine and batch."""

    def label(row: Any) -> str:
        return f"{row.profile}, {row.engine}, batch {row.batch}"

    measured: dict[str, list[Any]] = {}
    for row in sorted(found.arms, key=lambda row: row.k):
        if row.speedup is not None:
            measured.setdefault(label(row), []).append((row.k, row.name, row.speedup))
    predicted: dict[str, list[Any]] = {}
    for point in sorted(found.predictions, key=lambda point: point.k):
        predicted.setdefault(label(point), []).append(point)
    return list(measured.items()), list(predicted.items())


def counted_rounds(accepted: Iterable[int]) -> dict[int, int]:
    """{tokens accepted: rounds}, without gaps."""
    counts = Counter(accepted)
    return {n: counts[n] for n in range(max(counts, default=0) + 1)} if counts else {}


def _accepted_counts(bench: Bench, arm: str) -> dict[int, int]:
    from specgen.analysis.columns import ended_rounds

    return counted_rounds(r.accepted for m in bench.timed(arm) for row in m.rows for r in ended_rounds(row))


def _bench_views(bench: Bench, best: str | None) -> list[View]:
    """Of each arm and prompt the first timed generation; the best arm's first, plain decoding last."""
    views = []
    for arm in bench.arms:
        seen: set[int] = set()
        for m in sorted(bench.timed(arm.name), key=lambda m: m.run):
            for row in m.rows:
                if row.prompt in seen:
                    continue
                seen.add(row.prompt)
                n, steps = len(row.committed), m.steps
                other = [t - d - v for t, d, v in zip(steps.total_s, steps.draft_s, steps.verify_s, strict=True)]
                prompt = bench.prompts[row.prompt]
                category = f" ({prompt.category})" if prompt.category else ""
                views.append(
                    View(
                        arm.name,
                        prompt.name + category,
                        prompt.text,
                        ms_text(steps.draft_s[:n]),
                        ms_text(steps.verify_s[:n]),
                        ms_text(other[:n]),
                        _row_tokens(row, bench.pieces, plain=arm.kind == "plain"),
                    )
                )
    plain = {arm.name for arm in bench.arms if arm.kind == "plain"}
    return sorted(views, key=lambda view: (view.arm != best, view.arm in plain))


def _row_tokens(row: Row, pieces: dict[int, str], *, plain: bool) -> list[list[Any]]:
    """A row's tokens as `View` has them; who wrote each follows from its round's counts."""
    from specgen.analysis.columns import rounds_of

    found: list[list[Any]] = []
    for r in rounds_of(row):
        last = Origin.CORRECTION if r.tested > r.accepted else Origin.BONUS
        for j in range(len(r.committed)):
            origin = Origin.PLAIN if plain else Origin.ACCEPTED if j < r.accepted else last
            overlap = r.overlaps[j] if j < r.tested else None
            token = row.tokens[len(found)]
            piece = row.pieces.get(len(found), pieces.get(token))
            found.append([piece_of(piece, token), LETTERS[origin], overlap, r.index + 1, j + 1])
    return found


def piece_of(text: str | None, token: int) -> str:
    return f"⟨{token}⟩" if text is None else text


def _arms_grid(found: Analysis) -> Grid:
    from specgen.analysis.intervals import interval_text

    columns = [
        "arm",
        "speedup [interval]",
        "predicted speedup",
        "measured / predicted",
        "α",
        "τ",
        "draft ms/token",
        "verify ms",
        "other ms",
        "tokens/s",
        "first token ms",
    ]
    if found.identical:
        columns.append("identical")
    rows = []
    for a in found.arms:
        row = [
            a.name,
            interval_text(a.speedup),
            number(a.predicted),
            number(a.ratio),
            number(a.alpha, 3),
            number(a.tau),
            *map(_seconds, (a.draft_s, a.verify_s, a.other_s)),
            number(a.tokens_per_second),
            _seconds(a.first_s),
        ]
        if found.identical:
            same = found.identical.get(a.name)
            row.append("-" if same is None else f"{same[0]}/{same[1]}")
        rows.append(tuple(row))
    return Grid("Every arm", tuple(columns), tuple(rows))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)
