"""The upload process of a run.

    python -m harness.checkpoint.remote RUN_DIR      uploads what is not in the store yet, then exits

Rank 0 starts it with its run (`upload_process`). It never imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.checkpoint.remote.remote_run import open_remote_run
from harness.checkpoint.remote.upload_process import UPLOAD_LOG
from harness.checkpoint.remote.uploader import Uploader
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError
from harness.config.schema import Config
from harness.core.child_process import ignore_trainer_signals, is_run_over, lower_priority, wait_for_trainer
from harness.core.locking.file_lock import exclusive
from harness.core.object_store import AccessDenied
from harness.core.rundir import RunDir
from harness.core.stderr_lines import log_with_time

POLL_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
LOCK = "upload.lock"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.checkpoint.remote", description="Upload the checkpoints of a run to its object store."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    run = RunDir(options.run_dir.absolute())
    if options.trainer is not None:
        ignore_trainer_signals()
        lower_priority()
    try:
        cfg = compose.read(run.config)
        with exclusive(run.path / LOCK, keep_trying=wait_with_notice(run)):
            return upload_until_end(run, cfg, trainer=options.trainer)
    except ConfigError as error:
        log_with_time(str(error))
        is_final = options.trainer is None or not isinstance(error, AccessDenied)
        return EXIT_BAD_CONFIG if is_final else EXIT_INTERRUPTED


def wait_with_notice(run: RunDir) -> Callable[[], bool]:
    """A condition that always holds, and says once that another process uploads the run."""
    line = f"waiting for the process that uploads {run.path}: that of a run that trains ends with the run; its log is"
    lines = iter([f"{line} {run.logs / UPLOAD_LOG}"])

    def keep_trying() -> bool:
        for line in lines:
            log_with_time(line)
        return True

    return keep_trying


def has_store(run: RunDir) -> bool:
    return compose.read(run.config).checkpoint.remote.url is not None


def upload_until_end(run: RunDir, cfg: Config, *, trainer: int | None) -> int:
    """Upload until the trainer, the parent of this process, is gone and everything is in the store. The store gets
    `exit_wait_s` seconds after that; without a trainer as long.

    The place in the store follows `run.name`, as that of a resume does: the directory may be a link or may have moved.
    Denied access ends it while the trainer is there: rank 0 warns and starts it again. Later nobody would.
    """
    checkpoint, name = cfg.checkpoint, cfg.run.name
    assert checkpoint.remote.url is not None
    assert name is not None, "a start names its run"
    remote = open_remote_run(checkpoint.remote.url, name, retry_s=0)
    uploader: Uploader | None = None
    pause_s, failed, gone_s = FIRST_PAUSE_S, "", None
    while True:
        is_last = trainer is None or is_run_over(trainer)
        if is_last and gone_s is None:
            gone_s = time.monotonic()
        try:
            uploader = uploader or Uploader(run, remote, checkpoint)
            for line in uploader.upload_due(last=is_last):
                log_with_time(line)
            if failed:
                log_with_time("the store answers again; everything was uploaded")
            failed, pause_s = "", FIRST_PAUSE_S
            if is_last:
                return EXIT_DONE
        except (OSError, AccessDenied) as error:
            if isinstance(error, AccessDenied) and (trainer is None or not is_last):
                raise
            problem = _describe(error)
            log_with_time(problem if problem != failed else f"still: {problem}")
            failed, pause_s = problem, min(2 * pause_s, LONGEST_PAUSE_S)
        if gone_s is not None and time.monotonic() - gone_s > checkpoint.remote.exit_wait_s:
            return EXIT_INTERRUPTED
        _sleep(pause_s if failed else POLL_S, trainer)


def _describe(error: OSError | AccessDenied) -> str:
    if isinstance(error, StorageError | AccessDenied):
        return str(error)
    return f"{error.filename}: {error.strerror}"


def _sleep(seconds: float, trainer: int | None) -> None:
    """Sleep; wakes up early when the trainer ends."""
    if trainer is None or is_run_over(trainer):
        time.sleep(seconds)
    else:
        wait_for_trainer(seconds)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread of a client that waits for its server must not keep the process
