"""Reads `manifest.json` and checks its structure; `harness.telemetry.manifest` writes it. Imports no torch.

A key may be missing or null, because a run of an older version has fewer. What is there has the type that was written,
so readers need no checks of their own.
"""

from __future__ import annotations

import json
from itertools import starmap
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError

START: dict[str, Any] = {
    "hardware": {"gpus": [{"memory_bytes": int}]},
    "dtype": {"fp8": {}},
    "versions": {},
    "environment": {},
    "diff": {"size_bytes": int, "sha256": str},
    "untracked": [str],
}
"""What readers rely on in the description of one start: the keys of a mapping, the entries of a list, or a type."""
MANIFEST = START | {"starts": [START]}


def read_run_manifest(path: Path) -> dict[str, Any]:
    """The first start, with the later ones in `starts`; empty if there is no file. A damaged file is a `ConfigError`
    that names it."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        problem = find_mismatch(tree, MANIFEST, "it")
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem or tree is None:
        raise ConfigError(str(path), f"is damaged: {problem or 'it is empty'}; repair it, or move it away")
    return dict(tree)


def find_mismatch(value: Any, expected: Any, name: str) -> str:
    """What differs from the expected structure, in one line; empty if nothing does."""
    parts: list[tuple[Any, Any, str]] = []
    match expected:
        case _ if value is None:
            return ""
        case dict():
            if not isinstance(value, dict):
                return f"{name} is not a mapping"
            parts = [(value.get(key), inner, key) for key, inner in expected.items()]
        case [entry]:
            if not isinstance(value, list) or None in value:
                return f"{name} is not a list of entries"
            parts = [(each, entry, f"{name}[{number}]") for number, each in enumerate(value)]
        case _ if type(value) is not expected:
            return f"{name} is {value!r}"
    return next(filter(None, starmap(find_mismatch, parts)), "")
