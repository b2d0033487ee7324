"""Renders the post-mortem as one HTML file: readable on a phone, in light and dark mode, without a network.

The Markdown of `harness.analysis.postmortem.report.markdown_report` is the only source. Pictures are embedded.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from harness.analysis.markdown_html import to_html_with_pictures

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
li > p { margin: 0; }
pre, code { background: var(--soft); border-radius: 4px; font-size: .85rem; }
code { padding: .1rem .25rem; }
pre { padding: .6rem; overflow-x: auto; white-space: pre-wrap; }
pre code { padding: 0; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .88rem; margin: .8rem 0; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; }
.figure { display: block; margin: 1rem 0; }
img { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; background: #ffffff; }
.caption { display: block; font-size: .8rem; }
"""


def render(markdown: str, folder: Path, *, title: str) -> str:
    """The page; pictures are read from `folder`."""
    body = to_html_with_pictures(markdown, folder=folder)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}</style></head>\n<body>\n{body}</body>\n</html>\n"
    )
