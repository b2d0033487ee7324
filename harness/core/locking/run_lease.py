"""The lease of a run directory: only one start of a run writes at a time.

Rank 0 takes the lease in `harness.resume`, or before it downloads the run from an object store, before it changes
anything. It renews it from a thread during the run, and releases it at the end. A launcher checks it before it creates
a file. In an elastic run the launcher that coordinates a restart holds it from the death of one rank 0 until the next
takes it over (OFFERED_BY): of two launchers that have lost each other, only one writes.
`harness.core.locking.directory_lease` explains how a lease works and when one that was not released is stale.
`harness checkpoint import` takes it while it writes. Commands that only read, and `harness ctl`, do not need it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from harness.config.command_line import shell_command
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError, StorageError
from harness.core.locking import directory_lease
from harness.core.locking.directory_lease import InUseError, Lease, SeenLease
from harness.core.locking.lease_holder import DEFAULT_LEASE_S, this_process
from harness.core.transient_io import TRANSIENT_ERRORS, retry_transient

FOLDER = "lease"
OFFERED_BY = "HARNESS_LEASE_OFFERED_BY"
"""Environment variable of a rank: owner of the lease that rank 0 takes over from the launcher; empty: none."""
TAKEOVER_ATTEMPTS = 3
"""How often a holder that the job has lost may be seen alive before it counts as alive."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
STORAGE_ERRORS = (*TRANSIENT_ERRORS, *DISK_FULL)
"""Errors after which the same command may succeed."""

_held: Lease | None = None
"""Lease of the run that this process writes."""
_abandoned: Lease | None = None
"""Lease of a run that crashed in this process while the process lives on."""


def hold(run: Path, lease_s: float) -> None:
    """Take the lease of a run for this process, unless it has it. Raises ConfigError if another process holds it."""
    global _held, _abandoned
    if _held is not None and _held.directory == run / FOLDER:
        return
    if _abandoned is not None:
        _abandoned.release()
        _abandoned = None
    try:
        _held = directory_lease.acquire(
            run / FOLDER,
            this_process(lease_s),
            on_lost=exit_after_takeover,
            on_wait=report_waiting,
            offered_by=os.environ.get(OFFERED_BY, ""),
        )
    except InUseError as error:
        raise in_use_error(run, error) from None
    except OSError as error:
        raise io_error(run, "cannot create", error) from None


@contextmanager
def holding() -> Iterator[None]:
    """Context that releases at its end the lease that `hold` took inside.

    After a crash the lease stays held: a writer thread of a checkpoint may still be running. It is free once the
    process is gone.
    """
    global _held, _abandoned
    try:
        yield
    except ConfigError:
        _release()
        raise
    except BaseException:
        _held, _abandoned = None, _held
        raise
    _release()


def _release() -> None:
    global _held
    if _held is not None:
        _held.release()
        _held = None


@contextmanager
def clearing_dead_lease(run: Path) -> Iterator[None]:
    """Context for a launcher, around its ranks: if rank 0 died here, frees its lease for every machine."""
    try:
        yield
    finally:
        clear_dead_lease(run)


def clear_dead_lease(run: Path) -> None:
    """Free the lease of a process that died on this machine without releasing it; for its launcher."""
    with suppress(OSError):
        if (dead := _dead_lease(run)) is not None:
            release_stale_lease(run / FOLDER, dead)


def guard() -> None:
    """Call before a durable write: exits if another process has taken over the run of this one."""
    if _held is not None and _held.me.pid == os.getpid():
        _held.verify()


def exit_after_takeover(seen: SeenLease) -> NoReturn:
    """Exit at once, because another process writes the run now.

    The launcher sees rank 0 exit and terminates the other ranks; without rank 0 none of them publishes anything. The
    exit code is 2 and not 75: a requeue of this job would end the start that has taken over.
    """
    line = f"this run was taken over by {seen.describe()}; this process exits and writes nothing more"
    print(f"harness: {line}", file=sys.stderr, flush=True)
    os._exit(EXIT_BAD_CONFIG)


def require_free(run: Path, *, wait: bool) -> None:
    """Raise ConfigError if another process holds the lease of a run.

    With `wait`, waits until a silent holder on another machine renews its lease or the lease is stale, and then clears
    it. Otherwise returns after a few missed renewals.
    """
    directory, me = run / FOLDER, this_process()
    try:
        seen = directory_lease.read_newest(directory)
        if seen is None or (seen.holder is not None and seen.holder.is_same_process(me)):
            return
        at_most_s = None if wait or seen.holder is None else seen.holder.overdue_s
        on_wait = report_waiting if wait else None
        free = directory_lease.wait_until_free(directory, me, at_most_s=at_most_s, on_wait=on_wait)
        if wait and free is not None and not free.released and free.is_alive(me) is None:
            release_stale_lease(directory, free)
    except InUseError as error:
        raise in_use_error(run, error) from None
    except OSError as error:
        raise io_error(directory, "cannot read", error) from None


def is_in_use(run: Path) -> bool:
    """Whether another process holds the lease of a run, or may hold it because the lease cannot be read."""
    try:
        retry_transient(partial(require_free, run, wait=False))
    except (ConfigError, StorageError):
        return True
    return False


def take_over_lease(run: Path) -> Lease:
    """Take the lease of a run whose rank 0 is dead or lost, for the launcher that decides about the next start.

    The lease of a process on another machine is taken once it has missed a few renewals; that process exits when it
    sees this, if it lives. Raises ConfigError if the lease is renewed again and again.
    """
    directory = run / FOLDER
    for attempt in range(1, TAKEOVER_ATTEMPTS + 1):
        try:
            seen = retry_transient(partial(directory_lease.read_newest, directory))
            me = this_process(DEFAULT_LEASE_S if seen is None else seen.lease_s)
            at_most_s = None if seen is None or seen.holder is None else seen.holder.overdue_s
            return directory_lease.acquire(directory, me, on_lost=lambda _: None, at_most_s=at_most_s)
        except InUseError as error:  # it may have been renewed a last time
            if attempt == TAKEOVER_ATTEMPTS:
                raise in_use_error(run, error) from None
        except OSError as error:
            raise io_error(directory, "cannot take", error) from None
    raise AssertionError("the last attempt returns or raises")


def dead_holder(run: Path) -> str:
    """The last writer of a run, if it died on this machine without releasing the lease; else empty."""
    with suppress(OSError):
        if (dead := _dead_lease(run)) is not None:
            return f"{dead.describe()}, is gone"
    return ""


def _dead_lease(run: Path) -> SeenLease | None:
    """The lease, if its holder is known to have died without releasing it."""
    seen = directory_lease.read_newest(run / FOLDER)
    is_dead = seen is not None and not seen.released and seen.is_alive(this_process()) is False
    return seen if is_dead else None


def release_stale_lease(directory: Path, stale: SeenLease) -> None:
    """Create a released lease above that of a dead holder, so that no process waits for it."""
    descriptor = directory_lease.create(directory, stale.number + 1, this_process(), released=True)
    if descriptor is not None:
        os.close(descriptor)


def io_error(path: Path, problem: str, error: OSError, *, key: str = "run.dir") -> Exception:
    """The exception for an I/O error: StorageError if the storage failed, ConfigError if the path of `key` is wrong."""
    if error.errno in STORAGE_ERRORS:
        return StorageError(error.errno, f"{problem} it: {error.strerror}", str(path))
    return ConfigError(key, f"{problem} {path}: {error.strerror}")


@contextmanager
def naming_full_disk(run: Path) -> Iterator[None]:
    """Context in which the error of a write to a full disk becomes a StorageError, which is one line for the user."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or error.errno not in DISK_FULL:
            raise
        raise io_error(Path(error.filename or run), "cannot write", error) from None


def in_use_error(run: Path, error: InUseError) -> ConfigError:
    """The exception for a run that another process writes."""
    stop = shell_command("harness", "ctl", run, "stop")
    advice = f"stop it ({stop} --reason ...), wait until it ends, or choose another name"
    return ConfigError("run.name", f"{run} is in use by {error}; {advice}")


def report_waiting(seen: SeenLease, stale_after_s: float) -> None:
    """Print for which holder and how long this process waits."""
    line = f"waiting up to {stale_after_s:.0f} s for a sign of life of {seen.describe()}"
    print(f"harness: {line}", file=sys.stderr, flush=True)
