"""Turns every error of Hydra and OmegaConf about a config into one line that names the key and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from harness.config.conf_files import BASE, explain_yaml, find_bad_defaults, options_of
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.config.usual_keys import USUAL_KEYS
from harness.config.value_shapes import require_shape
from harness.core.credentials import without_credentials

NO_ENTRY = r"Key '.*' is not in struct|Invalid type assigned: dict is not a subclass"
"""OmegaConf's message for an override inside a section that does not exist in its dict."""

UNREADABLE = "cannot be parsed; write key=value and quote special characters"

TRANSLATIONS = (
    (r"Value '(.*)' of type '.*' could not be converted to Float", r"must be a number, got '\1'"),
    (r"Value '(.*)' of type '.*' could not be converted to Integer", r"must be an integer, got '\1'"),
    (r"Value '(.*)' is not a valid bool .*", r"must be true or false, got '\1'"),
    (r"Cannot convert '.*' to string: '(.*)'", r"must be a string, got \1"),
    (r"Invalid value '(.*)', expected one of \[(.*)\]", r"must be one of \2, got '\1'"),
    (r"(Invalid type assigned|Merge error): .* value: (.*)", r"must be a section of keys, got \2"),
    (r"Invalid value assigned: (.*) is not a ListConfig, list or tuple\.", r"must be a list: [...]"),
    (r"Cannot assign (.*) to Dict.*", r"must map names to sections: {name: {...}}"),
    (r"field '.*' is not Optional", r"must not be null"),
    (r"Missing mandatory value: .*", r"has no value"),
    (
        r"Could not create instance of `Config`: .* missing \d+ required .*?: '(\w+)'.*",
        r"section \1 must not be removed",
    ),
    (r".* does not support deletion", r"cannot be removed"),
    (r"Ambiguous value for argument '(.*?)=(.*?)'.*", r"\1: got several values, \2; add --multirun to sweep over them"),
    (
        r"Could not override '(.*?)'\. No match in the defaults list\..*use (\+.*)",
        r"\1: not chosen by default; add it with \2",
    ),
)
"""Patterns of Hydra's and OmegaConf's messages, and our message beside the name of the key."""


def explain(error: Exception, overrides: Sequence[str] = ()) -> Exception:
    """Convert an error of Hydra or OmegaConf about an override to a `ConfigError`; other errors are returned as is."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if wrong := find_wrong_shape(overrides):
        return wrong
    match cause:
        case MissingConfigException(missing_cfg_file=str(missing), options=[*options]):
            group, _, option = missing.rpartition("/")
            choices = ", ".join(name for name in options if name != BASE)
            return ConfigError(group, f"no {option!r}; choose one of {choices}")
        case OverrideParseException():
            return ConfigError(without_credentials(cause.override or ""), UNREADABLE)
        case OmegaConfBaseException() if cause.full_key:
            return explain_key(whole_key(str(cause.full_key), overrides), str(cause))
        case yaml.MarkedYAMLError() if cause.problem_mark:
            return explain_yaml(cause, cause.problem_mark.name)
        case OmegaConfBaseException():
            return ConfigError(suspects(overrides), translate(str(cause).splitlines()[0]))
        case AttributeError() | ValueError():
            explained = explain_override(cause, overrides)
            return explained if explained is not cause else find_bad_defaults() or cause
        case HydraException():
            return ConfigError("", translate(str(cause)))
        case _:
            return error


def explain_key(key: str, complaint: str, keys: Callable[[str], tuple[str, ...]] | None = None) -> ConfigError:
    """The error for a known key: the key does not exist, or its value has the wrong type.

    `keys` lists the keys of a section; by default, of a section of a run's configuration.
    """
    keys = keys or keys_of
    section, _, name = key.rpartition(".")
    allowed = keys(section)
    if keys(key) and not allowed and re.match(NO_ENTRY, complaint):
        listed = ", ".join(keys(key))
        return ConfigError(key, f"does not exist; add it with +{section}={{{name}: {{...}}}} and the keys {listed}")
    if re.sub(r"\[\d+\]$", "", name) in allowed or not allowed:
        inside = f"; its keys are {', '.join(keys(key))}" if keys(key) else ""
        return ConfigError(key, translate(complaint.splitlines()[0]) + inside)
    meant = guess_key(name, allowed, in_run=keys is keys_of)
    hint = f"; did you mean {meant}?" if meant else ""
    return ConfigError(key, f"no such key; {section or 'the configuration'} has {', '.join(allowed)}{hint}")


def guess_key(name: str, allowed: Sequence[str], *, in_run: bool) -> str:
    """The key that a user may have meant: of the same section, under its usual name, or of another section.

    `in_run`: the key belongs to the configuration of a run.
    """
    if close := difflib.get_close_matches(name, allowed, n=1):
        return close[0]
    if not in_run:
        return ""
    if name in USUAL_KEYS:
        return USUAL_KEYS[name]
    leaves = leaf_keys()
    close = difflib.get_close_matches(name, leaves, n=1)
    return leaves[close[0]] if close else ""


@cache
def leaf_keys() -> dict[str, str]:
    """Last part of a key -> the whole key, for those that only one section has."""
    found: dict[str, list[str]] = {}

    def walk(section: str) -> None:
        for name in keys_of(section):
            key = f"{section}.{name}" if section else name
            if keys_of(key):
                walk(key)
            else:
                found.setdefault(name, []).append(key)

    walk("")
    return {name: keys[0] for name, keys in found.items() if len(keys) == 1}


def whole_key(key: str, overrides: Sequence[str]) -> str:
    """The key with its section, which OmegaConf omits inside a dict or a list of sections."""
    first = re.split(r"[.\[]", key)[0]
    if first in keys_of(""):
        return key
    for override in overrides:
        section, _, value = override.lstrip("+~").partition("=")
        above, found, _ = f".{section}.".partition(f".{first}.")
        if found:
            return f"{above}.{key}".lstrip(".")
        if re.search(rf"\b{re.escape(first)}\b", value):
            return f"{section}.{key}"
    return key


def find_wrong_shape(overrides: Sequence[str]) -> ConfigError | None:
    """The error of the first override without a key, or with a list or a map where the schema has another shape."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if not key:
            return ConfigError(without_credentials(override), UNREADABLE)
        try:
            parsed = parser.parse_override(override)
        except HydraException:
            continue
        parts = key.split(".")
        if parsed.is_delete() or parsed.is_sweep_override() or any(part.isdecimal() for part in parts):
            continue
        value: Any = parsed.value()
        for part in reversed(parts):
            value = {part: value}
        try:
            require_shape(Config, value, "")
        except ConfigError as error:
            return error
    return None


def suspects(overrides: Sequence[str]) -> str:
    """The overrides that an error without a key may be about: those that remove a key, or hold a list or a map."""
    found = [each for each in overrides if each.startswith("~") or re.search(r"=\s*[\[{]", each)]
    return without_credentials(" ".join(found))


def explain_override(error: Exception, overrides: Sequence[str]) -> Exception:
    """Find the override that an error without a key must be about; returns the error itself if there is none."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if options_of(key):
            if value not in options_of(key) and isinstance(error, ValueError):
                return ConfigError(key, f"no {value!r}; choose one of {', '.join(options_of(key))}")
        elif "/" not in key and (unknown := find_unknown(key)):
            return explain_key(unknown, "")
    return error


def find_unknown(key: str) -> str:
    """The key up to its first part that no section of a run's configuration has; empty if there is no such part."""
    section = ""
    for name in key.split("."):
        whole = f"{section}.{name}".lstrip(".")
        if keys_of(section) and name not in keys_of(section):
            return whole
        section = whole
    return ""


def translate(complaint: str) -> str:
    """Our one-line message for a message of Hydra or OmegaConf."""
    line = " ".join(complaint.split())
    for pattern, message in TRANSLATIONS:
        if re.fullmatch(pattern, line):
            return re.sub(pattern, message, line)
    return line


@cache
def keys_of(section: str, root: Any = Config) -> tuple[str, ...]:
    """Keys of a section of the tree; empty if there is no such section."""
    node = type_of(section, root)
    return tuple(field.name for field in fields(node)) if is_dataclass(node) else ()


def is_text_key(key: str) -> bool:
    """Whether the value of a key is a string; also if it may be null."""
    return type_of(key) in (str, str | None)


def type_of(key: str, root: Any = Config) -> Any:
    """The type of a key of the tree, of a list that of its items; None if there is no such key."""
    node: Any = root
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[\d+\]|\.\d+\b", "", key)):
        # the name of a dictionary's item is the user's
        node = get_args(node)[-1] if get_origin(node) is dict else _types_of(node).get(name)
        if get_origin(node) is list:  # all its items have one type
            (node,) = get_args(node)
    return node


@cache
def _types_of(section: Any) -> dict[str, Any]:
    """Types of the keys of a section; empty if it is none. Cached: Python evaluates all annotations at each call."""
    return get_type_hints(section) if is_dataclass(section) else {}
