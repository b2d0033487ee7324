"""Snapshots and checkpoints on a GPU: no host sync, complete before the next update, bit-equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.build import Parts, build
from harness.checkpoint import store
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.events import Action, ActionKind, CheckpointSaved
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from harness.recovery import recover
from harness.step import finish_step, forward_backward
from tests.gpu.one_rank import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
]
SLOW_COPY_CYCLES = 2_000_000_000
"""About a second of a GPU's clock."""


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    yield
    disconnect()


def start(run: Path, *overrides: str) -> tuple[Parts, Config]:
    cfg = load([*SMALL, "precision=bf16", *overrides])
    return build(cfg, connect(cfg.parallel), RunDir(run)), cfg


def step(parts: Parts, cfg: Config, index: int) -> None:
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    finish_step(parts, cfg=cfg, probe=False)


def copy_tensors(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: local(tensor.detach()).clone() for name, tensor in parts.tensors().items()}


def all_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_snapshot_needs_no_sync_and_holds_the_state_of_its_step(tmp_path: Path) -> None:
    """Many snapshots in a row, each while the next step is already queued to overwrite what it copies."""
    parts, cfg = start(tmp_path, "checkpoint.ring.slots=4")
    for index in range(2):
        step(parts, cfg, index)
    torch.cuda.synchronize()
    slots, expected = [], []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(2, 6):
            step(parts, cfg, index)
            expected.append(copy_tensors(parts))
            slots.append(parts.ring.take_snapshot(RunState(iteration=index)))
        step(parts, cfg, 6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slot, before in zip(slots, expected, strict=True):
        assert slot.is_finite
        for name, tensor in slot.tensors.items():
            assert torch.equal(tensor, before[name].cpu()), name
            assert tensor.numel() == 0 or tensor.is_pinned(), name
    parts.close()


def delay_copies(parts: Parts) -> None:
    """Make the next snapshot copy only after the device has issued everything that the test queues meanwhile."""
    with torch.cuda.stream(parts.ring._stream):
        torch.cuda._sleep(SLOW_COPY_CYCLES)  # type: ignore[no-untyped-call]


def test_a_step_waits_for_a_slow_copy(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path)
    step(parts, cfg, 0)
    before = copy_tensors(parts)
    delay_copies(parts)
    slot = parts.ring.take_snapshot(RunState(iteration=1))
    step(parts, cfg, 1)
    slot.wait()
    assert not torch.equal(parts.gate.history, before["device.gate"])
    assert [name for name, tensor in slot.tensors.items() if not torch.equal(tensor, before[name].cpu())] == []
    parts.close()


def test_accepting_new_data_waits_for_a_slow_copy(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path)
    step(parts, cfg, 0)
    before = copy_tensors(parts)
    delay_copies(parts)
    slot = parts.ring.take_snapshot(RunState(iteration=1))
    action = Action(
        time=0.0, iteration=1, step=1, incident=1, kind=ActionKind.accept, onset=1, reason="", level=9.0, grad_level=9.0
    )
    recover(action, parts, RunState(iteration=1), root=tmp_path)
    slot.wait()
    assert not torch.equal(parts.gate.history, before["device.gate"])
    assert torch.equal(slot.tensors["device.gate"], before["device.gate"].cpu())
    parts.close()


def test_a_rewind_replays_bit_for_bit(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path)
    step(parts, cfg, 0)
    slot = parts.ring.take_snapshot(RunState(iteration=1, step=1))
    slot.complete(step=1, refused_in_row=0)
    before = copy_tensors(parts)
    for index in range(1, 4):
        step(parts, cfg, index)
    after = copy_tensors(parts)
    assert parts.ring.restore(slot).step == 1
    assert all_equal(copy_tensors(parts), before)
    for index in range(1, 4):
        step(parts, cfg, index)
    assert all_equal(copy_tensors(parts), after)
    parts.close()


def test_a_non_finite_snapshot_is_detected(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path)
    step(parts, cfg, 0)
    for value in (math.nan, math.inf, -math.inf):
        local(parts.update.state()["norm.weight"]["exp_avg_sq"])[3] = value
        assert not parts.ring.take_snapshot(RunState(iteration=1)).is_finite
    parts.close()


def test_a_background_save_can_be_loaded(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path, "checkpoint.every_steps=2")
    for index in range(2):
        step(parts, cfg, index)
    state = RunState(iteration=2, step=2, cursor=2)
    before = copy_tensors(parts)
    assert parts.checkpoints.save_last(state, is_done=False)
    (saved,) = [event for event in parts.checkpoints.drain_events() if isinstance(event, CheckpointSaved)]
    assert saved.bytes > sum(tensor.nbytes for tensor in before.values())
    for index in range(2, 4):
        step(parts, cfg, index)
    assert not all_equal(copy_tensors(parts), before)
    found = store.load_newest(RunDir(tmp_path).checkpoints, parts.tensors(), world=parts.world)
    assert found.loaded == store.LoadedCheckpoint(state, saved.directory)
    assert all_equal(copy_tensors(parts), before)
    parts.close()
