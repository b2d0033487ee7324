"""Runs without a trainer, whose checkpoints are uploaded to an object store and restored from it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.checkpoint import catalog, integrity
from harness.checkpoint.integrity import Manifest
from harness.checkpoint.remote.remote_run import RemoteRun, open_remote_run
from harness.checkpoint.remote.uploader import Uploader
from harness.config.checkpoint import CheckpointConfig, CheckpointRemoteConfig
from harness.config.compose import read, to_yaml
from harness.core.locking import run_lease
from harness.core.rundir import RunDir
from harness.remote_resume import open_store, restore_from_store
from tests.composed import load

FILE_BYTES = 2**16


def make_run(path: Path, url: str) -> RunDir:
    """A run directory with a log."""
    run = RunDir(path)
    run.checkpoints.mkdir(parents=True)
    run.logs.mkdir()
    overrides = [
        f"run.name={path.name}",
        f"checkpoint.remote.url={url}",
        "checkpoint.remote.keep=2",
        "checkpoint.remote.exit_wait_s=60",
    ]
    run.config.write_text(to_yaml(load(overrides)))
    run.events.write_text('{"event":"run_started"}\n{"event":"step"}\n{"event":"half')
    run.ledger.write_text("")
    return run


def settings(run: RunDir) -> CheckpointConfig:
    return read(run.config).checkpoint


def save(
    run: RunDir,
    step: int,
    *,
    generation: int = 0,
    iteration: int | None = None,
    num_files: int = 3,
    num_bytes: int = FILE_BYTES,
) -> str:
    """A checkpoint as `saver.write` leaves it."""
    name = catalog.name_of(step, generation)
    scratch = catalog.scratch_path(run.checkpoints, name)
    scratch.mkdir()
    names = [f"__{number}_0.distcp" for number in range(num_files)] + [".metadata", "state.json"]
    for file in names:
        (scratch / file).write_bytes(os.urandom(num_bytes - 1) + b".")
    manifest = Manifest(
        step=step,
        generation=generation,
        iteration=step if iteration is None else iteration,
        tokens=step,
        time=time.time(),
        world_size=num_files,
        files=integrity.hash_files(scratch, names),
    )
    integrity.write_checkpoint_manifest(scratch, manifest)
    catalog.publish(scratch, run.checkpoints / name)
    return name


def remote_of(run: RunDir) -> RemoteRun:
    url = settings(run).remote.url
    assert url is not None
    return open_remote_run(url, run.path.name, retry_s=10)


def upload(run: RunDir) -> list[str]:
    return list(Uploader(run, remote_of(run), settings(run)).upload_due(last=True))


def restore(run: RunDir, cfg: CheckpointRemoteConfig) -> None:
    with run_lease.holding():
        restore_from_store(run, open_store(run, cfg), lease_s=1.0)


def stored(run: RunDir) -> list[tuple[str, str]]:
    return [(each.name, each.health.value) for each in remote_of(run).list_checkpoints()]
