"""Checkpoints on disk: one directory per (step, generation), there whole or not at all.

How: all ranks write their shards with torch.distributed.checkpoint into a hidden directory; when all are done, rank 0
adds the numbers of the host and renames it, which is the moment it exists. Weights, moments and counters are loaded in
place, into tensors that already have their final sharding, so the number of ranks may change between runs.
Left out: random state, because nothing draws from one: weights and data are pure functions of the seed.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from harness.config import ConfigError
from harness.events import CheckpointSaved
from harness.parallel import World, barrier, broadcast
from harness.rundir import write_atomically
from harness.state import RunState

NAME = re.compile(r"step-(\d+)-gen-(\d+)")
STATE_FILE = "state.json"


def saved(root: Path) -> list[Path]:
    """Checkpoints that exist, oldest first."""
    found = [(match, path) for path in root.glob("step-*-gen-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][2]), int(item[0][1])))]


def save(root: Path, tensors: dict[str, Any], state: RunState, *, world: World, keep: int) -> CheckpointSaved:
    """Write one checkpoint and drop those beyond the newest `keep`; returns when it is safe on disk."""
    begun = time.monotonic()
    target = root / f"step-{state.step:08d}-gen-{state.generation}"
    if not broadcast(target.exists()):
        scratch = root / f".{target.name}.part"
        if world.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        barrier()
        save_shards(tensors, checkpoint_id=scratch)
        if world.is_first:
            write_atomically(scratch / STATE_FILE, json.dumps(asdict(state)))
            scratch.rename(target)
            for old in saved(root)[:-keep]:
                shutil.rmtree(old)
    barrier()
    return CheckpointSaved(
        time=time.time(),
        iteration=state.iteration,
        step=state.step,
        directory=target.name,
        seconds=time.monotonic() - begun,
    )


def load_newest(root: Path, tensors: dict[str, Any], *, world: World) -> tuple[RunState, str] | None:
    """Fill `tensors` in place from the newest checkpoint; None where there is none."""
    newest = broadcast(saved(root)[-1:] if world.is_first else [])
    if not newest:
        return None
    path = newest[0]
    load_shards(tensors, checkpoint_id=path)
    try:
        state = RunState(**json.loads((path / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("run.name", f"{path / STATE_FILE} cannot be read: {error}") from None
    return state, path.name
