"""Builds the default config from the files of `conf/`, without Hydra.

Why: Hydra takes 0.4 CPU-s to be imported and to compose it, more than all else that the help does.
How: the files of the default hold plain values and defaults lists of plain names. A `conf/` that was edited to need
more gives None, and Hydra composes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.config.conf_files import conf_dir, read_tree
from harness.config.plain_config import build_plain
from harness.config.schema import Config


def read_default() -> Config | None:
    """The default config, not checked beyond its types; None: the files need Hydra."""
    own = read_tree(conf_dir() / "config.yaml")
    defaults = own.pop("defaults", [])
    own.pop("hydra", None)
    tree: dict[str, Any] = {}
    for entry in defaults:
        match entry:
            case "schema":
                pass
            case "_self_":
                merge(tree, own)
            case dict() if len(entry) == 1:
                ((group, option),) = entry.items()
                if str(group).startswith("override hydra/"):
                    continue
                if (values := _read_option(group, option)) is None:
                    return None
                merge(tree, {group: values})
            case _:
                return None
    return build_plain(tree) if "_self_" in defaults else None


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
