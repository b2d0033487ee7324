"""The page of one run: data in, one HTML document out that needs nothing else, not even a network.

How: style, script, the plotting library and the data are written into the document. Data is JSON with every `<`, `>`
and `&` escaped, texts become text nodes, and the document's own policy lets no script run but the two it carries, by
their hashes: what a file of the run says, a name or a reason, is shown and never obeyed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

SCRIPTS = ("tables.js", "panels.js", "page.js")


def render(data: dict[str, Any]) -> str:
    """The document of `harness.analysis.dashboard.page_data.page_data`."""
    plotly, script = library(), "\n".join(resource(name) for name in SCRIPTS)
    return fill(
        resource("page.html"),
        title=escape(data["facts"]["run"]["name"]),
        policy=policy(plotly, script, live=data["live"]),
        style=resource("page.css"),
        data=to_json(data),
        plotly=plotly,
        script=script,
    )


def fill(template: str, **texts: str) -> str:
    """The template with each {{name}} replaced; what is filled in is not looked at again."""
    parts = template.split("{{")
    out = [parts[0]]
    for part in parts[1:]:
        name, rest = part.split("}}", 1)
        out += [texts[name], rest]
    return "".join(out)


def policy(*scripts: str, live: bool) -> str:
    """What the browser may do for this page: run these scripts, use its style, and, of a server, ask for more."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts
    )
    connect = "connect-src 'self'; " if live else ""
    inline = "style-src 'unsafe-inline'; img-src data: blob:"
    return f"default-src 'none'; script-src {hashes}; {connect}{inline}; base-uri 'none'; form-action 'none'"


def to_json(data: Any) -> str:
    """JSON that can stand in a script element; what is not finite is null."""
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: finite(child) for key, child in value.items()}
        case list() | tuple():
            return [finite(child) for child in value]
        case _:
            return value


@cache
def resource(name: str) -> str:
    """A file that lies beside this one."""
    return (files("harness.analysis.dashboard") / name).read_text(encoding="utf-8")


@cache
def library() -> str:
    """The plotting library; a closing tag inside it would end its script."""
    return str(get_plotlyjs()).replace("</script", "<\\/script")
