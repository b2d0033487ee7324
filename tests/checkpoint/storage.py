"""Simulates storage errors: opening files with certain names fails in this process, as with a lost mount."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def failing(name: str, *, times: float = float("inf"), code: int = errno.EIO) -> Iterator[list[str]]:
    """Opening a file whose path ends with the given text fails this many times; yields the paths that failed."""
    genuine, failed = io.open, list[str]()

    def deny(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith(name) and len(failed) < times:
            failed.append(str(file))
            raise OSError(code, os.strerror(code), str(file))
        return genuine(file, *arguments, **options)

    io.open = deny
    try:
        yield failed
    finally:
        io.open = genuine


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path below a directory with its mode, modification time and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, content)
    return found
