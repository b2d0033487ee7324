"""Directories of drills: creates and replaces them, and reuses finished twins.

    runs/drill-NAME/   runs/drill-NAME-twin/   runs/campaign-SEED/{twin, round-NNN}/

A twin is a pure function of its configuration, the code and the machine. `twin.json` holds a digest of the three, so a
finished twin with the same digest is copied instead of trained again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from harness.config import compose
from harness.config.errors import EXIT_DONE, ConfigError, require
from harness.config.parallel import DeviceKind
from harness.config.schema import Config, find_nondeterminism
from harness.core import event_json, rundir
from harness.core.events import RunEnded, RunStarted
from harness.core.locking import run_lease
from harness.core.rundir import RunDir, write_atomically

TWIN = "twin.json"
DETERMINISTIC = "run.deterministic="
NOT_IN_TWIN_KEY = (
    "run.name",
    "run.dir",
    "telemetry.",
    "launch.hang_after_s",
    "launch.hang_steps",
    "launch.start_within_s",
    "parallel.timeout_s",
)
"""Keys that do not change what a twin computes: name, place, telemetry and timeouts."""


def configure(train: Sequence[str], overrides: Sequence[str]) -> Config:
    """Compose the training config of a drill, without replays; overrides of the command line come last.

    A run that may use a GPU is deterministic, so that it can be compared with its twin bit for bit, unless an override
    sets `run.deterministic` or another setting does not allow it.
    """
    cfg = compose.load([*train, "telemetry.replay_s=0", *overrides])
    is_chosen = any(override.lstrip("+~").startswith(DETERMINISTIC) for override in [*train, *overrides])
    if not is_chosen and cfg.parallel.device is not DeviceKind.cpu and not find_nondeterminism(cfg):
        cfg = replace(cfg, run=replace(cfg.run, deterministic=True))
    require(cfg.run.name is None, "run.name", "must not be set: a drill is named after its scenario")
    require(not cfg.launch.dry_run, "launch.dry_run", "must be false: a drill starts two real runs")
    return cfg


def check_replaceable(run: RunDir) -> None:
    """Raise ConfigError if the directory exists and is not a drill, or is a drill that is running."""
    run_lease.require_free(run.path, wait=False)
    marks = (run.drill, run.path / TWIN)
    is_free = not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir()))
    if not is_free and not any(mark.is_file() for mark in marks):
        raise ConfigError("run.dir", f"{run.path} exists and is not a drill; move it away, or choose another run.dir")


def create_directory(cfg: Config, run: RunDir) -> None:
    """Create an empty run of this configuration; replaces an earlier drill."""
    check_replaceable(run)
    shutil.rmtree(run.path, ignore_errors=True)
    write_config(cfg, run)


def write_config(cfg: Config, run: RunDir) -> None:
    named = replace(cfg, run=replace(cfg.run, name=run.path.name, dir=str(run.path.parent)))
    rundir.prepare_run_dir(named, run)


def prepare_twin(cfg: Config, run: RunDir) -> bool:
    """Create the directory of a twin. True: it is trained already, here or as a copy of an equal twin."""
    quiet = replace(cfg, telemetry=replace(cfg.telemetry, mlflow=False))
    key = twin_key(quiet)
    check_replaceable(run)
    found = find_twin(run, key)
    if found is None:
        create_directory(quiet, run)
        write_atomically(run.path / TWIN, json.dumps({"key": key}) + "\n")
        return False
    if found.path != run.path:
        shutil.rmtree(run.path, ignore_errors=True)
        copy_run(found, run)
        write_atomically(run.config, compose.to_yaml(replace(quiet, run=replace(cfg.run, name=run.path.name))))
    return True


def copy_run(source: RunDir, target: RunDir) -> None:
    """Copy a finished run. Checkpoints are hard links, because they are never written to again."""
    shutil.copytree(source.path, target.path, ignore=shutil.ignore_patterns(source.checkpoints.name))
    if source.checkpoints.is_dir():
        shutil.copytree(source.checkpoints, target.checkpoints, copy_function=os.link)


def find_twin(run: RunDir, key: str) -> RunDir | None:
    """A finished twin with this digest: this directory, one beside it, or one beside its parent."""
    marks = [run.path / TWIN, *run.path.parent.glob(f"*/{TWIN}"), *run.path.parent.parent.glob(f"*/{TWIN}")]
    for mark in marks:
        twin = RunDir(mark.parent)
        if _key_in(mark) == key and has_finished(twin):
            return twin
    return None


def _key_in(mark: Path) -> str | None:
    try:
        return str(json.loads(mark.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_finished(run: RunDir) -> bool:
    """Whether a run finished in its first start."""
    if not run.events.exists():
        return False
    found = [event for event in event_json.read(run.events) if isinstance(event, RunStarted | RunEnded)]
    match found:
        case [RunStarted(), RunEnded(exit_code=code)]:
            return code == EXIT_DONE
        case _:
            return False


def twin_key(cfg: Config) -> str:
    """Digest of configuration, code and machine; equal digests mean equal twins."""
    tree = compose.flat(compose.plain(cfg))
    kept: dict[str, Any] = {key: value for key, value in tree.items() if not key.startswith(NOT_IN_TWIN_KEY)}
    text = json.dumps([kept, code_digest(), socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")])
    return hashlib.sha256(text.encode()).hexdigest()


def code_digest() -> str:
    """Digest of every module of the package, committed or not."""
    root, digest = Path(harness.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
