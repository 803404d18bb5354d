"""The page's charts, as plotly figures in the light palette; the page itself swaps in the dark one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from specgen.analysis.intervals import Interval, interval_text

if TYPE_CHECKING:
    from specgen.analysis.tables import Predicted


# name → (light, dark). No light colour may occur twice: the page finds the dark one by it.
PALETTE = {
    "page": ("#fbfbf9", "#15181b"),
    "panel": ("#f2f2ee", "#1e2226"),
    "ink": ("#1c2125", "#e3e6e8"),
    "muted": ("#59626b", "#9da6ae"),
    "rule": ("#dcded8", "#343a40"),
    "accepted": ("#1d7550", "#63c79b"),
    "correction": ("#ab431b", "#f0976c"),
    "bonus": ("#2d5bae", "#8ab2f7"),
    "plain": ("#5d646c", "#a8b0b7"),
    "accepted-tint": ("#e2f1e9", "#1b332a"),
    "correction-tint": ("#f9e3d8", "#42261a"),
    "bonus-tint": ("#dfe8f8", "#1f2f4b"),
    "s1": ("#0f6cb3", "#62b0ee"),
    "s2": ("#c8551b", "#f5935a"),
    "s3": ("#2a8463", "#55c49b"),
    "s4": ("#8b4fa8", "#c893e2"),
    "s5": ("#8a6d0b", "#d6b548"),
    "s6": ("#b03a66", "#f0809f"),
    "draft": ("#d9863c", "#e79a55"),
    "verify": ("#3f78a8", "#5f9fd3"),
    "other": ("#8c949b", "#79828a"),
}


LIGHT = {name: colours[0] for name, colours in PALETTE.items()}


SERIES = [LIGHT[f"s{i}"] for i in range(1, 7)]


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")


DASHES = ("solid", "dash", "dot", "dashdot")


PATTERNS = ("", "/", "x", ".", "\\", "+", "-")


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"


def _of(values: Sequence[str], at: int) -> str:
    return values[at % len(values)]


def escaped(text: str) -> str:
    """Text for a chart: plotly reads a few tags and entities in labels, and a name is none of them."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _figure(x: str, y: str, height: int = 340, **layout: Any) -> go.Figure:
    axis = {
        "gridcolor": LIGHT["rule"],
        "linecolor": LIGHT["rule"],
        "zeroline": False,
        "automargin": True,
        "title": {"font": {"size": 13}, "standoff": 10},
        "tickfont": {"size": 12},
        "fixedrange": True,
    }
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(),
        height=height,
        margin={"l": 8, "r": 12, "t": 12, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        dragmode=False,
        font={"family": FONT, "size": 13, "color": LIGHT["ink"]},
        showlegend=True,
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)",
            "traceorder": "normal",
        },
        hoverlabel={"bgcolor": LIGHT["panel"], "bordercolor": LIGHT["rule"], "font": {"color": LIGHT["ink"]}},
        xaxis=axis,
        yaxis=axis,
        **layout,
    )
    figure.update_xaxes(title_text=x, showgrid=False)
    figure.update_yaxes(title_text=y)
    return figure


def _pattern(shape: str) -> dict[str, Any]:
    """Strokes in the page's colour over the bar's own, so that colour is not all that tells bars apart."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": LIGHT["page"], "solidity": 0.2, "size": 7}


def _ends(i: Interval) -> tuple[float, float]:
    return (i.estimate, i.estimate) if i.low is None or i.high is None else (i.low, i.high)


def _bars(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Error bars; none where an interval has no ends."""
    return {
        "type": "data",
        "symmetric": False,
        "thickness": 1.5,
        "width": 5,
        "array": [_ends(i)[1] - i.estimate for i in intervals],
        "arrayminus": [i.estimate - _ends(i)[0] for i in intervals],
    }


def _shown(interval: Interval) -> str:
    coverage = "too few prompts for an interval" if interval.coverage is None else f"{interval.coverage:.1%} interval"
    return f"speedup {interval_text(interval)} ({coverage})"


def speedup(
    measured: Sequence[tuple[str, list[tuple[int, str, Interval]]]],
    predicted: Sequence[tuple[str, list[Predicted]]],
) -> go.Figure:
    """Against k. measured, predicted: by line (profile, engine, batch), points in the order of k."""
    figure = _figure("k, tokens drafted a round", "times plain decoding")
    labels = list(dict.fromkeys([name for name, _ in measured] + [name for name, _ in predicted]))
    alone = len(labels) == 1
    for name, line in predicted:
        at = labels.index(name)
        figure.add_scatter(
            x=[p.k for p in line],
            y=[p.speedup for p in line],
            mode="lines+markers",
            name="predicted speedup" if alone else f"predicted, {escaped(name)}",
            line={"color": _of(SERIES, at), "dash": "dot", "width": 1.5},
            marker={"symbol": f"{_of(SYMBOLS, at)}-open", "size": 6, "color": _of(SERIES, at)},
            customdata=[[p.tau, p.alpha] for p in line],
            hovertemplate="k = %{x}: predicted speedup %{y:.2f}<br>τ %{customdata[0]:.2f}<extra></extra>",
        )
    for name, points in measured:
        at = labels.index(name)
        figure.add_scatter(
            x=[k for k, _, _ in points],
            y=[i.estimate for _, _, i in points],
            mode="markers",
            name="speedup, measured" if alone else f"measured, {escaped(name)}",
            marker={"symbol": _of(SYMBOLS, at), "size": 10, "color": _of(SERIES, at)},
            error_y=_bars([i for _, _, i in points]),
            text=[f"{escaped(arm)}: {_shown(i)}" for _, arm, i in points],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.add_hline(y=1, line={"color": LIGHT["muted"], "width": 1})
    figure.update_xaxes(dtick=1 if max([k for _, line in measured for k, _, _ in line], default=1) <= 12 else None)
    figure.update_yaxes(autorangeoptions_include=1)
    return figure


def acceptance(lines: Sequence[tuple[str, Sequence[Any]]]) -> go.Figure:
    """Conditional rate at each drafted position. lines: (label, rows with position, tested, accepted, rate)."""
    figure = _figure("position in the round", "accepted / tested")
    for at, (name, rows) in enumerate(lines):
        figure.add_scatter(
            x=[r.position for r in rows],
            y=[r.rate for r in rows],
            name=escaped(name),
            mode="lines+markers",
            line={"color": _of(SERIES, at), "dash": _of(DASHES, at), "width": 1.8},
            marker={"symbol": _of(SYMBOLS, at), "size": 8, "color": _of(SERIES, at)},
            customdata=[[r.accepted, r.tested] for r in rows],
            hovertemplate="position %{x}: %{y:.3f}<br>%{customdata[0]} accepted of %{customdata[1]} tested"
            "<extra>%{fullData.name}</extra>",
        )
    figure.update_yaxes(range=[0, 1.04])
    figure.update_xaxes(dtick=1 if max([r.position for _, rows in lines for r in rows], default=1) <= 16 else None)
    return figure


def histogram(lines: Sequence[tuple[str, dict[int, int]]]) -> go.Figure:
    """Share of rounds by the number of tokens accepted. lines: (label, {accepted: rounds})."""
    figure = _figure("accepted in a round", "share of rounds", barmode="group", bargap=0.25)
    for at, (name, counts) in enumerate(lines):
        rounds = sum(counts.values())
        figure.add_bar(
            x=list(counts),
            y=[n / rounds for n in counts.values()],
            name=escaped(name),
            marker={"color": _of(SERIES, at), "pattern": _pattern(_of(PATTERNS, at))},
            customdata=list(counts.values()),
            hovertemplate="%{x} accepted: %{y:.1%}, %{customdata} rounds<extra>%{fullData.name}</extra>",
        )
    figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(dtick=1 if max([a for _, counts in lines for a in counts], default=1) <= 16 else None)
    return figure


def categories(lines: Sequence[tuple[str, Sequence[tuple[str, Interval]]]]) -> go.Figure:
    """Speedup of each arm in each category, with its interval. lines: (arm, its (category, speedup))."""
    names = list(dict.fromkeys(category for _, rows in lines for category, _ in rows))
    height = 110 + len(names) * (30 + 16 * len(lines))
    figure = _figure("speedup, times plain decoding", "", height, scattermode="group", scattergap=0.3)
    for at, (name, rows) in enumerate(lines):
        figure.add_scatter(
            x=[i.estimate for _, i in rows],
            y=[escaped(category) for category, _ in rows],
            mode="markers",
            name=escaped(name),
            orientation="h",
            marker={"symbol": _of(SYMBOLS, at), "size": 9, "color": _of(SERIES, at)},
            error_x=_bars([i for _, i in rows]),
            text=[f"{escaped(category)}, {escaped(name)}: {_shown(i)}" for category, i in rows],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.add_vline(x=1, line={"color": LIGHT["muted"], "width": 1})
    ends = [1.0, *(end for _, rows in lines for _, i in rows for end in _ends(i))]
    room = 0.06 * (max(ends) - min(ends)) or 0.1  # plotly's own choice would begin at 0 here
    figure.update_xaxes(showgrid=True, range=[min(ends) - room, max(ends) + room])
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def timeline(draft: Sequence[float], verify: Sequence[float], other: Sequence[float]) -> go.Figure:
    """Milliseconds of each round, stacked; the page puts another generation's numbers into the same three traces."""
    figure = _figure("round", "ms", barmode="stack", bargap=0.15)
    rounds = list(range(1, len(verify) + 1))
    for name, values, shape in (("draft", draft, "/"), ("verify", verify, ""), ("other", other, ".")):
        figure.add_bar(
            x=rounds,
            y=list(values),
            name=name,
            marker={"color": LIGHT[name], "line": {"width": 0}, "pattern": _pattern(shape)},
            hovertemplate=f"round %{{x}}: {name} %{{y:.2f}} ms<extra></extra>",
        )
    return figure
