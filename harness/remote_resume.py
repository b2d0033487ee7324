"""Brings a run back from its object store: a start without a local run directory resumes where the uploads ended.

How: rank 0 downloads the newest checkpoint that is complete and not tainted, verifies it against its manifest, and then
the run files, the event log last. From there on the start is an ordinary resume from a run directory. The other ranks
wait in short collectives, because a download may take longer than `parallel.timeout_s`.
A local run directory is preferred, unless the run has gone on elsewhere since: then the start is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged
from harness.checkpoint.remote.remote_run import KEY, RemoteRun, RunIndex, open_remote_run
from harness.checkpoint.remote.uploader import new_run_id, read_run_id, write_run_id
from harness.config.checkpoint import CheckpointRemoteConfig
from harness.config.errors import StorageError, require
from harness.config.schema import Config
from harness.core import rundir
from harness.core.locking import run_lease
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning
from harness.distributed.collectives import run_on_rank_zero
from harness.telemetry.event_log import last_iteration

POLL_S = 10.0
"""How long the ranks wait in one collective."""


def restore_remote_run(cfg: Config) -> None:
    """Download the run from `checkpoint.remote.url` if there is no local one; all ranks return or raise together."""
    if cfg.checkpoint.remote.url is None or cfg.run.name is None:
        return
    with ThreadPoolExecutor(max_workers=1) as worker:
        work = start_once(worker, cfg)
        while not run_on_rank_zero(lambda: is_done(work())):
            pass


def start_once(worker: ThreadPoolExecutor, cfg: Config) -> Callable[[], Future[None]]:
    """A function that starts the download at its first call, on rank 0, and returns its future."""
    started: list[Future[None]] = []

    def start() -> Future[None]:
        if not started:
            started.append(
                worker.submit(restore_from_store, rundir.locate(cfg), cfg.checkpoint.remote, lease_s=cfg.run.lease_s)
            )
        return started[0]

    return start


def is_done(work: Future[None]) -> bool:
    """Wait a while; True if the download is finished. Raises its error."""
    wait([work], timeout=POLL_S)
    if work.done():
        work.result()
    return work.done()


def restore_from_store(run: RunDir, cfg: CheckpointRemoteConfig, *, lease_s: float) -> None:
    """On rank 0: download the run, unless it is there, or was never uploaded. Takes its lease before."""
    assert cfg.url is not None
    is_local = rundir.has_begun(run)
    remote = open_remote_run(cfg.url, run.path.name, retry_s=0 if is_local else cfg.retry_s)
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
    except StorageError as error:
        if not is_local:
            raise
        print_warning(f"{error}; resuming from {run.path}, uploads wait")


def require_newest(run: RunDir, remote: RemoteRun, index: RunIndex) -> None:
    """Reject a local directory that belongs to another run than the one in the store, or that is older."""
    known = read_run_id(run)
    message = f"{remote.url} and {run.path} hold different runs; choose another run.name or another URL"
    require(known in (None, index.run_id), KEY, message)
    usable = [each for each in remote.list_checkpoints() if each.health is not Health.tainted]
    if not usable:
        return
    newest, here = remote.read_manifest(usable[-1].name).iteration, last_iteration(run.events)
    message = f"{remote.url} is at iteration {newest}, {run.path} at {here}"
    advice = f"move {run.path} away to resume from the store, or choose another run.name"
    require(newest <= max(here, 0), KEY, f"{message}; {advice}")


def download(run: RunDir, remote: RemoteRun, index: RunIndex) -> None:
    """Download the newest intact checkpoint, then the run files. Without any checkpoint the run starts over.

    Then the store is taken over: the start that uploaded run files only is gone, or it is told that it is not the run.
    """
    usable: list[Checkpoint] = [each for each in remote.list_checkpoints() if each.health is not Health.tainted]
    problems: list[str] = []
    for checkpoint in reversed(usable):
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
