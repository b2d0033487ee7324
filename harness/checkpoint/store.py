"""Writes and loads checkpoints with torch.distributed.checkpoint (DCP): atomic on write, verified before a load.

How: all ranks write their shards into a hidden directory, one file each, and hash the files on disk. Rank 0 adds
state.json and the manifest and renames the directory; from then on the checkpoint exists. `write` needs only host
memory and its own process group, so it runs in the writer thread beside training.
A load verifies the manifest first; the ranks share the files to hash. Then it fills tensors in place that already have
their final sharding, so the number of ranks may change between runs. A damaged checkpoint is quarantined and the next
older one is tried. An I/O error is retried and never counts as damage. Every operation that can fail on one rank runs
inside `gather_results` or `run_on_rank_zero`, so that all ranks see the same outcome.
Planning: DCP makes a new plan for every save, in Python on rank 0, from the gathered plans of all ranks.
`SavePlanCache` keeps the plan of the first save, and later saves of the same tensors reuse it. DCP's own cache
(`enable_plan_caching`) is not used: it is global to the process, whatever the group; it does not notice that a dtype
has changed; and rank 0 still gathers all write results and pickles the metadata for every save.
Left out: random state. Nothing draws from one: weights and data are pure functions of the seed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from harness.checkpoint import catalog, integrity, tensor_index
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, Entry, Manifest, OtherVersion, storage_error
from harness.checkpoint.io_retry import IoRetry
from harness.checkpoint.tensor_index import METADATA_FILE, IndexedTensor, TensorIndex
from harness.config.errors import ConfigError, StorageError
from harness.core.rundir import write_atomically
from harness.core.state import RunState
from harness.distributed.collectives import gather_results, run_on_rank_zero
from harness.distributed.shards import local
from harness.distributed.world import World

STATE_FILE = catalog.STATE_FILE
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
        catalog.fsync(path)
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
    write_atomically(scratch / STATE_FILE, json.dumps(state.as_dict()))
    files |= integrity.hash_files(scratch, [METADATA_FILE, STATE_FILE])
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


class LoadedCheckpoint(NamedTuple):
    state: RunState
    name: str


class LoadResult(NamedTuple):
    """The result of looking for a checkpoint to load."""

    loaded: LoadedCheckpoint | None
    damage: list[Damaged]
    """The damaged checkpoints, newest first."""
    unread: list[StorageError | OtherVersion] = []  # noqa: RUF012 -- never changed
    """Why other checkpoints, which may be intact, were skipped; their files are unchanged."""


def load_newest(root: Path, tensors: Mapping[str, Tensor], *, world: World, retry_s: float = 0.0) -> LoadResult:
    """Fill `tensors` in place from the newest intact checkpoint that is not tainted; no-op if none was ever saved.

    A candidate is accepted: a resume keeps every step that is not suspect. Damaged checkpoints are quarantined.
    A checkpoint that cannot be read, or that another version wrote, is an error: loading an older one would lose work.
    """
    retry = IoRetry(retry_s)
    names = retry.call(lambda: run_on_rank_zero(lambda: _newest_first(root)))
    result = load_first(root, names, tensors, world=world, retry=retry)
    if result.loaded is not None:
        return result
    if lost := retry.call(lambda: run_on_rank_zero(lambda: [str(path) for path in catalog.list_damaged(root)])):
        problem = "; ".join(map(str, result.damage)) or f"{len(lost)} were found damaged before"
        raise ConfigError("run.name", f"no checkpoint in {root} is intact ({problem}); remove {lost[-1]} to start over")
    return result


def load_first(
    root: Path,
    names: Iterable[str],
    tensors: Mapping[str, Tensor],
    *,
    world: World,
    retry: IoRetry | None = None,
    prepare: Callable[[str], None] = lambda _: None,
    quarantines: bool = True,
    skip_unreadable: bool = False,
) -> LoadResult:
    """Fill `tensors` in place from the first of these checkpoints that is intact.

    A damaged checkpoint is renamed if `quarantines`, and the next one is tried. One that cannot be read, or that
    another version wrote, is an error; if `skip_unreadable`, the next one is tried. Then `StorageError` is raised only
    if none could be loaded; tensors may be partly filled.
    `prepare` is called with the name of a verified checkpoint before anything is filled.
    All ranks must call this with the same arguments, and all see the same outcome.
    """
    retry = retry or IoRetry(0.0)
    damage: list[Damaged] = []
    unread: list[StorageError | OtherVersion] = []
    for name in names:
        try:
            opened = _open(root / name, tensors, world=world, retry=retry)
            prepare(name)
            _fill(root / name, tensors, opened.tensor_index, retry=retry)
            return LoadResult(LoadedCheckpoint(opened.state, name), damage, unread)
        except Damaged as error:
            damage.append(error)
            if quarantines and world.is_first:
                with suppress(OSError):  # without the rename it is only found damaged again
                    catalog.quarantine(root / name)
        except (StorageError, OtherVersion) as error:
            if not skip_unreadable:
                raise
            unread.append(error)
    for problem in unread:
        if isinstance(problem, StorageError):
            raise problem
    return LoadResult(None, damage, unread)


def _newest_first(root: Path) -> list[str]:
    """Names of all checkpoints that are not tainted; on rank 0. Unreadable health is an error: it may be tainted."""
    catalog.remove_unfinished(root)
    saved = reversed(catalog.list_checkpoints(root))
    return [checkpoint.name for checkpoint in saved if _require_health(checkpoint) is not Health.tainted]


def newest_saved_iteration(root: Path) -> int:
    """Iteration of the checkpoint that `load_newest` would try first; -1 if there is none. On rank 0.

    Raises `StorageError` or `OtherVersion` if it cannot be read.
    """
    for name in _newest_first(root):
        with suppress(Damaged):
            return integrity.read_manifest(root / name).iteration
    return -1


def _require_health(checkpoint: Checkpoint) -> Health:
    is_unread = checkpoint.health is Health.unread
    return catalog.read_health(checkpoint.path) if is_unread else checkpoint.health


class _Opened(NamedTuple):
    tensor_index: TensorIndex
    state: RunState


def _open(path: Path, tensors: Mapping[str, Tensor], *, world: World, retry: IoRetry) -> _Opened:
    """Verify a checkpoint and return its tensor index and run state on every rank.

    Every rank hashes its share of the files; rank 0 reads everything else. Raises on all ranks alike: `Damaged`
    (nothing is unpickled then), `StorageError`, `OtherVersion`, or `ConfigError` if the model has other tensors.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    manifest = retry.call(lambda: run_on_rank_zero(lambda: integrity.read_manifest(path)))
    verified: list[Manifest] = []

    def check() -> None:
        if not verified:  # do not hash again when only another rank retries
            verified.append(integrity.verify(path, part=world.rank, parts=world.size, manifest=manifest))

    retry.call(lambda: gather_results(check))
    state = retry.call(lambda: run_on_rank_zero(lambda: read_state(path)))
    return _Opened(retry.call(lambda: run_on_rank_zero(lambda: read_index(path, shapes))), state)


def read_state(path: Path) -> RunState:
    """The run state (state.json) of a verified checkpoint."""
    file = path / STATE_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise storage_error(file, error) from None
    try:
        return RunState(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise OtherVersion(file, str(error)) from None


def read_index(path: Path, shapes: Mapping[str, torch.Size]) -> TensorIndex:
    """The tensor index of a verified checkpoint. A tensor that is missing or has another shape is a `ConfigError`: the
    checkpoint is intact, the configuration differs."""
    index = tensor_index.read(path)
    saved = index.shapes
    for name, shape in shapes.items():
        if saved.get(name) != shape:
            there = f"has {name} with shape {list(saved[name])}" if name in saved else f"has no {name}"
            needed = f"this configuration needs {list(shape)}"
            if name not in saved and f"{name.rpartition('.')[0]}.exp_avg" in saved:
                needed = "a checkpoint of Muon (optim.kind) has no state that AdamW could continue with"
            raise ConfigError("run.name", f"{path} {there}; {needed}")
    return index


def _fill(path: Path, tensors: Mapping[str, Tensor], index: TensorIndex, *, retry: IoRetry) -> None:
    """Read this rank's part of every tensor; ranks read independently, and a failure on one is raised on all."""
    filled: list[bool] = []

    def fill() -> None:
        if not filled:
            read_into(path, tensors, index)
            filled.append(True)

    retry.call(lambda: gather_results(fill))


def read_into(path: Path, tensors: Mapping[str, Tensor], index: TensorIndex) -> None:
    """Fill this process's part of tensors from a verified checkpoint; needs no process group."""
    reader = _Reader(path, tensor_index.metadata_for(index, tensors))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: no_dist=True
        try:
            load_shards(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError):
                raise storage_error(path, cause) from None
            raise RuntimeError(f"{path} could not be loaded: {cause}") from cause


def read_shapes(path: Path) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a verified checkpoint; needs no process group."""
    return tensor_index.read(path).shapes


def read_tensors(path: Path, names: Iterable[str], index: TensorIndex | None = None) -> dict[str, Tensor]:
    """Full (unsharded) tensors of a verified checkpoint, by name; needs no process group. Reads the index if `index` is
    not given."""
    index = index or tensor_index.read(path)
    saved = index.tensors
    tensors = {name: torch.empty(saved[name].size, dtype=saved[name].dtype) for name in names}
    read_into(path, tensors, index)
    return tensors


class _Reader(FileSystemReader):
    """Reads shards with metadata that is already in memory."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata
