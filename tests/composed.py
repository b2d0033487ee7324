"""`load` for tests: `harness.config.compose.load`, where Hydra reads and merges the YAML files once per process.

Why: Hydra takes as long to compose a config as a tiny model takes for ten steps, and tests compose a thousand of them.
How: Hydra composes the tree of a list of config groups once. Overrides `section.key=value` are then applied to a copy
of it by the function that Hydra itself calls after it merged the groups. All other overrides take the usual way.
tests/config/test_compose.py compares the two ways, configs and errors.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from harness.config import compose, conf_files
from harness.config.schema import Config

LOAD = compose.load
"""Kept, so that a test can replace `compose.load` by `load`."""
GROUP = re.compile(rf"\+?({'|'.join(path.name for path in conf_files.conf_dir().iterdir() if path.is_dir())})=\w+")
VALUE = re.compile(r"[a-z]\w*(\.\w+)+=.*")


def load(overrides: Sequence[str] = ()) -> Config:
    """The default configuration with `overrides`."""
    return deepcopy(_load(tuple(overrides)))


@cache
def _load(overrides: tuple[str, ...]) -> Config:
    if not all(GROUP.fullmatch(override) or VALUE.fullmatch(override) for override in overrides):
        return LOAD(overrides)
    with (
        patch.object(hydra, "compose", _compose),
        patch.object(hydra, "initialize_config_dir", lambda *_, **__: nullcontext()),
    ):
        return LOAD(overrides)


def _compose(_name: str, overrides: Sequence[str]) -> Any:
    values = [_parse(each) for each in overrides if not GROUP.fullmatch(each)]
    tree = pickle.loads(_tree(tuple(each for each in overrides if GROUP.fullmatch(each))))
    if any(value.is_sweep_override() for value in values):
        return _compose_with_hydra(overrides)
    ConfigLoaderImpl._apply_overrides_to_config(values, tree)
    return tree


@cache
def _parse(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


@cache
def _tree(groups: tuple[str, ...]) -> bytes:
    """Pickled: a copy is made five times as fast as by `deepcopy`."""
    return pickle.dumps(_compose_with_hydra(groups))


COMPOSE, INITIALIZE = hydra.compose, hydra.initialize_config_dir


def _compose_with_hydra(overrides: Sequence[str]) -> Any:
    with INITIALIZE(str(conf_files.conf_dir()), version_base="1.3"):
        return COMPOSE("config", overrides=list(overrides))
