"""The upload process of a run: starts it, starts it again if it ends by accident, and waits for it at the end.

How: it runs in its own session with low priority and shares only the run directory with the trainer. After a crash of
the trainer it is left alone: it uploads what is complete, and ends. A thread of rank 0 sees when it ends before the run
does. Configuration that it cannot work with is final, and said once; anything else, denied access too, is repeated with
growing pauses and a warning each time.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from harness.config.checkpoint import CheckpointRemoteConfig
from harness.config.command_line import shell_command
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_INTERRUPTED
from harness.core import processes
from harness.core.processes import last_line
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning

UPLOAD_MODULE = "harness.checkpoint.remote"
UPLOAD_LOG = "upload.log"
POLL_S = 5.0
LONGEST_PAUSE_S = 600.0


@contextmanager
def uploading(run: RunDir, cfg: CheckpointRemoteConfig, *, is_first: bool) -> Iterator[None]:
    """Upload checkpoints during the `with` block, on rank 0, if `checkpoint.remote.url` is set.

    At the end it waits until everything is uploaded, for at most `checkpoint.remote.exit_wait_s`.
    """
    process = UploadProcess(run) if cfg.url is not None and is_first else None
    yield
    if process is not None:
        process.finish(wait_s=cfg.exit_wait_s)


@final
class UploadProcess:
    def __init__(self, run: RunDir, *, poll_s: float = POLL_S) -> None:
        self._run, self._poll_s = run, poll_s
        self._is_ending = threading.Event()
        self._is_final = False
        """It ended, and another start would end in the same way."""
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="uploads", daemon=True)
        self._watcher.start()

    def finish(self, *, wait_s: float) -> bool:
        """Let the process upload the rest and wait for it; False if something is not in the store."""
        self._is_ending.set()
        self._watcher.join()
        if not self._is_final and (self._process is None or self._process.poll() is not None):
            self._restart()
        if self._process is None:
            return False
        assert self._process.stdin is not None
        self._process.stdin.close()
        is_done = processes.wait_or_end(self._process, wait_s=wait_s, grace_s=processes.GRACE_S)
        if not is_done:
            command = shell_command("harness", "checkpoint", "upload", self._run.path)
            print_warning(f"some checkpoints were not uploaded ({self._last_line()}); `{command}` uploads the rest")
        return is_done

    def _start(self) -> subprocess.Popen[bytes] | None:
        """Start the process; if that fails, only a warning is printed."""
        args = (str(self._run.path), "--trainer", str(os.getpid()))
        try:
            log = self._run.logs / UPLOAD_LOG
            return processes.start_logged(UPLOAD_MODULE, *args, log=log, stdin=subprocess.PIPE)
        except OSError as error:
            print_warning(f"cannot start the upload process: {error}")
            return None

    def _restart(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = self._start()

    def _watch(self) -> None:
        """Until the run ends: start the process again if it has ended."""
        pause_s = self._poll_s
        while not self._is_ending.wait(self._poll_s):
            code = None if self._process is None else self._process.poll()
            if self._process is not None and code is None:
                continue
            if code == EXIT_BAD_CONFIG:
                print_warning(f"checkpoints are not uploaded: {self._last_line()}")
                self._is_final = True
                return
            if code == EXIT_INTERRUPTED:
                print_warning(f"uploads wait: {self._last_line()}; trying again in {pause_s:.0f} s")
            elif code is not None:
                print_warning(f"the upload process ended with {code}, it starts again in {pause_s:.0f} s")
            if self._is_ending.wait(pause_s):
                return
            self._restart()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _last_line(self) -> str:
        return last_line(self._run.logs / UPLOAD_LOG)
