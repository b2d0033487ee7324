"""Tests of mutual exclusion, on file systems with file locks and without."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from harness.config.errors import ConfigError
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir
from harness.telemetry.sinks.feeder import sole_sender
from harness.telemetry.sinks.parent_run import parent_lock
from harness.telemetry.sinks.sink import SinkKind
from harness.telemetry.sinks.store_uri import schema_lock
from launch.sweeps.scheduler import lock_sweep
from tests.forks import forks

FLOCK_RESULTS = ["works", "ENOSYS", "EOPNOTSUPP", "ENOLCK"]
"""Results of flock; "works" is the real one."""


def use_flock(result: str) -> None:
    """Make flock fail with this error from now on, in this process."""

    def fail(*_: object) -> None:
        number = getattr(errno, result)
        raise OSError(number, os.strerror(number))

    if result != "works":
        fcntl.flock = fail


@pytest.fixture(params=FLOCK_RESULTS)
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    use_flock(request.param)
    return str(request.param)


def try_once(path: Path) -> AbstractContextManager[object]:
    return exclusive(path, keep_trying=lambda: False)


def test_a_second_holder_is_rejected_until_the_first_has_released(tmp_path: Path, flock: str) -> None:
    path = tmp_path / ".lock"
    with try_once(path) as first, try_once(path) as second:
        assert (first is not None, second) == (True, None)
    with try_once(path) as third:
        assert third is not None
    assert (tmp_path / ".lock.lease").exists() == (flock != "works")


def hold_until_killed(path: Path, result: str, reports: Connection) -> None:
    use_flock(result)
    with try_once(path) as lock:
        reports.send(lock is not None)
        time.sleep(60)


@pytest.mark.parametrize("flock", ["works", "ENOSYS"], indirect=True)
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, flock: str) -> None:
    parent_end, child_end = forks().Pipe()
    process = forks().Process(target=hold_until_killed, args=(tmp_path / ".lock", flock, child_end))
    process.start()
    assert parent_end.poll(60)
    assert parent_end.recv()
    with try_once(tmp_path / ".lock") as lock:
        assert lock is None
    process.kill()
    process.join()
    with try_once(tmp_path / ".lock") as lock:
        assert lock is not None


@contextmanager
def sent(directory: Path) -> Iterator[None]:
    sole = partial(sole_sender, RunDir(directory), SinkKind.mlflow, keep_trying=lambda: False)
    with sole() as is_sole:
        assert is_sole
        with sole() as another:
            assert not another
        yield


@contextmanager
def swept(directory: Path) -> Iterator[None]:
    with lock_sweep(directory) as lock:
        assert os.fstat(lock.fileno())
        with pytest.raises(ConfigError, match=r"^run\.name: .* is being swept"), lock_sweep(directory):
            pass
        yield


USERS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "sender": sent,
    "sweep": swept,
    "store": lambda directory: schema_lock(f"sqlite:///{directory}/mlflow.db"),
    "parent": lambda directory: parent_lock(RunDir(directory)),
}


@pytest.mark.parametrize("flock", ["ENOSYS"], indirect=True)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.usefixtures("flock")
def test_mlflow_and_sweeps_work_without_flock(tmp_path: Path, user: str) -> None:
    for _ in range(2):
        with USERS[user](tmp_path):
            pass


def test_any_other_error_of_flock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    use_flock("EIO")
    with pytest.raises(OSError, match="Input/output"), try_once(tmp_path / ".lock"):
        pass
