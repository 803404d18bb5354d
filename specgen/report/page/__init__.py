"""A result → one self-contained HTML page. Its numbers come from `analysis` and `statistics`; here they are laid out.

Needs plotly and jinja2 (the extra `report`); plotly's script is written into the page, which asks for nothing outside
itself. A policy in the page lets the browser run these scripts only, whatever a prompt or a model's text holds.
"""

from __future__ import annotations

from typing import Any

from specgen.errors import UsageError
from specgen.report.page.bench import bench_content
from specgen.report.page.run import run_content
from specgen.results.files import parsed
from specgen.results.run import Run

KINDS = frozenset({"bench", "run"})


INSTALL = "the HTML page needs plotly and jinja2: pip install 'specgen[report]'"


def require_libraries() -> None:
    """Raises UsageError where the page cannot be laid out or its charts cannot be drawn."""
    try:
        import jinja2  # noqa: F401
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        raise UsageError(INSTALL) from None


def page(document: dict[str, Any], name: str = "the result") -> str:
    """The whole page, as HTML5 text, of the JSON data of a bench or of a run. Raises UsageError; name: for it."""
    require_libraries()
    from specgen.report.page.render import rendered

    if document.get("kind") == "bench":
        return rendered(bench_content(document, name))
    if document.get("kind") != "run":
        raise UsageError(f"{name}: a result of specgen {document.get('kind')} has no page: give one of run or bench")
    return rendered(run_content(parsed(Run, document, name)))
