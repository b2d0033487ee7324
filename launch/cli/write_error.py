"""The error of a command that cannot write one of its files."""

from __future__ import annotations

from pathlib import Path

from harness.config.errors import ConfigError, StorageError
from harness.core.locking.run_lease import STORAGE_ERRORS


def write_error(path: Path, error: OSError, *, key: str = "") -> ConfigError | StorageError:
    """StorageError (exit code 75) if the disk is full or the storage failed, because the same command may succeed
    later; else ConfigError (2), with the option that names the file, if there is one."""
    if error.errno in STORAGE_ERRORS:
        return StorageError(error.errno, f"cannot be written: {error.strerror}", str(path))
    problem = f"cannot be written: {error.strerror or error}"
    return ConfigError(key, f"{path} {problem}") if key else ConfigError(str(path), problem)
