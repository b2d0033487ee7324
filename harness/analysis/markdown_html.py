"""Renders Markdown reports as HTML that is safe to put into a page. Only this module imports the Markdown library.

HTML tags in the text are escaped, and links that could run a script stay text. The dashboard turns pictures into links,
because it already draws the panels; the page of a post-mortem embeds them, so that it is one file.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, MutableMapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

RenderRule = Callable[[RendererHTML, Sequence[Token], int, Any, MutableMapping[str, Any]], str]


def to_html(text: str, *, folder: str) -> str:
    """`text` as HTML; pictures become links, and relative links point into `folder`."""
    return _render(text, image=_image_link, folder=folder)


def to_html_with_pictures(text: str, *, folder: Path) -> str:
    """`text` as HTML with its pictures embedded; they are read from `folder`."""
    return _render(text, image=_embedded_image, folder=folder)


def _render(text: str, *, image: RenderRule, folder: str | Path) -> str:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("image", image)
    if isinstance(folder, str):
        parser.add_render_rule("link_open", _relative_link)
    return str(parser.render(text, {"folder": folder}))


def _image_link(
    _: RendererHTML, tokens: Sequence[Token], index: int, __: Any, environment: MutableMapping[str, Any]
) -> str:
    source, caption = str(tokens[index].attrGet("src") or ""), tokens[index].content or "picture"
    return f'<a href="{escape(_address_in(source, environment["folder"]))}">{escape(caption)}</a>'


def _embedded_image(
    _: RendererHTML, tokens: Sequence[Token], index: int, __: Any, environment: MutableMapping[str, Any]
) -> str:
    """The picture as a data URI; a missing one is replaced by its name. Only plain file names are read."""
    source, caption = str(tokens[index].attrGet("src") or ""), escape(tokens[index].content or "picture")
    name = Path(source).name
    try:
        data = b64encode((environment["folder"] / name).read_bytes()).decode("ascii")
    except OSError:
        return f'<span class="caption">{caption}: {escape(name)} is missing</span>'
    picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f'<span class="figure">{picture}<span class="caption">{caption}</span></span>'


def _relative_link(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: Any, environment: MutableMapping[str, Any]
) -> str:
    tokens[index].attrSet("href", _address_in(str(tokens[index].attrGet("href") or ""), environment["folder"]))
    return renderer.renderToken(tokens, index, options, environment)


def _address_in(address: str, folder: str) -> str:
    is_absolute = ":" in address or address.startswith(("/", "#"))
    return address if is_absolute else f"{folder}/{address}"
