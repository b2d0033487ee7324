"""Verifies checkpoints and loads them with torch.distributed.checkpoint (DCP); `harness.checkpoint.saver` writes them.

How: a load verifies the manifest first; the ranks share the files to hash. Then it fills tensors in place that already
have their final sharding, so the number of ranks may change between runs. A damaged checkpoint is quarantined and the
next older one is tried. An I/O error is retried and never counts as damage. Every operation that can fail on one rank
runs inside `gather_results` or `run_on_rank_zero`, so that all ranks see the same outcome.
Left out: random state. Nothing draws from one: weights and data are pure functions of the seed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from harness.checkpoint import catalog, integrity, tensor_index
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, Manifest, OtherVersion, storage_error
from harness.checkpoint.io_retry import IoRetry
from harness.checkpoint.tensor_index import WEIGHTS, TensorIndex
from harness.config.errors import ConfigError, StorageError
from harness.core.state import RunState
from harness.distributed.collectives import gather_results, run_on_rank_zero
from harness.distributed.world import World

STATE_FILE = catalog.STATE_FILE


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


def load_newest(root: Path, tensors: Mapping[str, Tensor], *, world: World, retry: IoRetry | None = None) -> LoadResult:
    """Fill `tensors` in place from the newest intact checkpoint that is not tainted; no-op if none was ever saved.

    A candidate is accepted: a resume keeps every step that is not suspect. Damaged checkpoints are quarantined.
    A checkpoint that cannot be read, or that another version wrote, is an error: loading an older one would lose work.
    """
    retry = retry or IoRetry(0.0)
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
    (nothing is unpickled then), `StorageError`, `OtherVersion`, or `ConfigError` if the model has other tensors
    or the checkpoint has no run state.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    manifest = retry.call(lambda: run_on_rank_zero(lambda: integrity.read_manifest(path)))
    verified: list[Manifest] = []

    def check() -> None:
        if not verified:  # do not hash again when only another rank retries
            verified.append(integrity.verify(path, part=world.rank, parts=world.size, manifest=manifest))

    retry.call(lambda: gather_results(check))
    if STATE_FILE not in manifest.files:
        message = f"{path} has parameters only, as `harness checkpoint average` writes them; to train them further, "
        raise ConfigError("run.name", f"{message}export it, import the export as a new run and train that")
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
    """The tensor index of a verified checkpoint. A tensor that is missing or has another shape is a `ConfigError`, and
    so is a weight that this configuration does not have: the checkpoint is intact, the configuration differs."""
    index = tensor_index.read(path)
    saved = index.shapes
    for name, shape in shapes.items():
        if saved.get(name) != shape:
            there = f"has {name} with shape {list(saved[name])}" if name in saved else f"has no {name}"
            needed = f"this configuration needs {list(shape)}"
            if name not in saved and f"{name.rpartition('.')[0]}.exp_avg" in saved:
                needed = "a checkpoint of Muon (optim.kind) has no state that AdamW could continue with"
            raise ConfigError("run.name", f"{path} {there}; {needed}")
    unused = sorted(name for name in saved if name.startswith(WEIGHTS) and name not in shapes)
    if unused:
        message = f"{path} has {unused[0]}, one of {len(unused)} weights that this configuration would drop"
        raise ConfigError("run.name", message)
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
