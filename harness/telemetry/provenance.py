"""Identifies the running code: commit, diff and untracked files.

The copy of the code that a job runs has no git; it carries this information in a file beside its packages.
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
    """Commit and diff of the tree that a package belongs to; None values if git does not track it."""
    carried = directory.parent / CARRIED
    if carried.exists():
        content = json.loads(carried.read_text(encoding="utf-8"))
        assert isinstance(content, dict)
        return content
    untracked_here = _git(directory, "ls-files", "--error-unmatch", "__init__.py") is None
    commit = None if untracked_here else _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "diff": None, "untracked": None}
    untracked = (_git(directory, "ls-files", "--others", "--exclude-standard", "--full-name", ":/") or b"").decode(
        errors="replace"
    )
    return {
        "commit": commit.decode().strip(),
        "diff": _describe_diff(_git(directory, "diff", "HEAD", "--no-ext-diff", "--no-color")),
        "untracked": untracked.splitlines()[:UNTRACKED_LIMIT],
    }


def _describe_diff(diff: bytes | None) -> dict[str, Any] | None:
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
