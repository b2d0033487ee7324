"""Mutual exclusion between processes: a file lock, or a lease where the file system has no file locks.

`flock` is tried first: the kernel releases it with its process, and processes that inherit the open file hold it too.
Lustre without `-o flock` and some FUSE file systems answer ENOSYS, EOPNOTSUPP or ENOLCK. There a lease beside the file
replaces it (`harness.core.locking.directory_lease`): only this process holds it, and the lease of a dead process on
another machine is stale after a minute.
"""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from harness.core.locking import directory_lease
from harness.core.locking.lease_holder import this_process

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
POLL_S = 0.5


@contextmanager
def exclusive(path: Path, *, keep_trying: Callable[[], bool]) -> Iterator[IO[str] | None]:
    """Hold the lock and yield its open file; None if another process holds it and `keep_trying` returns False."""
    with path.open("w") as file, ExitStack() as held:
        while not _try_lock(file, path, held):
            if not keep_trying():
                yield None
                return
            time.sleep(POLL_S)
        yield file


def _try_lock(file: IO[str], path: Path, held: ExitStack) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    me = replace(this_process(), launcher_pid=0)  # there are no other ranks to wait for
    try:
        held.callback(directory_lease.acquire(path.with_name(f"{path.name}.lease"), me, on_lost=lambda _: None).release)
    except directory_lease.InUseError:
        return False
    return True
