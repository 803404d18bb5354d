"""`specgen compare`: two benches made by hand, with every number known; and what is refused."""

from __future__ import annotations

import copy
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
from typer.testing import CliRunner

from specgen.analysis import compare as compare_module
from specgen.analysis.analyse import analyse
from specgen.cli import app
from specgen.errors import UsageError
from specgen.results.bench import Bench
from support import bench_documents
from support import stored_results as stored
from support.stored_results import Times, arm

SIX = [(i, i + 1) for i in range(0, 12, 2)]  # prompts, as token ids
PLAIN: Times = {(p,): [4.0, 4.0, 4.0] for p in range(3)}


def parsed(document: dict[str, Any]) -> Bench:
    return Bench.model_validate(document)  # its parts whole; several tests leave out arms that a whole file has


def a_bench(k4: Times, plain: Times = PLAIN, **changes: Any) -> dict[str, Any]:
    return stored.bench([(arm("plain", 0), plain), (arm("k=4", 4), k4)], **changes)


def compared(a: dict[str, Any], b: dict[str, Any]) -> compare_module.Comparison:
    return compare_module.compare(parsed(a), parsed(b))


def invoked(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app.app, ["compare", *arguments], input=stdin)


def files(folder: Path, a: Any, b: Any) -> tuple[str, str]:
    return str(stored.write(folder, a, "a.json")), str(stored.write(folder, b, "b.json"))


def refusal(a: dict[str, Any], b: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as raised:
        compared(a, b)
    return str(raised.value)


# Medians over runs: a 2, 3, 1; b 1, 2, 2 seconds per token.
A: Times = {(0,): [2.0, 9.0, 1.0], (1,): [3.0, 3.0, 3.0], (2,): [1.0, 1.0, 5.0]}
B: Times = {(0,): [1.0, 1.0, 7.0], (1,): [2.0, 0.5, 2.5], (2,): [2.0]}


def test_every_number_by_hand() -> None:
    plain, k4 = compared(a_bench(A), a_bench(B, {(p,): [6.0] for p in range(3)})).arms
    assert [(m.kind, m.k, m.name) for m in (plain, k4)] == [("plain", 0, "plain"), ("speculative", 4, "k=4")]
    assert k4.groups == (("p0", 2.0), ("p1", 1.5), ("p2", 0.5))
    assert (k4.ratio.estimate, k4.ratio.low, k4.ratio.n) == (1.5, None, 3)
    assert k4.finding == "too few prompts for an interval (3)"
    assert (k4.a.seconds_per_token, k4.b.seconds_per_token) == (2, 2)
    assert k4.a.speedup is not None
    assert k4.b.speedup is not None
    assert (k4.a.speedup.estimate, k4.b.speedup.estimate) == (2, 3)  # of 4/2, 4/3, 4/1; of 6/1, 6/2, 6/2
    assert k4.speedups == 1.5
    assert k4.a.alpha == pytest.approx(5 / 6)  # of a row: 4 + 1 accepted of 4 + 2 tested
    assert k4.a.tau == 3.5  # 5 + 2 tokens of 2 calls
    assert plain.groups == (("p0", 4 / 6), ("p1", 4 / 6), ("p2", 4 / 6))
    assert (plain.a.alpha, plain.a.tau, plain.a.speedup, plain.speedups) == (None, 1, None, None)


def test_the_same_file_twice_gives_one_everywhere() -> None:
    document = a_bench(
        {(p,): [1.0 + p, 2.0, 0.3] for p in range(6)}, {(p,): [7.0 * p + 1] for p in range(6)}, prompts=SIX
    )
    found = compared(document, document)
    assert len(found.arms) == 2
    for m in found.arms:
        assert {ratio for _, ratio in m.groups} == {1.0}
        assert (m.ratio.estimate, m.ratio.low, m.ratio.high) == (1, 1, 1)
        assert m.finding == "no measurable difference"
        assert m.speedups in (1, None)
        assert m.a == m.b
        assert not m.below(1.0)
    assert (found.differs, found.notes) == ((), ())


@pytest.mark.parametrize("n", [6, 9, 17])
def test_the_interval_is_scipys(n: int) -> None:
    draw = random.Random(n)
    a = {(p,): [draw.uniform(1, 2) for _ in range(3)] for p in range(n)}
    b = {(p,): [draw.uniform(1, 2) for _ in range(3)] for p in range(n)}
    prompts = [(p, p) for p in range(n)]
    arms = [(arm("plain", 0), a)], [(arm("plain", 0), b)]
    (m,) = compared(*(stored.bench(x, prompts=prompts) for x in arms)).arms
    ratios = [statistics.median(a[p]) / statistics.median(b[p]) for p in a]
    assert [r for _, r in m.groups] == pytest.approx(ratios)
    oracle = scipy.stats.quantile_test(ratios, p=0.5).confidence_interval(0.95)
    assert (m.ratio.low, m.ratio.high) == pytest.approx(tuple(oracle))
    assert m.ratio.estimate == pytest.approx(statistics.median(ratios))


def test_over_all_prompts_an_arms_numbers_are_those_of_the_bench_itself() -> None:
    bench = bench_documents.document()
    rows, found = analyse(bench).arms, compare_module.compare(bench, bench).arms
    assert len(rows) == len(found) == 2
    for row, m in zip(rows, found, strict=True):
        assert (m.a.arm, m.a.alpha, m.a.tau, m.a.speedup) == (row.name, row.alpha, row.tau, row.speedup)
        assert m.a.seconds_per_token == row.seconds_per_token
    assert found[1].a.speedup is not None


def test_the_finding_follows_from_the_interval() -> None:
    base = {(p,): [1.0] for p in range(6)}
    for times, finding in (
        ([0.5, 0.6, 0.7, 0.8, 0.9, 0.99], "b is faster"),
        ([1.5, 1.6, 1.7, 1.8, 1.9, 1.01], "b is slower"),
        ([0.5, 0.6, 0.7, 0.8, 0.9, 1.01], "no measurable difference"),
    ):
        arms = [(arm("plain", 0), base)], [(arm("plain", 0), {(p,): [t] for p, t in enumerate(times)})]
        (m,) = compared(*(stored.bench(x, prompts=SIX) for x in arms)).arms
        assert m.finding == finding


def test_prompts_are_matched_by_their_tokens_whatever_their_order_and_name() -> None:
    a = a_bench(A)
    b = a_bench({(0,): [0.5], (1,): [1.5]}, prompts=[(5, 6), (1, 2), (9, 9)])  # a's third, a's first, a new one
    b["prompts"][1]["name"] = "another name"
    k4 = compared(a, b).arms[1]
    assert k4.groups == (("p0", 2 / 1.5), ("p2", 1 / 0.5))
    assert (k4.a.seconds_per_token, k4.b.seconds_per_token) == (1.5, 1.0)  # of those prompts alone
    assert compared(a, b).notes == ("2 prompts in common, of 3 and 3: all numbers are over those",)


def test_without_token_ids_the_text_decides_and_a_repeated_prompt_is_matched_in_order() -> None:
    b = a_bench(A)
    for prompt in b["prompts"]:
        prompt["tokens"] = []
    assert len(compared(a_bench(A), b).arms[1].groups) == 3
    b["prompts"][0]["text"] = "another"
    assert [label for label, _ in compared(a_bench(A), b).arms[1].groups] == ["p1", "p2"]
    twice = a_bench(A, prompts=[(1, 2), (1, 2), (5, 6)])
    once = a_bench(B, prompts=[(1, 2), (3, 4), (5, 6)])
    assert compared(twice, twice).arms[1].groups == (("p0", 1.0), ("p1", 1.0), ("p2", 1.0))
    assert [label for label, _ in compared(twice, once).arms[1].groups] == ["p0", "p2"]


def test_groups_of_a_batch_are_paired_where_all_their_prompts_match() -> None:
    batched = [arm("plain", 0, batch=2), arm("k=4", 4, batch=2)]
    prompts = [(1, 2), (3, 4), (5, 6), (7, 8)]
    a = stored.bench([(x, {(0, 1): [2.0], (2, 3): [3.0]}) for x in batched], prompts=prompts)
    b = stored.bench([(x, {(1, 0): [1.0], (2, 3): [1.0]}) for x in batched], prompts=[*prompts[:3], (9, 9)])
    k4 = compared(a, b).arms[1]
    assert k4.groups == (("p0 + p1", 2.0),)
    assert (k4.a.tau, k4.batch) == (3.5, 2)
    ragged = stored.bench([(x, {(0, 1): [1.0], (2,): [1.0]}) for x in batched], prompts=prompts[:3])
    assert [label for label, _ in compared(a, ragged).arms[1].groups] == ["p0 + p1"]  # half of a's other group


def test_arms_are_matched_by_kind_k_and_batch_and_where_there_are_several_by_profile_and_engine() -> None:
    def names(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        documents = [parsed(stored.bench([(x, {}) for x in arms])) for arms in (a, b)]
        return [(x.name, y.name) for x, y in compare_module.match_arms(*documents)]

    plain = arm("plain", 0)
    assert names([plain, arm("x", 4)], [arm("z", 2), arm("y", 4), plain]) == [("plain", "plain"), ("x", "y")]
    assert names([arm("x", 4)], [arm("y", 4, batch=2)]) == []
    # one profile and engine each: what they are called may differ
    assert names([arm("x", 4)], [arm("y", 4, profile="other", engine="packed")]) == [("x", "y")]
    two = [arm("p4", 4, profile="p"), arm("q4", 4, profile="q"), arm("plain", 0, profile="p")]
    assert names(two, two[::-1]) == [("p4", "p4"), ("q4", "q4"), ("plain", "plain")]
    assert names(two, [two[1]]) == [("q4", "q4")]
    assert names([two[0], arm("q2", 2, profile="q")], [two[1]]) == []  # k = 4 of another draft among several
    # a plain arm has no draft: only where there are several must its profile be the same
    assert names(two, [arm("base", 0, profile="q")]) == [("plain", "base")]
    engines = [arm("eager", 0), arm("packed", 0, engine="packed")]
    assert names(engines, engines) == [("eager", "eager"), ("packed", "packed")]
    assert names(engines, [engines[1]]) == [("packed", "packed")]


def test_arms_of_one_file_alone_and_groups_that_were_cut_are_said() -> None:
    a = stored.bench(
        [(arm("plain", 0), PLAIN), (arm("k=4", 4), A), (arm("k=8", 8), A), (arm("k=2", 2), {(0,): [1.0]})]
    )
    b = stored.bench([(arm("plain", 0), PLAIN), (arm("k=4", 4), {(0,): [1.0]}), (arm("k=2", 2), {(1,): [1.0]})])
    found = compared(a, b)
    assert [(m.name, len(m.groups)) for m in found.arms] == [("plain", 3), ("k=4", 1)]
    assert found.notes == ("k=2: no prompt that both files measured", "arms in a alone: k=8")


def changed(**paths: Any) -> Callable[[], dict[str, Any]]:
    """A bench's document with values replaced: sampling__mode="greedy"."""

    def document() -> dict[str, Any]:
        found = copy.deepcopy(a_bench(A))
        for path, value in paths.items():
            *folders, last = path.split("__")
            at = found
            for folder in folders:
                at = at[folder]
            at[last] = value
        return found

    return document


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (changed(checkpoints__target__revision="xyz"), "target differs, abc and xyz"),
        (
            changed(checkpoints__target__revision=None, checkpoints__target__checkpoint="org/x"),
            "target differs, org/target (abc) and org/x",
        ),
        (changed(dtype="bfloat16"), "dtype differs, float32 and bfloat16"),
        (changed(device="mps"), "device differs, cpu and mps"),
        (changed(environment__processor="another"), "processor differs, a processor and another"),
        (changed(environment__threads=None), "threads differs, 2 and not set"),
        (changed(sampling__mode="coupled"), "mode differs, exact and coupled"),
        (changed(sampling__temperature=0.7), "temperature differs, 1.0 and 0.7"),
        (changed(sampling__top_k=40), "top_k differs, not set and 40"),
        (changed(sampling__repetition_penalty=1.2), "repetition_penalty differs, not set and 1.2"),
        (changed(design__max_new_tokens=20), "max_new_tokens differs, 10 and 20"),
        (lambda: a_bench(A, prompts=[(8, 8), (9, 9), (10, 10)]), "no prompt in common"),
        (lambda: stored.bench([(arm("k=2", 2), A)]), "no arm in common: plain, k=4 and k=2"),
        (lambda: a_bench({}, {}), "no arm was measured over the same prompts in both"),
    ],
)
def test_what_is_not_comparable_is_refused_with_the_reason(other: Any, reason: str) -> None:
    assert refusal(a_bench(A), other()) == f"a and b are not comparable: {reason}"
    assert refusal(other(), a_bench(A)).startswith("a and b are not comparable: ")


def test_all_reasons_are_named() -> None:
    other = changed(dtype="float16", environment__threads=4, sampling__top_p=0.9, prompts=[])()
    other["arms"], other["measurements"] = [arm("k=2", 2)], []
    assert refusal(a_bench(A), other) == (
        "a and b are not comparable: dtype differs, float32 and float16; threads differs, 2 and 4; "
        "top_p differs, not set and 0.9; no prompt in common; no arm in common: plain, k=4 and k=2"
    )


def test_gpus_are_compared_where_one_is_in_use() -> None:
    def on(device: str, *names: str) -> dict[str, Any]:
        return changed(device=device, environment__gpu=list(names))()

    assert "GPU differs, x and y" in refusal(on("cuda:0", "x"), on("cuda:0", "y"))
    assert compared(on("cuda:0", "x", "y"), on("cuda:1", "z", "x")).arms
    assert compared(on("cpu", "x"), on("cpu")).arms


@pytest.mark.parametrize(
    "other",
    [
        changed(sampling__k=8, sampling__seed=3, sampling__end_tokens=[7], sampling__sources={"k": "flag"}),
        changed(sampling__lenience=0.9, sampling__typical_delta=0.5),  # say nothing in mode exact
        changed(checkpoints__target__checkpoint="/a/copy", checkpoints__target__path="/a/copy"),  # one revision
        changed(checkpoints={"target": stored.CHECKPOINTS["target"], "draft one": stored.CHECKPOINTS["draft"]}),
        changed(environment__processor="a processor", environment__packages={}),
    ],
)
def test_what_may_differ_is_compared(other: Any) -> None:
    assert len(compared(a_bench(A), other()).arms) == 2


def test_a_setting_of_the_mode_in_use_must_agree() -> None:
    a, b = (changed(sampling__mode="lenient", sampling__lenience=x)() for x in (0.5, 0.9))
    assert refusal(a, b).endswith(": lenience differs, 0.5 and 0.9")


def test_what_differs_is_listed() -> None:
    b = changed(
        created="2025-02-02",
        environment__specgen="0.3.0",
        environment__git={"commit": "beef", "dirty": True},
        environment__packages={"torch": "2.14.0", "numpy": "2.0"},
        environment__load_average=[3.0, 1, 1],
        checkpoints__draft__checkpoint="org/smaller",
        design__runs_done=5,
    )()
    for x in b["arms"]:
        x["engine"] = "packed"
    assert compared(a_bench(A), b).differs == (
        ("specgen", "0.2.0", "0.3.0"),
        ("commit", "c0ffee", "beef (changed)"),
        ("torch", "2.13.0", "2.14.0"),
        ("transformers", "5.24.0", "not set"),
        ("engine", "eager", "packed"),
        ("draft", "org/draft (def)", "org/smaller (def)"),
        ("date", "2025-01-01T00:00:00+00:00", "2025-02-02"),
        ("load", "0.25", "3.00"),
        ("runs", "3", "5"),
        ("numpy", "not set", "2.0"),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"not JSON"),
        (json.dumps(a_bench(A))[:-50], r"not JSON"),
        ("{}", r"no result of specgen"),
        (json.dumps(stored.run([0.5])), r"a result of specgen run, where one of bench is needed"),
        (json.dumps(a_bench(A, schema_version=99)), r"schema version 99, and this specgen reads 1 to 2"),
        (json.dumps({k: v for k, v in a_bench(A).items() if k != "arms"}), r"not a whole bench result: arms"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    a, b = files(tmp_path, a_bench(A), text)
    result = invoked(a, b)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"specgen: {b}: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_files_that_are_not_there_and_stdin_twice(tmp_path: Path) -> None:
    a = str(stored.write(tmp_path, a_bench(A)))
    assert invoked(a, str(tmp_path / "none.json")).exit_code == 2
    twice = invoked("-", "-", stdin="")
    assert (twice.exit_code, twice.stderr) == (2, "specgen: - (stdin) can be read only once\n")
    assert invoked(a, "-", stdin=json.dumps(a_bench(A))).exit_code == 0


def ratios_of(values: Mapping[str, Sequence[float]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two benches whose paired ratios time(a) / time(b) are these, by arm."""
    n = len(next(iter(values.values())))
    prompts = [(p, p) for p in range(n)]
    arms = {"plain": arm("plain", 0), "k=4": arm("k=4", 4)}
    a = stored.bench([(arms[x], {(p,): [1.0] for p in range(n)}) for x in values], prompts=prompts)
    b = stored.bench(
        [(arms[x], {(p,): [1 / r] for p, r in enumerate(v)}) for x, v in values.items()], prompts=prompts
    )
    return a, b


@pytest.mark.parametrize(
    ("values", "bound", "failing"),
    [
        ({"plain": [1.0] * 6, "k=4": [0.8, 0.7, 0.8, 0.8, 0.9, 0.94]}, 0.95, ["k=4"]),
        ({"plain": [1.0] * 6, "k=4": [0.8, 0.7, 0.8, 0.8, 0.9, 0.96]}, 0.95, []),  # the interval reaches 0.95
        ({"plain": [0.5] * 6, "k=4": [0.5] * 6}, 0.95, ["plain", "k=4"]),
        ({"plain": [1.0] * 6, "k=4": [1.0] * 6}, 1.0, []),
        ({"plain": [1.0] * 3, "k=4": [0.9, 0.94, 1.5]}, 0.95, ["k=4"]),  # no interval: the estimate decides
        ({"plain": [1.0] * 3, "k=4": [0.9, 0.96, 0.5]}, 0.95, ["k=4"]),
        ({"plain": [1.0] * 3, "k=4": [0.9, 0.96, 1.5]}, 0.95, []),
    ],
)
def test_fail_below(tmp_path: Path, values: Any, bound: float, failing: list[str]) -> None:
    a, b = files(tmp_path, *ratios_of(values))
    assert invoked(a, b).exit_code == 0
    result = invoked(a, b, "--fail-below", str(bound))
    assert result.exit_code == (1 if failing else 0)
    assert "Seconds a token" in result.stdout  # the table comes whatever the outcome
    for name in values:
        assert (f"{name}: " in result.stderr) == (name in failing)
    if failing:
        assert result.stderr.startswith(f"specgen: {b} is slower than {bound:g} of {a}'s speed: {failing[0]}: 0.")
    document = json.loads(invoked(a, b, "--fail-below", str(bound), "--json").stdout)
    assert (document["fail_below"], document["failing"]) == (bound, failing)


def lacking() -> tuple[dict[str, Any], dict[str, Any]]:
    """a: plain, k = 4 and k = 8; b: plain alone, as fast."""
    times = {(p,): [1.0] for p in range(6)}
    a = stored.bench([(arm("plain", 0), times), (arm("k=4", 4), times), (arm("k=8", 8), times)], prompts=SIX)
    return a, stored.bench([(arm("plain", 0), times)], prompts=SIX)


def test_an_arm_that_b_lacks_fails_the_gate_and_is_noted_without_one(tmp_path: Path) -> None:
    a, b = files(tmp_path, *lacking())
    said = f"arms of {a} that {b} lacks, and that were not compared: k=4, k=8"
    gated = invoked(a, b, "--fail-below", "0.95")
    assert (gated.exit_code, gated.stderr) == (1, f"specgen: {said}\n")
    assert "Seconds a token" in gated.stdout
    plain = invoked(a, b)
    assert (plain.exit_code, plain.stderr) == (0, f"specgen: note: {said}\n")
    assert f"arms in {a} alone: k=4, k=8" in " ".join(plain.stdout.split())  # a long path folds
    document = json.loads(invoked(a, b, "--fail-below", "0.95", "--json").stdout)
    assert (document["failing"], document["missing"]) == ([], ["k=4", "k=8"])
    other_way = invoked(b, a, "--fail-below", "0.95")  # what b has besides is no failure
    assert (other_way.exit_code, other_way.stderr) == (0, "")


def test_an_arm_without_a_prompt_in_common_and_a_slow_one_both_fail_the_gate(tmp_path: Path) -> None:
    times = {(p,): [1.0] for p in range(6)}
    slow = {(p,): [2.0] for p in range(6)}
    a = stored.bench([(arm("plain", 0), times), (arm("k=4", 4), times), (arm("k=2", 2), {(0,): [1.0]})], prompts=SIX)
    b = stored.bench([(arm("plain", 0), times), (arm("k=4", 4), slow), (arm("k=2", 2), {(1,): [1.0]})], prompts=SIX)
    result = invoked(*files(tmp_path, a, b), "--fail-below", "0.95")
    assert result.exit_code == 1
    assert "speed: k=4: 0.500" in result.stderr
    assert result.stderr.endswith("not compared: k=2\n")


def test_fail_below_needs_a_sensible_number(tmp_path: Path) -> None:
    a, b = files(tmp_path, a_bench(A), a_bench(B))
    for value in ("0", "-1", "nan", "inf"):
        result = invoked(a, b, "--fail-below", value)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--fail-below {float(value)}: needs a number above 0" in result.stderr


def test_the_table_and_the_json_say_the_same(tmp_path: Path) -> None:
    a, b = files(tmp_path, a_bench(A), a_bench(B, created="[red]later"))
    shown = invoked(a, b)
    assert (shown.exit_code, shown.stderr) == (0, "")
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["k=4", "too", "few", "prompts", "for", "an", "interval", "(3)", "3", "1.500"] in rows
    assert ["k=4", "2.00", "2.00", "1.000", "0.833", "0.833", "3.500", "3.500"] in rows
    assert ["date", "2025-01-01T00:00:00+00:00", "[red]later"] in rows
    document = json.loads(invoked(a, b, "--json").stdout)
    assert (document["schema_version"], document["kind"], document["a"], document["b"]) == (2, "compare", a, b)
    k4 = document["arms"][1]
    assert (k4["name"], k4["ratio"]["estimate"], k4["ratio"]["low"]) == ("k=4", 1.5, None)
    assert k4["groups"][0] == {"label": "p0", "ratio": 2.0}
    assert (k4["a"]["tau"], k4["b"]["speedup"]["estimate"], k4["speedups"]) == (3.5, 2.0, 1.0)
    assert document["differs"] == [{"what": "date", "a": "2025-01-01T00:00:00+00:00", "b": "[red]later"}]


def test_an_interval_is_shown_behind_its_estimate(tmp_path: Path) -> None:
    a, b = files(tmp_path, *ratios_of({"plain": [0.8, 0.7, 0.8, 0.8, 0.9, 0.94]}))
    assert "0.800 [0.700, 0.940]" in invoked(a, b).stdout
    assert "b is slower" in invoked(a, b).stdout


def test_no_torch_is_imported(tmp_path: Path) -> None:
    a, b = files(tmp_path, a_bench(A), a_bench(B))
    code = (
        "import sys\nfrom specgen.cli.app import app\n"
        f"app(['compare', {a!r}, {b!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
