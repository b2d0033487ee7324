"""Renders every config key with its value and its meaning, for `harness train --help`.

The meaning and the unit of a key are the docstring under its field in `harness/config/`. The same texts make
docs/configuration.md, so the two cannot differ.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from harness.config.schema import Config

TEXT_COLUMN = 36
"""Column of the meanings."""
NARROW = 90
"""Below this width a meaning starts on the line after its key."""


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Class name -> its syntax tree. `inspect.getsource` of each class would parse the whole module every time."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def field_texts(section: type) -> dict[str, str]:
    """Field name -> the docstring under it, in one line; empty if there is none."""
    node = _classes_of(section.__module__)[section.__name__]
    texts: dict[str, str] = {}
    for statement, next_statement in zip(node.body, [*node.body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                texts[name] = ""
                match next_statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        texts[name] = " ".join(text.split())
    return texts


def render_keys(cfg: Config, *, width: int) -> str:
    """Every key of a configuration as YAML, with its meaning as a comment; no line is wider than `width`."""
    return "\n".join(line for section in _lines(cfg, "") for line in _wrap(*section, width=width))


def _lines(section: Any, indent: str) -> Iterator[tuple[str, str]]:
    """`key: value` and its meaning, for each key of a section and of those below it."""
    texts = field_texts(type(section))
    for field in fields(section):
        value, text = getattr(section, field.name), texts.get(field.name, "")
        match value:
            case _ if is_dataclass(value):
                yield f"{indent}{field.name}:", text or section_text(type(value))
                yield from _lines(value, indent + "  ")
            case dict() if value and all(is_dataclass(child) for child in value.values()):
                yield f"{indent}{field.name}:", text
                for name, child in value.items():
                    yield f"{indent}  {name}:", ""
                    yield from _lines(child, indent + "    ")
            case _:
                yield f"{indent}{field.name}: {yaml_value(value)}", text


def section_text(section: type) -> str:
    """The docstring of a section, if it is one line."""
    text = inspect.getdoc(section) or ""
    return text.splitlines()[0] if text else ""


def yaml_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case StrEnum():
            return str(value)
        case list() | tuple():
            return f"[{', '.join(map(yaml_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{name}: {yaml_value(child)}' for name, child in value.items())}}}"
        case _ if is_dataclass(value):
            return yaml_value({field.name: getattr(value, field.name) for field in fields(value)})
        case _:
            return str(value)


def _wrap(key: str, text: str, *, width: int) -> Iterator[str]:
    """A key beside its meaning, which continues below itself; in a narrow terminal, below its key."""
    is_narrow = width < NARROW
    indent = len(key) - len(key.lstrip())
    column = indent + 4 if is_narrow else TEXT_COLUMN
    rows = textwrap.wrap(f"# {text}", max(20, width - column), subsequent_indent="# ", break_long_words=False)
    if not text or is_narrow or len(key) >= TEXT_COLUMN:
        yield from textwrap.wrap(key, width, subsequent_indent=" " * (indent + 2), break_long_words=False)
        rows = rows if text else []
    else:
        yield f"{key:<{TEXT_COLUMN}}{rows.pop(0)}"
    yield from (" " * column + row for row in rows)
