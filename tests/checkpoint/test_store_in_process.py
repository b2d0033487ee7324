"""Writing and loading on one rank in this process: plan cache, cleanup after errors, choice of checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.checkpoint import catalog, integrity, saver, store, tensor_index
from harness.checkpoint.catalog import Health, name_of
from harness.checkpoint.integrity import MANIFEST, Damaged, OtherVersion
from harness.checkpoint.io_retry import IoRetry
from harness.config.errors import ConfigError, StorageError
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.world import World
from tests.checkpoint.storage import failing, tree

SHARD = "__0_0.distcp"


def tensors(value: float) -> dict[str, Tensor]:
    return {"model.weight": torch.full((4, 3), value), "device.step": torch.tensor(int(value))}


def save(root: Path, world: World, step: int, plan_cache: saver.SavePlanCache | None = None) -> Path:
    state = RunState(step=step, iteration=step + 1, tokens=10 * step)
    return saver.write(root, tensors(step), state, world=world, rollback={"steps": 7.0}, plan_cache=plan_cache).path


class Outcome(NamedTuple):
    found: store.LoadResult
    weight: float


def newest(root: Path, world: World, **options: Any) -> Outcome:
    into = tensors(-1.0)
    found = store.load_newest(root, into, world=world, **options)
    return Outcome(found, float(into["model.weight"][2, 1]))


def first(root: Path, world: World, *steps: int, **options: Any) -> Outcome:
    into = tensors(-1.0)
    found = store.load_first(root, [name_of(step, 0) for step in steps], into, world=world, **options)
    return Outcome(found, float(into["model.weight"][2, 1]))


def damage(path: Path, name: str = SHARD) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])


def test_checkpoint_contains_tensors_and_state(tmp_path: Path, world: World) -> None:
    written = saver.write(
        tmp_path / "deep" / "root", tensors(5), RunState(step=5, tokens=50), world=world, rollback={"steps": 7.0}
    )
    manifest = integrity.verify(written.path)
    assert set(manifest.files) == {SHARD, tensor_index.METADATA_FILE, store.STATE_FILE}
    assert (manifest.step, manifest.tokens, manifest.world_size, manifest.rollback) == (5, 50, 1, {"steps": 7.0})
    assert written == (tmp_path / "deep" / "root" / name_of(5, 0), manifest.bytes)
    assert [path.name for path in written.path.parent.iterdir()] == [written.path.name], "nothing half-written is left"
    assert store.read_shapes(written.path) == {"model.weight": (4, 3), "device.step": ()}
    found = tensor_index.read(written.path)
    (written.path / tensor_index.METADATA_FILE).unlink()
    (read,) = store.read_tensors(written.path, ["model.weight"], found).values()
    assert read.tolist() == [[5.0] * 3] * 4, "a description that is given is not read again"


def test_files_are_synced_before_the_checkpoint_is_published(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[tuple[str, int]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        if not (tmp_path / name_of(2, 0)).exists():
            name = Path(f"/proc/self/fd/{descriptor}").readlink().name
            forced.append((name, os.fstat(descriptor).st_size))
        fsync(descriptor)

    plan_cache = saver.SavePlanCache()
    save(tmp_path, world, 1, plan_cache)
    monkeypatch.setattr(os, "fsync", record)
    path = save(tmp_path, world, 2, plan_cache)
    assert [name for name, _ in forced].count(SHARD) == 2, "by torch, and again once its last buffer is written"
    for name in (SHARD, tensor_index.METADATA_FILE):
        assert (name, (path / name).stat().st_size) in forced, "all of it"


@contextmanager
def counted_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts how often a save was planned."""
    plans: list[int] = []

    def count(*arguments: Any, **options: Any) -> Any:
        plans.append(len(plans))
        return save_shards(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "save_shards", count)
        yield plans


def test_plan_is_cached_while_the_layout_is_unchanged(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_cache = saver.SavePlanCache()
    with counted_plans(monkeypatch) as plans:
        for step in (1, 2, 3):
            save(tmp_path, world, step, plan_cache)
            assert first(tmp_path, world, step).weight == step
        assert len(plans) == 1
        assert plan_cache.metadata == (tmp_path / name_of(3, 0) / tensor_index.METADATA_FILE).read_bytes()
        plan_cache.results = plan_cache.results[:-1]
        save(tmp_path, world, 4, plan_cache)
        assert (len(plans), len(plan_cache.results)) == (2, 2), "the chunks have other offsets than in the plan"
        plan_cache.signature = []
        save(tmp_path, world, 5, plan_cache)
        assert len(plans) == 3, "other tensors"
        save(tmp_path, world, 6)
        assert len(plans) == 4, "no plan was given"
    for step in (4, 5, 6):
        assert first(tmp_path, world, step).weight == step


@pytest.mark.parametrize(
    ("signature", "has_plan", "expected"), [(["a"], True, True), (["a"], False, False), (["b"], True, False)]
)
def test_plan_fits_only_its_signature(signature: list[Any], has_plan: bool, expected: bool) -> None:
    plan: Any = object() if has_plan else None
    assert saver.SavePlanCache(signature=["a"], plan=plan).fits(signature) is expected


def test_the_signature_changes_with_everything_a_plan_depends_on(world: World) -> None:
    def sharded(placement: Shard | Replicate) -> DTensor:
        return DTensor.from_local(torch.zeros(4, 2), world.host_mesh, [placement], run_check=False)

    kinds: list[dict[str, Tensor]] = [
        {"a": torch.zeros(4, 2)},
        {"b": torch.zeros(4, 2)},
        {"a": torch.zeros(2, 4)},
        {"a": torch.zeros(4, 2, dtype=torch.int32)},
        {"a": sharded(Shard(0))},
        {"a": sharded(Shard(1))},
        {"a": sharded(Replicate())},
    ]
    signatures = [saver.signature_of(each) for each in kinds]
    assert all(one != other for number, one in enumerate(signatures) for other in signatures[:number])
    assert saver.signature_of(kinds[4]) == saver.signature_of({"a": sharded(Shard(0))})


@pytest.mark.parametrize("is_planned", [False, True])
def test_failed_write_raises_one_line_and_leaves_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    plan_cache = saver.SavePlanCache()
    if is_planned:
        save(tmp_path, world, 1, plan_cache)
    before = tree(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"^rank 0: .*Input/output error"):
            save(tmp_path, world, 2, plan_cache)
    assert (plan_cache.plan is not None) is is_planned, "a plan is no worse for a disk that failed"
    assert tree(tmp_path).keys() == before.keys()
    save(tmp_path, world, 2, plan_cache)
    assert newest(tmp_path, world).weight == 2


def test_the_first_rank_that_failed_is_named() -> None:
    failures: Any = {3: (OSError("c"), None), 1: (OSError("a"), None), 2: (OSError("b"), None)}
    assert saver._first_failure(CheckpointException("write", failures)) == "rank 1: a"


@pytest.mark.parametrize(
    ("free_bytes", "reason", "expected"),
    [
        (2**20 - 1, "it failed", "it failed (No space left on device)"),
        (2**20, "it failed", "it failed"),
        (0, "No space left on device", "No space left on device"),
    ],
)
def test_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, reason: str, expected: str
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert saver._explain_write_error(reason, tmp_path) == expected


def test_a_checkpoint_replaces_only_a_tainted_one_of_its_name(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, world, 5)
    inode = path.stat().st_ino
    with pytest.raises(OSError, match="not empty"):
        save(tmp_path, world, 5)
    assert path.stat().st_ino == inode
    catalog.mark(path, Health.tainted, "a test")
    save(tmp_path, world, 5)
    assert path.stat().st_ino != inode
    assert catalog.health_of(path) is Health.candidate


def test_newest_intact_untainted_checkpoint_is_loaded(tmp_path: Path, world: World) -> None:
    assert newest(tmp_path / "nowhere", world) == (store.LoadResult(None, []), -1.0)
    paths = [save(tmp_path, world, step) for step in (5, 10, 15)]
    shutil.copytree(paths[0], tmp_path / f".{name_of(20, 0)}.part")
    catalog.mark(paths[2], Health.tainted, "a test")
    catalog.mark(paths[1], Health.good, "a test")
    found, weight = newest(tmp_path, world)
    assert found == store.LoadResult(
        store.LoadedCheckpoint(RunState(step=10, iteration=11, tokens=100), name_of(10, 0)), []
    )
    assert weight == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths], (
        "unfinished directories are removed"
    )
    damage(paths[1])
    found, weight = newest(tmp_path, world)
    assert (weight, [each.path for each in found.damage]) == (5, [paths[1] / SHARD])
    assert [path.name for path in catalog.list_damaged(tmp_path)] == [f"{name_of(10, 0)}.damaged"]
    damage(paths[0], MANIFEST)
    for problem in (f"{paths[0] / MANIFEST}: is not a manifest", "2 were found damaged before"):
        with pytest.raises(ConfigError) as caught:
            newest(tmp_path, world)
        assert problem in str(caught.value)
        assert f"remove {tmp_path / name_of(10, 0)}.damaged to start over" in str(caught.value)


def test_health_that_cannot_be_read_is_an_error(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, world, 5)
    (path / catalog.HEALTH).mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        newest(tmp_path, world)


FILES = [MANIFEST, SHARD, tensor_index.METADATA_FILE, store.STATE_FILE]


@pytest.mark.parametrize("file", FILES)
def test_an_io_error_is_retried_if_it_is_allowed(tmp_path: Path, world: World, file: str) -> None:
    save(tmp_path, world, 5)
    save(tmp_path, world, 10)
    before = tree(tmp_path)
    name = f"{name_of(10, 0)}/{file}"
    with failing(name, times=1) as failed:
        assert newest(tmp_path, world, retry=IoRetry(0.01)).weight == 10
        assert len(failed) == 1
    with failing(name, times=1), pytest.raises(StorageError):
        newest(tmp_path, world)
    with failing(name, times=1), pytest.raises(StorageError):
        first(tmp_path, world, 10, 5)
    with failing(name, times=1):
        assert first(tmp_path, world, 10, 5, retry=IoRetry(0.01)).weight == 10
    with failing(name):
        found, weight = first(tmp_path, world, 10, 5, skip_unreadable=True)
        assert (weight, [type(each) for each in found.unread]) == (5, [StorageError])
    with failing(file), pytest.raises(StorageError):
        first(tmp_path, world, 10, 5, skip_unreadable=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("fails", [[True], [False, True]], ids=["verify", "fill"])
def test_verified_files_are_not_read_again_when_another_rank_retries(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, fails: list[bool]
) -> None:
    """A rank that has verified its files does nothing when all ranks retry because of another one."""
    save(tmp_path, world, 5)
    calls: list[str] = []
    for module, name in ((integrity, "read_manifest"), (integrity, "verify"), (store, "read_into")):
        genuine = getattr(module, name)

        def count(*arguments: Any, name: str = name, genuine: Any = genuine, **options: Any) -> Any:
            calls.append(name)
            return genuine(*arguments, **options)

        monkeypatch.setattr(module, name, count)
    left = [*fails]

    def unlucky(work: Any, *group: Any) -> Any:
        """This rank succeeds, and another one fails."""
        done = gather_results(work, *group)
        if left and left.pop(0):
            raise StorageError(errno.EIO, "cannot be read", "elsewhere")
        return done

    monkeypatch.setattr(store, "gather_results", unlucky)
    assert first(tmp_path, world, 5, retry=IoRetry(0.01)).weight == 5
    assert (calls, left) == (["read_manifest", "verify", "read_into"], [])


def test_damaged_checkpoint_is_quarantined_only_if_allowed(tmp_path: Path, world: World) -> None:
    save(tmp_path, world, 5)
    damage(save(tmp_path, world, 10))
    prepared: list[str] = []
    before = tree(tmp_path)
    found, weight = first(tmp_path, world, 10, 5, quarantines=False, prepare=prepared.append)
    assert (weight, prepared, [type(each) for each in found.damage]) == (5, [name_of(5, 0)], [Damaged])
    assert tree(tmp_path) == before
    assert first(tmp_path, world, 10, 5).weight == 5
    assert [path.name for path in catalog.list_damaged(tmp_path)] == [f"{name_of(10, 0)}.damaged"]
    assert first(tmp_path, world).found == store.LoadResult(None, [])


def test_other_version_is_skipped_only_if_allowed(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, world, 5)
    (path / store.STATE_FILE).write_text(json.dumps({"new_field": 1}))
    manifest = integrity.read_manifest(path)
    manifest.files.update(integrity.hash_files(path, manifest.files))
    integrity.write_checkpoint_manifest(path, manifest)
    with pytest.raises(OtherVersion, match="new_field"):
        first(tmp_path, world, 5)
    found, weight = first(tmp_path, world, 5, skip_unreadable=True)
    assert (weight, found.loaded, [type(each) for each in found.unread]) == (-1, None, [OtherVersion])


def test_other_model_is_rejected_by_name(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, world, 5)
    other_shape = ((4, 4), "model.weight", "has model.weight with shape [4, 3]")
    for shape, name, problem in (other_shape, ((4,), "x", "has no x")):
        with pytest.raises(ConfigError, match="this configuration needs") as caught:
            store.read_index(path, {"device.step": torch.Size(()), name: torch.Size(shape)})
        assert problem in str(caught.value)
        assert str(caught.value).endswith(f"needs {list(shape)}")


def test_a_checkpoint_without_run_state_is_rejected(tmp_path: Path, world: World) -> None:
    """As `harness checkpoint average` writes it."""
    written = save(tmp_path, world, 3)
    manifest = integrity.read_manifest(written)
    (written / store.STATE_FILE).unlink()
    kept = {name: entry for name, entry in manifest.files.items() if name != store.STATE_FILE}
    integrity.write_checkpoint_manifest(written, replace(manifest, files=kept))
    with pytest.raises(ConfigError, match=f"run.name: {written} has parameters only, .* export it, import the export"):
        newest(tmp_path, world, retry=IoRetry(60.0))


def test_a_model_that_would_drop_weights_is_rejected(tmp_path: Path, world: World) -> None:
    """As `run.resume=changed` with fewer layers would; state of the optimizer may be dropped."""
    path = save(tmp_path, world, 5)
    with pytest.raises(ConfigError, match=r"has model\.weight, one of 1 weights that this configuration would drop"):
        store.read_index(path, {"device.step": torch.Size(())})
    store.read_index(path, {"model.weight": tensor_index.read(path).shapes["model.weight"]})


def test_reading_tensors_needs_no_other_rank(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process reads a checkpoint of many ranks; a collective would block."""
    path = save(tmp_path, world, 5)

    def collective(*_: object, **__: object) -> None:
        raise AssertionError("a collective")

    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
        monkeypatch.setattr(dist, name, collective)
    assert store.read_tensors(path, ["device.step"])["device.step"].item() == 5


def test_unreadable_shard_is_an_io_error_and_undecodable_shard_is_not(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, world, 5)
    with failing(f"{path.name}/{SHARD}"), pytest.raises(StorageError, match="Input/output error"):
        store.read_tensors(path, ["model.weight"])
    (path / SHARD).write_bytes(bytes((path / SHARD).stat().st_size))
    with pytest.raises(RuntimeError, match=f"{path.name} could not be loaded: "):
        store.read_tensors(path, ["model.weight"])
    (path / store.STATE_FILE).unlink()
    with pytest.raises(StorageError, match="No such file"):
        store.read_state(path)
