"""Exit codes, and the exceptions that a user sees as one line."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_BAD_CONFIG = 2
EXIT_HALTED = 3
EXIT_INTERRUPTED = 75

LONGEST_DURATION_S = 1e9
"""30 years. Threads, sockets and calendars do not take ten times as much."""
LEAST_FP32 = 2.0**-126
"""The smallest normal number of fp32. A device may take a smaller one as 0."""


class ConfigError(Exception):
    """Invalid config; the message names the key and what is allowed."""

    is_shared = False
    """It is raised on all ranks, and rank 0 prints it."""
    is_of_one_rank = False
    """It was found in data that only this rank reads: the other ranks may wait for this one in a collective."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        """Make it picklable: ranks send it to each other."""
        return ConfigError, ("", str(self))


class StorageError(OSError):
    """Storage failed or did not answer. The data may be intact: the same command may succeed later, so the exit code of
    a run is 75. Constructed like `OSError`: errno, problem, path."""

    is_shared = False
    is_of_one_rank = False
    """Both as of `ConfigError`."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def require(condition: bool, key: str, message: str) -> None:
    """Raise ConfigError unless `condition` holds."""
    if not condition:
        raise ConfigError(key, message)


def require_duration(value: float, key: str, *, unit_s: float = 1.0) -> None:
    """Raise ConfigError unless clocks and threads can hold a duration of this many units; its lower limit is checked by
    the caller."""
    most = LONGEST_DURATION_S / unit_s
    require(value <= most, key, f"must be at most {most:.3g} (30 years), got {value:g}")


def require_positive_fp32(value: float, key: str, off: str = "") -> None:
    """Raise ConfigError unless an fp32 tensor on the device can hold this positive number. `off` says how to turn it
    off."""
    require(value > 0, key, f"must be positive{off}, got {value}")
    message = f"must be at least {LEAST_FP32:.3g}, because the device holds it in fp32, got {value}"
    require(value >= LEAST_FP32, key, message)
