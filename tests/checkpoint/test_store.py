"""A checkpoint exists complete or not at all, and only verified content is loaded.

I/O errors and checkpoints of other versions quarantine nothing.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checkpoint import catalog, integrity, saver, store
from harness.checkpoint.integrity import OtherVersion
from harness.checkpoint.io_retry import IoRetry
from harness.checkpoint.tensor_index import METADATA_FILE
from harness.config.errors import ConfigError, StorageError
from harness.core import event_json, events
from harness.core.events import CheckpointJudged, RunStarted
from harness.core.state import RunState
from harness.distributed.world import World, connect, disconnect
from tests.checkpoint.storage import failing, tree
from tests.composed import load
from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.forks import Launched

ROLLBACK = {"steps_at_most": 7.0}


def tensors(value: float) -> dict[str, Tensor]:
    return {"model.weight": torch.full((4, 3), value), "device.step": torch.tensor(int(value))}


def world() -> World:
    return connect(load(["parallel.device=cpu"]).parallel)


def write_many(root: str, steps: list[int]) -> list[str]:
    here = world()
    names = []
    for step in steps:
        state = RunState(step=step, cursor=step + 1)
        names.append(saver.write(Path(root), tensors(step), state, world=here, rollback=ROLLBACK).path.name)
    disconnect()
    return names


def load_newest(root: str) -> tuple[RunState | None, str | None, float, list[str]]:
    here = world()
    into = tensors(-1.0)
    try:
        found = store.load_newest(Path(root), into, world=here)
    finally:
        disconnect()
    state, name = found.loaded or (None, None)
    assert int(into["device.step"]) == int(into["model.weight"][2, 1])
    return state, name, float(into["model.weight"][2, 1]), [str(error) for error in found.damage]


def complaint_of_loading(root: str, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    here = world()
    into = tensors(-1.0) if shapes is None else {name: torch.zeros(shape) for name, shape in shapes.items()}
    try:
        store.load_newest(Path(root), into, world=here)
    except ConfigError as error:
        return str(error)
    finally:
        disconnect()
    return ""


@pytest.mark.parametrize("size", [1, 2])
def test_newest_checkpoint_round_trip(ranks: Pool, tmp_path: Path, size: int) -> None:
    for names in ranks.run(size, write_many, str(tmp_path), [5, 10, 10000000]):
        assert names == ["step-00000005-gen-0", "step-00000010-gen-0", "step-10000000-gen-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for state, directory, weight, damage in ranks.run(size, load_newest, str(tmp_path)):
        assert state == RunState(step=10000000, cursor=10000001)
        assert (directory, weight, damage) == ("step-10000000-gen-0", 10000000.0, [])


def test_every_file_is_in_the_manifest(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, write_many, str(tmp_path), [5])
    directory = tmp_path / "step-00000005-gen-0"
    manifest = integrity.verify(directory)
    assert set(manifest.files) | {integrity.MANIFEST} == {path.name for path in directory.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "state.json"} <= set(manifest.files)
    assert (manifest.step, manifest.world_size, manifest.rollback) == (5, 2, ROLLBACK)
    assert manifest.bytes == sum((directory / name).stat().st_size for name in manifest.files)


def test_nothing_is_loaded_if_nothing_was_saved(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, load_newest, str(tmp_path / "nowhere")) == [(None, None, -1.0, [])] * 2


def test_unfinished_directories_are_neither_listed_nor_kept(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, write_many, str(tmp_path), [5])
    shutil.copytree(tmp_path / "step-00000005-gen-0", tmp_path / ".step-00000009-gen-0.part")
    assert [checkpoint.step for checkpoint in catalog.list_checkpoints(tmp_path)] == [5]
    (found,) = ranks.run(1, load_newest, str(tmp_path))
    assert found[1] == "step-00000005-gen-0"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005-gen-0"]


def test_tainted_checkpoints_are_skipped(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, write_many, str(tmp_path), [5, 10])
    catalog.mark(tmp_path / "step-00000010-gen-0", catalog.Health.tainted, "taken after the onset of an incident")
    (found,) = ranks.run(1, load_newest, str(tmp_path))
    assert found[1:] == ("step-00000005-gen-0", 5.0, [])


def test_other_model_is_rejected_by_name_and_nothing_is_quarantined(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, write_many, str(tmp_path), [5])
    other = {"model.weight": (4, 4), "device.step": ()}
    for complaint in ranks.run(2, complaint_of_loading, str(tmp_path), other):
        assert "has model.weight with shape [4, 3]; this configuration needs [4, 4]" in complaint
    for complaint in ranks.run(2, complaint_of_loading, str(tmp_path), {"model.head": (4,)}):
        assert "has no model.head" in complaint
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005-gen-0"]


def flip_bit(directory: Path) -> str:
    """Flip one bit in the middle of rank 1's shards."""
    return _spoil(directory / "__1_0.distcp", lambda data: data[:100000] + bytes([data[100000] ^ 1]) + data[100001:])


def zero_hole(directory: Path) -> str:
    return _spoil(directory / "__0_0.distcp", lambda data: data[:4096] + bytes(4096) + data[8192:])


def truncate(directory: Path) -> str:
    return _spoil(directory / "__0_0.distcp", lambda data: data[:-1])


def empty(directory: Path) -> str:
    return _spoil(directory / "__1_0.distcp", lambda _: b"")


def spoil_metadata(directory: Path) -> str:
    return _spoil(directory / ".metadata", lambda data: data[:-20] + b"?" + data[-19:])


def spoil_state(directory: Path) -> str:
    return _spoil(directory / "state.json", lambda data: data.replace(b'"cursor": 9', b'"cursor": 8'))


def lose_a_file(directory: Path) -> str:
    (directory / "__1_0.distcp").unlink()
    return "__1_0.distcp"


def lose_the_manifest(directory: Path) -> str:
    (directory / integrity.MANIFEST).unlink()
    return integrity.MANIFEST


def _spoil(path: Path, change: Callable[[bytes], bytes]) -> str:
    before = path.read_bytes()
    after = change(before)
    assert after != before
    path.write_bytes(after)
    return path.name


DAMAGES = [flip_bit, spoil_state, lose_the_manifest]
MORE_DAMAGES = [zero_hole, truncate, empty, spoil_metadata, lose_a_file]
STEPS = (
    "run.name=a",
    "model.num_layers=1",
    "checkpoint.every_steps=3",
    "checkpoint.good_after_steps=2",
    "train.num_steps=9",
)
LONGER = (*STEPS, "train.num_steps=12", "run.resume=changed", "optim.schedule=constant")


@pytest.fixture(scope="module")
def trained(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 6 and 9."""
    directory = tmp_path_factory.mktemp("trained")
    ranks.run(2, cases.run, str(directory), *STEPS, "optim.schedule=constant")
    assert [checkpoint.step for checkpoint in catalog.list_checkpoints(directory / "a" / "checkpoints")] == [6, 9]
    return directory


@pytest.fixture(scope="module")
def control(ranks: Pool, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory = tmp_path_factory.mktemp("control") / "copy"
    shutil.copytree(trained, directory)
    return _history(ranks.run(2, cases.run, str(directory), *LONGER)[0][1])


def _history(records: list[events.StepRecord]) -> list[Any]:
    last = {record.step: (record.cursor, record.loss, record.grad_norm, record.lr) for record in records}
    return sorted(last.items())


@pytest.mark.parametrize(
    "damage",
    [*DAMAGES, *(pytest.param(damage, marks=pytest.mark.full) for damage in MORE_DAMAGES)],
    ids=lambda damage: damage.__name__,
)
def test_damaged_checkpoint_is_named_and_the_older_one_is_loaded(
    ranks: Pool, trained: Path, control: list[Any], tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "a" / "checkpoints"
    name = damage(checkpoints / "step-00000009-gen-0")
    code, records = ranks.run(2, cases.run, str(tmp_path), *LONGER)[0]
    assert code == 0
    log = list(event_json.read(tmp_path / "a" / "events.jsonl"))
    assert [event for event in log if isinstance(event, RunStarted)][-1].resumed_from == "step-00000006-gen-0"
    (event,) = [event for event in log if isinstance(event, CheckpointJudged) and event.health == "damaged"]
    assert f"step-00000009-gen-0/{name}" in event.reason
    assert (checkpoints / "step-00000009-gen-0.damaged").is_dir(), "it is kept for inspection"
    assert _history(records) == control, "and the run is the one that resumed from the newest"
    assert [checkpoint.step for checkpoint in catalog.list_checkpoints(checkpoints)] == [9, 12]
    for checkpoint in catalog.list_checkpoints(checkpoints):
        integrity.verify(checkpoint.path)


def test_run_with_only_damaged_checkpoints_does_not_start_over(ranks: Pool, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for checkpoint in catalog.list_checkpoints(tmp_path / "a" / "checkpoints"):
        truncate(checkpoint.path)
    for attempt in range(2):
        for complaint in ranks.run(2, complaint_of_running, str(tmp_path)):
            assert "no checkpoint in" in complaint
            assert "\n" not in complaint
            assert attempt or "step-00000009-gen-0/__0_0.distcp" in complaint


def complaint_of_running(directory: str) -> str:
    try:
        cases.run(directory, *LONGER)
    except ConfigError as error:
        return str(error)
    return ""


class Payload:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_no_code_in_a_checkpoint_is_executed(ranks: Pool, tmp_path: Path) -> None:
    """Even if an attacker recomputed the manifest."""
    ranks.run(1, write_many, str(tmp_path), [5])
    directory = tmp_path / "step-00000005-gen-0"
    (directory / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "proof")))
    _forge(directory)
    (complaint,) = ranks.run(1, complaint_of_loading, str(tmp_path))
    assert "posix.mkdir is not allowed in a checkpoint" in complaint
    assert not (tmp_path / "proof").exists()


def test_paths_outside_the_checkpoint_are_rejected(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, write_many, str(tmp_path), [5, 10])
    directory = tmp_path / "step-00000010-gen-0"
    with (directory / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = "../step-00000005-gen-0/__0_0.distcp"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    _forge(directory)
    (complaint,) = ranks.run(1, complaint_of_loading, str(tmp_path))
    assert "which is outside the checkpoint" in complaint
    assert directory.is_dir()


def _forge(directory: Path) -> None:
    """Write a manifest that matches the files in the directory."""
    manifest = integrity.read_manifest(directory)
    files = integrity.hash_files(directory, manifest.files)
    integrity.write_checkpoint_manifest(directory, integrity.Manifest(**(_shallow(manifest) | {"files": files})))


def _shallow(manifest: integrity.Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__slots__}


def test_tensors_are_read_whole_without_a_process_group(trained: Path) -> None:
    directory = trained / "a" / "checkpoints" / "step-00000009-gen-0"
    shapes = store.read_shapes(directory)
    name = "model.blocks.0.mlp.up.weight"
    (read,) = store.read_tensors(directory, [name]).values()
    assert read.shape == shapes[name] == (48, 32)
    assert json.loads((directory / store.STATE_FILE).read_text())["step"] == 9
    assert int(store.read_tensors(directory, ["device.step"])["device.step"]) == 9


RETRY_S = 0.05
Failing = tuple[int, str, float]
"""On which rank, the end of the path of a file, how often."""


Outcome = tuple[str, str | None, float, int]
"""The outcome of a load in words, the name of the checkpoint, a weight, and the failures on this rank."""


def load_through(root: str, where: Failing, **options: Any) -> Outcome:
    """Load the newest checkpoint while one rank's storage fails."""
    here = world()
    try:
        return load_while_failing(here, root, where, **options)
    finally:
        disconnect()


def load_while_failing(here: World, root: str, where: Failing, **options: Any) -> Outcome:
    into = tensors(-1.0)
    rank, file, times = where
    outcome, name = "loaded", None
    with failing(file, times=times if here.rank == rank else 0, code=errno.ESTALE) as failed:
        try:
            if options:
                names = [each.name for each in reversed(catalog.list_checkpoints(Path(root)))]
                retry = IoRetry(RETRY_S)
                found = store.load_first(Path(root), names, into, world=here, retry=retry, **options)
                outcome = "; ".join(map(str, [*found.damage, *found.unread])) or outcome
            else:
                found = store.load_newest(Path(root), into, world=here, retry=IoRetry(RETRY_S))
            name = found.loaded and found.loaded.name
        except (StorageError, ConfigError) as error:
            outcome = f"{type(error).__name__}: {error}"
    return outcome, name, float(into["model.weight"][2, 1]), len(failed)


NEWEST = "step-00000010-gen-0"
READ_BY = [
    (0, f"{NEWEST}/{integrity.MANIFEST}"),
    (0, f"{NEWEST}/{catalog.HEALTH}"),
    (0, f"{NEWEST}/.metadata"),
    (0, f"{NEWEST}/state.json"),
    (1, f"{NEWEST}/state.json"),
    (1, f"{NEWEST}/__0_0.distcp"),
    (0, f"{NEWEST}/__1_0.distcp"),
]
"""Every file of a checkpoint, with a rank that reads it."""


def load_at_each(root: str, times: float) -> list[Outcome]:
    """Load the newest checkpoint once for each place in `READ_BY`, while that place fails this often."""
    here = world()
    try:
        return [load_while_failing(here, root, (*where, times)) for where in READ_BY]
    finally:
        disconnect()


@pytest.mark.full
def test_an_io_error_on_one_rank_is_retried_by_all(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, write_many, str(tmp_path), [5, 10])
    catalog.mark(tmp_path / NEWEST, catalog.Health.good, "a test")
    before = tree(tmp_path)
    outcomes = ranks.run(2, load_at_each, str(tmp_path), 1)
    for (rank, file), *loaded in zip(READ_BY, *outcomes, strict=True):
        assert [each[:3] for each in loaded] == [("loaded", NEWEST, 10.0)] * 2, file
        assert loaded[rank][3] == 1, f"{file}: it did fail"
    assert tree(tmp_path) == before


@pytest.mark.full
def test_lasting_io_error_ends_the_start_on_all_ranks_and_quarantines_nothing(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, write_many, str(tmp_path), [5, 10])
    catalog.mark(tmp_path / NEWEST, catalog.Health.good, "a test")
    before = tree(tmp_path)
    outcomes = ranks.run(2, load_at_each, str(tmp_path), float("inf"))
    for (_, file), *ended in zip(READ_BY, *outcomes, strict=True):
        assert ended[0][:2] == ended[1][:2], file
        outcome, name = ended[0][:2]
        assert outcome.startswith(f"StorageError: {tmp_path}/{NEWEST}"), file
        assert "Stale file handle" in outcome, file
        assert name is None, f"{file}: an older one would lose work"
    assert tree(tmp_path) == before
    for _, name, *_ in ranks.run(2, load_through, str(tmp_path), (0, "", 0)):
        assert name == NEWEST, "and later it is there"


def test_unlistable_checkpoints_do_not_start_a_new_run(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    for outcome, *_ in ranks.run(2, load_through, str(tmp_path / "checkpoints"), (0, "", 0)):
        assert outcome.startswith(f"StorageError: {tmp_path}/checkpoints: cannot be read on ")


def test_rollback_skips_unreadable_checkpoints_and_reports_them(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, write_many, str(tmp_path), [5, 10])
    before = tree(tmp_path)
    for file in (f"{NEWEST}/__0_0.distcp", f"{NEWEST}/state.json"):
        for outcome, name, weight, _ in ranks.run(2, load_passing_over, str(tmp_path), (1, file, float("inf"))):
            assert "cannot be read on" in outcome
            assert (name, weight) == ("step-00000005-gen-0", 5.0)
    for outcome, name, *_ in ranks.run(2, load_passing_over, str(tmp_path), (1, "", float("inf"))):
        assert outcome.startswith("StorageError: ")
        assert name is None
    assert tree(tmp_path) == before


def load_passing_over(root: str, where: Failing) -> Outcome:
    return load_through(root, where, skip_unreadable=True)


def load_as_a_reader(root: str) -> Outcome:
    return load_through(root, (0, "", 0), quarantines=False)


def test_load_without_quarantine_renames_nothing(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, write_many, str(tmp_path), [5, 10])
    shutil.copytree(tmp_path / NEWEST, tmp_path / ".step-00000015-gen-0.part")
    truncate(tmp_path / NEWEST)
    before = tree(tmp_path)
    for outcome, name, *_ in ranks.run(2, load_as_a_reader, str(tmp_path)):
        assert "bytes" in outcome
        assert name == "step-00000005-gen-0"
    assert tree(tmp_path) == before


def newer_state(directory: Path) -> str:
    path = directory / store.STATE_FILE
    path.write_text(json.dumps(asdict(RunState(step=10)) | {"new_field": 1}))
    return "new_field"


def newer_metadata(directory: Path) -> str:
    path = directory / METADATA_FILE
    content = path.read_bytes()
    assert b"ChunkStorageMetadata" in content
    path.write_bytes(content.replace(b"ChunkStorageMetadata", b"ChunkStorageMetadatb"))
    return "ChunkStorageMetadatb"


def newer_health(directory: Path) -> str:
    (directory / catalog.HEALTH).write_text(json.dumps({"health": "archived"}))
    return "archived"


@pytest.mark.parametrize("change", [newer_state, newer_metadata, newer_health], ids=lambda change: change.__name__)
def test_checkpoint_of_a_newer_version_is_rejected_in_one_line_and_kept(
    ranks: Pool, tmp_path: Path, change: Callable[[Path], str]
) -> None:
    ranks.run(2, write_many, str(tmp_path), [5, 10])
    named = change(tmp_path / NEWEST)
    _forge(tmp_path / NEWEST)
    before = tree(tmp_path)
    for outcome, name, weight, _ in ranks.run(2, load_through, str(tmp_path), (0, "", 0)):
        assert outcome.startswith(f"{OtherVersion.__name__}: {tmp_path}/{NEWEST}")
        assert named in outcome
        assert "\n" not in outcome
        assert (name, weight) == (None, -1.0)
    assert tree(tmp_path) == before


FOR_GOOD = ExitStack()


def unmounted() -> None:
    """From here on, shards cannot be read in this process and its forks."""
    FOR_GOOD.enter_context(failing("__0_0.distcp", code=errno.ESTALE))


@pytest.mark.full
def test_start_that_cannot_read_its_checkpoint_exits_75_and_resumes_later(
    ranks: Pool, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    before = tree(tmp_path / "a" / "checkpoints")
    overrides = [*cases.TINY, *LONGER, f"run.dir={tmp_path}", "launch.nproc=2", f"checkpoint.retry_s={RETRY_S}"]
    with Launched("launch.train", *overrides, output=tmp_path / "output", first=unmounted) as process:
        assert process.wait(timeout=200) == 75
        assert "Traceback" not in process.stderr
        complaints = [line for line in process.stderr.splitlines() if line.startswith("harness: ")]
    (complaint,) = complaints
    assert "step-00000009-gen-0/__0_0.distcp: cannot be read on " in complaint
    assert tree(tmp_path / "a" / "checkpoints") == before
    assert ranks.run(2, cases.run, str(tmp_path), *LONGER)[0][0] == 0


@pytest.mark.full
def test_a_stop_while_a_start_waits_for_storage_exits_75(trained: Path, tmp_path: Path) -> None:
    """`checkpoint.retry_s` is 300."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    before = tree(tmp_path / "a" / "checkpoints")
    overrides = [*cases.TINY, *LONGER, f"run.dir={tmp_path}", "launch.nproc=2"]
    with Launched("launch.train", *overrides, output=tmp_path / "output", first=unmounted) as process:
        deadline_s = time.monotonic() + 200
        while not (tmp_path / "output.stderr").exists() or "trying again" not in process.stderr:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
        complaints = [line for line in process.stderr.splitlines() if line.startswith("harness: /")]
    (complaint,) = complaints
    assert "step-00000009-gen-0/__0_0.distcp: cannot be read on " in complaint
    assert "Traceback" not in process.stderr
    assert tree(tmp_path / "a" / "checkpoints") == before
