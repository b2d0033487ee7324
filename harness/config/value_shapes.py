"""Finds a list, a map or null where the schema has another shape.

Why: OmegaConf accepts a list or a map as an item of a list of strings or numbers, and names no key in some of its
errors about lists and maps.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import is_dataclass
from enum import EnumMeta
from functools import cache
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from harness.config.errors import ConfigError
from harness.config.plain_config import UNRESOLVED

WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def require_shape(kind: Any, value: Any, key: str) -> None:
    """Raise `ConfigError` at the first value below `key` that is a list, a map or null where its type is another. A
    single value where a section belongs is left to OmegaConf."""
    if kind is Any or (isinstance(value, str) and any(mark in value for mark in UNRESOLVED)):
        return
    if isinstance(kind, UnionType) and NoneType in get_args(kind):
        if value is None:
            return
        kind, *_ = (each for each in get_args(kind) if each is not NoneType)
    origin = get_origin(kind)
    match value:
        case dict() if is_dataclass(kind):
            hints = _hints(cast(Hashable, kind))
            for name in hints.keys() & value.keys():
                require_shape(hints[name], value[name], f"{key}.{name}".lstrip("."))
        case dict() if origin is dict:
            for name, child in value.items():
                if not isinstance(name, str):
                    raise ConfigError(key, f"must have names that are strings, got {name}")
                require_shape(get_args(kind)[1], child, f"{key}.{name}")
        case list() if origin is list:
            for number, child in enumerate(value):
                require_shape(get_args(kind)[0], child, f"{key}[{number}]")
        case dict() if origin is list:
            items = "{...}" if is_dataclass(get_args(kind)[0]) else "..."
            raise ConfigError(key, f"is a list; write {key}=[{items}]")
        case list() if origin is dict:
            inner = "sections: {name: {...}}" if is_dataclass(get_args(kind)[1]) else "numbers: {name: 1}"
            raise ConfigError(key, f"must map names to {inner}, got {value}")
        case list() | dict() | None if not is_dataclass(kind) and origin not in (list, dict):
            _require_single(kind, value, key)


def _require_single(kind: Any, value: Any, key: str) -> None:
    """Raise `ConfigError` for a list, a map or null where one value belongs."""
    if value is None:
        raise ConfigError(key, "must not be null")
    word = f"one of {', '.join(kind.__members__)}" if isinstance(kind, EnumMeta) else WORDS[kind]
    raise ConfigError(key, f"must be {word}, got {value}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Cached: Python evaluates all annotations at each call."""
    return get_type_hints(kind)
