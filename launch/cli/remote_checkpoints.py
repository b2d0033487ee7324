"""`harness checkpoint list URL`, `verify URL` and `upload RUN`: checkpoints of a run in an object store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from harness.checkpoint.integrity import Damaged
from harness.checkpoint.listing import CheckpointRow, render
from harness.checkpoint.remote import __main__ as upload_main
from harness.checkpoint.remote.remote_run import RemoteRun
from harness.config.errors import EXIT_DONE, ConfigError, require
from harness.core.object_store import ObjectStore
from harness.core.rundir import RunDir

RETRY_S = 10.0
EXIT_DAMAGED = 1


def open_url(url: str) -> RemoteRun:
    """A run by its URL, as `harness checkpoint` takes it."""
    return RemoteRun(ObjectStore(url, key=url, retry_s=RETRY_S))


def list_remote(url: str, *, as_json: bool) -> int:
    """Print the complete checkpoints of a run in a store."""
    remote = open_url(url)
    rows = [remote_row(remote, each.name, each.health.value) for each in remote.list_checkpoints()]
    if as_json:
        print(json.dumps({"run": url, "checkpoints": [asdict(row) for row in rows]}))
    else:
        print(render(rows, now_s=time.time()) if rows else f"{url} has no checkpoints")
    return EXIT_DONE


def remote_row(remote: RemoteRun, name: str, health: str) -> CheckpointRow:
    try:
        manifest, problem = remote.read_manifest(name), None
    except Damaged as damage:
        return CheckpointRow(
            name=name, step=0, generation=0, health=health, time=0.0, bytes=0, tokens=None, problem=str(damage)
        )
    return CheckpointRow(
        name=name,
        step=manifest.step,
        generation=manifest.generation,
        health=health,
        time=manifest.time,
        bytes=manifest.bytes,
        tokens=manifest.tokens,
        problem=problem,
    )


def verify_remote(url: str, names: Sequence[str]) -> int:
    """Read every byte of the checkpoints in a store, and print a line for each."""
    remote = open_url(url)
    listed = [each.name for each in remote.list_checkpoints()]
    for name in names:
        require(name in listed, name, f"no such checkpoint; {url} has {', '.join(listed) or 'none'}")
    if not listed:
        print(f"{url} has no checkpoints")
    code = EXIT_DONE
    for name in names or listed:
        try:
            remote.verify_checkpoint(name)
        except Damaged as damage:
            print(f"{name}  {damage.path.name}: {damage.problem}", flush=True)
            code = EXIT_DAMAGED
        else:
            print(f"{name}  ok", flush=True)
    return code


def upload_rest(run: RunDir) -> int:
    """Upload what the run has not uploaded."""
    require(run.config.is_file(), str(run.path), "is not a run directory: it has no config.yaml")
    if not upload_main.has_store(run):
        raise ConfigError(str(run.path), "its config has no checkpoint.remote.url")
    return upload_main.main([str(run.path)])
