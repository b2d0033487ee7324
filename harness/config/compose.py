"""Composes a checked `Config` from overrides with Hydra, and reads and writes stored ones.

The launcher, `torchrun -m harness.train` and the tests all use this module, so they read a command line the same way.
`conf/config.yaml` starts from the schema registered here, so a wrong key or type fails in the merge. Every error is one
line (`harness.config.explain`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml

from harness.config.conf_files import FAST_LOADER, conf_dir, list_groups, read_tree
from harness.config.default_config import read_default
from harness.config.errors import ConfigError, require
from harness.config.explain import explain, explain_key, is_text_key, keys_of
from harness.config.plain_config import build_plain
from harness.config.schema import Config
from harness.config.value_shapes import require_shape
from harness.core.credentials import require_no_credentials

T = TypeVar("T")

NUMBER_OR_BOOLEAN = re.compile(r"[-+.\d]|(true|false|inf|nan)$", re.IGNORECASE)
"""How the text of an override begins that Hydra may read as a number or a boolean."""
MOST_COUNT = 2**53
"""Largest integer of a configuration: readers of JSON may round larger ones, and indices of batches must fit in int64
with room for sums."""
PLAIN_LIST = re.compile(r"\[([^\[\]{}()'\"\\$]+)\]")
"""A list of values without quotes or brackets of their own."""
FAST_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The emitter in C, which takes a tenth of the time, where PyYAML was built with it."""


def validate(tree: Any) -> Config:
    """Convert a tree composed by Hydra, or an untyped tree from a file, plain data too, to checked dataclasses."""
    from omegaconf import MissingMandatoryValue, OmegaConf

    try:
        tree = tree if OmegaConf.is_config(tree) else OmegaConf.create(tree)
        is_typed = OmegaConf.get_type(tree) is Config
        require_shape(Config, OmegaConf.to_container(tree, resolve=is_typed), "")
        cfg = OmegaConf.to_object(tree if is_typed else OmegaConf.merge(OmegaConf.structured(Config), tree))
    except MissingMandatoryValue as error:
        raise ConfigError(error.full_key or "", "has no value") from None
    assert isinstance(cfg, Config)
    require_numbers(cfg)
    if is_typed:  # a file of an earlier version may hold these values and can still be read
        require(bool(cfg.run.dir), "run.dir", "must not be empty; . is the current directory")
        require_no_credentials(cfg.telemetry.tracking_uri)
    return cfg


def require_numbers(cfg: Config) -> None:
    """Reject infinity and NaN, which YAML knows, and counts and batch indices that are too large to be meant. Seeds
    have a limit of their own."""
    for key, value in leaves(plain(cfg)):
        require(not isinstance(value, float) or math.isfinite(value), key, f"must be finite, got {value}")
        is_moderate = not isinstance(value, int) or value <= MOST_COUNT or key.endswith("seed")
        require(is_moderate, key, f"must be at most 2**53, got {value}")


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every single value below a node of plain data, also of items of lists."""
    match node:
        case dict():
            for name, child in node.items():
                yield from leaves(child, f"{key}.{name}".lstrip("."))
        case list():
            for number, child in enumerate(node):
                yield from leaves(child, f"{key}[{number}]")
        case _:
            yield key, node


@cache
def register() -> None:
    """Once per process: register with Hydra the schema of `conf/config.yaml` and the resolvers of the YAML files."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("groups", list_groups, replace=True)
    OmegaConf.register_new_resolver("warmup", usual_warmup, replace=True)
    OmegaConf.register_new_resolver("scaled", lambda size, factor: round(size * factor), replace=True)


def usual_warmup(num_steps: int) -> int:
    """Warm-up steps of a run of this length: 2,000, or 2 % of a shorter run."""
    return min(2000, math.ceil(0.02 * num_steps))


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose the default configuration with `overrides`, like the Hydra command line."""
    if not overrides and (cfg := read_default()):
        require_numbers(cfg)
        require_no_credentials(cfg.telemetry.tracking_uri)
        return cfg
    try:
        return validate(compose_tree(overrides))
    except Exception as error:
        raise explain(error, overrides) from None


def compose_job(overrides: Sequence[str]) -> tuple[Any, Any]:
    """The composed tree of one job, and Hydra's own settings for it."""
    from omegaconf import open_dict

    tree = compose_tree(overrides, return_hydra_config=True)
    settings = tree.hydra
    with open_dict(tree):
        del tree["hydra"]
    return tree, settings


def compose_tree(overrides: Sequence[str], **options: bool) -> Any:
    """The default tree with `overrides`; `options` go to Hydra."""
    from hydra import compose, initialize_config_dir

    register()
    with parsing_in_c(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=keep_text(overrides), **options)


def keep_text(overrides: Sequence[str]) -> list[str]:
    """The overrides with the text of string keys in quotes where Hydra would read a number or a boolean and write it in
    another way: 1.10 is a name. So are the items of a list of strings."""
    kept = []
    for override in overrides:
        key, _, text = override.partition("=")
        if not override.startswith(("-", "~")) and is_text_key(key.lstrip("+")):
            if plain_list := PLAIN_LIST.fullmatch(text):
                override = f"{key}=[{','.join(quote_number(item.strip()) for item in plain_list[1].split(','))}]"
            elif quote_number(text) != text:
                override = f"{key}={quote_number(text)}"
        kept.append(override)
    return kept


def quote_number(text: str) -> str:
    """The text of a value; in quotes if Hydra would read a number or a boolean."""
    if not NUMBER_OR_BOOLEAN.match(text):
        return text
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"x={text}")
    is_other = not parsed.is_sweep_override() and isinstance(parsed.value(), bool | int | float)
    return f"'{text}'" if is_other else text


@contextmanager
def parsing_in_c() -> Iterator[None]:
    """OmegaConf derives the loader of each file from `yaml.SafeLoader`; inside, that is the parser in C."""
    in_python = yaml.SafeLoader
    yaml.SafeLoader = FAST_LOADER  # type: ignore[misc]
    try:
        yield
    finally:
        yaml.SafeLoader = in_python  # type: ignore[misc]


def read(path: Path) -> Config:
    """Read and check the stored configuration of a run."""
    tree = read_tree(path)
    cfg = build_plain(tree)
    if cfg is not None:
        require_numbers(cfg)
        return cfg
    try:
        return validate(tree)
    except Exception as error:
        raise explain(error) from None


def load_typed(kind: type[T], name: str, trees: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> T:
    """Merge trees in order, then overrides `name.key=value`, into one checked dataclass.

    For configuration outside the tree of a run, such as drill scenarios, with the same error messages.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def keys(section: str) -> tuple[str, ...]:
        return keys_of(section.partition(".")[2], cast(Hashable, kind))

    tree, at = OmegaConf.structured(kind), name
    try:
        for values in trees:
            tree = OmegaConf.merge(tree, OmegaConf.create(dict(values)))
        for override in overrides:
            at = override.partition("=")[0]
            tree = OmegaConf.merge(tree, OmegaConf.create(_as_tree(override, name)))
        require_shape(kind, OmegaConf.to_container(tree, resolve=True), name)
        merged = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = f"{name}.{error.full_key}" if error.full_key else at
        raise explain_key(key, str(error), keys) from None
    assert isinstance(merged, kind)
    return merged


def _as_tree(override: str, name: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    path = key.split(".")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        tree, equals = None, ""
    readable = bool(equals) and path[0] == name and all(part.isidentifier() for part in path) and len(path) > 1
    require(readable, override, "cannot be parsed; write key=value and quote special characters")
    for part in reversed(path[1:]):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


def schema_default(key: str) -> Any:
    """The default value of a key in the schema, as plain data; None if it has none."""
    kind: Any = Config
    first, *rest = key.split(".")
    while True:
        found = {field.name: field for field in fields(kind)} if is_dataclass(kind) else {}
        if first not in found:
            return None
        default, factory = found[first].default, found[first].default_factory
        if default is not MISSING or factory is not MISSING:
            break
        if not rest:
            return None
        kind, (first, *rest) = get_type_hints(kind)[first], rest
    value = default if factory is MISSING else factory()
    for name in rest:  # a section with a default brings those of its keys
        value = getattr(value, name, None)
    return str(value) if isinstance(value, StrEnum) else value


def to_yaml(cfg: Config) -> str:
    """The whole tree as YAML, the format of config.yaml in the run directory."""
    return str(yaml.dump(plain(cfg), Dumper=FAST_DUMPER, sort_keys=False))


def flat_values(section: Any) -> dict[str, Any]:
    """A section of the configuration with dotted keys and plain values."""
    return flat(plain(section))


def plain(cfg: Any) -> dict[str, Any]:
    """The tree, or a section of it, as nested dictionaries of plain values."""

    def value(node: Any) -> Any:
        match node:
            case dict():
                return {key: value(child) for key, child in node.items()}
            case list():
                return [value(child) for child in node]
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
