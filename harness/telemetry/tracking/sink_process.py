"""The trainer's handle on the process that sends its events to MLflow.

Why: MLflow's import, retries and locks must never touch the training loop, and a dead server must never stop a run.
How: `start` runs `python -m harness.telemetry.tracking.mlflow_sink` in a session of its own, so that signals meant for
the trainer pass it by; the two share nothing but the run directory. `finish` waits a bounded time and leaves no process
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
    """Rank 0 owns one, started after `config.yaml` is written and finished after `RunEnded` is in the log."""

    def __init__(self, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    def start(cls, run: RunDir) -> Self:
        """Begin to send what the event log holds and will hold; a failure to start costs a warning, not the run."""
        log = run.logs / "mlflow.log"
        log_bytes = run.events.stat().st_size if run.events.exists() else 0
        words = [str(run.path), "--trainer", str(os.getpid()), "--log-bytes", str(log_bytes)]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    processes.command(SINK_MODULE, *words),
                    env=processes.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            _warn(f"cannot start the MLflow sink: {error}")
            return cls(None, log)
        return cls(process, log)

    def finish(self, wait_s: float) -> bool:
        """Wait for the rest to be sent; False where it was not, and `mlflow_sink` can send it later."""
        if self._process is None:
            return False
        try:
            sent = self._process.wait(timeout=wait_s) == 0
        except subprocess.TimeoutExpired:
            sent = False
            _end(self._process)
        if not sent:
            _warn(f"not everything reached MLflow: {last_line(self._log) or f'still sending after {wait_s:g} s'}")
        return sent


def last_line(path: Path) -> str:
    """The last thing a log says; empty where it says nothing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=TERMINATE_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
