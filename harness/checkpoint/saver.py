"""Writes checkpoints with torch.distributed.checkpoint (DCP), atomically; `harness.checkpoint.store` loads them.

How: all ranks write their shards into a hidden directory, one file each, and hash the files on disk. Rank 0 adds
state.json and the manifest and renames the directory; from then on the checkpoint exists. `write` needs only host
memory and its own process group, so it runs in the writer thread beside training. Every operation that can fail on one
rank runs inside `gather_results`, so that all ranks see the same outcome.
Planning: DCP makes a new plan for every save, in Python on rank 0, from the gathered plans of all ranks.
`SavePlanCache` keeps the plan of the first save, and later saves of the same tensors reuse it. DCP's own cache
(`enable_plan_caching`) is not used: it is global to the process, whatever the group; it does not notice that a dtype
has changed; and rank 0 still gathers all write results and pickles the metadata for every save.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Health
from harness.checkpoint.integrity import Entry, Manifest
from harness.checkpoint.tensor_index import METADATA_FILE, IndexedTensor
from harness.config.errors import ConfigError
from harness.core.rundir import fsync, write_atomically
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.shards import local
from harness.distributed.world import World

LEAST_FREE_BYTES = 1 << 20
"""A disk with less free space counts as full."""


class Written(NamedTuple):
    path: Path
    bytes: int


@final
@dataclass(slots=True)
class SavePlanCache:
    """DCP's save plan and write results of the last save, reused by the next one; belongs to one process group."""

    signature: list[Any] = field(default_factory=list)
    """What the plan depends on: name, dtype, shape and sharding of every tensor."""
    plan: SavePlan | None = None
    """What this rank writes."""
    results: list[WriteResult] = field(default_factory=list)
    """Offset and size of each chunk in this rank's file."""
    metadata: bytes = b""
    """Content of DCP's .metadata file, identical for every save; on rank 0."""

    def fits(self, signature: list[Any]) -> bool:
        return self.plan is not None and self.signature == signature


def write(
    root: Path,
    tensors: Mapping[str, Tensor],
    state: RunState,
    *,
    world: World,
    rollback: Mapping[str, float],
    plan_cache: SavePlanCache | None = None,
) -> Written:
    """Write one checkpoint from host memory; returns when it is safe on disk, or raises `OSError` on every rank."""
    target = root / catalog.name_of(state.step, state.generation)
    scratch = catalog.scratch_path(root, target.name)
    plan_cache = SavePlanCache() if plan_cache is None else plan_cache
    try:
        gather_results(lambda: _recreate_directory(scratch) if world.is_first else None, world.background_group)
        _write_shards(scratch, dict(tensors), plan_cache, world)
        measured = gather_results(lambda: _hash_own_shards(scratch, world.rank), world.background_group)
        files = {name: entry for entries in measured for name, entry in entries.items()}
        finished = gather_results(
            lambda: _publish(scratch, target, state, files, world, rollback) if world.is_first else 0,
            world.background_group,
        )
        return Written(target, max(finished))
    except CheckpointException as error:
        raise OSError(_explain_write_error(_first_failure(error), root)) from None
    finally:
        if world.is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def _write_shards(scratch: Path, tensors: dict[str, Tensor], plan_cache: SavePlanCache, world: World) -> None:
    """Write all shards, with the cached plan if the tensors of every rank have the layout of the last save."""
    signature = signature_of(tensors)
    if all(gather_results(lambda: plan_cache.fits(signature), world.background_group)):
        if all(
            gather_results(lambda: _write_with_cached_plan(scratch, tensors, plan_cache, world), world.background_group)
        ):
            return
        gather_results(lambda: _recreate_directory(scratch) if world.is_first else None, world.background_group)
    plan_cache.plan = None
    writer = _Writer(scratch)
    save_shards(tensors, storage_writer=writer, process_group=world.background_group)
    plan_cache.signature, plan_cache.plan, plan_cache.results = signature, writer.plan, writer.results

    def keep_metadata() -> None:
        if world.is_first:
            plan_cache.metadata = (scratch / METADATA_FILE).read_bytes()

    gather_results(keep_metadata, world.background_group)


def _write_with_cached_plan(scratch: Path, tensors: dict[str, Tensor], plan_cache: SavePlanCache, world: World) -> bool:
    """Write this rank's file, and on rank 0 .metadata; False if a chunk has another offset or size than last time."""
    assert plan_cache.plan is not None
    writer, planner = _Writer(scratch), DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=world.is_first)
    writer.set_up_storage_writer(world.is_first, rank=world.rank, use_collectives=True)
    try:
        writer.write_data(plan_cache.plan, planner)
        if world.is_first:
            write_metadata(scratch, plan_cache.metadata)
    except (OSError, RuntimeError) as error:
        raise OSError(_explain_write_error(f"rank {world.rank}: {error}", scratch.parent)) from None
    return writer.results == plan_cache.results


def write_metadata(scratch: Path, metadata: bytes) -> None:
    """Write .metadata from the cache; its content is the same for every save."""
    with (scratch / METADATA_FILE).open("wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())


def signature_of(tensors: Mapping[str, Tensor]) -> list[Any]:
    """What DCP's plan to save these tensors on this rank depends on."""
    return [
        (name, tensor.dtype, tensor.shape, local(tensor).shape)
        + ((tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ())
        for name, tensor in tensors.items()
    ]


class _Writer(FileSystemWriter):
    """Writes one file per rank and keeps the plan and the write results. The .metadata it writes has neither directory
    nor time in it, so that it is identical for every save."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
        self.plan: SavePlan | None = None
        self.results: list[WriteResult] = []

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        self.plan, self.results = plan, written.value()
        return written


def _recreate_directory(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)


def _hash_own_shards(scratch: Path, rank: int) -> dict[str, Entry]:
    """Sync this rank's shards and hash them. The sync is needed: DCP syncs before it has written its last buffer."""
    own = list(scratch.glob(f"__{rank}_*.distcp"))
    for path in own:
        fsync(path)
    return integrity.hash_files(scratch, [path.name for path in own])


def _publish(
    scratch: Path,
    target: Path,
    state: RunState,
    files: dict[str, Entry],
    world: World,
    rollback: Mapping[str, float],
) -> int:
    """On rank 0: write state.json and the manifest, then rename, which makes it a checkpoint. Returns its bytes."""
    write_atomically(scratch / catalog.STATE_FILE, json.dumps(state.as_dict()))
    files |= integrity.hash_files(scratch, [METADATA_FILE, catalog.STATE_FILE])
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
    integrity.write_checkpoint_manifest(scratch, manifest)
    if catalog.health_of(target) is Health.tainted:
        catalog.delete(target)
    catalog.publish(scratch, target)
    return manifest.bytes


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause}"


def _explain_write_error(reason: str, root: Path) -> str:
    """Add "No space left on device" if the disk is full: torch's writer may only report that the write failed."""
    full = os.strerror(errno.ENOSPC)
    is_full = shutil.disk_usage(root).free < LEAST_FREE_BYTES
    return f"{reason} ({full})" if is_full and full not in reason else reason


def write_computed(
    target: Path, layout: Mapping[str, IndexedTensor], compute: Callable[[str], Tensor], manifest: Manifest
) -> Written:
    """Write a checkpoint whose tensors are computed one after the other, in this process alone.

    `compute` is called once for each name in `layout`, and its tensor is released before the next call. `manifest` has
    everything but the files.
    """
    scratch = catalog.scratch_path(target.parent, target.name)
    placeholders = {name: torch.empty((), dtype=t.dtype).expand(t.size) for name, t in layout.items()}
    try:
        _recreate_directory(scratch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: no_dist=True
            save_shards(placeholders, storage_writer=_Writer(scratch), planner=_ComputingPlanner(compute), no_dist=True)
        files = _hash_own_shards(scratch, 0) | integrity.hash_files(scratch, [METADATA_FILE])
        integrity.write_checkpoint_manifest(scratch, replace(manifest, files=files))
        catalog.publish(scratch, target)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, ConfigError):
            raise cause from None
        raise OSError(_explain_write_error(_first_failure(error), target.parent)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Written(target, sum(entry.bytes for entry in files.values()))


class _ComputingPlanner(DefaultSavePlanner):
    """Plans with placeholders, and computes each tensor when the writer asks for it."""

    def __init__(self, compute: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._compute(index.fqn)
