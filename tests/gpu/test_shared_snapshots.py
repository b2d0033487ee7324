"""Snapshots of CUDA ranks in shared memory: pinned, without a host sync, kept by a partner, and resumed from."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.build import build
from harness.checkpoint import integrity
from harness.config.compose import load
from harness.core.event_json import read
from harness.core.events import RunStarted
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.shards import local
from harness.distributed.world import connect
from tests.distributed.pool import Pool
from tests.gpu.one_rank import SMALL
from tests.gpu.test_checkpoint import step
from tests.gpu.test_deterministic import Setting, assert_identical, prepare, restarts, train
from tests.no_sync import host_syncs_fail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IN_MEMORY = ("checkpoint.every_steps=1000", "checkpoint.ring.every_steps=5")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in a tmpfs."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def share_with_a_partner(memory: str) -> dict[str, Any]:
    """Take two snapshots on a rank that is alone on its node, each trusted two steps later. No step may wait."""
    rank = os.environ["RANK"]
    os.environ["GROUP_RANK"] = rank
    folder = Path(memory) / f"node-{rank}"
    folder.mkdir()
    words = ("launch.nproc=2", "launch.ranks_per_gpu=2", f"checkpoint.ring.shared_dir={folder}")
    cfg = load([*SMALL, "precision=bf16", *words, "checkpoint.ring.replicas=1"])
    world = connect(cfg.parallel, ranks_per_gpu=2)
    parts = build(cfg, world, RunDir(Path(memory)), shares_snapshots=True)
    shared = parts.ring.shared
    assert shared is not None
    shared.begin_start("first", None)
    for index in range(2):
        step(parts, cfg, index)
    for index in range(2, 8):
        with host_syncs_fail():
            step(parts, cfg, index)
            if index in (2, 5):
                before = {name: local(tensor.detach()).clone() for name, tensor in parts.tensors().items()}
                slot = parts.ring.take_snapshot(RunState(iteration=index))
                slot.complete(step=index, refused_in_row=0)
            if index in (4, 7):
                parts.ring.trust(index)
        shared.wait()  # the thread publishes one snapshot after the other
    gather_results(lambda: None)
    keeper = shared.keeper
    assert keeper is not None, "replicas are still sent"
    assert keeper.last is not None
    headers = shared.files.headers()
    kept = {header.iteration: name for name, header in headers.items() if name.startswith("replica-")}
    found = {
        "pinned": all(part.is_pinned() for part in slot.tensors.values() if part.numel()),
        "equal": all(torch.equal(slot.tensors[name], part.cpu()) for name, part in before.items()),
        "intact": keeper.last.is_intact,
        "seconds": keeper.last.seconds,
        "own": integrity.hash_buffer(slot.block.view),
        "own header": headers[slot.name].sha256,
        "iterations of the partner": sorted(kept),
        "of the partner": integrity.hash_buffer(memoryview(shared.files.block(kept[5]).read_bytes())),
    }
    parts.ring.end_sharing()
    parts.close()
    return found


def test_a_partner_keeps_the_pinned_snapshot_of_a_cuda_rank(nccl_ranks: Pool, memory: Path) -> None:
    first, second = nccl_ranks.run(2, share_with_a_partner, str(memory))
    print(first, second)
    for mine, other in ((first, second), (second, first)):
        assert mine["pinned"]
        assert mine["equal"]
        assert mine["intact"]
        assert mine["own"] == mine["own header"] == other["of the partner"]
        assert mine["iterations of the partner"] == [2, 5]
    assert first["own"] != second["own"], "they hold different shards"


def test_a_killed_rank_resumes_from_shared_memory(tmp_path: Path, memory: Path) -> None:
    """Without a checkpoint on disk, bit-identical to a run without the kill."""
    words = ("precision=bf16", "parallel.compile=false", f"checkpoint.ring.shared_dir={memory}", *IN_MEMORY)
    setting = Setting(2, words, num_steps=24, killed_at=18)
    control = train(prepare(setting, RunDir(tmp_path / "control")))
    victim = train(prepare(setting, RunDir(tmp_path / "killed"), "kill_rank", f"drill.fault.at={setting.killed_at}"))
    assert restarts(victim) == 1
    last = [event for event in read(victim.events) if isinstance(event, RunStarted)][-1]
    assert last.in_memory, last
    assert 5 <= last.step < setting.killed_at
    assert_identical(victim, control)
