"""Log files of the ranks of one node, and how each rank ended.

Rank 0 keeps the terminal. The output of the others and the last exception of each are files in one directory, which all
nodes of a run share; file names carry the global rank.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core.events import EndCause
from harness.core.locking.run_lease import io_error
from harness.core.rundir import write_atomically
from harness.core.transient_io import retry_transient
from launch.local.hang_report import dump_file, stacks_file

PID_FILE = "HARNESS_PID_FILE"
"""Environment variable: the file with the PID of a worker, for people; written once it can handle a stop signal."""
FAILURE_FILE = "HARNESS_FALL_FILE"
"""Environment variable: the file for the exception that ends a worker, written when it is raised."""

COLLECTIVES_FILE = "HARNESS_COLLECTIVES_FILE"
"""Environment variable: the file for the last collectives, written on STACKS_SIGNAL."""
STACKS_FILE = "HARNESS_STACKS_FILE"
"""Environment variable: the file for the stacks of all threads, written on STACKS_SIGNAL."""
PROBE_BYTES = 2**16
"""What must fit onto the disk before ranks start: about what they write before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Negative: the signal that killed it."""
    log: str
    """File of its stderr; empty: the terminal."""
    message: str = ""
    """Text of the exception; empty without one."""
    is_user_error: bool = False
    """The message is one line for the user; no traceback is needed."""
    traceback: str = ""
    error: str = ""
    """Type and place of the exception."""
    shortage: dict[str, Any] = field(default_factory=dict)
    """What the rank knows about the memory that ran out (`launch.local.out_of_memory`); empty for other errors."""
    explanation: str = ""
    """The failure in words, if its cause is known; no traceback is needed."""

    @property
    def kind(self) -> str:
        """Type and place of the error, to recognise the same one again; empty for a kill from outside."""
        return self.error or (str(self.cause) if self.explanation else "")

    @property
    def cause(self) -> EndCause:
        """Kind of the failure."""
        if self.explanation:
            return EndCause.out_of_memory
        if self.exit_code == EXIT_INTERRUPTED:  # without a message: stopped before it could train
            return EndCause.lost_storage if self.is_user_error else EndCause.unknown
        return EndCause.killed_rank if self.exit_code < 0 else EndCause.error

    def describe(self) -> str:
        if self.explanation:
            return self.explanation
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"exited with code {self.exit_code}"


def run_exit_code(failure: RankFailure, *, stopping: bool) -> int:
    """The exit code of the run."""
    if failure.exit_code in (EXIT_BAD_CONFIG, EXIT_HALTED, EXIT_INTERRUPTED):
        return failure.exit_code
    if stopping and failure.exit_code < 0:
        return EXIT_INTERRUPTED
    return EXIT_BAD_CONFIG if failure.is_user_error else EXIT_CRASHED


def render_failure(failure: RankFailure, *, stopping: bool) -> str:
    """The message about a crash or a user error; empty for all other exit codes."""
    if failure.is_user_error:
        return f"harness: {failure.message}"
    if run_exit_code(failure, stopping=stopping) != EXIT_CRASHED:
        return ""
    log = f"its log: {failure.log}" if failure.log else "its log is above"
    traceback = "" if failure.explanation else failure.traceback.rstrip()
    lines = [f"harness: rank {failure.rank} {failure.describe()}; {log}", traceback]
    return "\n".join(filter(None, lines))


@final
@dataclass(frozen=True, slots=True)
class RankLogs:
    """The files of the ranks of this node."""

    directory: Path
    ranks: range

    def create(self) -> None:
        """Create the directory and remove what is left there of earlier ranks. Raises if no file can be written: on a
        full disk no rank could even report its failure."""
        try:
            retry_transient(self._create)
        except OSError as error:
            raise io_error(self.directory, "cannot create", error) from None

    def _create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        probe = self.directory / f".probe-{self.ranks.start}"
        write_atomically(probe, " " * PROBE_BYTES)
        probe.unlink()
        for rank in self.ranks:
            self.failure_file(rank).unlink(missing_ok=True)
            self.pid_file(rank).unlink(missing_ok=True)

    def failure_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.fall.json"

    def pid_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.pid"

    def have_answered(self) -> bool:
        """Whether all ranks have written their last collectives."""
        return all(dump_file(self.directory, rank).exists() for rank in self.ranks)

    def stream(self, rank: int, name: str) -> str:
        """The file of a stream; "" for the terminal."""
        return str(self.directory / f"rank-{rank}.{name}") if rank > 0 else ""

    def environment(self, rank: int) -> dict[str, str]:
        """Environment variables with the files of a rank."""
        return {
            FAILURE_FILE: str(self.failure_file(rank)),
            PID_FILE: str(self.pid_file(rank)),
            STACKS_FILE: str(stacks_file(self.directory, rank)),
            COLLECTIVES_FILE: str(dump_file(self.directory, rank)),
        }

    def first_failure(self, error: ChildFailedError) -> RankFailure:
        """The rank that failed first: the one torch names, or an older exception of another rank.

        A file that cannot be read counts as missing.
        """
        rank, process = error.get_first_failure()
        found: dict[int, tuple[int, dict[str, Any]]] = {}
        for number in self.ranks:
            with suppress(OSError, ValueError):
                file = self.failure_file(number)
                found[number] = file.stat().st_mtime_ns, json.loads(file.read_text(encoding="utf-8"))
        if rank not in found:
            return RankFailure(rank=rank, exit_code=process.exitcode, log=self.stream(rank, "stderr"))
        first = min(found, key=lambda number: found[number][0])
        return RankFailure(rank=first, log=self.stream(first, "stderr"), **found[first][1])
