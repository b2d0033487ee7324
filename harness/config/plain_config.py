"""Builds a `Config` from a tree of plain values, without OmegaConf.

Why: every rank, node and offline tool reads `config.yaml` when it starts, and the help reads the files of the default
config. OmegaConf takes 0.12 CPU-s to merge the tree into the schema, and 0.1 CPU-s to be imported.
How: in such a tree every value has the type of its field, or is an integer for a float. A key that is missing has the
default of the schema. Any other tree (a missing key without a default, an interpolation, an invalid value) gives None:
`compose` then takes the usual way, with its conversions and error messages.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
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
    """A key without a default is missing, a key is unknown, or a value has another type than its field."""


def build_plain(tree: Any) -> Config | None:
    """The config of a tree; None: the tree is not complete, or not valid."""
    try:
        cfg = _build(Config, tree)
    except (_InexactError, ConfigError):
        return None
    assert isinstance(cfg, Config)
    return cfg


def _build(kind: Any, value: Any) -> Any:
    """The value of a field of this type."""
    if kind is float and type(value) is int:
        return float(value)
    if kind in SCALARS:
        _require_exact(type(value) is kind)
        _require_exact(kind is not str or not any(mark in value for mark in UNRESOLVED))
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        _require_exact(isinstance(value, dict) and _required(kind) <= value.keys() <= hints.keys())
        return kind(**{name: _build(hints[name], child) for name, child in value.items()})
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


@cache
def _required(kind: Any) -> set[str]:
    """Names of the fields without a default."""
    return {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
