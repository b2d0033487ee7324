"""Exit codes, and the errors that a user sees as one line."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_BAD_CONFIG = 2
EXIT_HALTED = 3
EXIT_INTERRUPTED = 75


class ConfigError(Exception):
    """The user asked for something that cannot be; the message names the key and what is allowed."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        """A rank sends it to the others."""
        return ConfigError, ("", str(self))


class StorageError(OSError):
    """Storage did not answer, or answered with an error. This says nothing about the data: the same command may succeed
    later, so the exit code of a run is 75. Built like `OSError`: errno, problem, path."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def require(condition: bool, key: str, message: str) -> None:
    """Refuse the configuration unless `condition` holds."""
    if not condition:
        raise ConfigError(key, message)
