"""A result → one self-contained HTML page. Its numbers come from `analysis` and `statistics`; here they are laid out.

Needs plotly (the extra `report`); its script is written into the page, which asks for nothing outside itself. A
policy in the page lets the browser run these scripts only, whatever a prompt or a model's text holds.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from specgen.report import milliseconds, number
from specgen.rounds import PROMISES, Committed, Mode, Origin, Round, UsageError
from specgen.statistics import Statistics, summarise

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from specgen.analysis import Analysis, ArmRow
    from specgen.results import Bench, Row

KINDS = frozenset({"bench", "run"})
INSTALL = "the HTML page needs plotly: pip install 'specgen[report]'"
SHOWN_LINES = 6  # in one chart; more arms than this cannot be told apart
_LETTERS = {Origin.ACCEPTED: "a", Origin.CORRECTION: "c", Origin.BONUS: "b", Origin.PLAIN: "p"}

_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # in HTML


def require_plotly() -> None:
    """Raises UsageError where the charts cannot be drawn."""
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        raise UsageError(INSTALL) from None


def page(document: dict[str, Any], name: str = "the result") -> str:
    """The whole page, as HTML5 text, of the JSON data of a bench or of a run. Raises UsageError; name: for it."""
    require_plotly()
    if document.get("kind") == "bench":
        return _assembled(_bench(document, name))
    if document.get("kind") != "run":
        raise UsageError(f"{name}: a result of specgen {document.get('kind')} has no page: give one of run or bench")
    try:
        content = _run(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{name}: not a whole run result: {type(error).__name__} {error}") from None
    return _assembled(content)


# ------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class _View:
    """One generation: whose it is, its rounds in milliseconds, its tokens.

    tokens: [text, first letter of the origin, overlap or None, round, place in the round], the last two from 1.
    """

    arm: str
    prompt: str
    text: str
    draft: list[float]
    verify: list[float]
    other: list[float]
    tokens: list[list[Any]]


@dataclass(frozen=True)
class _Content:
    """What a page is made of. sections: (heading, HTML); figures: by the id of the element they are drawn in."""

    title: str
    kind: str
    lead: str
    sections: list[tuple[str, str]]
    figures: dict[str, Figure]
    views: list[_View]


def _bench(document: dict[str, Any], name: str) -> _Content:
    from specgen.analysis import analyse
    from specgen.page import figures
    from specgen.results import parse_bench

    bench = parse_bench(document, name)
    found = analyse(bench)
    speculative = [row for row in found.arms if row.kind == "speculative"]
    drawn = _shown(speculative, found.verdict.best)
    lines = {row.name: [p for p in found.positions if p.arm == row.name] for row in drawn}
    by_category = [
        (row.name, [(c.category, c.speedup) for c in found.categories if c.arm == row.name and c.speedup is not None])
        for row in drawn
    ]
    left_out = len(speculative) - len(drawn)
    note = _p(f"{len(drawn)} of {len(speculative)} arms are drawn; the table has them all.") if left_out else ""
    charts = {
        "speedup": figures.speedup(*_lines_by_k(found)),
        "acceptance": figures.acceptance([(name, rows) for name, rows in lines.items() if rows]),
        "histogram": figures.histogram([(row.name, _accepted_counts(bench, row.name)) for row in drawn]),
    }
    sections = [
        ("Speedup", _chart("speedup", "Speedup against k with its interval, and the predicted speedup")
         + _arms_table(found)),
        ("Acceptance", note + _chart("acceptance", "Accepted / tested, by position in the round")
         + _positions_table([(p.arm, p) for p in found.positions])
         + _chart("histogram", "Tokens accepted in a round")),
    ]  # fmt: skip
    if with_rows := [line for line in by_category if line[1]]:
        charts["categories"] = figures.categories(with_rows)
        caption = "Speedup by category, with its interval where there are prompts enough for one"
        sections.append(("By category", note + _chart("categories", caption)))
    views = _bench_views(bench, found.verdict.best)
    sections += _generation_sections(views, charts, "Of the first timed run.")
    design = bench.design.model_dump()
    settings = {"created": bench.created, "design": design, "sampling": bench.sampling, "dtype": bench.dtype,
                "device": bench.device, "profiles": bench.profiles, "checkpoints": bench.checkpoints}  # fmt: skip
    sections += _settings_sections(settings, bench.environment)
    verdict = _p(found.verdict.text, "verdict") + "".join(_p(reason) for reason in found.verdict.reasons)
    lead = verdict + _contract(str(bench.sampling.get("mode"))) + _warnings([*found.warnings, *bench.notes])
    return _Content(", ".join(bench.profiles), "bench", lead, sections, charts, views)


def _run(document: dict[str, Any]) -> _Content:
    from specgen.page import figures

    results = document["results"]
    rounds = [_rounds(result) for result in results]
    plain = all(result["plain"] for result in results)
    pooled = summarise([r for one in rounds for r in one], drafting=not plain)
    charts: dict[str, Figure] = {}
    sections = []
    if pooled.positions:
        charts["acceptance"] = figures.acceptance([("all prompts" if len(results) > 1 else "run", pooled.positions)])
        charts["histogram"] = figures.histogram([("run", _counted(r.accepted for one in rounds for r in one))])
        for chart in charts.values():
            chart.update_layout(showlegend=False)
        sections.append((
            "Acceptance",
            _chart("acceptance", "Accepted / tested, by position in the round")
            + _positions_table([("", p) for p in pooled.positions])
            + _chart("histogram", "Tokens accepted in a round"),
        ))  # fmt: skip
    views = [_run_view(result, one) for result, one in zip(results, rounds, strict=True)]
    old = "" if all("pieces" in result for result in results) else (
        "This file holds no text of the single tokens (an older specgen wrote it): they are shown by id."
    )  # fmt: skip
    sections += _generation_sections(views, charts, old)
    sections.append(("The run's check of itself", "".join(_check(result, len(results) > 1) for result in results)))
    settings = {name: document[name] for name in ("sampling", "dtype", "device", "profile", "checkpoints")}
    sections += _settings_sections(settings, document["environment"])
    lead = _p(_rates(pooled), "verdict") + _p(
        "No speedup is shown: a run is not measured against plain decoding (specgen bench does that)."
    )
    lead += _p("plain decoding of the target, no draft") if plain else _contract(document["sampling"]["mode"])
    return _Content(document["profile"]["name"] or "run", "run", lead, sections, charts, views)


def _rates(s: Statistics) -> str:
    speed = f"{number(s.tokens_per_second)} tokens/s ({s.committed} tokens, prefill apart)"
    if not s.tested:
        return speed
    return (
        f"α {number(s.alpha, 3)} = {s.accepted} accepted / {s.tested} tested; τ {number(s.tau, 3)} = {s.committed} "
        f"committed / {s.rounds} target calls; {speed}"
    )


# ----------------------------------------------------------------------------------------- from bench and run


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


def _counted(accepted: Iterable[int]) -> dict[int, int]:
    """{tokens accepted: rounds}, without gaps."""
    counts = Counter(accepted)
    return {n: counts[n] for n in range(max(counts, default=0) + 1)} if counts else {}


def _accepted_counts(bench: Bench, arm: str) -> dict[int, int]:
    return _counted(a for m in bench.timed(arm) for row in m.rows for a in row.accepted)


def _bench_views(bench: Bench, best: str | None) -> list[_View]:
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
                views.append(_View(
                    arm.name, prompt.name + category, prompt.text,
                    _ms(steps.draft_s[:n]), _ms(steps.verify_s[:n]), _ms(other[:n]),
                    _row_tokens(row, bench.pieces, plain=arm.kind == "plain"),
                ))  # fmt: skip
    plain = {arm.name for arm in bench.arms if arm.kind == "plain"}
    return sorted(views, key=lambda view: (view.arm != best, view.arm in plain))


def _row_tokens(row: Row, pieces: dict[int, str], *, plain: bool) -> list[list[Any]]:
    """A row's tokens as `_View` has them; who wrote each follows from its round's counts."""
    from specgen.analysis import rounds_of

    found: list[list[Any]] = []
    for r in rounds_of(row):
        last = Origin.CORRECTION if r.tested > r.accepted else Origin.BONUS
        for j in range(len(r.committed)):
            origin = Origin.PLAIN if plain else Origin.ACCEPTED if j < r.accepted else last
            overlap = r.overlaps[j] if j < r.tested else None
            token = row.tokens[len(found)]
            found.append([_piece(pieces.get(token), token), _LETTERS[origin], overlap, r.index + 1, j + 1])
    return found


def _piece(text: str | None, token: int) -> str:
    return f"⟨{token}⟩" if text is None else text


def _rounds(result: dict[str, Any]) -> list[Round]:
    """A run's rounds out of its JSON."""
    return [
        Round(**{**r, "committed": tuple(Committed(**{**c, "origin": Origin(c["origin"])}) for c in r["committed"])})
        for r in result["rounds"]
    ]


def _run_view(result: dict[str, Any], rounds: Sequence[Round]) -> _View:
    pieces = result.get("pieces") or [None] * len(result["tokens"])
    committed = [(c, r.index + 1, j) for r in rounds for j, c in enumerate(r.committed, 1)]
    tokens: list[list[Any]] = [
        [_piece(piece, c.token), _LETTERS[c.origin], c.overlap, n, j]
        for piece, (c, n, j) in zip(pieces, committed, strict=True)
    ]
    return _View(
        "plain" if result["plain"] else "run", result["name"], result["prompt"],
        _ms([r.draft_s for r in rounds]), _ms([r.verify_s for r in rounds]), _ms([r.other_s for r in rounds]), tokens,
    )  # fmt: skip


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(s * 1000, 4) for s in seconds]


# ------------------------------------------------------------------------------------------------------- HTML


def _text(value: object) -> str:
    """Escaped for HTML; what HTML may not hold (control characters, half surrogate pairs) shows as U+FFFD."""
    return html.escape(_FORBIDDEN.sub("\ufffd", str(value)))


def _p(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{_text(text)}</p>' if kind else f"<p>{_text(text)}</p>"


def _chart(name: str, caption: str) -> str:
    return (
        f'<figure><figcaption id="{name}-caption">{_text(caption)}</figcaption>'
        f'<div class="chart" id="{name}" role="group" aria-labelledby="{name}-caption"></div></figure>'
    )


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """The first column heads its row. Scrolls sideways on its own where it is too wide, with the keyboard too."""
    head = "".join(f'<th scope="col">{_text(c)}</th>' for c in columns)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(c)}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{_text(caption)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _arms_table(found: Analysis) -> str:
    from specgen.analysis import interval_text

    columns = ["arm", "speedup [interval]", "predicted speedup", "measured / predicted", "α", "τ", "draft ms/token",
               "verify ms", "other ms", "tokens/s", "first token ms"]  # fmt: skip
    if found.identical:
        columns.append("identical")
    rows = []
    for a in found.arms:
        row = [a.name, interval_text(a.speedup), number(a.predicted), number(a.ratio), number(a.alpha, 3),
               number(a.tau), *map(_seconds, (a.draft_s, a.verify_s, a.other_s)), number(a.tokens_per_second),
               _seconds(a.first_s)]  # fmt: skip
        if found.identical:
            same = found.identical.get(a.name)
            row.append("-" if same is None else f"{same[0]}/{same[1]}")
        rows.append(row)
    return _table("Every arm", columns, rows)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def _positions_table(rows: Sequence[tuple[str, Any]]) -> str:
    """rows: (arm or nothing, PositionRow or PositionRate)."""
    arms = any(arm for arm, _ in rows)
    columns = [*(["arm"] if arms else []), "position", "tested", "accepted", "rate", "mean overlap"]
    body = [
        [*([arm] if arms else []), p.position, p.tested, p.accepted, number(p.rate, 3), number(p.overlap, 3)]
        for arm, p in rows
    ]
    return f"<details><summary>The numbers</summary>{_table('Acceptance by position', columns, body)}</details>"


def _contract(mode: str) -> str:
    promise = PROMISES[Mode(mode)] if mode in set(Mode) else "unknown to this specgen"
    return f'<p class="contract"><strong>{_text(mode)}</strong>: {_text(promise)}</p>'


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f"<li>{_text(w)}</li>" for w in warnings)
    return f'<section class="warnings" aria-label="Warnings"><h2>Warnings</h2><ul>{items}</ul></section>'


def _generation_sections(views: Sequence[_View], charts: dict[str, Figure], note: str) -> list[tuple[str, str]]:
    """One generation, chosen by arm and prompt: its rounds and its text, filled in by the page's script."""
    from specgen.page.figures import timeline

    if not views:
        return []
    charts["timeline"] = timeline(views[0].draft, views[0].verify, views[0].other)
    arms = list(dict.fromkeys(v.arm for v in views))
    prompts = list(dict.fromkeys(v.prompt for v in views))

    def chooser(name: str, label: str, options: Sequence[str]) -> str:
        listed = "".join(f'<option value="{_text(o)}">{_text(o)}</option>' for o in options)
        hidden = " hidden" if len(options) < 2 else ""
        return f'<label{hidden}>{label} <select id="{name}">{listed}</select></label>'

    legend = "".join(
        f'<li><span class="t {letter}">{_text(word)}</span> {_text(meaning)}</li>'
        for letter, word, meaning in (
            ("a", "accepted", "drafted, and kept"),
            ("c", "correction", "drawn at the first rejection"),
            ("b", "bonus", "drawn after all drafted tokens were kept"),
            ("p", "plain", "decoded without a draft"),
        )
        if any(token[1] == letter for view in views for token in view.tokens)
    )
    return [(
        "One generation",
        (_p(note) if note else "")
        + f'<p class="choose">{chooser("arm", "arm", arms)} {chooser("prompt", "prompt", prompts)}</p>'
        + _chart("timeline", "Where each round's time goes")
        + '<h3>Text, by who wrote it</h3><details><summary>The prompt</summary><pre id="prompt-text"></pre></details>'
        + f'<ul class="legend">{legend}</ul>'
        + '<div id="text" class="text" role="listbox" aria-label="Tokens; arrow keys move"></div>'
        + '<p id="token" class="token">Hover, tap or focus a token for its overlap.</p>',
    )]  # fmt: skip


def _check(result: dict[str, Any], named: bool) -> str:
    heading = f"<h3>{_text(result['name'])}</h3>" if named else ""
    check = result["check"]
    if check is None:
        return heading + _p("left out")
    marks = {True: "ok", False: "FAILED", None: "–"}
    rows = [
        [
            r["name"],
            marks[r["passed"]],
            "-" if r["value"] is None else f"{r['value']:.3g}",
            f"{r['bound']:.3g}",
            r["note"],
        ]
        for r in check["rows"]
    ]
    table = _table("Self-check", ["check", "", "value", "bound", "what it sees"], rows, "noted") if rows else ""
    return heading + _p(check["verdict"]) + table


def _settings_sections(settings: dict[str, Any], environment: dict[str, Any]) -> list[tuple[str, str]]:
    def listed(data: dict[str, Any]) -> str:
        pairs = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in _flat(data))
        return f"<dl>{pairs}</dl>"

    return [(
        "Settings and environment",
        f"<details><summary>Settings</summary>{listed(settings)}</details>"
        f"<details><summary>Environment</summary>{listed(environment)}</details>",
    )]  # fmt: skip


def _flat(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """{"a": {"b": 1}} → [("a.b", "1")]; what is empty or off is left out."""
    if isinstance(data, dict):
        return [
            pair for key, value in data.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if data is None or data in ([], ""):
        return []
    return [(prefix, data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))]


# -------------------------------------------------------------------------------------------------- the whole


def _json(data: Any) -> str:
    """JSON that may stand inside <script>: nothing in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _palette_css() -> str:
    from specgen.page.figures import PALETTE

    def variables(at: int) -> str:
        return "".join(f"--{name}:{colours[at]};" for name, colours in PALETTE.items())

    return f":root{{{variables(0)}}}\n@media (prefers-color-scheme: dark){{:root{{{variables(1)}}}}}\n"


def _assembled(content: _Content) -> str:
    from plotly.offline import get_plotlyjs

    from specgen.environment import version
    from specgen.page.figures import PALETTE

    folder = resources.files("specgen.page")
    # The library holds control characters in string literals, where an escape is the same.
    plotly = _FORBIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", get_plotlyjs())
    script = folder.joinpath("script.js").read_text(encoding="utf-8")
    data = {
        "figures": {name: json.loads(figure.to_json()) for name, figure in content.figures.items()},
        "views": [vars(view) for view in content.views],
        "dark": dict(PALETTE.values()),
    }
    body = "".join(f"<section><h2>{_text(heading)}</h2>{inner}</section>\n" for heading, inner in content.sections)
    parts = {
        "title": _text(content.title),
        "kind": _text(content.kind),
        "version": _text(version()),
        "policy": f"default-src 'none'; script-src {_digest(plotly)} {_digest(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'",
        "style": _palette_css() + folder.joinpath("style.css").read_text(encoding="utf-8"),
        "lead": content.lead,
        "body": body,
        "data": _json(data),
        "plotly": plotly,
        "script": script,
    }
    template = folder.joinpath("template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
