"""Which code this is: commit and diff, also of a copy that was taken out of its checkout.

A copy for a job carries what was known where it was taken, in a file beside its packages.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

CARRIED = "code.json"
DIFF_LIMIT_BYTES = 200_000
UNTRACKED_LIMIT = 100
GIT_TIMEOUT_S = 20


def code(directory: Path) -> dict[str, Any]:
    """Commit and diff of the tree that a package belongs to; nulls where git does not track it."""
    carried = directory.parent / CARRIED
    if carried.exists():
        known = json.loads(carried.read_text(encoding="utf-8"))
        assert isinstance(known, dict)
        return known
    untracked_here = _git(directory, "ls-files", "--error-unmatch", "__init__.py") is None
    commit = None if untracked_here else _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "diff": None, "untracked": None}
    untracked = (_git(directory, "ls-files", "--others", "--exclude-standard", "--full-name", ":/") or b"").decode(
        errors="replace"
    )
    return {
        "commit": commit.decode().strip(),
        "diff": _described(_git(directory, "diff", "HEAD", "--no-ext-diff", "--no-color")),
        "untracked": untracked.splitlines()[:UNTRACKED_LIMIT],
    }


def _described(diff: bytes | None) -> dict[str, Any] | None:
    if not diff:
        return None
    return {
        "size_bytes": len(diff),
        "sha256": hashlib.sha256(diff).hexdigest(),
        "truncated": len(diff) > DIFF_LIMIT_BYTES,
        "text": diff[:DIFF_LIMIT_BYTES].decode(errors="replace"),
    }


def _git(directory: Path, *arguments: str) -> bytes | None:
    try:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=GIT_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
