"""The post-mortem as one HTML file: readable on a phone, in light and in dark, without a network.

How: the Markdown of `harness.analysis.postmortem.report.markdown_report` is the only source. It uses little of the
language (headings, lists, code, pictures), so a few lines here turn it into HTML; whatever comes from data is escaped.
Pictures are put into the page itself; one that cannot be read is left out with its name.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path

STYLE = """\
:root { color-scheme: light dark; --ink: #24292f; --paper: #ffffff; --line: #d9dde2; --soft: #f4f5f7; --link: #2563a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d7dce2; --paper: #15181c; --line: #353b43; --soft: #20252b; --link: #7fb2ea; }
}
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; margin-top: 2rem; }
h2 { font-size: 1.1rem; margin-top: 1.6rem; }
h3 { font-size: .95rem; margin-bottom: .2rem; }
ul, ol { padding-left: 1.2rem; margin: .3rem 0; }
pre, code { background: var(--soft); border-radius: 4px; font-size: .85rem; }
code { padding: .1rem .25rem; }
pre { padding: .6rem; overflow-x: auto; white-space: pre-wrap; }
pre code { padding: 0; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; background: #ffffff; }
figcaption { font-size: .8rem; }
"""
IMAGE = re.compile(r"!\[(.*?)\]\((.*?)\)")
HEADING = re.compile(r"(#{1,3}) (.*)")
ITEM = re.compile(r"( *)(?:-|(\d+)\.) (.*)")
CODE = re.compile(r"`([^`]*)`")
INDENT = "      "


def render(markdown: str, folder: Path, *, title: str) -> str:
    """The page; pictures are looked for in `folder`."""
    body = "\n".join(_blocks(markdown.splitlines(), folder))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _blocks(lines: list[str], folder: Path) -> Iterator[str]:
    opened: list[str] = []
    """Lists that are open, outermost first."""
    for line in lines:
        item = None if line.startswith(INDENT) else ITEM.fullmatch(line)
        depth = len(item[1]) // 2 + 1 if item else 0
        kind = "ol" if item and item[2] else "ul"
        while len(opened) > depth or (len(opened) == depth > 0 and opened[-1] != kind):
            yield f"</{opened.pop()}>"
        if item is not None:
            if len(opened) < depth:
                opened.append(kind)
                yield f"<{kind}>"
            yield f"<li>{_inline(item[3])}</li>"
        elif line.startswith(INDENT):
            yield f"<pre><code>{escape(line.strip())}</code></pre>"
        elif heading := HEADING.fullmatch(line):
            level = len(heading[1])
            yield f"<h{level}>{_inline(heading[2])}</h{level}>"
        elif image := IMAGE.fullmatch(line):
            yield _figure(image[1], folder / image[2])
        elif line.strip():
            yield f"<p>{_inline(line)}</p>"
    while opened:
        yield f"</{opened.pop()}>"


def _inline(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", escape(text))


def _figure(caption: str, path: Path) -> str:
    try:
        data = b64encode(path.read_bytes()).decode("ascii")
    except OSError:
        return f"<p>{escape(caption)}: {escape(path.name)} is missing</p>"
    picture = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"
