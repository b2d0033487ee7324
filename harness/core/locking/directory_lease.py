"""One writer for a directory: a lease that a process holds and renews, without file locks.

Why: two starts of one run delete each other's unfinished checkpoints. `flock` does not help: Lustre without `-o flock`
and many FUSE file systems do not have it.
How: the lease is a file `NNNNNN.json`; the highest number counts. Its first line says who holds it and never changes.
Its second line is a counter that the holder's thread rewrites every few seconds, and a flag for a clean exit.
A process takes the lease by creating the next number with link(2), from a file that is already complete: link fails if
the name exists, on local file systems, NFS and Lustre alike, so exactly one of several starters succeeds. (O_EXCL gives
the same from NFSv3 on, but a process killed before its first write would leave a lease that names nobody. It is used
only where hard links are missing.) The highest number is never deleted, so a slow starter that acts on an old view
creates a number that is too low, sees the higher one, and gives way.
On the holder's machine the lease is free as soon as its process is gone; pid and start time identify the process. From
another machine it is free once the counter has not changed for `lease_s`, by the clock of the observer: clocks of two
machines are never compared. A holder that finds another one's lease was taken over and hears of it (`on_lost`); it can
also ask before it writes (`make_sure`), which costs nothing unless renewals have been missing.
Left out: recalling a write that the kernel has already accepted when the lease is lost.
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

LOOK_EVERY_S = 0.2
RELEASE_WITHIN_S = 2.0
"""A file system that hangs does not keep a process from exiting."""
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@final
@dataclass(frozen=True, slots=True)
class SeenLease:
    """A lease file as it was read."""

    number: int
    holder: Holder | None
    """None: the file is empty or damaged; its holder is judged by whether the file changes."""
    pulse: str
    """The second line; any change of it is a sign of life."""
    released: bool
    time: float
    """Of the last renewal, by the holder's clock; only to be shown."""

    @property
    def lease_s(self) -> float:
        return DEFAULT_LEASE_S if self.holder is None else self.holder.lease_s

    def patience_s(self, me: Holder) -> float:
        """How long the counter must stand still before the lease counts as stale."""
        then = self.holder
        if then is not None and me.job and me.job == then.job and me.restart > then.restart:
            return then.sure_s  # Slurm has ended the earlier start of this job; this only makes sure
        return self.lease_s

    def is_alive(self, me: Holder) -> bool | None:
        """Whether the holder lives; None where only the counter can tell."""
        then = self.holder
        if then is None or then.machine != me.machine:
            return None
        start = start_of(then.pid)
        if start is not None and start in (then.started, HIDDEN):
            return True if start == then.started else None
        launcher_lives = start_of(then.launcher_pid) in (then.launcher_started, HIDDEN)
        is_ours = then.launcher_pid in (me.launcher_pid, me.pid)
        return None if then.launcher_pid and launcher_lives and not is_ours else False

    def describe(self) -> str:
        """Who holds the lease, and for how long; for one line of text."""
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


def file_of(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.json"


def newest(directory: Path) -> SeenLease | None:
    """The lease that counts; None where there never was one."""
    while True:
        numbers = _numbers(directory)
        if not numbers:
            return None
        with suppress(FileNotFoundError):  # a higher number came and this one was deleted: look again
            return _read(directory, max(numbers))


def _numbers(directory: Path) -> list[int]:
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return [int(stem) for stem in stems if stem.isdigit()]


def _read(directory: Path, number: int) -> SeenLease:
    text = file_of(directory, number).read_text(encoding="utf-8", errors="replace")
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
    tell: Callable[[SeenLease, float], None] | None = None,
) -> SeenLease | None:
    """Return once nobody holds the lease: the last one that was seen. Raises if its holder lives.

    With `at_most_s`, also returns if no sign of life was seen for so long. `tell` hears that there is something to
    wait for. Time counts only between looks that succeeded: a file system that hangs here proves nothing.
    """
    seen, silent_s, blind_s, looked_s = newest(directory), 0.0, 0.0, time.monotonic()
    while seen is not None and not seen.released:
        alive = seen.is_alive(me)
        if alive:
            raise InUseError(seen)
        patience_s = min(seen.patience_s(me), seen.lease_s if at_most_s is None else at_most_s)
        if alive is False or silent_s >= patience_s:
            return seen
        if tell is not None:
            tell(seen, patience_s)
            tell = None
        time.sleep(min(LOOK_EVERY_S, patience_s / 4))
        elapsed_s, looked_s = time.monotonic() - looked_s, time.monotonic()
        try:
            now = newest(directory)
        except OSError:
            blind_s += elapsed_s
            if blind_s > seen.lease_s:
                raise
            continue
        if now is not None and not now.released and (now.number, now.pulse) != (seen.number, seen.pulse):
            raise InUseError(now)
        seen, silent_s = now, silent_s + min(elapsed_s, 2 * LOOK_EVERY_S)
    return seen


def acquire(
    directory: Path,
    me: Holder,
    *,
    on_lost: Callable[[SeenLease], None],
    tell: Callable[[SeenLease, float], None] | None = None,
) -> Lease:
    """Take the lease of a directory, which is created. Raises InUseError if another process holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        free = wait_until_free(directory, me, tell=tell)
        number = 1 if free is None else free.number + 1
        descriptor = create(directory, number, me)
        if descriptor is not None:
            return Lease(directory, number, me, descriptor, on_lost)


def create(directory: Path, number: int, me: Holder, *, released: bool = False) -> int | None:
    """Create the lease of this number; its open file, or None where another process was first."""
    scratch, path = directory / f"new-{me.owner}", file_of(directory, number)
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
    except (FileExistsError, FileNotFoundError):  # another starter has the number, or has removed our scratch file
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
    """Whether link(2) worked although it failed: over NFS its answer may be lost and the call be repeated."""
    try:
        return scratch.stat().st_nlink == 2
    except OSError:
        return False


def _write_new(path: Path, me: Holder, *, released: bool) -> int:
    """A new file with a whole lease in it, open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, f"{json.dumps(asdict(me))}\n{_pulse(0, released=released)}".encode(), 0)
        os.fdatasync(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _pulse(beats: int, *, released: bool) -> str:
    """The second line; always of the same length, so that it is overwritten in place."""
    flag = "true " if released else "false"
    return f'{{"beats": {beats:>12}, "released": {flag}, "time": {time.time():>17.3f}}}\n'


def _prune(directory: Path, number: int) -> None:
    """Delete lower numbers, and what killed starters left."""
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
        self._sure_s = time.monotonic()
        self._ended = Event()
        self._thread = Thread(target=self._renew_on, name="lease", daemon=True)
        self._thread.start()

    def make_sure(self) -> None:
        """Return if the lease is still ours. Looks at the directory only if renewals have been missing."""
        if time.monotonic() - self._sure_s > self.me.sure_s and not self._ended.is_set():
            self._check()

    def release(self) -> None:
        """Stop renewing and leave the lease to the next; best effort where the file system does not answer."""
        self._ended.set()
        self._thread.join(timeout=RELEASE_WITHIN_S)

    def _renew_on(self) -> None:
        while not self._ended.wait(self.me.every_s):
            with suppress(OSError):
                self._renew()
        with suppress(OSError):
            self._write(released=True)
        os.close(self._descriptor)

    def _renew(self) -> None:
        began_s = time.monotonic()
        try:
            self._write(released=False)
        finally:  # a write that fails may mean that the file was deleted by whoever took over
            self._check()
        self._sure_s = began_s

    def _write(self, *, released: bool) -> None:
        """Goes to our own file, whatever its name is now: it never overwrites another holder's lease."""
        self._beats += 1
        os.pwrite(self._descriptor, _pulse(self._beats, released=released).encode(), self._offset)
        os.fdatasync(self._descriptor)

    def _check(self) -> None:
        seen = newest(self.directory)
        if seen is None:
            return  # somebody deleted the directory; nobody has taken over
        is_other = seen.holder is not None and seen.holder.owner != self.me.owner
        if (is_other or seen.number > self.number) and not self._ended.is_set():
            self._ended.set()
            self._on_lost(seen)
