"""A post-mortem's Markdown as a piece of HTML that is safe to put into a page: the door to the Markdown library.

How: tags in the text are shown, not obeyed; links that could run something are not made; pictures become links, because
a page carries everything with it and the panels are on it already.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token


def to_html(text: str, *, folder: str) -> str:
    """`text` as HTML; relative links lead into `folder`."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("image", _picture)
    parser.add_render_rule("link_open", _link)
    return str(parser.render(text, {"folder": folder}))


def _picture(
    _: RendererHTML, tokens: Sequence[Token], index: int, __: Any, environment: MutableMapping[str, Any]
) -> str:
    source, words = str(tokens[index].attrGet("src") or ""), tokens[index].content or "picture"
    return f'<a href="{escape(_below(source, environment["folder"]))}">{escape(words)}</a>'


def _link(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: Any, environment: MutableMapping[str, Any]
) -> str:
    tokens[index].attrSet("href", _below(str(tokens[index].attrGet("href") or ""), environment["folder"]))
    return renderer.renderToken(tokens, index, options, environment)


def _below(address: str, folder: str) -> str:
    return address if ":" in address or address.startswith(("/", "#")) else f"{folder}/{address}"
