"""Tables and JSON of hand-written rounds with fixed times: every cell."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.decoding.result import result_of
from specgen.decoding.self_check import CheckResult, CheckRow, not_applicable
from specgen.report import numbers
from specgen.report import run as run_module
from specgen.results import document
from specgen.results.run import Result
from specgen.results.run import Round as Stored
from specgen.rounds.record import Committed, Finish, Origin, Round
from specgen.rounds.statistics import summarise
from specgen.settings import Mode, Sampling


def committed(origins: str) -> tuple[Committed, ...]:
    """A token per letter: a(ccepted), c(orrection), b(onus), p(lain)."""
    kinds = {"a": Origin.ACCEPTED, "c": Origin.CORRECTION, "b": Origin.BONUS, "p": Origin.PLAIN}
    return tuple(Committed(i, kinds[letter], -1.5, 2.0, 10, None) for i, letter in enumerate(origins))


# Times are sums of powers of two (of seconds / 1024), so that means and shares come out exactly.
MS = 1 / 1024
ROUNDS = (
    Round(0, 4, 3, 2, committed("aac"), (0.5, 0.75, 0.25), (), (), (), 8 * MS, 16 * MS, 1 * MS, 32 * MS),
    Round(1, 4, 4, 4, committed("aaaab"), (0.5, 0.5, 1.0, 1.0), (), (), (), 4 * MS, 16 * MS, 3 * MS, 32 * MS),
    Round(2, 0, 0, 0, committed("b"), (), (), (), (), 0.0, 16 * MS, 1 * MS, 24 * MS),
    Round(3, 2, 1, 0, committed("c"), (0.25,), (), (), (), 8 * MS, 16 * MS, 1 * MS, 40 * MS, Finish.LENGTH),
)


def generation(rounds: tuple[Round, ...] = ROUNDS, *, drafter: Any = "a draft", **settings: Any) -> Generation:
    """As a run would leave it. The tokenizer is none: tokens are written as numbers."""
    sampling = Sampling(**settings)
    models: dict[str, Any] = {
        "target": SimpleNamespace(device=torch.device("cpu"), engine="eager"),
        "drafter": drafter,
        "processors": None,
    }
    pair = Pair(**models, sampling=sampling, tokenizer=None, dtype=torch.float32, clock=lambda: 0.0)
    result = Generation(pair, [7, 8], plain=drafter is None)
    result.rounds = list(rounds)
    result.prefill_s = 64 * MS
    return result


def drawn(
    g: Generation, check: CheckResult | None = None, cost: dict[str, float] | None = None, **more: Any
) -> Table:
    """The summary of what a file would hold of it."""
    result = result_of(g, check, cost, prompt="x", name="x", **more)
    return run_module.summary(result, document.plain_data(g.pair.sampling))


def cells(table: Table) -> list[tuple[str, ...]]:
    """The rows of a table as they are laid out, styles and markup aside."""
    columns = [[getattr(cell, "plain", cell) for cell in column.cells] for column in table.columns]
    return [tuple(str(cell) for cell in row) for row in zip(*columns, strict=True)]


def named(table: Table) -> dict[str, str]:
    """A summary's rows by their names."""
    return {row[0]: row[1] for row in cells(table)}


def headings(table: Table) -> tuple[str, ...]:
    return tuple(str(column.header) for column in table.columns)


def printed(table: Table, width: int = 160) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_rounds_table() -> None:
    table = run_module.rounds_table(ROUNDS)
    assert headings(table) == (
        "round",
        "drafted",
        "tested",
        "accepted",
        "overlap",
        "draft ms",
        "verify ms",
        "other ms",
    )
    assert cells(table) == [
        ("1", "4", "3", "2", "0.50", "7.81", "15.6", "7.81"),
        ("2", "4", "4", "4", "0.75", "3.91", "15.6", "11.7"),
        ("3", "0", "0", "0", "-", "0.00", "15.6", "7.81"),
        ("4", "2", "1", "0", "0.25", "7.81", "15.6", "15.6"),
    ]
    assert table.title == "Rounds"
    assert table.caption is None


@pytest.mark.parametrize(("n", "hidden"), [(12, 0), (13, 0), (14, 2), (40, 28)])
def test_long_runs_show_both_ends_and_how_many_are_between(n: int, hidden: int) -> None:
    """One row is not hidden behind a row that says so."""
    table = run_module.rounds_table([Round(i, 1, 1, 1, committed("ab"), (1.0,)) for i in range(n)])
    first = [row[0] for row in cells(table)]
    if not hidden:
        assert first == [str(i + 1) for i in range(n)]
        assert table.caption is None
        return
    assert first == ["1", "2", "3", "4", "5", "6", "…", *(str(i) for i in range(n - 5, n + 1))]
    assert cells(table)[6] == ("…", *[""] * 7)
    assert str(table.caption).startswith(f"{hidden} rounds between are not shown (--trace FILE")
    assert f"{hidden} rounds between" in printed(table)


def test_positions_table() -> None:
    """Position 4 was drafted in two rounds and tested in one."""
    table = run_module.positions_table(summarise(ROUNDS))
    assert headings(table) == ("position", "tested", "accepted", "rate", "mean overlap")
    assert cells(table) == [
        ("1", "3", "2", "0.667", "0.417"),
        ("2", "2", "2", "1.000", "0.625"),
        ("3", "2", "1", "0.500", "0.625"),
        ("4", "1", "1", "1.000", "1.000"),
    ]
    assert table.title == "Acceptance by position"


def test_positions_never_tested_have_no_rate() -> None:
    table = run_module.positions_table(summarise([Round(0, 2, 1, 0, committed("c"), (0.5,))]))
    assert cells(table) == [("1", "1", "0", "0.000", "0.500"), ("2", "0", "0", "-", "-")]
    nothing = run_module.positions_table(summarise([Round(0, 0, 0, 0, committed("b"))]))
    assert cells(nothing) == []
    assert nothing.caption == "nothing was drafted"


def test_latency_table() -> None:
    """128 units of decoding in all: 20 drafting, 64 verifying, 44 other, of which 6 rolling back."""
    table = run_module.latency_table(summarise(ROUNDS), 64 * MS)
    assert headings(table) == ("what", "n", "median ms", "p90 ms", "share of decoding")
    # Per drafted token: 2, 1 and 4 units. Other: 8, 12, 8, 16. Roll-back: 1, 3, 1, 1. numpy interpolates p90.
    assert cells(table) == [
        ("draft, per token", "3", "1.95", "3.52", "15.6%"),
        ("verify, per round", "4", "15.6", "15.6", "50.0%"),
        ("other, per round", "4", "9.77", "14.5", "34.4%"),
        ("  of it roll-back", "4", "0.98", "2.34", "4.7%"),
        ("prefill", "1", "62.5", "-", "-"),
    ]
    shares = summarise(ROUNDS)
    assert [s.share for s in (shares.draft_per_token, shares.verify, shares.other, shares.rollback)] == [
        20 / 128,
        64 / 128,
        44 / 128,
        6 / 128,
    ]


def test_latency_of_plain_decoding_has_dashes_for_the_draft() -> None:
    rounds = [Round(0, 0, 0, 0, committed("p"), verify_s=4 * MS, total_s=8 * MS)]
    table = run_module.latency_table(summarise(rounds, drafting=False), 0.5)
    assert cells(table) == [
        ("draft, per token", "0", "-", "-", "0.0%"),
        ("verify, per round", "1", "3.91", "3.91", "50.0%"),
        ("other, per round", "1", "3.91", "3.91", "50.0%"),
        ("  of it roll-back", "1", "0.00", "0.00", "0.0%"),
        ("prefill", "1", "500.0", "-", "-"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (float("nan"), "-"), (0.0, "0.00"), (1.005, "1.00"), (12.345, "12.35"), (-0.5, "-0.50")],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert numbers.number(value) == shown


CHECK = CheckResult(
    10,
    (
        CheckRow("drift", 3.21e-6, 0.01, True, "[bold]note[/bold]"),
        CheckRow("impossible events", 2.0, 0.0, False, "rejected token 3"),
        CheckRow("acceptance z", None, 4.0, None, "not enough variation in 3 positions"),
    ),
)


def threads() -> str:
    n = torch.get_num_threads()
    return f"{n} thread{'s' * (n != 1)}"


def test_summary() -> None:
    g = generation(
        k=4,
        seed=11,
        temperature=0.7,
        top_p=0.9,
        ban=tuple(range(10)),
        stop=("[bold]", "\n"),
        end_tokens=(2,),
        sources={"temperature": "flag", "top_p": "generation_config", "ban": "profile", "stop": "flag"},
    )
    cost = {"c": 0.125, "draft_s": 0.0005, "target_s": 0.004}
    assert cells(drawn(g, CHECK, cost)) == [
        ("contract", "exact: the target's distribution, in exact arithmetic"),
        (
            "settings",
            "temperature 0.7 (flag); top_p 0.9 (generation_config); ban 0,1,2,3,4,5,6,7,… (10) (profile); "
            "stop '[bold]','\\n' (flag); end_tokens 2 (default)",
        ),
        ("seed, k", "11, 4"),
        ("engine", f"eager, float32 on cpu, {threads()}"),
        ("acceptance α", "0.750 = 6 accepted / 8 tested; the overlap predicts 0.594"),
        ("block efficiency τ", "2.500 = 10 committed / 4 target calls"),
        ("nothing proposed", "in 1 of 4 rounds the draft had nothing to propose"),
        (
            "cost c",
            "0.1250 = 0.50 ms a draft step / 4.00 ms a single-token target step (probed after the run)",
        ),
        ("tokens/s", "80.00 (10 tokens, prefill apart)"),
        ("finish", "length"),
        ("check of itself", CHECK.verdict),
        ("  drift", "ok  3.21e-06 (bound 0.01): [bold]note[/bold]"),
        ("  impossible events", "FAILED  2.00 (bound 0): rejected token 3"),
        ("  acceptance z", "-  - (bound 4): not enough variation in 3 positions"),
    ]
    assert not CHECK.passed
    assert "[bold]note[/bold]" in printed(drawn(g, CHECK, cost))
    assert "'[bold]'" in printed(drawn(g, CHECK, cost))


def test_summary_of_plain_decoding() -> None:
    rounds = tuple(Round(i, 0, 0, 0, committed("p"), verify_s=MS, total_s=4 * MS) for i in range(3))
    assert cells(drawn(generation(rounds, drafter=None))) == [
        ("contract", "exact: plain decoding of the target, no draft"),
        ("settings", "temperature 1.0 (default)"),
        ("seed, k", "0, no draft"),
        ("engine", f"eager, float32 on cpu, {threads()}"),
        ("tokens/s", "256.00 (3 tokens, prefill apart)"),
        ("finish", "none"),
        ("check of itself", "left out"),
    ]


def test_summary_of_an_interrupted_greedy_run() -> None:
    g = generation(ROUNDS[:2], mode=Mode.GREEDY, temperature=None)
    rows = named(drawn(g, not_applicable(Mode.GREEDY), interrupted=True))
    assert rows["contract"].startswith("greedy: token for token")
    assert rows["settings"] == ""
    assert rows["finish"] == "interrupted"
    assert "compare its text with plain greedy decoding" in rows["check of itself"]
    assert "nothing proposed" not in rows
    assert "cost c" not in rows


def test_a_last_round_without_room_is_no_failure_to_propose() -> None:
    last = Round(1, 0, 0, 0, committed("b"), verify_s=MS, total_s=MS, finish=Finish.LENGTH)
    rows = named(drawn(generation((ROUNDS[0], last))))
    assert "nothing proposed" not in rows


def test_json_round_trip() -> None:
    """Everything in the tables can be computed again from the rounds in the JSON."""
    g = generation(stop=("[x]",))
    cost = {"c": 0.125, "draft_s": 0.0005, "target_s": 0.004}
    result = result_of(g, CHECK, cost, prompt="[bold]", name="p.txt")
    data = json.loads(json.dumps(result.model_dump(mode="json"), allow_nan=False))
    again = Result.model_validate(data)
    assert again == result
    assert again.model_dump(mode="json") == data
    assert tuple(again.live_rounds) == ROUNDS
    statistics = summarise(again.live_rounds)
    assert statistics == again.statistics == g.statistics
    for name in ("alpha", "tau", "accepted_fraction", "tokens_per_second"):
        assert data["statistics"][name] == getattr(statistics, name)
    assert data["statistics"]["accepted_fraction"] == 0.6
    assert data["statistics"]["positions"][3] == {
        "position": 4,
        "drafted": 2,
        "tested": 1,
        "accepted": 1,
        "overlap": 1.0,
    }
    assert (data["prompt"], data["name"], data["text"]) == ("[bold]", "p.txt", g.text)
    assert data["prompt_tokens"] == [7, 8]
    assert data["tokens"] == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]
    assert (data["finish"], data["plain"], data["prefill_s"]) == ("length", False, 64 * MS)
    assert data["check"]["passed"] is False
    assert data["check"]["verdict"] == CHECK.verdict
    assert [row["passed"] for row in data["check"]["rows"]] == [True, False, None]


def test_a_number_that_is_not_finite_is_null_and_read_as_none_known() -> None:
    token = Committed(0, Origin.PLAIN, -math.inf, math.nan, 10, None)
    written = json.loads(json.dumps(Stored.of(Round(0, 0, 0, 0, (token,))).model_dump(mode="json"), allow_nan=False))
    assert (written["committed"][0]["log_prob"], written["committed"][0]["entropy"]) == (None, None)
    (again,) = Stored.model_validate(written).live().committed
    assert math.isnan(again.log_prob)
    assert math.isnan(again.entropy)


def test_json_of_a_run_that_was_interrupted_before_its_first_round() -> None:
    result = result_of(generation(()), None, None, prompt="x", name="x", interrupted=True)
    data = json.loads(json.dumps(result.model_dump(mode="json"), allow_nan=False))
    assert (data["finish"], data["rounds"], data["text"], data["check"]) == ("interrupted", [], "", None)
    assert data["statistics"]["alpha"] is None
    assert data["statistics"]["verify"] == {"n": 0, "median": None, "p90": None, "share": None}


def test_numbers_that_json_lacks_become_null() -> None:
    plain = document.plain_data(
        {"a": (math.nan, math.inf, -math.inf, 1.5), 3: Finish.END, "r": ROUNDS[0].committed[:1]}
    )
    assert plain["a"] == [None, None, None, 1.5]
    assert plain["3"] == "end"
    assert type(plain["3"]) is str
    assert plain["r"] == [
        {"token": 0, "origin": "accepted", "log_prob": -1.5, "entropy": 2.0, "support": 10, "overlap": None}
    ]


def test_a_json_line_keeps_the_fields_it_came_with() -> None:
    """Also those that an answer has too: it goes under a key of its own."""
    record = {"id": "[b]", "prompt": "x", "deep": {"a": [1, None]}, "text": "mine", "tokens": 3, "finish": None}
    g = generation()
    result, sampling = result_of(g, None, None, prompt="x", name="x"), document.plain_data(g.pair.sampling)
    line = run_module.answer(result, sampling, record)
    data = json.loads(json.dumps(line, allow_nan=False))
    assert list(data) == [*record, "specgen"]
    assert {key: data[key] for key in record} == record
    data = data["specgen"]
    assert list(data) == ["text", "finish", "tokens", "mode", "promise", "check", "statistics"]
    assert (data["mode"], data["finish"]) == ("exact", "length")
    statistics = data["statistics"]
    assert (statistics["rounds"], statistics["drafted"], statistics["tested"]) == (4, 10, 8)
    assert (statistics["alpha"], statistics["tau"], statistics["tokens_per_second"]) == (0.75, 2.5, 80.0)
