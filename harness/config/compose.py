"""Composes a checked `Config` from overrides with Hydra, and turns every error into one line.

The launcher, `torchrun -m harness.train` and the tests all use this module, so they read a command line the same way.
`conf/config.yaml` starts from the schema registered here, so a wrong key or type fails in the merge. `explain` turns
the errors of Hydra and OmegaConf into a line that names the key and what is allowed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from harness.config.errors import ConfigError, require
from harness.config.plain_config import build_plain
from harness.config.schema import Config
from harness.config.usual_keys import USUAL_KEYS
from harness.core.credentials import require_no_credentials, without_credentials

T = TypeVar("T")

BASE = "base"
"""Name of the file with the common values of a group; it is not an option."""
FAST_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The emitter and the parser in C, which take a tenth of the time, where PyYAML was built with them."""

NOT_RUN_GROUPS = ("drill", "hydra")
"""Folders of `conf/` that are not config groups of a run."""


def conf_dir() -> Path:
    """The directory of the YAML files: inside the package if installed, beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


def validate(tree: Any) -> Config:
    """Convert a tree composed by Hydra, or an untyped tree from a file, to checked dataclasses."""
    from omegaconf import MissingMandatoryValue, OmegaConf

    try:
        is_typed = OmegaConf.get_type(tree) is Config
        cfg = OmegaConf.to_object(tree if is_typed else OmegaConf.merge(OmegaConf.structured(Config), tree))
    except MissingMandatoryValue as error:
        raise ConfigError(error.full_key or "", "has no value") from None
    assert isinstance(cfg, Config)
    require_finite(cfg)
    if is_typed:  # a file of an earlier version may hold credentials and can still be read
        require_no_credentials(cfg.telemetry.tracking_uri)
    return cfg


def require_finite(cfg: Config) -> None:
    """Reject infinity and NaN, which YAML knows."""
    for key, value in flat(plain(cfg)).items():
        require(not isinstance(value, float) or math.isfinite(value), key, f"must be finite, got {value}")


def register() -> None:
    """Register with Hydra the schema of `conf/config.yaml` and the resolvers of the YAML files."""
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
        return cfg
    try:
        return validate(compose_tree(overrides))
    except Exception as error:
        raise explain(error, overrides) from None


def read_default() -> Config | None:
    """The default configuration, without Hydra, which takes 0.4 CPU-s to be imported and to compose it.

    None: an edited file of `conf/` needs Hydra, for more than a defaults list of plain names and plain values.
    """
    own = read_tree(conf_dir() / "config.yaml")
    defaults = own.pop("defaults", [])
    own.pop("hydra", None)
    tree: dict[str, Any] = {}
    for entry in defaults:
        match entry if isinstance(entry, str) else next(iter(entry.items())):
            case "_self_":
                merge(tree, own)
            case (str(group), option) if (values := _read_option(group, option)) is not None:
                merge(tree, {group: values})
            case (str(key), _) if key.startswith("override hydra/"):
                pass
            case "schema":
                pass
            case _:
                return None
    cfg = build_plain(tree) if "_self_" in defaults else None
    if cfg is not None:
        require_finite(cfg)
        require_no_credentials(cfg.telemetry.tracking_uri)
    return cfg


def _read_option(group: str, option: Any) -> dict[str, Any] | None:
    """The values of a file of a group, over those of the files of its defaults list; None: there is no such file."""
    path = conf_dir() / group / f"{option}.yaml"
    if not path.is_file():
        return None
    own, tree = read_tree(path), dict[str, Any]()
    for other in own.pop("defaults", []):
        if (values := _read_option(group, other)) is None:
            return None
        merge(tree, values)
    return merge(tree, own)


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `other`, section by section."""
    for key, value in other.items():
        tree[key] = merge(tree.get(key) or {}, value) if isinstance(value, dict) else value
    return tree


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
        return compose("config", overrides=list(overrides), **options)


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
        require_finite(cfg)
        return cfg
    from omegaconf import OmegaConf

    try:
        return validate(OmegaConf.create(tree))
    except Exception as error:
        raise explain(error) from None


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError:
        raise ConfigError(str(path), "is not valid YAML") from None
    require(isinstance(tree, dict), str(path), "must be a mapping of keys to values")
    return dict(tree)


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


def explain(error: Exception, overrides: Sequence[str] = ()) -> Exception:
    """Convert an error of Hydra or OmegaConf about an override to a `ConfigError`; other errors are returned as is."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    match cause:
        case MissingConfigException(missing_cfg_file=str(missing), options=[*options]):
            group, _, option = missing.rpartition("/")
            choices = ", ".join(name for name in options if name != BASE)
            return ConfigError(group, f"no {option!r}; choose one of {choices}")
        case OverrideParseException():
            return ConfigError(
                without_credentials(cause.override or ""),
                "cannot be parsed; write key=value and quote special characters",
            )
        case OmegaConfBaseException() if cause.full_key:
            return explain_key(whole_key(str(cause.full_key), overrides), str(cause))
        case AttributeError() | ValueError():
            return explain_override(cause, overrides)
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


def explain_override(error: Exception, overrides: Sequence[str]) -> Exception:
    """Find the override that an error without a key must be about; returns the error itself if there is none."""
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
"""OmegaConf's message for an override inside a section that does not exist in its dict."""

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
    (r".* does not support deletion", r"cannot be removed"),
    (r"Ambiguous value for argument '(.*?)=(.*?)'.*", r"\1: got several values, \2; add --multirun to sweep over them"),
    (
        r"Could not override '(.*?)'\. No match in the defaults list\..*use (\+.*)",
        r"\1: not chosen by default; add it with \2",
    ),
)
"""Patterns of Hydra's and OmegaConf's messages, and our message beside the name of the key."""


def translate(complaint: str) -> str:
    """Our one-line message for a message of Hydra or OmegaConf."""
    line = " ".join(complaint.split())
    for pattern, message in TRANSLATIONS:
        if re.fullmatch(pattern, line):
            return re.sub(pattern, message, line)
    return line


def groups() -> tuple[str, ...]:
    """Names of the config groups of a run."""
    folders = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
    return tuple(name for name in folders if name not in NOT_RUN_GROUPS)


def list_groups() -> str:
    """One line per config group with its options, for --help."""
    return "\n".join(f"{group}: {', '.join(options_of(group))}" for group in groups())


def options_of(group: str) -> tuple[str, ...]:
    """Options of a config group; empty if there is no such group."""
    files = (conf_dir() / group).glob("*.yaml") if group.isidentifier() else ()
    return tuple(sorted(file.stem for file in files if file.stem != BASE))


@cache
def keys_of(section: str, root: Any = Config) -> tuple[str, ...]:
    """Keys of a section of the tree; empty if there is no such section."""
    node: Any = root
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[\d+\]|\.\d+\b", "", section)):
        if get_origin(node) is dict:  # the name is the user's
            node = get_args(node)[-1]
        else:
            node = get_type_hints(node).get(name) if is_dataclass(node) else None
        if get_origin(node) is list:  # all its sections have one type
            (node,) = get_args(node)
    return tuple(field.name for field in fields(node)) if is_dataclass(node) else ()


def schema_default(key: str) -> Any:
    """The default value of a key in the schema, as plain data; None if it has none."""
    node: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        node = get_type_hints(node).get(section) if is_dataclass(node) else None
    found = {field.name: field for field in fields(node)} if is_dataclass(node) else {}
    if name not in found:
        return None
    default, factory = found[name].default, found[name].default_factory
    value = default if factory is MISSING else factory()
    return None if value is MISSING else str(value) if isinstance(value, StrEnum) else value


def to_yaml(cfg: Config) -> str:
    """The whole tree as YAML, the format of config.yaml in the run directory."""
    return str(yaml.dump(plain(cfg), Dumper=FAST_DUMPER, sort_keys=False))


def parse_yaml(text: str) -> Any:
    """The tree of a YAML text. A start of a rank reads its config half a dozen times."""
    return yaml.load(text, Loader=FAST_LOADER)


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
