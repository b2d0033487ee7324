"""Where drills lie on disk: which directories may be replaced, how one is laid out, and which twin may serve again.

    runs/drill-NAME/   runs/drill-NAME-twin/   runs/campaign-SEED/{twin, round-NNN}/

How: a twin is a pure function of its configuration, the code and the machine. `twin.json` holds the digest of the
three, so a finished twin of the same digest stands in for a new one, by copy.
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
from harness.config.schema import Config
from harness.core import events, rundir
from harness.core.events import RunEnded, RunStarted
from harness.core.locking import run_lease
from harness.core.rundir import RunDir, write_atomically

TWIN = "twin.json"
NOT_OF_A_TWIN = (
    "run.name",
    "run.dir",
    "telemetry.",
    "launch.hang_after_s",
    "launch.start_within_s",
    "parallel.timeout_s",
)
"""Keys in which a run and its twin may differ: who it is, who is told, and how long one waits."""


def configure(train: Sequence[str], overrides: Sequence[str]) -> Config:
    """The training of a drill; the command line has the last word, but for the name."""
    cfg = compose.load([*train, *overrides])
    require(cfg.run.name is None, "run.name", "is not yours to choose: a drill is named after its scenario")
    require(not cfg.launch.dry_run, "launch.dry_run", "there is nothing to print: a drill is two runs")
    return cfg


def check_replaceable(run: RunDir) -> None:
    """Refuse to touch what is no drill's, and a drill that is running."""
    run_lease.require_free(run.path, wait=False)
    mine = (run.drill, run.path / TWIN)
    is_free = not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir()))
    if not is_free and not any(mark.is_file() for mark in mine):
        raise ConfigError("run.dir", f"{run.path} is there and is no drill; move it away, or choose another run.dir")


def lay_out(cfg: Config, run: RunDir) -> None:
    """An empty run of this configuration, in the place of an earlier drill."""
    check_replaceable(run)
    shutil.rmtree(run.path, ignore_errors=True)
    write_config(cfg, run)


def write_config(cfg: Config, run: RunDir) -> None:
    named = replace(cfg, run=replace(cfg.run, name=run.path.name, dir=str(run.path.parent)))
    rundir.prepare(named, run)


def lay_out_twin(cfg: Config, run: RunDir) -> bool:
    """A twin in its place: True where it is trained already, here or in a directory beside, which is then copied."""
    quiet = replace(cfg, telemetry=replace(cfg.telemetry, mlflow=False))
    key = twin_key(quiet)
    check_replaceable(run)
    found = find_twin(run, key)
    if found is None:
        lay_out(quiet, run)
        write_atomically(run.path / TWIN, json.dumps({"key": key}) + "\n")
        return False
    if found.path != run.path:
        shutil.rmtree(run.path, ignore_errors=True)
        copy_run(found, run)
        write_atomically(run.config, compose.to_yaml(replace(quiet, run=replace(cfg.run, name=run.path.name))))
    return True


def copy_run(source: RunDir, target: RunDir) -> None:
    """All of a finished run; checkpoints, which nobody writes to, as second names of the same files."""
    shutil.copytree(source.path, target.path, ignore=shutil.ignore_patterns(source.checkpoints.name))
    if source.checkpoints.is_dir():
        shutil.copytree(source.checkpoints, target.checkpoints, copy_function=os.link)


def find_twin(run: RunDir, key: str) -> RunDir | None:
    """A finished twin of this digest: the one in this place, or any beside it or one level above."""
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
    """Whether a run came to its end at its first start."""
    if not run.events.exists():
        return False
    told = [event for event in events.read(run.events) if isinstance(event, RunStarted | RunEnded)]
    match told:
        case [RunStarted(), RunEnded(exit_code=code)]:
            return code == EXIT_DONE
        case _:
            return False


def twin_key(cfg: Config) -> str:
    """Equal where a twin would come out the same: configuration, code, machine."""
    tree = compose.flat(compose.plain(cfg))
    kept: dict[str, Any] = {key: value for key, value in tree.items() if not key.startswith(NOT_OF_A_TWIN)}
    words = json.dumps([kept, code_digest(), socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")])
    return hashlib.sha256(words.encode()).hexdigest()


def code_digest() -> str:
    """Of every module of the package, committed or not."""
    root, joined = Path(harness.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        joined.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return joined.hexdigest()
