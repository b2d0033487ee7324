"""Checkpoints on disk: written whole or not at all, verified before they are read.

How: all ranks write their shards with torch.distributed.checkpoint into a hidden directory, one file each, and hash
what lies there; rank 0 adds the numbers of the host and the manifest, and renames the directory, which is the moment it
exists. `write` needs nothing but host memory and a process group of its own, so it runs in a thread beside training.
Loading checks the manifest first, all ranks sharing the files, then fills tensors in place that already have their
final sharding, so the number of ranks may change between runs. A damaged checkpoint is set aside, and the next older
one taken.
Left out: random state, because nothing draws from one: weights and data are pure functions of the seed.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Health
from harness.checkpoint.integrity import Damaged, Entry, Manifest
from harness.config import ConfigError
from harness.parallel import World, broadcast, together
from harness.rundir import write_atomically
from harness.state import RunState

METADATA_FILE = ".metadata"
STATE_FILE = "state.json"
LEAST_FREE_BYTES = 1 << 20
"""Of a disk that is full for all purposes."""
_DESCRIPTION = "torch.distributed.checkpoint.metadata"
_MAY_BE_UNPICKLED = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *((_DESCRIPTION, name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
        *((_DESCRIPTION, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    }
)
"""What the description of sharded tensors is made of, name by name; dtypes come besides."""


class Written(NamedTuple):
    path: Path
    bytes: int


def write(
    root: Path, tensors: Mapping[str, Tensor], state: RunState, *, world: World, rollback: Mapping[str, float]
) -> Written:
    """Write one checkpoint from host memory; returns when it is safe on disk, or raises `OSError` on every rank."""
    target = root / catalog.name_of(state.step, state.generation)
    scratch = catalog.scratch(root, target.name)
    try:
        together(lambda: _make_room(scratch) if world.is_first else None, world.aside)
        writer = FileSystemWriter(scratch, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
        save_shards(dict(tensors), storage_writer=writer, process_group=world.aside)
        measured = together(lambda: _measure_own(scratch, world.rank), world.aside)
        files = {name: entry for each in measured for name, entry in each.items()}
        finished = together(
            lambda: _finish(scratch, target, state, files, world, rollback) if world.is_first else 0, world.aside
        )
        return Written(target, max(finished))
    except CheckpointException as error:
        raise OSError(_on_disk(_first_failure(error), root)) from None
    finally:
        if world.is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def _make_room(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)


def _measure_own(scratch: Path, rank: int) -> dict[str, Entry]:
    """Size and hash of this rank's shards, once they are on disk: DCP syncs before it has written its last buffer."""
    own = list(scratch.glob(f"__{rank}_*.distcp"))
    for path in own:
        catalog.sync(path)
    return integrity.measure_all(scratch, [path.name for path in own])


def _finish(
    scratch: Path,
    target: Path,
    state: RunState,
    files: dict[str, Entry],
    world: World,
    rollback: Mapping[str, float],
) -> int:
    """Rank 0's last touches; the rename makes it a checkpoint. Returns its size."""
    write_atomically(scratch / STATE_FILE, json.dumps(asdict(state)))
    files |= integrity.measure_all(scratch, [METADATA_FILE, STATE_FILE])
    manifest = Manifest(
        step=state.step,
        generation=state.generation,
        iteration=state.iteration,
        tokens=state.tokens,
        time=time.time(),
        world_size=world.size,
        files=files,
        rollback=dict(rollback),
    )
    integrity.write_manifest(scratch, manifest)
    if catalog.health_of(target) is Health.tainted:
        catalog.drop(target)
    catalog.publish(scratch, target)
    return manifest.bytes


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause}"


def _on_disk(reason: str, root: Path) -> str:
    """A failed write with its cause: torch's writer, told that the disk is full, may only say that it failed."""
    full = os.strerror(errno.ENOSPC)
    is_full = shutil.disk_usage(root).free < LEAST_FREE_BYTES
    return f"{reason} ({full})" if is_full and full not in reason else reason


class Loaded(NamedTuple):
    state: RunState
    name: str


class Found(NamedTuple):
    """What a look for the newest checkpoint came to."""

    loaded: Loaded | None
    damage: list[Damaged]
    """What was wrong with each that had to be passed over, newest first."""


def load_newest(root: Path, tensors: Mapping[str, Tensor], *, world: World) -> Found:
    """Fill `tensors` in place from the newest checkpoint that is whole; nothing is filled where none was ever saved."""
    found = load_first(root, broadcast(_newest_first(root) if world.is_first else []), tensors, world=world)
    if found.loaded is not None:
        return found
    if lost := broadcast([str(path) for path in catalog.damaged(root)] if world.is_first else []):
        problem = "; ".join(map(str, found.damage)) or f"{len(lost)} were found damaged before"
        raise ConfigError("run.name", f"no checkpoint in {root} is whole ({problem}); remove {lost[-1]} to begin again")
    return found


def load_first(
    root: Path,
    names: Iterable[str],
    tensors: Mapping[str, Tensor],
    *,
    world: World,
    prepare: Callable[[str], None] = lambda _: None,
) -> Found:
    """Fill `tensors` in place from the first of these checkpoints that is whole; damaged ones are set aside.

    `prepare` is called with the name of a checkpoint that has proved whole, before anything is filled.
    """
    damage: list[Damaged] = []
    for name in names:
        try:
            _verify(root / name, tensors, world=world)
            prepare(name)
            return Found(Loaded(_load(root / name, tensors), name), damage)
        except Damaged as error:
            damage.append(error)
            if world.is_first:
                catalog.set_aside(root / name)
    return Found(None, damage)


def _newest_first(root: Path) -> list[str]:
    catalog.sweep(root)
    return [each.name for each in reversed(catalog.saved(root)) if each.health is not Health.tainted]


def _verify(path: Path, tensors: Mapping[str, Tensor], *, world: World) -> None:
    """`Damaged` on every rank alike, with nothing unpickled, unless every file is what was saved."""
    together(lambda: integrity.verify(path, part=world.rank, parts=world.size) and None)
    check_shapes(path, {name: tensor.shape for name, tensor in tensors.items()})


def _load(path: Path, tensors: Mapping[str, Tensor]) -> RunState:
    try:
        load_shards(dict(tensors), storage_reader=Reader(path))
        return RunState(**json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
    except CheckpointException as error:
        raise Damaged(path, _first_failure(error)) from None
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(path / STATE_FILE, f"cannot be read: {error}") from None


def check_shapes(path: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse, by name, what does not fit the model: that is no damage, but another configuration."""
    saved = read_shapes(path)
    for name, shape in shapes.items():
        if saved.get(name) != shape:
            there = f"holds {name} as {list(saved[name])}" if name in saved else f"does not hold {name}"
            raise ConfigError("run.name", f"{path} {there}, and this configuration needs {list(shape)}")


class Reader(FileSystemReader):
    """Reads a verified checkpoint: unpickles its metadata from an allow-list, and follows no path out of it."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise Damaged(path, f"cannot be read: {error}") from None
        for info in metadata.storage_data.values():
            if not (Path(self.path) / info.relative_path).resolve().parent == Path(self.path).resolve():
                raise Damaged(path, f"names {info.relative_path!r}, which is outside the checkpoint")
        for name, described in metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                raise Damaged(path, f"{name} is not a tensor")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _MAY_BE_UNPICKLED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def read_shapes(path: Path) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a verified checkpoint; needs no process group."""
    described = Reader(path).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in described.items() if isinstance(tensor, TensorStorageMetadata)}


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors of a verified checkpoint, by name; needs no process group."""
    described = Reader(path).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensor = described[name]
        assert isinstance(tensor, TensorStorageMetadata)
        tensors[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is the point
        try:
            load_shards(tensors, storage_reader=Reader(path), no_dist=True)
        except CheckpointException as error:
            raise Damaged(path, _first_failure(error)) from None
    return tensors
