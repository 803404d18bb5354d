"""The HTML page: what it says, and how a real browser shows it."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specgen.analysis.analyse import analyse
from specgen.errors import UsageError
from specgen.report.page import KINDS, page
from specgen.report.page.figures import PALETTE
from specgen.results.files import SCHEMA_VERSION, parse_bench
from support import browser
from support.command import process, write_pair
from support.pages import HOSTILE, WORDS, bench_document, run_document


@pytest.fixture(scope="module")
def bench_page() -> str:
    return page(bench_document())


@pytest.fixture(scope="module")
def run_page() -> str:
    return page(run_document())


def data_of(text: str) -> dict[str, Any]:
    """The JSON that the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def figure(text: str, name: str) -> list[dict[str, Any]]:
    return list(data_of(text)["figures"][name]["data"])


def test_speedups_are_those_of_the_analysis_with_their_intervals(bench_page: str) -> None:
    found = analyse(parse_bench(bench_document(), "test"))
    predicted, measured = figure(bench_page, "speedup")
    rows = [row for row in found.arms if row.speedup is not None]
    assert measured["x"] == [1, 2, 4]
    assert measured["y"] == [row.speedup.estimate for row in rows if row.speedup]
    ups, downs = measured["error_y"]["array"], measured["error_y"]["arrayminus"]
    assert [(y + up, y - down) for y, up, down in zip(measured["y"], ups, downs, strict=True)] == [
        pytest.approx((row.speedup.high, row.speedup.low)) for row in rows if row.speedup
    ]
    assert predicted["x"] == [1, 2, 3, 4, 5, 6]  # every candidate, measured or not
    assert predicted["y"] == [p.speedup for p in found.predictions]
    assert found.verdict.text in bench_page
    assert "the target's distribution, in exact arithmetic" in html.unescape(bench_page)


def test_acceptance_by_position_is_accepted_of_tested(bench_page: str) -> None:
    line = figure(bench_page, "acceptance")[1]  # commits 3, 1, 3, 1, 3 and a lone 1; 7 prompts × 2 runs
    assert line["name"] == "k = 2"
    assert line["x"] == [1, 2]
    assert line["customdata"] == [[42, 70], [42, 42]]
    assert line["y"] == [0.6, 1.0]
    assert "<td>70</td><td>42</td><td>0.600</td>" in bench_page


def test_histogram_counts_every_round_of_the_timed_runs(bench_page: str) -> None:
    bars = figure(bench_page, "histogram")[1]
    assert (bars["x"], bars["customdata"], bars["y"]) == ([0, 1, 2], [42, 0, 42], [0.5, 0.0, 0.5])


def test_a_generation_has_its_rounds_in_ms_and_its_tokens_by_writer(bench_page: str) -> None:
    views = data_of(bench_page)["views"]
    assert len(views) == 4 * 7  # an arm and a prompt; the first run of each
    view = next(v for v in views if v["arm"] == "k = 2")
    assert view["draft"] == [3.9062] * 5 + [0]  # 2 steps of 2/1024 s
    assert view["verify"] == [17.5781] * 5 + [13.6719]
    assert view["other"] == [1.9531] * 6
    assert [t[1] for t in view["tokens"]] == list("aabcaabcaabb")
    assert [t[2:] for t in view["tokens"][:4]] == [[0.75, 1, 1], [0.75, 1, 2], [None, 1, 3], [0.75, 2, 1]]
    assert [t[0] for t in view["tokens"][:2]] == [WORDS[4], WORDS[5]]
    assert {t[1] for v in views if v["arm"] == "plain" for t in v["tokens"]} == {"p"}


def test_a_run_has_the_same_charts_but_speedup_and_shows_its_check(run_page: str) -> None:
    data = data_of(run_page)
    assert set(data["figures"]) == {"acceptance", "histogram", "timeline"}
    assert figure(run_page, "acceptance")[0]["y"] == [0.5, 1.0]
    assert figure(run_page, "histogram")[0]["customdata"] == [1, 0, 1]
    (view,) = data["views"]
    assert view["tokens"] == [
        ["The", "a", 0.75, 1, 1],
        [" cat", "a", 0.5, 1, 2],
        [HOSTILE, "b", None, 1, 3],
        ["\n", "c", 0.125, 2, 1],
    ]
    assert view["other"] == [3.0, 3.0]
    assert "not measured against plain decoding" in run_page
    assert "no fault seen in 4 positions" in run_page
    assert "α 0.667 = 2 accepted / 3 tested; τ 2.000 = 4 committed / 2 target calls" in run_page


def test_a_run_of_an_older_specgen_shows_token_ids() -> None:
    old = run_document()
    del old["results"][0]["pieces"]
    text = page({**old, "schema_version": 1})
    assert [t[0] for t in data_of(text)["views"][0]["tokens"]] == ["⟨0⟩", "⟨1⟩", "⟨7⟩", "⟨3⟩"]
    assert "This file holds no text of the single tokens" in text


def test_a_plain_run_has_no_acceptance() -> None:
    plain = run_document()
    result = plain["results"][0]
    result["plain"] = True
    result["rounds"] = [
        {
            **result["rounds"][1],
            "index": i,
            "drafted": 0,
            "tested": 0,
            "overlaps": [],
            "committed": [{**result["rounds"][1]["committed"][0], "origin": "plain", "overlap": None}],
        }
        for i in range(4)
    ]
    text = page(plain)
    assert set(data_of(text)["figures"]) == {"timeline"}
    assert "plain decoding of the target, no draft" in text


class Balanced(HTMLParser):
    """Every element is closed in its order, no id stands twice, and which attributes there are."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [v or "" for k, v in attrs if k == "id"]
        self.handlers += [k for k, _ in attrs if k.startswith("on") or k in ("src", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("which", ["bench_page", "run_page"])
def test_the_page_is_whole_html_and_hostile_text_stays_text(which: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(which)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.tags.count("script") == 3  # the data, the library, ours
    assert "img" not in parser.tags
    assert parser.handlers == []
    assert text.count("<script") - text.count("\\x3cscript") >= 3


def test_what_html_cannot_hold_is_replaced() -> None:
    odd = run_document()
    odd["profile"]["name"] = "a\ud800b\x00c"
    text = page(odd)
    assert "<h1>a\ufffdb\ufffdc</h1>" in text
    text.encode()


def test_texts_that_escape_from_a_script_or_a_template_do_neither() -> None:
    odd = run_document()
    odd["results"][0]["prompt"] = odd["profile"]["name"] = hostile = "</script><!--<script>{{ 1 + 1 }}{% raw %}&amp;"
    text = page(odd)
    assert text.count(hostile) == 0
    assert "<h1>&lt;/script&gt;&lt;!--&lt;script&gt;{{ 1 + 1 }}{% raw %}&amp;amp;</h1>" in text
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert not set("<>&") & set(found[1])
    assert data_of(text)["views"][0]["text"] == hostile


def test_light_colours_tell_their_dark_ones() -> None:
    lights = [light for light, _ in PALETTE.values()]
    assert len(set(lights)) == len(lights)


@pytest.mark.parametrize("broken", [{"results": [{}]}, {"results": None}, {"sampling": None}, {"profile": 3}])
def test_what_is_no_whole_run_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"r\.json: not a whole run result"):
        page({**run_document(), **broken}, "r.json")


def test_other_kinds_are_refused() -> None:
    assert {"bench", "run"} == KINDS
    with pytest.raises(UsageError, match="specgen audit has no page"):
        page({"kind": "audit"})


def report(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return process(folder, "report", *arguments, **environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bench.json").write_text(json.dumps(bench_document()))
    (tmp_path / "run.html").write_text(json.dumps(run_document()))
    return tmp_path


def test_report_writes_beside_the_result_and_says_where(folder: Path, bench_page: str) -> None:
    done = report(folder, "bench.json")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("specgen: wrote bench.html (")
    assert (folder / "bench.html").read_text() == bench_page


def test_report_to_stdout_is_the_page_alone(folder: Path, run_page: str) -> None:
    done = report(folder, "run.html", "-o", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_page


def test_report_refuses_its_own_input(folder: Path) -> None:
    for arguments in (["run.html"], ["bench.json", "-o", "./bench.json"]):
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        done = report(folder, *arguments)
        assert done.returncode == 2
        assert "is an input; name another file" in done.stderr
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.json"], "absent.json: No such file"),
        (["bench.json", "-o", "nowhere/x.html"], "there is no folder nowhere"),
        (["bench.json", "-o", "."], "is a folder"),
        (["audit.json"], "a result of specgen audit, where one of bench or run is needed"),
    ],
)
def test_report_says_what_is_wrong(folder: Path, arguments: list[str], says: str) -> None:
    (folder / "audit.json").write_text(json.dumps({"schema_version": 1, "kind": "audit"}))
    done = report(folder, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("library", ["plotly", "jinja2"])
def test_without_its_libraries_report_says_what_to_install(folder: Path, library: str) -> None:
    (folder / "hidden" / library).mkdir(parents=True)
    (folder / "hidden" / library / "__init__.py").write_text("raise ImportError('hidden')")
    path = [str(folder / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = report(folder, "bench.json", PYTHONPATH=os.pathsep.join(path))
    assert done.returncode == 2
    assert done.stderr == "specgen: the HTML page needs plotly and jinja2: pip install 'specgen[report]'\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair")).parent


def specgen_run(pair: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--profile", "pair.yaml", "--prompt", "a loaf", "--max-new-tokens", "12", *arguments]
    return process(pair, "run", *options)


def test_run_report_is_the_page_of_the_run_and_leaves_stdout_alone(pair: Path) -> None:
    done = specgen_run(pair, "--report", "out.html", "-q")
    assert done.returncode == 0
    assert re.fullmatch(r"specgen: wrote out\.html \(\d\.\d MB\)\n", done.stderr)
    tokens = data_of((pair / "out.html").read_text())["views"][0]["tokens"]
    assert len(tokens) == 12
    shown = "".join(t[0] for t in tokens).replace("[UNK]", "")  # a special token, which the text leaves out
    assert shown.strip("\n") == done.stdout.strip("\n")


def test_run_report_and_json_are_one_result(pair: Path) -> None:
    done = specgen_run(pair, "--report", "both.html", "--json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == SCHEMA_VERSION
    assert len(document["results"][0]["pieces"]) == 12
    assert (pair / "both.html").read_text() == page(document)


def test_run_report_is_refused_before_anything_runs(pair: Path) -> None:
    for target, says in (("nowhere/x.html", "there is no folder nowhere"), (".", "is a folder")):
        done = specgen_run(pair, "--report", target)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--report {target}: {says}" in done.stderr


DRAWN = "document.documentElement.dataset.drawn === 'yes'"


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Page]:
    if browser.found() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI has no Chromium: .ci/run installs one as root")
        pytest.skip("no Chromium here")
    with browser.browsing() as opened:
        yield opened


@pytest.fixture(params=["bench", "run"])
def opened(request: pytest.FixtureRequest, tab: browser.Page, tmp_path: Path) -> browser.Page:
    """The page, drawn on a wide light screen; nothing of an earlier one."""
    path = tmp_path / f"{request.param}.html"
    path.write_text(request.getfixturevalue(f"{request.param}_page"))
    tab.emulate()
    for seen in (tab.messages, tab.requests, tab.failed):
        seen.clear()
    tab.open(path, DRAWN)
    return tab


def pixels(png: bytes) -> tuple[int, bytes]:
    """Width, and the pixels of an 8 bit RGB or RGBA image, as filtered by rows."""
    assert png.startswith(b"\x89PNG")
    at, data, width = 8, b"", 0
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        if kind == b"IHDR":
            width = int.from_bytes(png[at + 8 : at + 12])
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    return width, zlib.decompress(data)


def test_nothing_is_loaded_and_nothing_complains(opened: browser.Page) -> None:
    assert opened.messages == []
    assert opened.failed == []
    assert [r for r in opened.requests if not r.startswith(("data:", "blob:"))] == [opened.run("location.href")]
    assert opened.run("performance.getEntriesByType('resource').map(e => e.name)") == []


def test_hostile_text_runs_nothing_and_is_shown(opened: browser.Page) -> None:
    assert opened.run("window.hit") is None
    assert opened.run("document.querySelectorAll('script').length") == 3
    assert opened.run("document.querySelectorAll('img').length") == 0
    assert opened.run("document.getElementById('prompt-text').textContent") == HOSTILE
    assert HOSTILE in opened.run("document.getElementById('text').textContent")


def test_the_policy_of_the_page_lets_nothing_else_run(opened: browser.Page) -> None:
    opened.run("document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.hit=3\">x</b>')")
    opened.run("document.body.lastElementChild.click()")
    assert opened.run("fetch('https://example.invalid/').then(() => 'fetched', () => 'refused')") == "refused"
    assert opened.run("window.hit") is None
    assert any("Content Security Policy" in m for m in opened.messages)


def test_every_chart_is_drawn(opened: browser.Page) -> None:
    charts = opened.run(
        """[...document.querySelectorAll('.chart')].map(c => ({
            id: c.id, traces: data.figures[c.id].data.length,
            width: c.querySelector('.main-svg')?.getBoundingClientRect().width ?? 0,
            height: c.querySelector('.main-svg')?.getBoundingClientRect().height ?? 0,
            drawn: c.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length,
            marks: c.querySelectorAll('.point path, path.point, .points path').length}))"""
    )
    names = opened.run("Object.keys(data.figures)")
    assert sorted(c["id"] for c in charts) == sorted(names)
    for chart in charts:
        assert chart["width"] > 300
        assert chart["height"] > 100
        assert chart["drawn"] == chart["traces"] > 0
        assert chart["marks"] > 0


def test_error_bars_are_drawn_where_there_is_an_interval(opened: browser.Page) -> None:
    bars = opened.run("document.querySelectorAll('#speedup .errorbar').length")
    assert bars == (3 if opened.run("'speedup' in data.figures") else 0)


def test_tokens_are_spans_with_their_overlap_and_the_keyboard_reaches_them(opened: browser.Page) -> None:
    spans = "[...document.querySelectorAll('#text > .t')]"
    view = opened.run("data.views[0]")
    assert opened.run(f"{spans}.map(s => s.textContent)") == [t[0] for t in view["tokens"]]
    assert opened.run(f"{spans}.map(s => s.classList[1])") == [t[1] for t in view["tokens"]]
    assert opened.run(f"{spans}.every(s => s.title && s.title === s.getAttribute('aria-label'))")
    label = opened.run(f"{spans}[0].title")
    assert re.search(r'": (accepted|correction), overlap 0\.750; round 1, token 1$', label)
    opened.run(f"{spans}[0].focus()")
    assert opened.run("document.getElementById('token').textContent") == label
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
    assert opened.run(f"{spans}.indexOf(document.activeElement)") == 1
    assert opened.run(f"{spans}.filter(s => s.tabIndex === 0).length") == 1
    lines = opened.run(f"[...new Set({spans}.map(s => getComputedStyle(s).textDecorationStyle))].length")
    assert lines == len({t[1] for t in view["tokens"]})  # told apart without colour


def test_another_generation_can_be_chosen(opened: browser.Page) -> None:
    if opened.run("data.views.length") == 1:
        assert opened.run("getComputedStyle(document.getElementById('arm').parentElement).display") == "none"
        return
    opened.run("arm.value = 'plain'; arm.dispatchEvent(new Event('change'))")
    opened.wait("document.querySelectorAll('#timeline .barlayer .trace')[1].querySelectorAll('.point').length === 12")
    assert opened.run("[...text.children].every(s => s.classList.contains('p'))")
    assert opened.messages == []


def test_light_and_dark_differ_in_page_and_charts(opened: browser.Page) -> None:
    def look() -> tuple[str, str, str]:
        return tuple(
            opened.run(f"getComputedStyle(document.querySelector('{at}')).{what}")
            for at, what in (("body", "backgroundColor"), ("body", "color"), ("#timeline .xtitle", "fill"))
        )  # type: ignore[return-value]

    light, bright = look(), opened.screenshot()
    opened.emulate(scheme="dark")
    opened.wait(f"getComputedStyle(document.querySelector('#timeline .xtitle')).fill !== '{light[2]}'")
    dark, dim = look(), opened.screenshot()
    assert light[0] == "rgb(251, 251, 249)"
    assert dark[0] == "rgb(21, 24, 27)"
    assert all(a != b for a, b in zip(light, dark, strict=True))
    for shot in (bright, dim):
        width, rows = pixels(shot)
        assert width >= 1000
        assert len(set(rows)) > 50  # not blank
    assert opened.messages == []


def test_a_phone_scrolls_down_only(opened: browser.Page) -> None:
    opened.emulate(width=360, height=740, mobile=True)
    opened.wait("document.querySelector('.chart .main-svg').getBoundingClientRect().width < 360")
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert opened.run("document.documentElement.scrollWidth") <= 360
    assert opened.run("Math.max(...[...document.querySelectorAll('.chart')].map(c => c.scrollWidth))") <= 360
    assert opened.messages == []
