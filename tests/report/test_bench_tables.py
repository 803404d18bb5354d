"""Tables, Markdown and CSV of a bench written by hand: every cell, and the same from the file."""

from __future__ import annotations

import csv as csv_module
import json

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specgen.analysis.analyse import analyse
from specgen.report.bench import csv, grids, lines, markdown, tables
from specgen.results.bench import Bench, Divergence
from support.bench_documents import K2, MS, PLAIN, Script, document

RATIOS = [1.0, 1.0, 1.0, 0.0] * 3  # what the texts of K2 say: 2, 0, 2, 0, … accepted


def whole() -> Bench:
    return document(ratios={"small": RATIOS}, candidates=[1, 2, 4], mode="greedy")


def cells(table: Table) -> list[tuple[str, ...]]:
    return [tuple(str(c) for c in row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def headings(table: Table) -> tuple[str, ...]:
    return tuple(str(column.header) for column in table.columns)


def drawn(bench: Bench) -> dict[str, Table]:
    return {str(t.title): t for t in tables(analyse(bench), bench) if isinstance(t, Table)}


def printed(bench: Bench, width: int) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        for table in tables(analyse(bench), bench):
            console.print(table)
    return captured.get()


def test_the_tables_and_their_order() -> None:
    assert list(drawn(whole())) == [
        "Speedup",
        "Acceptance by position",
        "Cost of a target call",
        "Cost",
        "By category",
        "Prediction by k",
    ]


def test_speedup() -> None:
    """Units of 1/1024 s: 14 + 2 a plain step; 4 + 18 + 2 a round; 192 and 136 a prompt of 12 tokens."""
    table = drawn(whole())["Speedup"]
    assert headings(table) == (
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
    assert cells(table) == [
        ("plain", "-", "1.00", "-", "13.7", "1.95", "64.0", "46.9", "-", "-", "-"),
        ("k = 2", "0.750", "2.00", "1.95", "17.6", "1.95", "90.4", "54.7", "1.41 [1.41, 1.41]", "1.41", "1.00"),
    ]
    assert str(table.caption) == (
        "7 prompts × 1 run × 12 tokens, float32 on cpu. Medians; verify and other per round; first token: the "
        "prefill and the first round; ratio: speedup / predicted speedup. A speedup is the median of paired ratios: "
        "two tokens/s do not divide to it. Speedup: median over 7 prompts [98.4% interval]."
    )


def test_the_caption_says_when_there_is_no_interval() -> None:
    table = drawn(document(categories=["chat"] * 4))["Speedup"]
    assert cells(table)[1][8] == "1.41"
    assert str(table.caption).endswith("Speedup: median over 4 prompts, too few prompts for an interval.")
    batch = document((Script("plain", batch=2), Script("k = 2", k=2, batch=2)), categories=["chat"] * 10)
    assert "median over 5 groups [93.8% interval]" in str(drawn(batch)["Speedup"].caption)


def test_positions() -> None:
    table = drawn(whole())["Acceptance by position"]
    assert headings(table) == (
        "arm",
        "position",
        "drafted",
        "tested",
        "accepted",
        "rate if tested",
        "cumulative",
        "mean overlap",
    )
    assert cells(table) == [
        ("k = 2", "1", "35", "35", "21", "0.600", "0.600", "0.750"),
        ("k = 2", "2", "35", "21", "21", "1.000", "0.600", "0.750"),
    ]
    assert str(table.caption) == (
        "Rate if tested: accepted / tested. Cumulative: accepted / rounds that drafted anything."
    )


def test_calls() -> None:
    table = drawn(whole())["Cost of a target call"]
    assert headings(table) == (
        "profile",
        "engine",
        "tokens in the call",
        "probed ms",
        "T(w)/T(1)",
        "in this bench ms",
    )
    assert cells(table) == [
        ("small", "eager", "1", "6.84", "1.00", "13.7"),
        ("small", "eager", "2", "7.81", "1.14", "15.6"),
        ("small", "eager", "3", "8.79", "1.29", "17.6"),
        ("small", "eager", "5", "13.7", "2.00", "-"),
    ]


def test_costs() -> None:
    table = drawn(whole())["Cost"]
    assert headings(table) == (
        "arm",
        "c",
        "draft",
        "verify",
        "other",
        "read MB/token",
        "read GB/s",
        "of copy bandwidth",
    )
    # Bytes of a prompt: 12,114,000 plain; 7,065,900 for k = 2 (test_analyse counts them); 192 and 136 units.
    assert cells(table) == [
        ("plain", "-", "0.0%", "87.5%", "12.5%", "1.01", f"{12_114_000 / 192 / MS / 1e9:.2f}", "6.5%"),
        ("k = 2", "0.143", "14.7%", "76.5%", "8.8%", "0.59", f"{7_065_900 / 136 / MS / 1e9:.2f}", "5.3%"),
    ]


def test_categories() -> None:
    table = drawn(whole())["By category"]
    assert headings(table) == ("category", "arm", "prompts", "α", "τ", "speedup")
    assert cells(table) == [
        ("chat", "k = 2", "3", "0.750", "2.00", "1.41"),
        ("code", "k = 2", "4", "0.750", "2.00", "1.41"),
    ]
    assert str(table.caption) == "Without brackets: too few prompts for an interval."
    five = document(categories=["chat"] * 6)
    assert cells(drawn(five)["By category"])[0][-1] == "1.41 [1.41, 1.41]"
    assert drawn(five)["By category"].caption is None


def test_prediction() -> None:
    table = drawn(whole())["Prediction by k"]
    assert headings(table) == ("profile", "engine", "B", "k", "α", "τ", "predicted speedup", "speedup")
    # Of tokens that the text accepts, accepts, accepts, rejects, k = 1 takes one and the next as its bonus: six
    # rounds of 2 + 16 + 2 units. k = 4 takes three rounds of four: twice 8 + 28 + 2, and a last one with room to
    # draft three, 6 + 23 + 2 (T(4) lies between the probed 9 and 14, times two), and tests all three of them.
    assert cells(table) == [
        ("small", "eager", "1", "1", "1.000", "2.00", "1.60", "-"),
        ("small", "eager", "1", "2", "0.750", "2.00", "1.41", "1.41 [1.41, 1.41]"),
        ("small", "eager", "1", "4", f"{9 / 11:.3f}", "4.00", f"{192 / (38 + 38 + 31):.2f}", "-"),
    ]
    assert "Prediction by k" not in drawn(document(ratios={"small": RATIOS}))


@pytest.mark.parametrize(("scored", "said"), [(21, "21 texts"), (7, "7 texts"), (1, "1 text")])
def test_the_prediction_says_how_many_texts_it_is_from(scored: int, said: str) -> None:
    bench = document(runs=3, ratios={"small": RATIOS}, candidates=[1, 2, 4])
    del bench.scores[scored:]
    caption = str(drawn(bench)["Prediction by k"].caption)
    assert caption == f"From {said} of the baseline, teacher-forced, and the measured costs."


def test_lines() -> None:
    bench = whole()
    assert lines(analyse(bench), bench) == [
        "k = 2: identical 7/7",
        "verdict: k = 2 pays: speedup 1.41 [1.41, 1.41] (98.4% interval over 7 prompts).",
        "mode: greedy: token for token what greedy decoding of the target yields, near ties of the two kinds of call "
        "aside",
    ]


@pytest.mark.parametrize(
    ("tie", "cause"), [(True, "a tie broken by arithmetic"), (False, "NOT explained by arithmetic")]
)
def test_divergences_notes_warnings_and_bias(tie: bool, cause: str) -> None:
    divergence = Divergence(
        arm="k = 2",
        prompt=3,
        run=0,
        position=1,
        plain_token=101,
        token=601,
        plain_margin=0.25,
        verify_margin=0.125,
        difference=0.5,
        tie=tie,
    )
    script = Script("k = 2", k=2, accepted=(2, 0), differs=[(3, 0)])
    bench = document((PLAIN, script), divergences=[divergence], load_before=9.0)
    bench.notes.append("a note")
    found = lines(analyse(bench), bench)
    assert found[0] == "k = 2: identical 6/7"
    assert found[1] == (
        "k = 2: p3, run 0, differs from position 1: token 601 for 101; top-2 margin 0.25 in the plain call, 0.125 in "
        f"the verifying call, which differ by 0.5: {cause}"
    )
    assert found[2] == "note: a note"
    assert "note: a note" in printed(bench, 110)
    assert "\n- note: a note\n" in markdown(analyse(bench), bench)
    assert found[3].startswith("warning: The machine was busy: load average 9.0 before it")
    lenient = document((PLAIN, Script("k = 2", k=2, bias=0.125)), mode="lenient")
    found = lines(analyse(lenient), lenient)
    assert found[0] == "k = 2: bias 0.1250, mean total variation from the target's distribution"
    assert found[-1].startswith("mode: lenient: approximate: not the target's distribution")


def test_tables_fit_in_110_columns_and_lose_no_number_in_60() -> None:
    long = Script("k=16 packed B=8", k=4, accepted=(2, 0), scale=lambda p, r: 8.0)
    bench = document((PLAIN, K2, long), ratios={"small": RATIOS}, candidates=[1, 2, 4])
    text = printed(bench, 110)
    assert all(len(line.rstrip()) <= 110 for line in text.splitlines())
    for grid in grids(analyse(bench), bench):
        for row in grid.rows:
            assert any(all(cell in line for cell in row) for line in text.splitlines()), row
    assert "…" not in printed(bench, 60)


def test_names_are_no_markup() -> None:
    bench = document((PLAIN, Script("k=2 [bold]", k=2)), categories=["[red]"] * 6)
    text = printed(bench, 110)
    assert "k=2 [bold]" in text
    assert "[red]" in text


def test_markdown_holds_the_same_cells() -> None:
    bench = whole()
    text = markdown(analyse(bench), bench)
    for grid in grids(analyse(bench), bench):
        assert f"### {grid.title}\n" in text
        for row in grid.rows:
            assert "| " + " | ".join(row) + " |\n" in text
    assert "| arm | α | τ | draft ms/token | verify ms | other ms | tokens /s | first token ms | speedup |" in text
    assert "| --- | ---: |" in text
    for line in lines(analyse(bench), bench):
        assert f"- {line}\n" in text
    assert "k\\|2" in markdown(analyse(piped := document((PLAIN, Script("k|2", k=2)))), piped)


def test_csv_is_one_row_an_arm_in_full() -> None:
    bench = whole()
    analysis = analyse(bench)
    text = csv(analysis, bench)
    rows = list(csv_module.DictReader(text.splitlines()))
    assert len(text.splitlines()) == 3
    assert [row["name"] for row in rows] == ["plain", "k = 2"]
    plain, k2 = rows
    assert (plain["speedup"], plain["alpha"], plain["identical"], plain["c"]) == ("", "", "", "")
    row, cost = analysis.arms[1], analysis.costs[1]
    assert row.speedup is not None
    expected = {
        "k": 2,
        "batch": 1,
        "alpha": 0.75,
        "tau": 2,
        "draft_s": 2 * MS,
        "verify_s": 18 * MS,
        "other_s": 2 * MS,
        "first_s": 56 * MS,
        "prefill_s": 32 * MS,
        "speedup": row.speedup.estimate,
        "speedup_low": row.speedup.low,
        "speedup_high": row.speedup.high,
        "speedup_coverage": 1 - 2 / 128,
        "speedup_n": 7,
        "predicted": row.predicted,
        "ratio": row.ratio,
        "seconds_per_token": row.seconds_per_token,
        "c": 1 / 7,
        "bytes_per_token": cost.bytes_per_token,
        "bandwidth": cost.bandwidth,
        "identical": 7,
        "identical_of": 7,
    }
    assert {name: float(k2[name]) for name in expected} == expected


def test_everything_is_rebuilt_from_the_file() -> None:
    bench = document((PLAIN, K2), runs=3, ratios={"small": RATIOS}, candidates=[1, 2, 8], load_before=9.0)
    again = Bench.model_validate(json.loads(bench.model_dump_json()))
    assert printed(again, 110) == printed(bench, 110)
    assert markdown(analyse(again), again) == markdown(analyse(bench), bench)
    assert csv(analyse(again), again) == csv(analyse(bench), bench)


def test_a_plain_arm_alone_is_shown() -> None:
    bench = document((PLAIN,), costs=())
    shown = drawn(bench)
    assert list(shown) == ["Speedup", "Cost of a target call", "Cost"]
    assert cells(shown["Cost"])[0][-3:] == ("-", "-", "-")
    last = tables(analyse(bench), bench)[-2]
    assert isinstance(last, Text)
    assert last.plain.startswith("verdict: Nothing to judge")
