"""Claims, headers and removal of the files that hold snapshots in shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.core import snapshot_files
from harness.core.snapshot_files import SnapshotHeader, SnapshotSet


def header(shard: int = 0, iteration: int = 10) -> SnapshotHeader:
    return SnapshotHeader(
        shard=shard,
        num_shards=2,
        world_size=2,
        config="c",
        layout="l",
        starts=["s"],
        iteration=iteration,
        num_bytes=64,
        sha256="0",
        state={"step": iteration},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    path = snapshot_files.snapshot_folder(tmp_path, run)
    snapshot_files.create_folder(path, run)
    return path


def leave_set(folder: Path, *headers: SnapshotHeader) -> Path:
    """A set whose process has died, with these snapshots."""
    files = snapshot_files.claim_any(folder)
    for index, each in enumerate(headers):
        files.block(f"slot-{index}").write_bytes(b"\0" * each.num_bytes)
        files.write_header(f"slot-{index}", each)
    path = files.path
    files.release()
    return path


def test_each_run_has_its_own_folder(tmp_path: Path) -> None:
    names = {snapshot_files.snapshot_folder(tmp_path, tmp_path / name).name for name in ("a", "b")}
    assert len(names) == 2
    assert snapshot_files.snapshot_folder(tmp_path, tmp_path / "x" / ".." / "a").name in names
    assert all(name.startswith(f"harness-snapshots-{os.getuid()}-") for name in names)


def test_a_rank_claims_the_files_of_its_shard_and_others_take_the_rest(folder: Path) -> None:
    first, second = leave_set(folder, header(shard=0)), folder / "set-1"
    held = SnapshotSet.claim(first)
    assert held is not None
    assert leave_set(folder, header(shard=1)) == second
    held.release()
    own = snapshot_files.claim_own(folder, 1)
    assert own is not None
    assert own.path == second
    assert snapshot_files.claim_own(folder, 1) is None, "it is claimed"
    assert snapshot_files.claim_own(folder, 5) is None
    assert snapshot_files.claim_any(folder).path == first
    assert snapshot_files.claim_rest(folder) == []
    assert snapshot_files.claim_any(folder).path == folder / "set-2"


def test_a_replica_does_not_make_a_set_the_partners_own(folder: Path) -> None:
    files = snapshot_files.claim_any(folder)
    files.write_header("replica-0", header(shard=1))
    files.release()
    assert snapshot_files.claim_own(folder, 1) is None


def test_the_death_of_a_process_frees_its_files(folder: Path) -> None:
    program = (
        "import os, pathlib; from harness.core import snapshot_files as f;"
        f"f.claim_any(pathlib.Path({str(folder)!r})); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert snapshot_files.claim_rest(folder) == []
    process.kill()
    process.communicate()
    assert [files.path.name for files in snapshot_files.claim_rest(folder)] == ["set-0"]


def test_released_files_stay_only_if_they_hold_a_snapshot(folder: Path) -> None:
    assert leave_set(folder, header()).exists()
    empty = SnapshotSet.claim(folder / "set-1")
    assert empty is not None
    empty.block("slot-0").write_bytes(b"x")
    empty.release()
    empty.release()
    assert not (folder / "set-1").exists()


def test_a_later_run_in_the_same_process_takes_over_the_files_of_a_crashed_one(folder: Path) -> None:
    crashed, other = snapshot_files.claim_any(folder), snapshot_files.claim_any(folder)
    crashed.write_header("slot-0", header())
    snapshot_files.unlock_leftovers(folder.parent / "another")
    assert snapshot_files.claim_rest(folder) == []
    snapshot_files.unlock_leftovers(folder)
    assert [files.path for files in snapshot_files.claim_rest(folder)] == [crashed.path, other.path]
    assert crashed.headers().keys() == {"slot-0"}


def test_headers_that_cannot_be_read_are_left_out(folder: Path) -> None:
    files = snapshot_files.claim_any(folder)
    files.write_header("slot-0", header(iteration=7))
    (files.path / "slot-1.json").write_text("{")
    (files.path / "slot-2.json").write_text(json.dumps({"iteration": 1}))
    old = json.loads((files.path / "slot-0.json").read_text()) | {"version": 0}
    (files.path / "slot-3.json").write_text(json.dumps(old))
    assert {name: each.iteration for name, each in files.headers().items()} == {"slot-0": 7}
    files.remove_header("slot-0")
    assert files.headers() == {}


def test_files_of_a_living_process_are_not_removed(folder: Path) -> None:
    leave_set(folder, header())
    held = SnapshotSet.claim(folder / "set-0")
    assert held is not None
    snapshot_files.remove_run(folder)
    assert (folder / "set-0" / "slot-0").exists()
    held.release()
    snapshot_files.remove_run(folder)
    assert not folder.exists()


def test_a_start_removes_what_lost_runs_left_behind(folder: Path) -> None:
    leave_set(folder, header())
    shared_dir = folder.parent
    snapshot_files.remove_abandoned(shared_dir)
    assert folder.exists(), "its run may be resumed"
    snapshot_files.remove_abandoned(shared_dir, now=time.time() + snapshot_files.KEEP_S - 60)
    assert folder.exists()
    snapshot_files.remove_abandoned(shared_dir, now=time.time() + snapshot_files.KEEP_S + 60)
    assert not folder.exists()


def test_snapshots_of_a_deleted_run_are_removed(folder: Path) -> None:
    leave_set(folder, header())
    (folder.parent / "run").rmdir()
    snapshot_files.remove_abandoned(folder.parent)
    assert not folder.exists()


def test_held_bytes_are_those_of_the_blocks(folder: Path) -> None:
    assert snapshot_files.held_bytes(folder) == 0
    files = snapshot_files.claim_any(folder)
    files.block("slot-0").write_bytes(b"x" * 1_000_000)
    assert 1_000_000 <= snapshot_files.held_bytes(folder) < 1_100_000


def test_a_folder_of_another_kind_is_not_used(tmp_path: Path) -> None:
    path = snapshot_files.snapshot_folder(tmp_path, tmp_path / "run")
    path.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="does not belong to this user"):
        snapshot_files.create_folder(path, tmp_path / "run")
