"""The door to Hydra: overrides in, a checked `Config` out, and every complaint in one line.

Why: the launcher, the plain torchrun door and the tests must read the same command line the same way.
How: `conf/config.yaml` starts from the schema registered here, so that a wrong key or type stops at the merge;
`explain` turns what Hydra and OmegaConf say about it into a line that names the key and what is allowed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from harness.config.errors import ConfigError, require
from harness.config.schema import Config
from harness.core.credentials import require_no_credentials, without_credentials

T = TypeVar("T")

BASE = "base"
"""The file of a group that holds what its options share; not itself a choice."""

NOT_OF_A_RUN = ("drill", "hydra")
"""Folders of `conf/` that nothing is chosen from for a run."""


def conf_dir() -> Path:
    """Where the values live: inside the package when installed, beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


def check(tree: Any) -> Config:
    """The composed Hydra tree, which has its types already, or one from a file, as checked dataclasses."""
    from omegaconf import MissingMandatoryValue, OmegaConf

    try:
        is_typed = OmegaConf.get_type(tree) is Config
        cfg = OmegaConf.to_object(tree if is_typed else OmegaConf.merge(OmegaConf.structured(Config), tree))
    except MissingMandatoryValue as error:
        raise ConfigError(error.full_key or "", "has no value") from None
    assert isinstance(cfg, Config)
    for key, value in flat(plain(cfg)).items():
        require(not isinstance(value, float) or math.isfinite(value), key, f"must be finite, got {value}")
    if is_typed:  # what an earlier version wrote can still be read
        require_no_credentials(cfg.telemetry.tracking_uri)
    return cfg


def register() -> None:
    """Tell Hydra the types that `conf/config.yaml` starts from, how a size follows another one, and what help lists."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("groups", list_groups, replace=True)
    OmegaConf.register_new_resolver("scaled", lambda size, factor: round(size * factor), replace=True)


def load(overrides: Sequence[str] = ()) -> Config:
    """The default configuration with `overrides` applied: what the Hydra command line would give."""
    from hydra import compose, initialize_config_dir

    register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return check(compose("config", overrides=list(overrides)))
    except Exception as error:
        raise explain(error, overrides) from None


def read(path: Path) -> Config:
    """The configuration that lies in a run directory, checked like any other."""
    from omegaconf import OmegaConf

    try:
        return check(OmegaConf.create(read_tree(path)))
    except Exception as error:
        raise explain(error) from None


def read_tree(path: Path) -> dict[str, Any]:
    """A YAML file that holds keys and values."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError:
        raise ConfigError(str(path), "is not YAML") from None
    require(isinstance(tree, dict), str(path), "must hold keys and values")
    return dict(tree)


def typed(kind: type[T], name: str, trees: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> T:
    """Trees, the later over the earlier, then overrides `name.key=value`, as one checked dataclass.

    For what is configured beside a run and is no part of its tree; complaints read as all others do.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def keys(section: str) -> tuple[str, ...]:
        return keys_of(section.partition(".")[2], cast(Hashable, kind))

    tree, at = OmegaConf.structured(kind), name
    try:
        for each in trees:
            tree = OmegaConf.merge(tree, OmegaConf.create(dict(each)))
        for override in overrides:
            at = override.partition("=")[0]
            tree = OmegaConf.merge(tree, OmegaConf.create(_as_tree(override, name)))
        made = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = f"{name}.{error.full_key}" if error.full_key else at
        raise explain_key(key, str(error), keys) from None
    assert isinstance(made, kind)
    return made


def _as_tree(override: str, name: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    path = key.split(".")
    try:
        words: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        words, equals = None, ""
    readable = bool(equals) and path[0] == name and all(part.isidentifier() for part in path) and len(path) > 1
    require(readable, override, "cannot be read; write key=value and quote special characters")
    for part in reversed(path[1:]):
        words = {part: words}
    assert isinstance(words, dict)
    return words


def explain(error: Exception, overrides: Sequence[str] = ()) -> Exception:
    """What Hydra and OmegaConf say of a bad override, as a `ConfigError`; any other error as it is."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    match cause:
        case MissingConfigException(missing_cfg_file=str(missing), options=[*options]):
            group, _, option = missing.rpartition("/")
            choices = ", ".join(each for each in options if each != BASE)
            return ConfigError(group, f"no {option!r}; choose one of {choices}")
        case OverrideParseException():
            return ConfigError(
                without_credentials(cause.override or ""),
                "cannot be read; write key=value and quote special characters",
            )
        case OmegaConfBaseException() if cause.full_key:
            return explain_key(whole_key(str(cause.full_key), overrides), str(cause))
        case AttributeError() | ValueError():
            return explain_override(cause, overrides)
        case HydraException():
            return ConfigError("", in_words(str(cause)))
        case _:
            return error


def explain_key(key: str, complaint: str, keys: Callable[[str], tuple[str, ...]] | None = None) -> ConfigError:
    """A complaint that came with its key: the key does not exist, or its value is not of the right kind.

    `keys` says which keys a section may have; without it, those of a run's configuration.
    """
    keys = keys or keys_of
    section, _, name = key.rpartition(".")
    allowed = keys(section)
    if keys(key) and not allowed and re.match(NO_ENTRY, complaint):
        listed = ", ".join(keys(key))
        return ConfigError(key, f"is not there; add it with +{section}={{{name}: {{...}}}} and the keys {listed}")
    if re.sub(r"\[\d+\]$", "", name) in allowed or not allowed:
        inside = f"; it has the keys {', '.join(keys(key))}" if keys(key) else ""
        return ConfigError(key, in_words(complaint.splitlines()[0]) + inside)
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(key, f"no such key; {section or 'the configuration'} has {', '.join(allowed)}{hint}")


def whole_key(key: str, overrides: Sequence[str]) -> str:
    """The key with its section: inside a dict or a list of sections OmegaConf forgets where it is."""
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


def explain_override(error: Exception, overrides: Sequence[str]) -> Exception:
    """A complaint without a key: the override it can only be about, or the error as it is where there is none."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        section, _, name = key.rpartition(".")
        if options_of(key):
            if value not in options_of(key) and isinstance(error, ValueError):
                return ConfigError(key, f"no {value!r}; choose one of {', '.join(options_of(key))}")
        elif keys_of(section) and name not in keys_of(section) and "/" not in key:
            return explain_key(key, "")
    return error


NO_ENTRY = r"Key '.*' is not in struct|Invalid type assigned: dict is not a subclass"
"""What OmegaConf says of an override inside a section that its dict does not have yet."""

COMPLAINTS = (
    (r"Value '(.*)' of type '.*' could not be converted to Float", r"must be a number, got '\1'"),
    (r"Value '(.*)' of type '.*' could not be converted to Integer", r"must be a whole number, got '\1'"),
    (r"Value '(.*)' is not a valid bool .*", r"must be true or false, got '\1'"),
    (r"Cannot convert '.*' to string: '(.*)'", r"must be a text, got \1"),
    (r"Invalid value '(.*)', expected one of \[(.*)\]", r"must be one of \2, got '\1'"),
    (r"(Invalid type assigned|Merge error): .* value: (.*)", r"is a section, got \2"),
    (r"Invalid value assigned: (.*) is not a ListConfig, list or tuple\.", r"must be a list, as [...]"),
    (r"Cannot assign (.*) to Dict.*", r"must map names to sections, as {name: {...}}"),
    (r"field '.*' is not Optional", r"must not be null"),
    (r"Missing mandatory value: .*", r"has no value"),
    (r".* does not support deletion", r"cannot be left out"),
    (r"Ambiguous value for argument '(.*?)=(.*?)'.*", r"\1: got several values, \2; add --multirun to sweep over them"),
    (
        r"Could not override '(.*?)'\. No match in the defaults list\..*use (\+.*)",
        r"\1: not chosen by default; add it with \2",
    ),
)
"""What the libraries say, and how it reads beside the name of the key."""


def in_words(complaint: str) -> str:
    """One line of plain words for a complaint of Hydra or OmegaConf."""
    line = " ".join(complaint.split())
    for said, meant in COMPLAINTS:
        if re.fullmatch(said, line):
            return re.sub(said, meant, line)
    return line


def groups() -> tuple[str, ...]:
    """The groups that a run's configuration is chosen from."""
    folders = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
    return tuple(name for name in folders if name not in NOT_OF_A_RUN)


def list_groups() -> str:
    return "\n".join(f"{group}: {', '.join(options_of(group))}" for group in groups())


def options_of(group: str) -> tuple[str, ...]:
    """What may be chosen for a config group; empty when there is no such group."""
    files = (conf_dir() / group).glob("*.yaml") if group.isidentifier() else ()
    return tuple(sorted(file.stem for file in files if file.stem != BASE))


@cache
def keys_of(section: str, root: Any = Config) -> tuple[str, ...]:
    """The keys a section of the tree may have; empty when there is no such section."""
    node: Any = root
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[\d+\]|\.\d+\b", "", section)):
        if get_origin(node) is dict:  # under a name of the user's choice
            node = get_args(node)[-1]
        else:
            node = get_type_hints(node).get(name) if is_dataclass(node) else None
        if get_origin(node) is list:  # all its sections are of one kind
            (node,) = get_args(node)
    return tuple(field.name for field in fields(node)) if is_dataclass(node) else ()


def to_yaml(cfg: Config) -> str:
    """The whole tree as YAML, as it lies in the run directory."""
    return yaml.safe_dump(plain(cfg), sort_keys=False)


def plain(cfg: Config) -> dict[str, Any]:
    """The tree as nested dictionaries of plain values."""

    def value(node: Any) -> Any:
        match node:
            case dict():
                return {key: value(child) for key, child in node.items()}
            case StrEnum():
                return str(node)
            case _:
                return node

    tree = value(asdict(cfg))
    assert isinstance(tree, dict)
    return tree


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested tree with dotted keys."""
    out: dict[str, Any] = {}
    for key, child in tree.items():
        out |= flat(child, f"{prefix}{key}.") if isinstance(child, dict) else {f"{prefix}{key}": child}
    return out
