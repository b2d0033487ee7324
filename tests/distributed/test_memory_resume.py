"""A run that is killed resumes from the snapshots in memory: bit-identical, and with fewer steps lost than from disk.

One run of two ranks, each on a node of its own, is killed once. Each case gets a copy of its run directory and of the
memory of both nodes, damages the memory in one way, and runs to the end. At the end every result of the run and every
bit of its state must equal those of a control run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from harness.checkpoint import catalog
from harness.checkpoint.shared_snapshots import SharedSnapshots
from harness.checkpoint.slot import Slot
from harness.config.schema import Config
from harness.core import event_json, rundir
from harness.core.events import RunStarted, StepRecord
from harness.core.snapshot_files import SnapshotHeader, SnapshotSet, list_sets, snapshot_folder
from tests.composed import load
from tests.distributed import cases
from tests.distributed.killable_ranks import KillableRanks, KillAtCall, Place, When, kill_in
from tests.distributed.test_kill import Control, run_rank, step_results

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from a process that imported torch"),
    pytest.mark.full,
]

SIZE = 2
EVERY_STEPS = 2
SAVED = 6
OVERRIDES = (
    "model.num_layers=1",
    "train.num_steps=14",
    f"checkpoint.every_steps={SAVED}",
    "checkpoint.good_after_steps=2",
    f"checkpoint.ring.every_steps={EVERY_STEPS}",
    "checkpoint.ring.shared_dir=memory",
    "checkpoint.ring.replicas=1",
    "run.name=victim",
)
FORWARD = Place("forward", "harness.train:forward_backward")
KILL = KillAtCall(place=FORWARD, when=When.before, nth=12, rank=1, grace_s=0.3)
"""Only the checkpoint of step 6 is on disk then."""


def kill_in_tensor_copy() -> None:
    kill_in(torch.Tensor, "copy_", lambda *_, **__: None)


def kill_in_rename() -> None:
    kill_in(Path, "replace", lambda *_: None)


LATER_KILLS = (
    (Place("load", "harness.resume:load_newest_snapshot"), When.after, 1, 0),
    (Place("new start", "harness.checkpoint.shared_snapshots:SharedSnapshots.begin_start"), When.after, 1, 1),
    (Place("start id", "harness.core.rundir:write_start"), When.after, 1, 0),
    (Place("snapshot", "harness.checkpoint.ring:Ring.take_snapshot", kill_in_tensor_copy), When.within, 1, 1),
    (Place("header", "harness.core.snapshot_files:SnapshotSet.write_header", kill_in_rename), When.within, 3, 0),
    (FORWARD, When.before, 3, 0),
)
"""Place, when, call number and rank of each further kill of one run."""


def run_on_node(cfg: Config, per_node: int = 1) -> tuple[int, str]:
    """Run one rank of a node with this many. A published snapshot is complete before the next step begins, so that the
    test knows which one is the newest."""
    node, local_rank = divmod(int(os.environ["RANK"]), per_node)
    os.environ.update(GROUP_RANK=str(node), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(per_node))
    cfg.checkpoint.ring.shared_dir = str(node_memory(Path(cfg.run.dir), node))
    submit = SharedSnapshots.submit

    def submit_and_wait(self: SharedSnapshots, slots: Sequence[Slot]) -> None:
        submit(self, slots)
        self.wait()

    SharedSnapshots.submit = submit_and_wait  # type: ignore[method-assign]
    return run_rank(cfg)


def node_memory(directory: Path, node: int) -> Path:
    """The directory that stands for the memory of a node."""
    return directory / f"memory-{node}"


@cache
def composed() -> Config:
    return load([*cases.TINY, *OVERRIDES])


def configure(directory: Path, *overrides: str) -> Config:
    cfg = load([*cases.TINY, *OVERRIDES, *overrides]) if overrides else deepcopy(composed())
    cfg.run.dir = str(directory)
    for node in range(SIZE):
        node_memory(directory, node).mkdir(exist_ok=True)
    return cfg


@pytest.fixture(scope="module")
def killable() -> Iterator[KillableRanks]:
    parent = KillableRanks(__name__, "torch._dynamo")
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def control(killable: KillableRanks, tmp_path_factory: pytest.TempPathFactory) -> Control:
    """An undisturbed run. It leaves nothing in memory."""
    directory = tmp_path_factory.mktemp("control")
    cfg = configure(directory)
    outcome = killable.run(SIZE, run_on_node, cfg)
    assert [code for code, _ in outcome.results] == [0] * SIZE
    assert [list(node_memory(directory, node).iterdir()) for node in range(SIZE)] == [[], []]
    found = step_results(rundir.locate(cfg).events)
    assert list(found) == list(range(1, 15))
    return Control(found, [digest for _, digest in outcome.results])


@pytest.fixture(scope="module")
def killed(killable: KillableRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed, with its memory."""
    directory = tmp_path_factory.mktemp("killed")
    cfg = configure(directory)
    assert killable.run(SIZE, run_on_node, cfg, kill_point=KILL).killed
    saved = catalog.list_checkpoints(rundir.locate(cfg).checkpoints)
    assert [checkpoint.step for checkpoint in saved] == [SAVED]
    return directory


def copy_of(killed: Path, directory: Path) -> Config:
    """A copy of the killed run and of the memory of its nodes."""
    cfg = configure(directory)
    run = rundir.locate(cfg).path
    shutil.copytree(killed / "victim", run)
    for node in range(SIZE):
        folder = snapshot_folder(node_memory(killed, node), killed / "victim")
        shutil.copytree(folder, snapshot_folder(node_memory(directory, node), run))
    return cfg


def files_of(cfg: Config, node: int) -> SnapshotSet:
    """The files of the only rank of a node."""
    directory = Path(cfg.run.dir)
    (path,) = list_sets(snapshot_folder(node_memory(directory, node), rundir.locate(cfg).path))
    files = SnapshotSet.claim(path)
    assert files is not None, "no process holds it"
    files.unlock()
    return files


def held(cfg: Config, node: int) -> dict[tuple[int, int], tuple[str, SnapshotHeader]]:
    """(shard, iteration) -> block name and header of every snapshot in the memory of a node."""
    found = files_of(cfg, node).headers()
    return {(header.shard, header.iteration): (name, header) for name, header in found.items()}


def flip_bit(cfg: Config, node: int, name: str) -> None:
    path = files_of(cfg, node).block(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Resumed(NamedTuple):
    started: RunStarted
    steps_lost: int
    """Logged steps that the resume computes again."""


def check_end(killable: KillableRanks, cfg: Config, control: Control) -> Resumed:
    """The run ends like the control run, and leaves nothing in memory."""
    run = rundir.locate(cfg)
    last_step = max(step_results(run.events))
    outcome = killable.run(SIZE, run_on_node, cfg)
    assert [code for code, _ in outcome.results] == [0] * SIZE
    assert step_results(run.events) == control.step_results
    assert [digest for _, digest in outcome.results] == control.digests
    log = list(event_json.read(run.events))
    iterations = [event.iteration for event in log if isinstance(event, StepRecord)]
    assert iterations == sorted(set(iterations)), "iterations never go back"
    assert not [path for node in range(SIZE) for path in node_memory(Path(cfg.run.dir), node).rglob("*")]
    started = [event for event in log if isinstance(event, RunStarted)][-1]
    return Resumed(started, last_step - started.step)


def test_a_killed_run_resumes_from_the_newest_snapshot_in_memory(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    cfg = copy_of(killed, tmp_path)
    newest = max(iteration for _, iteration in held(cfg, 0))
    assert newest > SAVED
    assert {(0, newest), (1, newest)} <= held(cfg, 0).keys() & held(cfg, 1).keys(), "own snapshot and the partner's"
    started, steps_lost = check_end(killable, cfg, control)
    assert (started.resumed_from, started.in_memory, started.fetched_ranks) == (
        f"snapshot of iteration {newest}",
        True,
        [],
    )
    assert steps_lost <= EVERY_STEPS


def test_ranks_of_a_lost_node_get_their_shards_from_the_partner(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    cfg = copy_of(killed, tmp_path)
    newest = max(iteration for _, iteration in held(cfg, 0))
    shutil.rmtree(node_memory(tmp_path, 0))
    node_memory(tmp_path, 0).mkdir()
    started, steps_lost = check_end(killable, cfg, control)
    assert (started.resumed_from, started.fetched_ranks) == (f"snapshot of iteration {newest}", [0])
    assert steps_lost <= EVERY_STEPS


def test_a_rank_whose_snapshot_is_damaged_gets_the_partners_copy(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    cfg = copy_of(killed, tmp_path)
    newest = max(iteration for _, iteration in held(cfg, 1))
    flip_bit(cfg, 1, held(cfg, 1)[1, newest][0])
    started, _ = check_end(killable, cfg, control)
    assert (started.resumed_from, started.fetched_ranks) == (f"snapshot of iteration {newest}", [1])


def test_without_an_intact_copy_of_one_shard_all_ranks_load_from_disk(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    """One copy of every snapshot of shard 1 is damaged, the other is missing."""
    cfg = copy_of(killed, tmp_path)
    for shard, iteration in held(cfg, 1):
        if shard == 1:
            flip_bit(cfg, 1, held(cfg, 1)[shard, iteration][0])
    for (shard, _), (name, _) in held(cfg, 0).items():
        if shard == 1:
            files_of(cfg, 0).remove_header(name)
    started, steps_lost = check_end(killable, cfg, control)
    assert (started.step, started.in_memory) == (SAVED, False)
    assert started.resumed_from == catalog.name_of(SAVED, 0)
    assert steps_lost > EVERY_STEPS


def test_ranks_that_changed_nodes_find_their_snapshots(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    """Each rank finds its shard in the memory of the other node only."""
    cfg = copy_of(killed, tmp_path)
    for node in range(SIZE):
        for (shard, _), (name, _) in held(cfg, node).items():
            if shard != node:
                files_of(cfg, node).remove_header(name)
    node_memory(tmp_path, 0).rename(tmp_path / "moved")
    node_memory(tmp_path, 1).rename(node_memory(tmp_path, 0))
    (tmp_path / "moved").rename(node_memory(tmp_path, 1))
    started, steps_lost = check_end(killable, cfg, control)
    assert started.fetched_ranks == [0, 1]
    assert steps_lost <= EVERY_STEPS


def test_snapshots_of_an_earlier_start_are_not_used(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    """Another start, on other machines, has continued the run since."""
    cfg = copy_of(killed, tmp_path)
    rundir.write_start(rundir.locate(cfg), "elsewhere")
    assert not check_end(killable, cfg, control).started.in_memory


def test_a_run_killed_again_and_again_resumes_from_memory_each_time(
    killable: KillableRanks, control: Control, killed: Path, tmp_path: Path
) -> None:
    cfg = copy_of(killed, tmp_path)
    for place, when, nth, rank in LATER_KILLS:
        kill_point = KillAtCall(place=place, when=when, nth=nth, rank=rank, grace_s=0.2)
        assert killable.run(SIZE, run_on_node, cfg, kill_point=kill_point).killed, str(kill_point)
    check_end(killable, cfg, control)
    starts = [event for event in event_json.read(rundir.locate(cfg).events) if isinstance(event, RunStarted)]
    assert all(started.in_memory for started in starts[1:]), "no kill point leaves a run without a snapshot"


def test_with_hsdp_a_lost_node_is_restored_from_the_other_replica(killable: KillableRanks, tmp_path: Path) -> None:
    """Two nodes of two ranks, and one replica of the model on each: nothing is sent during training."""
    overrides = ("parallel.replicate=2", "checkpoint.ring.replicas=0", "checkpoint.every_steps=4", "train.num_steps=9")
    ends = []
    for name in ("control", "victim"):
        directory = tmp_path / name
        directory.mkdir()
        cfg = configure(directory, *overrides)
        if name == "victim":
            early = KillAtCall(place=FORWARD, when=When.before, nth=9, rank=3, grace_s=0.3)
            assert killable.run(4, run_on_node, cfg, 2, kill_point=early).killed
            shutil.rmtree(node_memory(directory, 1))
            node_memory(directory, 1).mkdir()
        outcome = killable.run(4, run_on_node, cfg, 2)
        ends.append((outcome.results, step_results(rundir.locate(cfg).events)))
    assert ends[0] == ends[1]
    started = [event for event in event_json.read(rundir.locate(cfg).events) if isinstance(event, RunStarted)][-1]
    assert (started.in_memory, started.step, started.fetched_ranks) == (True, 6, [2, 3])
