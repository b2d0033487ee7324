"""The YAML files of `conf/`: where they are, how they are parsed, and the config groups that they form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from harness.config.errors import ConfigError, StorageError, require
from harness.core.transient_io import TRANSIENT_ERRORS, retry_transient

BASE = "base"
"""Name of the file with the common values of a group; it is not an option."""
FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in C, which takes a tenth of the time, where PyYAML was built with it."""
NOT_RUN_GROUPS = ("drill", "hydra")
"""Folders of `conf/` that are not config groups of a run."""


def conf_dir() -> Path:
    """The directory of the YAML files: inside the package if installed, beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    try:
        tree = parse_yaml(retry_transient(lambda: path.read_text(encoding="utf-8"))) or {}
    except OSError as error:
        if error.errno in TRANSIENT_ERRORS:
            raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from None
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise explain_yaml(error, path) from None
    require(isinstance(tree, dict), str(path), "must be a mapping of keys to values")
    return dict(tree)


def explain_yaml(error: yaml.YAMLError, path: Path | str) -> ConfigError:
    """The error for a file that is not YAML, with the line if it is known."""
    mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
    return ConfigError(str(path), "is not valid YAML" + (f": line {mark.line + 1}: {problem}" if mark else ""))


def find_bad_defaults() -> ConfigError | None:
    """The error for the first file with a malformed defaults list. An entry is a name, or a group with its option or
    options."""
    for path in sorted(conf_dir().rglob("*.yaml")):
        try:
            defaults = read_tree(path).get("defaults", [])
        except ConfigError:  # not the file that is looked for: Hydra reports one that it cannot parse
            continue
        if not isinstance(defaults, list):
            return ConfigError(str(path), "defaults: must be a list, with - in front of each entry")
        for entry in defaults:
            if not _is_default(entry):
                message = f"defaults: must hold names and entries such as `model: tiny`, got {entry!r}"
                return ConfigError(str(path), message)
    return None


def _is_default(entry: Any) -> bool:
    if not isinstance(entry, dict) or len(entry) != 1:
        return isinstance(entry, str)
    (option,) = entry.values()
    names = option if isinstance(option, list) else [option]
    return option is None or all(isinstance(name, str) for name in names)


def parse_yaml(text: str) -> Any:
    """The tree of a YAML text. A start of a rank reads its config half a dozen times."""
    return yaml.load(text, Loader=FAST_LOADER)


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
