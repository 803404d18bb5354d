"""A run's result → rich tables, or a line of JSON. Every number is computed elsewhere; here it is only laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from specgen.prompts.read import ANSWER_KEY
from specgen.report.numbers import milliseconds, number, percent
from specgen.results.document import plain_data
from specgen.results.run import Check, Result
from specgen.rounds.record import Round
from specgen.rounds.statistics import Spread, Statistics
from specgen.settings import Mode

SHOWN_ROUNDS = 6  # at either end of a long run


_MODE_SETTINGS = {Mode.LENIENT: ("lenience",), Mode.TYPICAL: ("typical_epsilon", "typical_delta")}


_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "ban",
    "stop",
    "end_tokens",
)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def rounds_table(rounds: Sequence[Round]) -> Table:
    """One row a round; of a long run the first and the last few, and how many are between."""
    columns = ("round", "drafted", "tested", "accepted", "overlap", "draft ms", "verify ms", "other ms")
    table = _table("Rounds", *columns)
    hidden = len(rounds) - 2 * SHOWN_ROUNDS
    for i, r in enumerate(rounds):
        if hidden > 1 and i == SHOWN_ROUNDS:
            table.add_row("…", *[""] * 7)
            table.caption = f"{hidden} rounds between are not shown (--trace FILE holds them all)"
        if hidden > 1 and SHOWN_ROUNDS <= i < len(rounds) - SHOWN_ROUNDS:
            continue
        overlap = sum(r.overlaps) / len(r.overlaps) if r.overlaps else None
        counts = (str(r.index + 1), str(r.drafted), str(r.tested), str(r.accepted), number(overlap))
        table.add_row(*counts, milliseconds(r.draft_s), milliseconds(r.verify_s), milliseconds(r.other_s))
    return table


def positions_table(statistics: Statistics) -> Table:
    """Of the first, second, … drafted token: how often it was tested, and accepted."""
    table = _table("Acceptance by position", "position", "tested", "accepted", "rate", "mean overlap")
    for p in statistics.positions:
        table.add_row(str(p.position), str(p.tested), str(p.accepted), number(p.rate, 3), number(p.overlap, 3))
    if not statistics.positions:
        table.caption = "nothing was drafted"
    return table


def latency_table(statistics: Statistics, prefill_s: float) -> Table:
    """Where the time goes. Shares are of the decoding time; the prefill is apart."""
    table = _table("Latency", "what", "n", "median ms", "p90 ms", "share of decoding")

    def row(name: str, spread: Spread) -> None:
        table.add_row(
            name, str(spread.n), milliseconds(spread.median), milliseconds(spread.p90), percent(spread.share)
        )

    row("draft, per token", statistics.draft_per_token)
    row("verify, per round", statistics.verify)
    row("other, per round", statistics.other)
    row("  of it roll-back", statistics.rollback)
    table.add_row("prefill", "1", milliseconds(prefill_s), "-", "-")
    return table


def setting(sampling: Mapping[str, Any], name: str) -> str:
    """A setting that is on, and where it comes from; empty for one that is off."""
    value = sampling.get(name)
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        shown = ",".join(
            repr(v) if isinstance(v, str) else str(tuple(v) if isinstance(v, list) else v) for v in value[:8]
        )
        value = shown + (f",… ({len(value)})" if len(value) > 8 else "")
    return f"{name} {value} ({sampling['sources'].get(name, 'default')})"


def tables(result: Result, sampling: Mapping[str, Any]) -> list[Table]:
    """All of one result's. sampling: the effective settings, as in the file's head."""
    own = [latency_table(result.statistics, result.prefill_s), summary(result, sampling)]
    return own if result.plain else [rounds_table(result.live_rounds), positions_table(result.statistics), *own]


def summary(result: Result, sampling: Mapping[str, Any]) -> Table:
    """The contract, the effective settings, the rates, and the run's check of itself."""
    s, mode = result.statistics, Mode(sampling["mode"])
    grid = Table(title="Summary", box=None, title_justify="left", show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        grid.add_row(Text(name), Text(value))

    row("contract", f"{mode}: {result.promise}")
    names = (*_MODE_SETTINGS.get(mode, ()), *_SETTINGS)
    row("settings", "; ".join(filter(None, (setting(sampling, name) for name in names))))
    row("seed, k", f"{sampling['seed']}, {'no draft' if result.plain else sampling['k']}")
    row("engine", result.engine)
    if not result.plain:
        source = "overlap" if mode is Mode.EXACT else "rule"
        counted = f"{s.accepted} accepted / {s.tested} tested"
        row("acceptance α", f"{number(s.alpha, 3)} = {counted}; the {source} predicts {number(s.predicted_alpha, 3)}")
        row("block efficiency τ", f"{number(s.tau, 3)} = {s.committed} committed / {s.rounds} target calls")
        if s.mean_bias is not None:
            row(
                "bias",
                f"{number(s.mean_bias, 4)} mean, {number(s.worst_bias, 4)} worst total variation from the "
                f"target's distribution, at {s.tested} tested positions",
            )
        if s.nothing_proposed:
            row(
                "nothing proposed",
                f"in {s.nothing_proposed} of {s.rounds} rounds the draft had nothing to propose",
            )
    if cost := result.cost:
        steps = f"{milliseconds(cost.draft_s)} ms a draft step / {milliseconds(cost.target_s)} ms"
        row("cost c", f"{number(cost.c, 4)} = {steps} a single-token target step (probed after the run)")
    row("tokens/s", f"{number(s.tokens_per_second)} ({s.committed} tokens, prefill apart)")
    row("finish", result.finish or "none")
    for name, value in check_lines(result.check):
        row(name, value)
    return grid


def check_lines(check: Check | None) -> list[tuple[str, str]]:
    if check is None:
        return [("check of itself", "left out")]
    lines = [("check of itself", check.verdict)]
    for r in check.rows:
        mark = {True: "ok", False: "FAILED", None: "-"}[r.passed]
        value = "-" if r.value is None else f"{r.value:.2e}" if abs(r.value) < 0.01 and r.value else f"{r.value:.2f}"
        lines.append((f"  {r.name}", f"{mark}  {value} (bound {r.bound:g}): {r.note}"))
    return lines


def answer(result: Result, sampling: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """One line of output for one line of .jsonl input: its fields as they came, and under ANSWER_KEY what became of
    its prompt."""
    names = ("committed", "rounds", "drafted", "tested", "accepted", "alpha", "predicted_alpha", "tau")
    found = {
        "text": result.text,
        "finish": result.finish,
        "tokens": result.tokens,
        "mode": sampling["mode"],
        "promise": result.promise,
        "check": result.check and {"passed": result.check.passed, "verdict": result.check.verdict},
        "statistics": {name: getattr(result.statistics, name) for name in (*names, "tokens_per_second")},
    }
    return {**record, ANSWER_KEY: plain_data(found)}
