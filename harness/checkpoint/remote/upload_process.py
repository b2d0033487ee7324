"""Starts the upload process of a run and waits for it at the end.

How: it runs in its own session with low priority and shares only the run directory with the trainer. After a crash it
is left alone: it uploads what is complete, and ends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from harness.config.checkpoint import CheckpointRemoteConfig
from harness.core import processes
from harness.core.processes import last_line
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning

UPLOAD_MODULE = "harness.checkpoint.remote"
UPLOAD_LOG = "upload.log"


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
    args = (str(run.path), "--trainer", str(os.getpid()))
    try:
        return processes.start_logged(UPLOAD_MODULE, *args, log=run.logs / UPLOAD_LOG, stdin=subprocess.PIPE)
    except OSError as error:
        print_warning(f"cannot start the upload process: {error}")
        return None


def finish_upload(process: subprocess.Popen[bytes], run: RunDir, *, wait_s: float) -> bool:
    """Let the process upload the rest and wait for it; False if something is not in the store."""
    assert process.stdin is not None
    process.stdin.close()
    is_done = processes.wait_or_end(process, wait_s=wait_s, grace_s=processes.GRACE_S)
    if not is_done:
        rest = f"`harness checkpoint upload {run.path}` uploads the rest"
        print_warning(f"some checkpoints were not uploaded ({last_line(run.logs / UPLOAD_LOG)}); {rest}")
    return is_done
