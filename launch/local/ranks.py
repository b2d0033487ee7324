"""The ranks of one machine: where their words go, and how each of them ended.

Rank 0 keeps the terminal; the streams of the others, and the last exception of each, are files of one directory, which
all machines of a run share: a file's name carries the number that the rank has in the whole run.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_HALTED, EXIT_INTERRUPTED, ConfigError

PID_FILE = "HARNESS_PID_FILE"
"""Environment variable of a worker: where it says that it can be told to stop."""
FALL_FILE = "HARNESS_FALL_FILE"
"""Environment variable of a worker: where it writes the exception that ends it, at the moment it is raised."""

STACKS_FILE = "HARNESS_STACKS_FILE"
"""Environment variable of a worker: where it writes, when it is asked, at which line each of its threads stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Negative: the number of the signal that killed it."""
    log: str
    """Where its stderr went; empty: the terminal."""
    message: str = ""
    """Text of the exception; empty where there was none."""
    is_user_error: bool = False
    """The message says all there is to say, in one line."""
    traceback: str = ""

    def how(self) -> str:
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"exited with code {self.exit_code}"


def exit_code_of(failure: Failure, *, stopping: bool) -> int:
    """What the run exits with."""
    if failure.exit_code in (EXIT_BAD_CONFIG, EXIT_HALTED, EXIT_INTERRUPTED):
        return failure.exit_code
    if stopping and failure.exit_code < 0:
        return EXIT_INTERRUPTED
    return EXIT_BAD_CONFIG if failure.is_user_error else EXIT_CRASHED


def render(failure: Failure, *, stopping: bool) -> str:
    """Why the run ended, where that was no part of the contract; else nothing."""
    if failure.is_user_error:
        return f"harness: {failure.message}"
    if exit_code_of(failure, stopping=stopping) != EXIT_CRASHED:
        return ""
    log = f"its log: {failure.log}" if failure.log else "its log is above"
    lines = [f"harness: rank {failure.rank} {failure.how()}; {log}", failure.traceback.rstrip()]
    return "\n".join(filter(None, lines))


@final
@dataclass(frozen=True, slots=True)
class RankLogs:
    """Rank 0 on the terminal; the streams of the others, and the last exception of each, as files of one directory."""

    directory: Path
    ranks: range

    def create(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("run.dir", f"cannot create {self.directory}: {error.strerror}") from None
        for rank in self.ranks:
            self.fall_file(rank).unlink(missing_ok=True)
            self.pid_file(rank).unlink(missing_ok=True)

    def fall_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.fall.json"

    def pid_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.pid"

    def pids(self) -> list[int]:
        """Processes of the workers that can answer a signal by now."""
        texts = [path.read_text() for rank in self.ranks if (path := self.pid_file(rank)).exists()]
        return [int(text) for text in texts if text]

    def stream(self, rank: int, name: str) -> str:
        """A file, or "" for the terminal."""
        return str(self.directory / f"rank-{rank}.{name}") if rank > 0 else ""

    def environment(self, rank: int) -> dict[str, str]:
        """Where a rank finds its files."""
        return {
            FALL_FILE: str(self.fall_file(rank)),
            PID_FILE: str(self.pid_file(rank)),
            STACKS_FILE: str(self.directory / f"rank-{rank}.stacks"),
        }

    def first_failure(self, error: ChildFailedError) -> Failure:
        """The rank that died first. The agent names one that is dead; an exception elsewhere may be older."""
        rank, process = error.get_first_failure()
        fallen = [each for each in self.ranks if self.fall_file(each).exists()]
        if rank not in fallen:
            return Failure(rank=rank, exit_code=process.exitcode, log=self.stream(rank, "stderr"))
        first = min(fallen, key=lambda each: self.fall_file(each).stat().st_mtime_ns)
        fall = json.loads(self.fall_file(first).read_text(encoding="utf-8"))
        return Failure(rank=first, log=self.stream(first, "stderr"), **({"exit_code": EXIT_CRASHED} | fall))
