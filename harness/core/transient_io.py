"""Repeats what a shared file system answers with an error that lasts only a moment.

An NFS client answers ESTALE once after another machine has replaced a file, and EIO while its server fails over. What
the launcher decides about a run must not depend on that moment. Reads of checkpoints, which may wait for minutes, have
a budget instead (`harness.checkpoint.io_retry`).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

TRANSIENT_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN)
ATTEMPTS = 3
PAUSE_S = 0.5

Answer = TypeVar("Answer")


def retry_transient(call: Callable[[], Answer]) -> Answer:
    """What a call returns, which may be repeated; raises its OSError if the last attempt fails too."""
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except OSError as error:
            if error.errno not in TRANSIENT_ERRORS:
                raise
            time.sleep(PAUSE_S)
    return call()
