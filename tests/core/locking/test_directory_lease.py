"""Tests of the lease with real processes and files: rejection, takeover, and never two holders."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint import catalog
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError, StorageError
from harness.core import transient_io
from harness.core.locking import directory_lease, lease_holder, run_lease
from harness.core.locking.directory_lease import InUseError, Lease, SeenLease
from harness.core.locking.lease_holder import Holder, this_process
from harness.core.rundir import append_line, write_atomically
from tests.forks import forks

ELSEWHERE = "another machine"
NUM_RACES = 20
SHORT_S = 0.4
FAR_TOO_LONG_S = 20.0


def ignore(_: SeenLease) -> None:
    """`on_lost` of a test."""


def holder_on_other_machine(lease_s: float = SHORT_S, **changes: Any) -> Holder:
    """A holder on another machine, whose process cannot be looked up here."""
    return replace(this_process(lease_s), machine=ELSEWHERE, host="node7", **changes)


def acquire(directory: Path, me: Holder | None = None) -> Lease:
    return directory_lease.acquire(directory, me or this_process(), on_lost=ignore)


def abandon_lease(directory: Path, who: Holder, number: int = 1) -> None:
    """Create the lease of a process that ended without releasing it."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = directory_lease.create(directory, number, who)
    assert descriptor is not None
    os.close(descriptor)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def in_a_process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = forks().Process(target=function, args=arguments)
    process.start()
    return process


def hold_and_wait(directory: Path, reports: Connection) -> None:
    acquire(directory)
    reports.send(os.getpid())
    time.sleep(60)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A directory whose holder was killed."""
    parent_end, child_end = forks().Pipe()
    process = in_a_process(hold_and_wait, tmp_path / "lease", child_end)
    assert parent_end.poll(60)
    with pytest.raises(InUseError, match=f"^pid {parent_end.recv()} on "):
        acquire(tmp_path / "lease")
    process.kill()
    process.join()
    return tmp_path / "lease"


def test_the_lease_of_a_killed_process_is_free_at_once(killed: Path) -> None:
    begun_s = time.monotonic()
    acquire(killed).release()
    assert time.monotonic() - begun_s < FAR_TOO_LONG_S
    assert names(killed) == ["000002.json"]


def test_a_released_lease_is_free_for_every_machine(tmp_path: Path) -> None:
    acquire(tmp_path, holder_on_other_machine(3600.0)).release()
    acquire(tmp_path).release()


def test_a_process_cannot_take_its_own_lease_again(tmp_path: Path) -> None:
    held = acquire(tmp_path)
    with pytest.raises(InUseError):
        acquire(tmp_path)
    held.release()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    me = this_process()
    abandon_lease(tmp_path, replace(me, started=me.started - 1))
    acquire(tmp_path).release()


def test_a_living_launcher_keeps_the_lease_of_its_dead_rank_busy_unless_it_restarts_the_rank(tmp_path: Path) -> None:
    me = this_process(SHORT_S)
    dead = replace(me, started=me.started - 1, launcher_pid=os.getppid(), launcher_started=start(os.getppid()))
    abandon_lease(tmp_path, dead)
    seen = directory_lease.read_newest(tmp_path)
    assert seen is not None
    assert seen.is_alive(me) is None, "its launcher terminates the other ranks"
    assert seen.is_alive(replace(me, launcher_pid=os.getppid())) is False
    assert seen.is_alive(replace(me, machine=ELSEWHERE)) is None


def start(pid: int) -> int:
    found = lease_holder.start_of(pid)
    assert found is not None
    return found


def test_a_renewal_on_another_machine_rejects_within_seconds(tmp_path: Path) -> None:
    held = acquire(tmp_path, holder_on_other_machine(3600.0, job="4711_2"))
    begun_s = time.monotonic()
    with pytest.raises(InUseError, match=r"^pid \d+ on node7, job 4711_2, held for \d+ s, last heartbeat \d+ s ago$"):
        acquire(tmp_path)
    assert time.monotonic() - begun_s < FAR_TOO_LONG_S
    held.release()


@pytest.mark.parametrize("skew_s", [-1e6, 1e6], ids=["behind", "ahead"])
def test_a_silent_lease_of_another_machine_is_stale_after_lease_s_whatever_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    now = time.time
    with monkeypatch.context() as skewed:
        skewed.setattr(time, "time", lambda: now() + skew_s)
        abandon_lease(tmp_path, holder_on_other_machine(1.0))
    begun_s = time.monotonic()
    acquire(tmp_path).release()
    assert 1.0 <= time.monotonic() - begun_s < FAR_TOO_LONG_S


def test_a_requeued_job_waits_only_for_a_few_heartbeats(tmp_path: Path) -> None:
    abandon_lease(tmp_path, holder_on_other_machine(3600.0, job="17"))
    seen = directory_lease.read_newest(tmp_path)
    assert seen is not None
    me = replace(this_process(), job="17", restart=1)
    assert seen.stale_after_s(me) == 3 * lease_holder.BEAT_S
    assert seen.stale_after_s(replace(me, restart=0)) == 3600.0
    assert seen.stale_after_s(replace(me, job="18")) == 3600.0


def test_an_unreadable_lease_is_stale_once_it_stops_changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lease, "DEFAULT_LEASE_S", SHORT_S)
    (tmp_path / "000004.json").write_text("{")
    acquire(tmp_path).release()
    assert names(tmp_path) == ["000005.json"]


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    holder = json.dumps(asdict(this_process()) | {"new": 1})
    (tmp_path / "000001.json").write_text(f'{holder}\n{{"beats": 1, "released": false, "time": 0, "more": 2}}\n')
    with pytest.raises(InUseError, match=f"^pid {os.getpid()} "):
        acquire(tmp_path)


def race(directory: Path, barrier: Barrier, reports: Connection) -> None:
    """Take every stale lease at the same moment as a competitor; report those that were won."""
    won = []
    for number in range(NUM_RACES):
        barrier.wait(60)
        with suppress(InUseError):
            acquire(directory / str(number))
            won.append(number)
    reports.send(won)
    barrier.wait(60)  # the loser must see that the winner is alive


@pytest.mark.parametrize("machine", ["this", ELSEWHERE])
def test_exactly_one_of_two_processes_takes_a_stale_lease(tmp_path: Path, machine: str) -> None:
    me = this_process()
    stale = replace(me, started=me.started - 1) if machine == "this" else holder_on_other_machine(0.1)
    for number in range(NUM_RACES):
        abandon_lease(tmp_path / str(number), stale)
    barrier = forks().Barrier(3)
    pipes = [forks().Pipe() for _ in range(2)]
    processes = [in_a_process(race, tmp_path, barrier, child_end) for _, child_end in pipes]
    for _ in range(NUM_RACES):
        barrier.wait(60)
    won = [parent_end.recv() for parent_end, _ in pipes]
    barrier.wait(60)
    for process in processes:
        process.join()
    assert sorted(won[0] + won[1]) == list(range(NUM_RACES)), "each once"


def test_a_slow_process_with_an_old_view_gives_up(tmp_path: Path) -> None:
    for _ in range(3):
        acquire(tmp_path).release()
    held = acquire(tmp_path)
    assert names(tmp_path) == ["000004.json"]
    assert directory_lease.create(tmp_path, 2, holder_on_other_machine()) is None, (
        "the number is free again, and too low"
    )
    assert names(tmp_path) == ["000004.json"]
    held.release()


def test_an_old_view_of_the_directory_is_read_again_with_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client may list a lease for seconds after another machine has replaced it."""
    abandon_lease(tmp_path, this_process(), number=2)
    list_numbers, num_calls, begun_s = directory_lease._numbers, 0, time.monotonic()

    def list_late(directory: Path) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        return [3] if time.monotonic() - begun_s < 0.5 else list_numbers(directory)

    monkeypatch.setattr(directory_lease, "_numbers", list_late)
    seen = directory_lease.read_newest(tmp_path)
    assert seen is not None
    assert seen.number == 2
    assert num_calls < 10


def test_a_take_over_reads_the_lease_again_after_an_io_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandon_lease(tmp_path / run_lease.FOLDER, holder_on_other_machine())
    read_newest, errors = directory_lease.read_newest, [errno.ESTALE, errno.EIO]

    def fail_first(directory: Path) -> SeenLease | None:
        if errors:
            raise OSError(number := errors.pop(), os.strerror(number))
        return read_newest(directory)

    monkeypatch.setattr(directory_lease, "read_newest", fail_first)
    monkeypatch.setattr(transient_io, "PAUSE_S", 0.01)
    assert not run_lease.is_in_use(tmp_path)
    errors += [errno.ESTALE, errno.EIO]
    lease = run_lease.take_over_lease(tmp_path)
    assert (lease.number, lease.is_newest()) == (2, True)
    lease.release()


def test_rank_0_takes_the_lease_that_the_launcher_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = run_lease.take_over_lease(tmp_path)
    with pytest.raises(ConfigError, match="is in use by pid"):
        run_lease.hold(tmp_path, 60.0)
    monkeypatch.setenv(run_lease.OFFERED_BY, launcher.me.owner)
    with run_lease.holding():
        run_lease.hold(tmp_path, 60.0)
        assert not launcher.is_newest()
        with pytest.raises(ConfigError, match="is in use by pid"):
            run_lease.take_over_lease(tmp_path)
    launcher.release()
    run_lease.take_over_lease(tmp_path).release()


def test_scratch_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "new-0123").touch()
    acquire(tmp_path).release()
    assert names(tmp_path) == ["000001.json"]


def test_a_file_system_without_hard_links_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    held = acquire(tmp_path)
    with pytest.raises(InUseError):
        acquire(tmp_path)
    assert directory_lease.create(tmp_path, 1, holder_on_other_machine()) is None
    held.release()
    assert names(tmp_path) == ["000001.json"]


def test_a_link_whose_reply_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        for _ in range(2):
            link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    acquire(tmp_path).release()
    assert names(tmp_path) == ["000001.json"]


def write_forever(run: Path) -> None:
    """A run on another machine that writes continuously."""
    lease_holder.this_machine = lambda: ELSEWHERE
    with run_lease.holding():
        run_lease.hold(run, 1.0)
        while True:
            append_line(run / "written", "x")
            time.sleep(0.005)


def test_a_holder_that_lost_its_lease_exits_before_it_writes_again(tmp_path: Path) -> None:
    process = in_a_process(write_forever, tmp_path)
    deadline = time.monotonic() + 200
    while not (tmp_path / "written").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with run_lease.holding():
        run_lease.hold(tmp_path, 60.0)
        written = (tmp_path / "written").read_bytes()
        os.kill(process.pid, signal.SIGCONT)
        process.join(60)
        assert process.exitcode == EXIT_BAD_CONFIG
        assert len((tmp_path / "written").read_bytes()) <= len(written) + 2, "at most the line it was stopped in"


class ExitedError(Exception):
    """Raised in place of the exit of the process."""


def exit_now(_: SeenLease) -> None:
    raise ExitedError


WRITERS: dict[str, Callable[[Path], object]] = {
    "append": lambda path: append_line(path / "ledger.jsonl", "x"),
    "replace": lambda path: write_atomically(path / "health.json", "x"),
    "publish": lambda path: catalog.publish(path / ".part", path / "step-00000001-gen-0"),
    "drop": lambda path: catalog.delete(path / ".part"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_after_a_stall_a_holder_checks_its_lease_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.setattr(run_lease, "exit_after_takeover", exit_now)
    kept = tmp_path / "kept"
    (kept / ".part").mkdir(parents=True)
    with run_lease.holding():
        run_lease.hold(tmp_path, 3600.0)
        abandon_lease(tmp_path / run_lease.FOLDER, holder_on_other_machine(), number=2)
        assert run_lease._held is not None
        run_lease._held._confirmed_s -= run_lease._held.me.overdue_s
        with pytest.raises(ExitedError):
            WRITERS[writer](kept)
    assert set(names(kept)) <= {".part", ".health.json.tmp"}


def test_a_late_renewal_does_not_end_a_holder_whose_lease_is_valid(tmp_path: Path) -> None:
    with run_lease.holding():
        run_lease.hold(tmp_path, 1.0)
        assert run_lease._held is not None
        run_lease._held._confirmed_s -= 1000.0
        append_line(tmp_path / "written", "x")
    seen = directory_lease.read_newest(tmp_path / "lease")
    assert seen is not None
    assert seen.released


def crash(run: Path) -> None:
    with run_lease.holding():
        run_lease.hold(run, 60.0)
        raise ZeroDivisionError


def test_after_a_crash_the_lease_stays_until_the_process_is_gone(tmp_path: Path) -> None:
    """Its writer thread may still be running. The launcher frees the lease for other machines."""
    with pytest.raises(ZeroDivisionError):
        crash(tmp_path)
    with pytest.raises(InUseError):
        acquire(tmp_path / run_lease.FOLDER)
    with run_lease.holding():
        run_lease.hold(tmp_path, 60.0)  # the same process may take it again

    process = in_a_process(crash_quietly, tmp_path / "other")
    with run_lease.clearing_dead_lease(tmp_path / "other"):
        process.join(60)
    seen = directory_lease.read_newest(tmp_path / "other" / run_lease.FOLDER)
    assert seen is not None
    assert (seen.number, seen.released) == (2, True)


def crash_quietly(run: Path) -> None:
    with suppress(ZeroDivisionError):
        crash(run)


def test_a_config_error_releases_the_lease(tmp_path: Path) -> None:
    with suppress(ConfigError), run_lease.holding():
        run_lease.hold(tmp_path, 60.0)
        raise ConfigError("a", "b")
    acquire(tmp_path / run_lease.FOLDER).release()


def test_a_second_start_is_rejected_with_the_holder_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "the first"
    held = acquire(run / run_lease.FOLDER, holder_on_other_machine(6.0))
    advice = rf"stop it \(harness ctl '{run}' stop"
    message = rf"^run\.name: {run} is in use by pid {os.getpid()} on node7, held for \d+ s, .*; {advice}"
    for wait in (True, False):
        with pytest.raises(ConfigError, match=message):
            run_lease.require_free(run, wait=wait)
    held.release()
    run_lease.require_free(run, wait=True)
    assert names(run / run_lease.FOLDER) == ["000001.json"], "nothing changed"


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, StorageError), (errno.ENOSPC, StorageError), (errno.EACCES, ConfigError)]
)
def test_a_storage_error_is_not_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory_lease, "read_newest", fail)
    with pytest.raises(kind, match=os.strerror(number)):
        run_lease.hold(tmp_path, 1.0)
    with pytest.raises(kind, match=os.strerror(number)):
        run_lease.require_free(tmp_path, wait=True)


def test_a_full_disk_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    message = f"^{tmp_path}: cannot write it: No space left"
    with pytest.raises(StorageError, match=message), run_lease.naming_full_disk(tmp_path):
        Path("/dev/full").write_text("x")
    with pytest.raises(FileNotFoundError), run_lease.naming_full_disk(tmp_path):
        (tmp_path / "none").read_text()


def test_a_launcher_clears_a_stale_lease_for_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    abandon_lease(tmp_path / run_lease.FOLDER, holder_on_other_machine(SHORT_S))
    run_lease.require_free(tmp_path, wait=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("harness: waiting up to 0 s for a sign of life of pid ")
    seen = directory_lease.read_newest(tmp_path / run_lease.FOLDER)
    assert seen is not None
    assert (seen.number, seen.released) == (2, True)


def test_without_wait_a_stale_lease_is_left_to_the_start(tmp_path: Path) -> None:
    abandon_lease(tmp_path / run_lease.FOLDER, holder_on_other_machine(1.2))
    run_lease.require_free(tmp_path, wait=False)
    assert names(tmp_path / run_lease.FOLDER) == ["000001.json"], "the start itself decides"
