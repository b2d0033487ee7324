"""The lease of a run directory: one start writes a run at a time.

Rank 0 takes it in `harness.resume` before it changes anything, renews it from a thread while the run goes on, and
releases it at the end. A launcher asks first, before it creates a file. `harness.core.locking.directory_lease` says how
a lease works and when one that was not released counts as stale. Commands that only read, and `harness ctl`, do not ask
for it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from harness.config.errors import EXIT_BAD_CONFIG, ConfigError, StorageError
from harness.core.locking import directory_lease
from harness.core.locking.directory_lease import InUseError, Lease, SeenLease
from harness.core.locking.lease_holder import this_process

FOLDER = "lease"
OF_STORAGE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN)
"""Errors after which the same command may succeed."""

_held: Lease | None = None
"""Of the run that this process writes."""
_left: Lease | None = None
"""Of a run that crashed in this process, which has not ended."""


def hold(run: Path, lease_s: float) -> None:
    """Take the lease of a run for this process; refuses if any process holds it."""
    global _held, _left
    if _left is not None:
        _left.release()
        _left = None
    try:
        _held = directory_lease.acquire(run / FOLDER, this_process(lease_s), on_lost=leave, tell=say_waiting)
    except InUseError as error:
        raise in_use(run, error) from None
    except OSError as error:
        raise unusable(run, "cannot create", error) from None


@contextmanager
def holding() -> Iterator[None]:
    """Release at the end the lease that `hold` took meanwhile.

    After a crash it stays: a thread that writes a checkpoint may still be at work. It is free once the process is gone.
    """
    global _held, _left
    try:
        yield
    except ConfigError:
        _release()
        raise
    except BaseException:
        _held, _left = None, _held
        raise
    _release()


def _release() -> None:
    global _held
    if _held is not None:
        _held.release()
        _held = None


@contextmanager
def cleared(run: Path) -> Iterator[None]:
    """In a launcher, around the ranks: if rank 0 died here, free its lease for every machine."""
    try:
        yield
    finally:
        with suppress(OSError):
            if (dead := _dead(run)) is not None:
                clear(run / FOLDER, dead)


def guard() -> None:
    """Before a write that lasts: exit if another process has taken over the run of this one."""
    if _held is not None and _held.me.pid == os.getpid():
        _held.make_sure()


def leave(seen: SeenLease) -> NoReturn:
    """End this process at once, because another one writes the run now.

    The launcher sees rank 0 exit and takes the other ranks down; without rank 0 none of them publishes anything. The
    exit code is 2 and not 75: a requeue of this job would end the start that has taken over.
    """
    line = f"this run was taken over by {seen.describe()}; this process exits and writes nothing more"
    print(f"harness: {line}", file=sys.stderr, flush=True)
    os._exit(EXIT_BAD_CONFIG)


def require_free(run: Path, *, wait: bool) -> None:
    """Refuse if another process holds the lease of a run. A lease that this process holds is free to it.

    With `wait`, it waits until a silent holder on another machine shows life or its lease is stale, and then clears the
    lease. Otherwise it returns after a few heartbeats without a sign of life.
    """
    directory, me = run / FOLDER, this_process()
    try:
        seen = directory_lease.newest(directory)
        if seen is None or (seen.holder is not None and seen.holder.is_same_process(me)):
            return
        at_most_s = None if wait or seen.holder is None else seen.holder.sure_s
        free = directory_lease.wait_until_free(directory, me, at_most_s=at_most_s, tell=say_waiting if wait else None)
        if wait and free is not None and not free.released and free.is_alive(me) is None:
            clear(directory, free)
    except InUseError as error:
        raise in_use(run, error) from None
    except OSError as error:
        raise unusable(directory, "cannot read", error) from None


def dead_holder(run: Path) -> str:
    """Who wrote a run last, if that process died on this machine without releasing the lease; else empty."""
    with suppress(OSError):
        if (dead := _dead(run)) is not None:
            return f"{dead.describe()}, is gone"
    return ""


def _dead(run: Path) -> SeenLease | None:
    """A lease whose holder is known to have died without releasing it."""
    seen = directory_lease.newest(run / FOLDER)
    is_dead = seen is not None and not seen.released and seen.is_alive(this_process()) is False
    return seen if is_dead else None


def clear(directory: Path, stale: SeenLease) -> None:
    """Put a released lease above that of a holder which is gone, so that nobody waits for it."""
    descriptor = directory_lease.create(directory, stale.number + 1, this_process(), released=True)
    if descriptor is not None:
        os.close(descriptor)


def unusable(path: Path, problem: str, error: OSError) -> Exception:
    """What to raise for an I/O error: one of the storage, or of the user who named the place."""
    if error.errno in OF_STORAGE:
        return StorageError(error.errno, f"{problem} it: {error.strerror}", str(path))
    return ConfigError("run.dir", f"{problem} {path}: {error.strerror}")


def in_use(run: Path, error: InUseError) -> ConfigError:
    advice = f"stop it (harness ctl {run} stop --reason ...), wait for its end, or choose another name"
    return ConfigError("run.name", f"{run} is in use by {error}; {advice}")


def say_waiting(seen: SeenLease, patience_s: float) -> None:
    line = f"waiting up to {patience_s:.0f} s for a sign of life of {seen.describe()}"
    print(f"harness: {line}", file=sys.stderr, flush=True)
