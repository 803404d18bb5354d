"""Content → the page: its template, filled in and escaped, with the style, the scripts and the data they draw."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from specgen.report.page.content import Content

_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # in HTML


def _shown(value: Any) -> Any:
    """What HTML may not hold (control characters, half surrogate pairs) shows as U+FFFD; what is HTML stays."""
    return value if hasattr(value, "__html__") else _FORBIDDEN.sub("\ufffd", str(value))


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("specgen.report.page"),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # `tojson` escapes what could end the element or open a comment.
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return templates


def _digest(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _palette_css() -> str:
    from specgen.report.page.figures import PALETTE

    def variables(at: int) -> str:
        return "".join(f"--{name}:{colours[at]};" for name, colours in PALETTE.items())

    return f":root{{{variables(0)}}}\n@media (prefers-color-scheme: dark){{:root{{{variables(1)}}}}}\n"


def rendered(content: Content) -> str:
    from plotly.offline import get_plotlyjs

    from specgen.machine.environment import version
    from specgen.report.page.figures import PALETTE

    folder = resources.files("specgen.report.page")
    # The library holds control characters in string literals, where an escape is the same.
    plotly = _FORBIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", get_plotlyjs())
    script = folder.joinpath("script.js").read_text(encoding="utf-8")
    return (
        _templates()
        .get_template(f"{content.kind}.html")
        .render(
            content.said,
            title=content.title,
            kind=content.kind,
            version=version(),
            policy=f"default-src 'none'; script-src {_digest(plotly)} {_digest(script)}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'",
            # Markup: these are the package's own, and a script's digest is of the very text.
            style=Markup(_palette_css() + folder.joinpath("style.css").read_text(encoding="utf-8")),
            plotly=Markup(plotly),
            script=Markup(script),
            data={
                "figures": {name: json.loads(figure.to_json()) for name, figure in content.figures.items()},
                "views": [vars(view) for view in content.views],
                "dark": dict(PALETTE.values()),
            },
        )
    )
