"""Which snapshots are published in shared memory, when they are withdrawn, and what happens if there is no room."""

from __future__ import annotations

import errno
import hashlib
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.checkpoint import integrity
from harness.checkpoint.memory_resume import SnapshotBounds, load_newest_snapshot
from harness.checkpoint.ring import Ring, check_budget
from harness.checkpoint.shared_snapshots import SharedSnapshots, open_shared
from harness.config.checkpoint import RingConfig
from harness.config.errors import ConfigError
from harness.core import snapshot_files
from harness.core.state import RunState
from harness.distributed.world import World
from harness.recovery import persist_before_restore
from tests.checkpoint.test_ring_in_process import RING


class SharedBench:
    """A ring over one tensor of one rank, in shared memory."""

    def __init__(self, world: World, directory: Path, *, slots: int = 2, config: str = "config") -> None:
        self.cfg = replace(deepcopy(RING), slots=slots, shared_dir=str(directory))
        (directory / "run").mkdir(exist_ok=True)
        self.tensor = torch.zeros(1000)
        opened = open_shared(self.cfg, directory / "run", world=world, config=config)
        assert opened is not None
        self.ring = Ring({"tensor": self.tensor}, cfg=self.cfg, world=world, shared=opened)

    @property
    def shared(self) -> SharedSnapshots:
        assert self.ring.shared is not None
        return self.ring.shared

    def begin(self, start: str = "first") -> None:
        self.shared.begin_start(start, None)

    def take(self, iteration: int, *, trust: bool = True) -> None:
        self.tensor.fill_(iteration)
        slot = self.ring.take_snapshot(RunState(iteration=iteration, step=iteration))
        slot.complete(step=iteration, refused_in_row=0, sentinel={"seen": iteration})
        if trust:
            self.trust(iteration + 1)

    def trust(self, iteration: int) -> None:
        self.ring.trust(iteration)
        self.shared.wait()

    @property
    def published(self) -> list[int]:
        return sorted(header.iteration for header in self.shared.files.headers().values())

    def load(self, start: str = "first", oldest: int = -1, newest: int = 10**9) -> RunState | None:
        found = load_newest_snapshot(self.ring, SnapshotBounds(start, oldest, newest))
        return None if found is None else found.state


@pytest.fixture
def bench(world: World, tmp_path: Path) -> Iterator[SharedBench]:
    bench = SharedBench(world, tmp_path)
    bench.begin()
    yield bench
    bench.ring.close()


def abandon(bench: SharedBench) -> None:
    """Leave the files as a crash of the run does. The next start in this process claims them."""
    bench.shared.wait()


def test_a_trusted_snapshot_is_published_with_its_hash_and_state(bench: SharedBench) -> None:
    bench.take(10, trust=False)
    bench.shared.wait()
    assert bench.published == []
    bench.trust(11)
    ((name, header),) = bench.shared.files.headers().items()
    content = bench.shared.files.block(name).read_bytes()
    assert torch.frombuffer(bytearray(content), dtype=torch.float32)[:1000].tolist() == [10.0] * 1000
    assert header.sha256 == integrity.hash_buffer(memoryview(content))
    assert (header.state["step"], header.state["sentinel"], header.starts) == (10, {"seen": 10}, ["first"])


def test_a_header_is_removed_before_its_block_is_overwritten(bench: SharedBench) -> None:
    for iteration in (10, 20, 30):
        bench.take(iteration)
    assert bench.published == [10, 20, 30]
    bench.take(40, trust=False)
    assert bench.published == [20, 30]
    bench.trust(41)
    assert bench.published == [20, 30, 40]


def test_suspicion_withdraws_and_its_end_publishes_again(bench: SharedBench) -> None:
    bench.take(10)
    bench.take(20)
    bench.ring.distrust(20)
    assert bench.published == [10]
    bench.ring.distrust(20)
    bench.trust(25)
    assert bench.published == [10, 20]
    bench.ring.discard_from(20)
    bench.trust(30)
    assert bench.published == [10]


def test_snapshots_that_a_restore_leaves_are_withdrawn_and_stay_in_the_ring(bench: SharedBench) -> None:
    bench.take(10)
    bench.take(20)
    bench.ring.withdraw_from(11)
    assert bench.published == [10]
    target = bench.ring.agree_on_target(before=100)
    assert target is not None
    assert target.state.iteration == 20
    bench.trust(25)
    assert bench.published == [10, 20], "the restore did not happen"


def test_a_snapshot_with_non_finite_values_is_not_published(bench: SharedBench) -> None:
    bench.take(10)
    bench.tensor[5] = torch.nan
    bench.ring.take_snapshot(RunState(iteration=20)).complete(step=20, refused_in_row=0)
    bench.trust(21)
    assert bench.published == [10]


def test_the_next_start_restores_it_and_reuses_the_memory(world: World, bench: SharedBench, tmp_path: Path) -> None:
    bench.take(10)
    bench.take(20)
    used_bytes = snapshot_files.held_bytes(bench.shared.folder)
    abandon(bench)
    later = SharedBench(world, tmp_path)
    assert later.load() == RunState(iteration=20, step=20, sentinel={"seen": 20})
    assert later.tensor.tolist() == [20.0] * 1000
    assert snapshot_files.held_bytes(later.shared.folder) == used_bytes
    later.shared.begin_start("second", 20)
    assert later.published == [20]
    assert [each.starts for each in later.shared.files.headers().values()] == [["first", "second"]]
    target = later.ring.agree_on_target(before=100)
    assert target is not None, "a rewind may use it too"
    assert target.state.iteration == 20
    later.take(30)
    assert later.published == [20, 30]
    later.ring.end_sharing()
    later.ring.close()
    assert not later.shared.folder.exists()


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (("first", -1, 10**9), 20),
        (("first", 20, 20), 20),
        (("first", -1, 19), 10),
        (("first", 21, 10**9), None),
        (("another", -1, 10**9), None),
        (("", -1, 10**9), None),
    ],
)
def test_only_snapshots_between_disk_and_log_of_the_newest_start_qualify(
    bench: SharedBench, bounds: tuple[str, int, int], expected: int | None
) -> None:
    bench.take(10)
    bench.take(20)
    found = bench.load(*bounds)
    assert (None if found is None else found.iteration) == expected


def test_snapshots_of_another_config_or_size_are_not_used(world: World, bench: SharedBench, tmp_path: Path) -> None:
    bench.take(10)
    abandon(bench)
    changed = SharedBench(world, tmp_path, config="changed")
    assert changed.published == [10]
    assert changed.load() is None
    (name,) = changed.shared.files.headers()
    changed.shared.config = "config"
    changed.shared.layouts = ["other"]
    assert changed.load() is None
    changed.shared.layouts = [changed.shared.files.headers()[name].layout]
    assert changed.load() is not None


def test_a_flipped_bit_makes_the_older_snapshot_the_newest(bench: SharedBench) -> None:
    bench.take(10)
    bench.take(20)
    ((name, _),) = [each for each in bench.shared.files.headers().items() if each[1].iteration == 20]
    content = bytearray(bench.shared.files.block(name).read_bytes())
    content[7] ^= 4
    bench.shared.files.block(name).write_bytes(content)
    found = bench.load()
    assert found is not None
    assert found.iteration == 10
    assert bench.tensor.tolist() == [10.0] * 1000


def test_a_block_that_somebody_deleted_makes_the_older_snapshot_the_newest(bench: SharedBench) -> None:
    for iteration in (10, 20):
        bench.take(iteration)
    (newest,) = (name for name, header in bench.shared.files.headers().items() if header.iteration == 20)
    bench.shared.files.block(newest).unlink()
    found = bench.load()
    assert found is not None
    assert found.iteration == 10
    assert (bench.tensor == 10).all()


def test_a_directory_without_room_leaves_the_ring_private(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmpfs = tmp_path / "full"
    tmpfs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmpfs)], check=False, stderr=-3)
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        cfg = replace(deepcopy(RING), slots=2, shared_dir=str(tmpfs))
        tensor = torch.ones(1000)
        ring = Ring({"a": tensor}, cfg=cfg, world=world, shared=open_shared(cfg, tmp_path, world=world, config="c"))
        assert ring.shared is None
        assert list(tmpfs.iterdir()) == []
        printed = capsys.readouterr().err
        assert "snapshots stay in private memory" in printed
        assert "No space left on device" in printed
        assert printed.count("\n") == 1
        slot = ring.take_snapshot(RunState(iteration=1))
        slot.complete(step=1, refused_in_row=0)
        ring.trust(2)
        ring.withdraw_from(0)
        ring.end_sharing()
        tensor.zero_()
        ring.restore(slot)
        assert tensor.tolist() == [1.0] * 1000
        ring.close()
    finally:
        subprocess.run(["umount", str(tmpfs)], check=True)


def test_a_missing_directory_leaves_the_ring_private(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = replace(deepcopy(RING), shared_dir=str(tmp_path / "missing"))
    assert open_shared(cfg, tmp_path, world=world, config="c") is None
    assert "No such file or directory" in capsys.readouterr().err
    assert open_shared(replace(cfg, shared_dir=None), tmp_path, world=world, config="c") is None
    assert open_shared(replace(cfg, slots=0), tmp_path, world=world, config="c") is None
    assert capsys.readouterr().err == ""


def test_memory_of_an_earlier_start_and_replicas_count_in_the_budget(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.size == 1
    monkeypatch.setattr("harness.checkpoint.ring.free_bytes", lambda: 600)
    cfg = replace(deepcopy(RING), slots=2)
    check_budget(100, cfg=cfg)
    with pytest.raises(ConfigError, match="2 snapshots, the one being saved and 2 of a partner need 5 x"):
        check_budget(100, cfg=cfg, num_replicas=2)
    check_budget(100, cfg=cfg, num_replicas=2, reused_bytes=400)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"replicas": 2}, "checkpoint.ring.replicas: must be 0 or 1"),
        ({"replicas": 1, "slots": 0}, "checkpoint.ring.replicas: needs checkpoint.ring.slots"),
        ({"replicas": 1, "shared_dir": None}, "checkpoint.ring.replicas: needs"),
        ({"replica_gb_s": 0.0}, "checkpoint.ring.replica_gb_s: must be positive"),
    ],
)
def test_invalid_values_name_their_key(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RingConfig(**{"slots": 2, "every_steps": 1, "memory_gb": None} | values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(problem)


def test_the_hash_of_a_block_covers_every_piece_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "PIECE_BYTES", 10)
    content = bytes(range(25))
    pieces = [hashlib.sha256(content[start : start + 10]).digest() for start in (0, 10, 20)]
    assert integrity.hash_buffer(memoryview(content)) == hashlib.sha256(b"".join(pieces)).hexdigest()
    flipped = {integrity.hash_buffer(memoryview(content[:at] + b"x" + content[at + 1 :])) for at in range(25)}
    assert len(flipped) == 25


def test_files_that_no_rank_can_use_are_removed_before_the_ring_is_allocated(world: World, tmp_path: Path) -> None:
    """The run had three ranks on this machine; now it has one."""
    bench = SharedBench(world, tmp_path)
    bench.begin()
    bench.take(10)
    header = next(iter(bench.shared.files.headers().values()))
    for world_size in (3, 1):
        other = snapshot_files.claim_any(bench.shared.folder)
        other.write_header("slot-0", replace(header, world_size=world_size, num_shards=world_size))
    abandon(bench)
    later = SharedBench(world, tmp_path)
    assert [path.name for path in snapshot_files.list_sets(later.shared.folder)] == ["set-0", "set-2"]
    assert [files.path.name for files in later.shared.rest] == ["set-2"]
    later.begin("second")
    assert [path.name for path in snapshot_files.list_sets(later.shared.folder)] == ["set-0"]
    later.ring.close()
    assert not later.shared.folder.exists()


def test_a_header_without_room_costs_the_snapshot_and_not_the_run(
    bench: SharedBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other programs have filled the tmpfs since the start."""
    bench.take(10)

    def write_to_full_disk(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_to_full_disk)
        bench.take(20)
        bench.shared.begin_start("second", 10)
        assert bench.published == []
    assert capsys.readouterr().err.count("No space left on device") == 1
    bench.take(30)
    assert bench.published == [30]


def test_a_restore_withdraws_snapshots_before_it_changes_anything_on_disk(bench: SharedBench) -> None:
    """A run that is killed in between must not resume from the state that it was leaving."""
    bench.take(10)
    bench.take(20)
    seen: list[list[int]] = []
    checkpoints = SimpleNamespace(
        taint_since=lambda *_: seen.append(bench.published), discard_after=lambda taken: seen.append([taken])
    )
    action: Any = SimpleNamespace(exclude=None, incident=1, reason="")
    parts: Any = SimpleNamespace(ring=bench.ring, checkpoints=checkpoints)
    persist_before_restore(action, parts, iteration=10)
    assert seen == [[10], [10]]
