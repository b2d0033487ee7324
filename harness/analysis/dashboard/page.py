"""Renders the dashboard of one run, or a comparison of runs, as a single HTML document that works without a network.

Style, script, plotting library and data are embedded. Data is JSON with every `<`, `>` and `&` escaped, and the script
inserts texts as text nodes. The Content-Security-Policy allows only the two embedded scripts, by their hashes. So text
from the run's files, such as a name or a reason, cannot run as code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

SCRIPTS = ("common.js", "tables.js", "panels.js", "page.js")
COMPARISON_SCRIPTS = ("common.js", "tables.js", "panels.js", "compare.js")


def render(data: dict[str, Any]) -> str:
    """The HTML document for the output of `harness.analysis.dashboard.page_data.page_data`."""
    return render_with_panels("page.html", SCRIPTS, data, title=data["facts"]["run"]["name"], live=data["live"])


def render_comparison(data: dict[str, Any]) -> str:
    """The HTML document for the output of `harness.analysis.dashboard.comparison.comparison_data`."""
    return render_with_panels("compare.html", COMPARISON_SCRIPTS, data, title=data["title"], live=False)


def render_with_panels(template: str, scripts: Sequence[str], data: dict[str, Any], *, title: str, live: bool) -> str:
    """A template with its style, data, the plotting library and scripts."""
    plotly, script = library(), "\n".join(resource(name) for name in scripts)
    return fill_template(
        resource(template),
        title=escape(title),
        policy=policy(plotly, script, live=live),
        style=resource("page.css"),
        data=script_json(data),
        plotly=plotly,
        script=script,
    )


def fill_template(template: str, **texts: str) -> str:
    """The template with each {{name}} replaced; inserted texts are not expanded again."""
    parts = template.split("{{")
    out = [parts[0]]
    for part in parts[1:]:
        name, rest = part.split("}}", 1)
        out += [texts[name], rest]
    return "".join(out)


def policy(*scripts: str, live: bool) -> str:
    """The Content-Security-Policy: only these scripts and inline style; on a live page also requests to its server."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    connect = "connect-src 'self'; " if live else ""
    inline = "style-src 'unsafe-inline'; img-src data: blob:"
    return f"default-src 'none'; script-src {hashes}; {connect}{inline}; base-uri 'none'; form-action 'none'"


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element; NaN and Inf become null."""
    text = json.dumps(replace_non_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def replace_non_finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: replace_non_finite(child) for key, child in value.items()}
        case list() | tuple():
            return [replace_non_finite(child) for child in value]
        case _:
            return value


@cache
def resource(name: str) -> str:
    """A file in the directory of this module."""
    return (files("harness.analysis.dashboard") / name).read_text(encoding="utf-8")


@cache
def library() -> str:
    """The plotting library, with closing script tags inside it escaped."""
    return str(get_plotlyjs()).replace("</script", "<\\/script")
