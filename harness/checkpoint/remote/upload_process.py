"""Starts the upload process of a run and waits for it at the end.

How: it runs in its own session with low priority and shares only the run directory with the trainer. After a crash it
is left alone: it uploads what is complete, and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config.checkpoint import CheckpointRemoteConfig
from harness.core import processes
from harness.core.rundir import RunDir

UPLOAD_MODULE = "harness.checkpoint.remote"
UPLOAD_LOG = "upload.log"
TERMINATE_WAIT_S = 5.0


@contextmanager
def uploading(run: RunDir, cfg: CheckpointRemoteConfig, *, is_first: bool) -> Iterator[None]:
    """Upload checkpoints during the `with` block, on rank 0, if `checkpoint.remote.url` is set.

    At the end it waits until everything is uploaded, for at most `checkpoint.remote.exit_wait_s`.
    """
    process = start_upload(run) if cfg.url is not None and is_first else None
    yield
    if process is not None:
        finish_upload(process, run, wait_s=cfg.exit_wait_s)


def start_upload(run: RunDir) -> subprocess.Popen[bytes] | None:
    """Start the process; if that fails, only a warning is printed."""
    log = run.logs / UPLOAD_LOG
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                processes.command(UPLOAD_MODULE, str(run.path), "--trainer", str(os.getpid())),
                env=processes.child_environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        _warn(f"cannot start the upload process: {error}")
        return None


def finish_upload(process: subprocess.Popen[bytes], run: RunDir, *, wait_s: float) -> bool:
    """Let the process upload the rest and wait for it; False if something is not in the store."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        is_done = process.wait(timeout=wait_s) == 0
    except subprocess.TimeoutExpired:
        is_done = False
        process.terminate()
        try:
            process.wait(timeout=TERMINATE_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if not is_done:
        last = _last_line(run.logs / UPLOAD_LOG)
        _warn(f"some checkpoints were not uploaded ({last}); `harness checkpoint upload {run.path}` uploads the rest")
    return is_done


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
