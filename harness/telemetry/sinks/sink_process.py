"""Starts and stops the sink process, which sends the events of a run to its sinks.

Why: imports, retries and locks of the libraries must not slow the training loop, and a dead server must not stop a run.
How: `start` runs `python -m harness.telemetry.sinks` in its own session, so that it does not receive the trainer's
signals. The two processes share the run directory, and a pipe for what the user must know at once. `finish` waits a
bounded time and leaves no process behind. After a crash the launcher calls `send_last_alerts`: a scheduler may end all
processes of a job with its launcher.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Self, final

from harness.config.telemetry import TelemetryConfig
from harness.core import processes
from harness.core.processes import last_line
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning
from harness.telemetry.event_log import log_size
from harness.telemetry.sinks.sink import SinkKind

SINK_MODULE = "harness.telemetry.sinks"
SINK_LOG = "sinks.log"


@final
class SinkProcess:
    """Owned by rank 0; started after `config.yaml` is written, finished after `RunEnded` is in the log."""

    def __init__(self, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    def start(cls, run: RunDir) -> Self:
        """Start sending the event log as it grows. If the process cannot start, only a warning is printed."""
        log = run.logs / SINK_LOG
        log_bytes = log_size(run.events)
        pids = ["--trainer", str(os.getpid()), "--launcher", str(os.getppid())]
        try:
            with reports() as sender:
                args = [str(run.path), *pids, "--log-bytes", str(log_bytes), "--reports", str(sender)]
                return cls(processes.start_logged(SINK_MODULE, *args, log=log, inherited=(sender,)), log)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can start
            print_warning(f"cannot start the sink process: {error}")
            return cls(None, log)

    def finish(self, wait_s: float) -> bool:
        """Wait until everything is sent; False if it was not. The rest can be sent later."""
        if self._process is None:
            return False
        sent = processes.wait_or_end(self._process, wait_s=wait_s, grace_s=processes.GRACE_S)
        if not sent:
            print_warning(f"some events were not sent: {last_line(self._log) or f'still sending after {wait_s:g} s'}")
        return sent


@contextmanager
def reports() -> Iterator[int]:
    """A pipe that a process started inside inherits. What is sent through it is printed, until the process ends."""
    reader, sender = os.pipe()
    try:
        thread = Thread(target=print_reports, args=(reader,), name="sink reports", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            os.close(reader)
            raise
        yield sender
    finally:
        os.close(sender)


def print_reports(reader: int) -> None:
    """Thread of rank 0: print what the sink process reports, until it ends."""
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            print_warning(line.rstrip("\n"))


def send_last_alerts(run: RunDir, cfg: TelemetryConfig, *, log_bytes: int) -> None:
    """Send the alerts about a crash, from the launcher, within `telemetry.exit_wait_s`; prints a warning if some wait.

    `log_bytes` is the size of the log before this start. The sink process of the dead trainer may be sending the
    alerts: then this waits for it.
    """
    if not cfg.alerts.has_channel:
        return
    args = [str(run.path), "--only", str(SinkKind.alerts), "--wait", "--log-bytes", str(log_bytes)]
    if problem := send_rest(args, log=run.logs / SINK_LOG, within_s=cfg.exit_wait_s):
        print_warning(f"some alerts were not sent: {problem}")


def send_rest(args: Sequence[str], *, log: Path, within_s: float | None) -> str:
    """Run a sink process to its end, for at most `within_s` seconds; returns what went wrong, or an empty string."""
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                processes.command(SINK_MODULE, *args),
                env=processes.child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
    except OSError as error:
        return str(error)
    try:
        code = process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return last_line(log) or f"no answer within {within_s:g} s"
    finally:
        if process.returncode is None:
            processes.end_process(process)
    return "" if code == 0 else last_line(log) or f"exit code {code}"
