"""The door to Hydra: overrides in, a checked `Config` out, and every complaint in one line.

Why: the launcher, the plain torchrun door and the tests must read the same command line the same way.
How: `conf/config.yaml` starts from the schema registered here, so that a wrong key or type stops at the merge; `explain`
turns what Hydra and OmegaConf say about it into a line that names the key and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from harness.config import Config, ConfigError


def conf_dir() -> Path:
    """Where the values live: inside the package when installed, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


def check(tree: Any) -> Config:
    """The composed Hydra tree as checked dataclasses."""
    from omegaconf import MissingMandatoryValue, OmegaConf

    try:
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), tree))
    except MissingMandatoryValue as error:
        raise ConfigError(error.full_key or "", "has no value") from None
    assert isinstance(cfg, Config)
    return cfg


def register() -> None:
    """Tell Hydra the types under the name that `conf/config.yaml` starts from."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def load(overrides: Sequence[str] = ()) -> Config:
    """The default configuration with `overrides` applied: what the Hydra command line would give."""
    from hydra import compose, initialize_config_dir

    register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return check(compose("config", overrides=list(overrides)))
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error) from None


def explain(error: Exception) -> Exception:
    """What Hydra and OmegaConf say of a bad override, as one line that names the key and what is allowed."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = str(cause.full_key)
        section, _, name = key.rpartition(".")
        allowed = keys_of(section)
        if name in allowed or not allowed:
            return ConfigError(key, str(cause).splitlines()[0])
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        where = section or "the configuration"
        return ConfigError(key, f"no such key; {where} has {', '.join(allowed)}{hint}")
    if isinstance(error, HydraException):
        return ConfigError("", " ".join(str(error).split()))
    return error


@cache
def keys_of(section: str) -> tuple[str, ...]:
    """The keys a section of the tree may have; empty when there is no such section."""
    node: Any = Config
    for name in filter(None, section.split(".")):
        node = get_type_hints(node).get(name) if is_dataclass(node) else None
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
