"""One writer per directory: a lease that a process holds and renews, without file locks.

Why: two starts of one run would delete each other's unfinished checkpoints. `flock` does not help: Lustre without
`-o flock` and many FUSE file systems do not have it.
How: the lease is a file `NNNNNN.json`; the highest number is the valid one. Its first line identifies the holder and
never changes. Its second line is a counter that the holder's thread rewrites every few seconds, and a flag for a clean
exit.
A process takes the lease by creating the next number with link(2), from a complete file. link fails if the name exists,
on local file systems, NFS and Lustre alike, so exactly one of several processes succeeds. (O_EXCL gives the same from
NFSv3 on, but a process killed before its first write would leave a lease without a holder. It is used only where hard
links are missing.) The highest number is never deleted: a slow process with an old view creates a number that is too
low, sees the higher one, and gives up.
On the holder's machine the lease is free as soon as its process is gone; pid and start time identify the process. On
another machine it is free once the counter has not changed for `lease_s`, by the clock of the observer. Clocks of two
machines are never compared. A holder that finds a newer lease has lost its own (`on_lost`). It can also check before a
write (`verify`), which costs nothing unless renewals are overdue. A holder can offer its lease to another process, by
its owner id (`offered_by`): that process takes it without a moment in which it is free.
Left out: a write that the kernel has already accepted when the lease is lost.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import final

from harness.core.locking.lease_holder import DEFAULT_LEASE_S, HIDDEN, Holder, start_of

POLL_S = 0.2
RELEASE_WITHIN_S = 2.0
"""Time limit of a release, so that a hanging file system does not keep a process from exiting."""
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@final
@dataclass(frozen=True, slots=True)
class SeenLease:
    """The content of a lease file at the time it was read."""

    number: int
    holder: Holder | None
    """None: the file is empty or damaged. Its holder then counts as alive if the file changes."""
    pulse: str
    """The second line; any change of it shows that the holder is alive."""
    released: bool
    time: float
    """Last renewal, by the holder's clock, in seconds since 1970; for display only."""

    @property
    def lease_s(self) -> float:
        return DEFAULT_LEASE_S if self.holder is None else self.holder.lease_s

    def stale_after_s(self, me: Holder) -> float:
        """Seconds without a change of the counter after which the lease is stale."""
        holder = self.holder
        if holder is not None and me.job and me.job == holder.job and me.restart > holder.restart:
            return holder.overdue_s  # Slurm has ended the earlier start of this job; this is only a safeguard
        return self.lease_s

    def is_alive(self, me: Holder) -> bool | None:
        """Whether the holder is alive; None if only the counter can show it."""
        holder = self.holder
        if holder is None or holder.machine != me.machine:
            return None
        start = start_of(holder.pid)
        if start is not None and start in (holder.started, HIDDEN):
            return True if start == holder.started else None
        launcher_lives = start_of(holder.launcher_pid) in (holder.launcher_started, HIDDEN)
        is_ours = holder.launcher_pid in (me.launcher_pid, me.pid)
        return None if holder.launcher_pid and launcher_lives and not is_ours else False

    def is_free(self, offered_by: str = "") -> bool:
        """Whether the lease may be taken at once: it was released, or its owner offers it."""
        return self.released or (self.holder is not None and self.holder.owner == offered_by)

    def describe(self) -> str:
        """Holder and age of the lease, as part of a line."""
        if self.holder is None:
            return f"an unknown process (lease {self.number} is unreadable)"
        job = f", job {self.holder.job}" if self.holder.job else ""
        now = time.time()
        held, beat = (max(0.0, now - then) for then in (self.holder.since, self.time))
        return (
            f"pid {self.holder.pid} on {self.holder.host}{job}, held for {held:.0f} s, last heartbeat {beat:.0f} s ago"
        )


@final
class InUseError(Exception):
    """Another process holds the lease."""

    def __init__(self, seen: SeenLease) -> None:
        super().__init__(seen.describe())


def lease_file(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.json"


def read_newest(directory: Path) -> SeenLease | None:
    """The valid lease; None if there never was one."""
    while True:
        numbers = _numbers(directory)
        if not numbers:
            return None
        try:
            return _read(directory, max(numbers))
        except FileNotFoundError:  # replaced by a higher number and deleted meanwhile, or NFS shows an old directory
            time.sleep(POLL_S)


def _numbers(directory: Path) -> list[int]:
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return [int(stem) for stem in stems if stem.isdigit()]


def _read(directory: Path, number: int) -> SeenLease:
    text = lease_file(directory, number).read_text(encoding="utf-8", errors="replace")
    first, _, second = text.partition("\n")
    try:
        known = {key: value for key, value in json.loads(first).items() if key in Holder.__dataclass_fields__}
        holder, pulse = Holder(**known), json.loads(second)
        return SeenLease(number, holder, second, released=bool(pulse["released"]), time=float(pulse["time"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return SeenLease(number, None, text, released=False, time=0.0)


def wait_until_free(
    directory: Path,
    me: Holder,
    *,
    at_most_s: float | None = None,
    on_wait: Callable[[SeenLease, float], None] | None = None,
    offered_by: str = "",
) -> SeenLease | None:
    """Wait until nobody holds the lease; returns the last one that was seen. Raises InUseError if its holder is alive.

    With `at_most_s`, also returns after that many seconds without a sign of life. `on_wait` is called once if there is
    something to wait for. The lease of the owner `offered_by` counts as free. Only time between successful reads
    counts: a file system that hangs here proves nothing.
    """
    seen, silent_s, blind_s, read_s = read_newest(directory), 0.0, 0.0, time.monotonic()
    while seen is not None and not seen.is_free(offered_by):
        alive = seen.is_alive(me)
        if alive:
            raise InUseError(seen)
        stale_after_s = min(seen.stale_after_s(me), seen.lease_s if at_most_s is None else at_most_s)
        if alive is False or silent_s >= stale_after_s:
            return seen
        if on_wait is not None:
            on_wait(seen, stale_after_s)
            on_wait = None
        time.sleep(min(POLL_S, stale_after_s / 4))
        elapsed_s, read_s = time.monotonic() - read_s, time.monotonic()
        try:
            now = read_newest(directory)
        except OSError:
            blind_s += elapsed_s
            if blind_s > seen.lease_s:
                raise
            continue
        if now is not None and not now.is_free(offered_by) and (now.number, now.pulse) != (seen.number, seen.pulse):
            raise InUseError(now)
        seen, silent_s = now, silent_s + min(elapsed_s, 2 * POLL_S)
    return seen


def acquire(
    directory: Path,
    me: Holder,
    *,
    on_lost: Callable[[SeenLease], None],
    at_most_s: float | None = None,
    on_wait: Callable[[SeenLease, float], None] | None = None,
    offered_by: str = "",
) -> Lease:
    """Take the lease of a directory, and create the directory. Raises InUseError if another process holds it.

    `wait_until_free` explains the options.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)  # a rejected start may remove it while this one waits
        free = wait_until_free(directory, me, at_most_s=at_most_s, on_wait=on_wait, offered_by=offered_by)
        number = 1 if free is None else free.number + 1
        descriptor = create(directory, number, me)
        if descriptor is not None:
            return Lease(directory, number, me, descriptor, on_lost)


def create(directory: Path, number: int, me: Holder, *, released: bool = False) -> int | None:
    """Create the lease of this number. Returns its open file, or None if another process was first."""
    scratch, path = directory / f"new-{me.owner}", lease_file(directory, number)
    try:
        descriptor = _write_new(scratch, me, released=released)
        try:
            os.link(scratch, path)
        except OSError as error:
            if not _was_linked(scratch):
                os.close(descriptor)
                if error.errno not in NO_HARD_LINKS:
                    raise
                descriptor = _write_new(path, me, released=released)
    except (FileExistsError, FileNotFoundError):  # another process has the number, or removed our scratch file
        return None
    finally:
        scratch.unlink(missing_ok=True)
    if max(_numbers(directory), default=number) > number:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    _prune(directory, number)
    return descriptor


def _was_linked(scratch: Path) -> bool:
    """Whether link(2) succeeded despite its error: over NFS the reply can be lost and the call repeated."""
    try:
        return scratch.stat().st_nlink == 2
    except OSError:
        return False


def _write_new(path: Path, me: Holder, *, released: bool) -> int:
    """Create a file with a complete lease; returns it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, f"{json.dumps(asdict(me))}\n{_pulse(0, released=released)}".encode(), 0)
        os.fdatasync(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _pulse(beats: int, *, released: bool) -> str:
    """The second line, of fixed length, so that it is overwritten in place."""
    flag = "true " if released else "false"
    return f'{{"beats": {beats:>12}, "released": {flag}, "time": {time.time():>17.3f}}}\n'


def _prune(directory: Path, number: int) -> None:
    """Delete lower numbers, and scratch files of killed processes."""
    for path in directory.iterdir():
        stem = path.name.removesuffix(".json")
        if path.name.startswith("new-") or (stem.isdigit() and int(stem) < number):
            with suppress(OSError):
                path.unlink()


@final
class Lease:
    """A lease that this process holds; a thread renews it until `release`."""

    def __init__(
        self, directory: Path, number: int, me: Holder, descriptor: int, on_lost: Callable[[SeenLease], None]
    ) -> None:
        self.directory, self.number, self.me = directory, number, me
        self._descriptor, self._on_lost = descriptor, on_lost
        self._offset = len(json.dumps(asdict(me)).encode()) + 1
        self._beats = 0
        self._confirmed_s = time.monotonic()
        self._ended = Event()
        self._thread = Thread(target=self._renew_until_ended, name="lease", daemon=True)
        self._thread.start()

    def verify(self) -> None:
        """Check that the lease is still ours. Reads the directory only if renewals are overdue."""
        if time.monotonic() - self._confirmed_s > self.me.overdue_s and not self._ended.is_set():
            self._check()

    def is_newest(self) -> bool:
        """Whether no other process has taken the lease since. Reads the directory."""
        self._check()
        return not self._ended.is_set()

    def release(self) -> None:
        """Stop renewing and mark the lease as released; best effort if the file system does not answer."""
        self._ended.set()
        self._thread.join(timeout=RELEASE_WITHIN_S)

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self.me.renew_every_s):
            with suppress(OSError):
                self._renew()
        with suppress(OSError):
            self._write(released=True)
        os.close(self._descriptor)

    def _renew(self) -> None:
        began_s = time.monotonic()
        try:
            self._write(released=False)
        finally:  # a write can fail because the new holder deleted our file
            self._check()
        self._confirmed_s = began_s

    def _write(self, *, released: bool) -> None:
        """Write to our own open file, whatever its name is now; never to the lease of another holder."""
        self._beats += 1
        os.pwrite(self._descriptor, _pulse(self._beats, released=released).encode(), self._offset)
        os.fdatasync(self._descriptor)

    def _check(self) -> None:
        seen = read_newest(self.directory)
        if seen is None:
            return  # the directory was deleted; no other process took over
        is_other = seen.holder is not None and seen.holder.owner != self.me.owner
        if (is_other or seen.number > self.number) and not self._ended.is_set():
            self._ended.set()
            self._on_lost(seen)
