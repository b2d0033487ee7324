"""Starts and stops the sink process, which sends the events of a run to MLflow.

Why: MLflow's import, retries and locks must not slow the training loop, and a dead server must not stop a run.
How: `start` runs `python -m harness.telemetry.tracking.mlflow_sink` in its own session, so that it does not receive the
trainer's signals. The two processes share only the run directory. `finish` waits a bounded time and leaves no process
behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self, final

from harness.core import processes
from harness.core.rundir import RunDir

SINK_MODULE = "harness.telemetry.tracking.mlflow_sink"
TERMINATE_WAIT_S = 5.0


@final
class SinkProcess:
    """Owned by rank 0; started after `config.yaml` is written, finished after `RunEnded` is in the log."""

    def __init__(self, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    def start(cls, run: RunDir) -> Self:
        """Start sending the event log as it grows. If the process cannot start, only a warning is printed."""
        log = run.logs / "mlflow.log"
        log_bytes = run.events.stat().st_size if run.events.exists() else 0
        args = [str(run.path), "--trainer", str(os.getpid()), "--log-bytes", str(log_bytes)]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    processes.command(SINK_MODULE, *args),
                    env=processes.child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            _warn(f"cannot start the MLflow sink process: {error}")
            return cls(None, log)
        return cls(process, log)

    def finish(self, wait_s: float) -> bool:
        """Wait until everything is sent; False if it was not. `mlflow_sink` can send the rest later."""
        if self._process is None:
            return False
        try:
            sent = self._process.wait(timeout=wait_s) == 0
        except subprocess.TimeoutExpired:
            sent = False
            _terminate(self._process)
        if not sent:
            _warn(f"some events were not sent to MLflow: {last_line(self._log) or f'still sending after {wait_s:g} s'}")
        return sent


def last_line(path: Path) -> str:
    """The last nonempty line of a file; empty if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=TERMINATE_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
