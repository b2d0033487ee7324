"""Brings a run back from its object store: a start without a local run directory resumes where the uploads ended.

How: rank 0 downloads the newest checkpoint that is complete and not tainted, verifies it against its manifest, and then
the run files, the event log last. From there on the start is an ordinary resume from a run directory. The other ranks
wait in short collectives, because a download may take longer than `parallel.timeout_s`. After each of them the ranks
reduce their stop requests: a stop ends the start on all ranks with 75, and nothing waits for the download.
A local run directory is preferred, unless the run has gone on elsewhere since: then the start is rejected. With one, a
store that does not answer or denies access is a warning.
"""

from __future__ import annotations

import errno
from concurrent.futures import Future, wait
from threading import Thread
from typing import final

from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged
from harness.checkpoint.io_retry import StopCheck
from harness.checkpoint.remote.remote_run import KEY, RemoteRun, RunIndex, open_remote_run
from harness.checkpoint.remote.uploader import new_run_id, read_run_id, write_run_id
from harness.config.checkpoint import CheckpointRemoteConfig
from harness.config.errors import StorageError, require
from harness.config.schema import Config
from harness.core import rundir
from harness.core.locking import run_lease
from harness.core.object_store import AccessDenied
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning
from harness.distributed.collectives import any_rank, run_on_rank_zero
from harness.telemetry.event_log import last_iteration

POLL_S = 1.0
"""How long the ranks wait in one collective, and between two looks for a stop request."""


def restore_remote_run(cfg: Config, *, is_stopping: StopCheck) -> None:
    """Download the run from `checkpoint.remote.url` if there is no local one; all ranks return or raise together.

    `is_stopping` is about this rank alone.
    """
    url = cfg.checkpoint.remote.url
    if url is None or cfg.run.name is None:
        return
    restore = RemoteRestore(cfg)
    while not run_on_rank_zero(restore.poll):
        if any_rank(is_stopping()):
            restore.abandon()
            stopped = StorageError(errno.EINTR, "a stop was requested before the run was read from the store", url)
            stopped.is_shared = True
            raise stopped


@final
class RemoteRestore:
    """The download on rank 0, in a thread that the end of the process does not wait for."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._remote: RemoteRun | None = None
        self._work: Future[None] = Future()

    def poll(self) -> bool:
        """Start it at the first call, and wait a while; True if it is finished. Raises its error."""
        if self._remote is None:
            run = rundir.locate(self._cfg)
            self._remote = open_store(run, self._cfg.checkpoint.remote)
            Thread(target=self._restore, args=(run, self._remote), name="restore", daemon=True).start()
        wait([self._work], timeout=POLL_S)
        if self._work.done():
            self._work.result()
        return self._work.done()

    def abandon(self) -> None:
        """Let the thread end soon; what it has written stays."""
        if self._remote is not None:
            self._remote.store.close()

    def _restore(self, run: RunDir, remote: RemoteRun) -> None:
        try:
            restore_from_store(run, remote, lease_s=self._cfg.run.lease_s)
        except BaseException as error:
            self._work.set_exception(error)
        else:
            self._work.set_result(None)


def open_store(run: RunDir, cfg: CheckpointRemoteConfig) -> RemoteRun:
    """The store of a run. With a local run directory, it is asked only once."""
    assert cfg.url is not None
    return open_remote_run(cfg.url, run.path.name, retry_s=0 if rundir.has_begun(run) else cfg.retry_s)


def restore_from_store(run: RunDir, remote: RemoteRun, *, lease_s: float) -> None:
    """On rank 0: download the run, unless it is there, or was never uploaded. Takes its lease before."""
    is_local = rundir.has_begun(run)
    try:
        index = remote.read_index()
        if index is None:
            remote.store.require_bucket()
            return
        if is_local:
            require_newest(run, remote, index)
            return
        run_lease.hold(run.path, lease_s)
        download(run, remote, index)
    except (StorageError, AccessDenied) as error:
        if not is_local:
            raise
        print_warning(f"{error}; resuming from {run.path}, uploads wait")


def require_newest(run: RunDir, remote: RemoteRun, index: RunIndex) -> None:
    """Reject a local directory that belongs to another run than the one in the store, or that is older."""
    known = read_run_id(run)
    message = f"{remote.url} and {run.path} hold different runs; choose another run.name or another URL"
    require(known in (None, index.run_id), KEY, message)
    newest, here = newest_iteration(remote), last_iteration(run.events)
    message = f"{remote.url} is at iteration {newest}, {run.path} at {here}"
    advice = f"move {run.path} away to resume from the store, or choose another run.name"
    require(newest <= max(here, 0), KEY, f"{message}; {advice}")


def newest_iteration(remote: RemoteRun) -> int:
    """The iteration of the newest checkpoint that a download would try and whose manifest is intact; -1: none."""
    for checkpoint in reversed(usable_checkpoints(remote)):
        try:
            return remote.read_manifest(checkpoint.name).iteration
        except Damaged as damage:
            print_warning(str(damage))
    return -1


def usable_checkpoints(remote: RemoteRun) -> list[Checkpoint]:
    """The checkpoints that are complete and not tainted, oldest first."""
    return [each for each in remote.list_checkpoints() if each.health is not Health.tainted]


def download(run: RunDir, remote: RemoteRun, index: RunIndex) -> None:
    """Download the newest intact checkpoint, then the run files. Without any checkpoint the run starts over.

    Then the store is taken over: the start that uploaded run files only is gone, or it is told that it is not the run.
    """
    problems: list[str] = []
    for checkpoint in reversed(usable_checkpoints(remote)):
        print(f"downloading {remote.url}/{checkpoint.path}", flush=True)
        try:
            remote.download_checkpoint(checkpoint.name, run.checkpoints)
        except Damaged as damage:
            problems.append(str(damage))
            print_warning(str(damage))
            continue
        break
    else:
        message = (
            f"no checkpoint in {remote.url} is intact ({'; '.join(problems)}); choose another run.name to start over"
        )
        require(not problems, KEY, message)
        print_warning(f"{remote.url} has no usable checkpoint; the run starts over and replaces what is there")
        run_id = new_run_id()
        remote.take_over(run_id)
        run.path.mkdir(parents=True, exist_ok=True)
        write_run_id(run, run_id)
        return
    names = sorted(index.files, key=lambda name: name == run.events.name)
    for name in names:
        remote.download_file(index.files[name], run.path / name)
        if name == names[-2]:
            write_run_id(run, index.run_id)
