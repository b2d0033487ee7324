"""Builds a `Config` from the tree of a file that the harness wrote itself, without OmegaConf.

Why: every rank, node and offline tool reads `config.yaml` when it starts. OmegaConf takes 0.12 CPU-s to merge the tree
into the schema, and 0.1 CPU-s to be imported.
How: such a file has every key, and every value has the type of its field. A tree of this kind is built directly. Any
other (an older version, an edit by hand, an interpolation, an invalid value) gives None: `compose.read` then takes the
usual way, with its conversions, defaults and error messages.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from harness.config.errors import ConfigError
from harness.config.schema import Config

SCALARS = (bool, int, float, str)
UNRESOLVED = ("${", "???")
"""OmegaConf's marks of an interpolation and of a missing value."""


class _InexactError(Exception):
    """A key is missing or unknown, or a value has another type than its field."""


def build_stored(tree: Any) -> Config | None:
    """The config of a complete tree; None: the tree is not complete, or not valid."""
    try:
        cfg = _build(Config, tree)
    except (_InexactError, ConfigError):
        return None
    assert isinstance(cfg, Config)
    return cfg


def _build(kind: Any, value: Any) -> Any:
    """The value of a field of this type."""
    if kind in SCALARS:
        _require_exact(type(value) is kind)
        _require_exact(kind is not str or not any(mark in value for mark in UNRESOLVED))
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        _require_exact(isinstance(value, dict) and value.keys() == hints.keys())
        return kind(**{name: _build(hint, value[name]) for name, hint in hints.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [each for each in inner if each is not NoneType]
        _require_exact(len(others) == 1 and len(inner) == 2)
        return None if value is None else _build(others[0], value)
    if origin is list:
        _require_exact(isinstance(value, list))
        return [_build(inner[0], each) for each in value]
    if origin is dict:
        _require_exact(isinstance(value, dict) and inner[0] is str)
        return {_build(str, name): _build(inner[1], each) for name, each in value.items()}
    _require_exact(isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str))
    _require_exact(value in kind.__members__)
    return kind[value]


def _require_exact(is_exact: bool) -> None:
    if not is_exact:
        raise _InexactError


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
