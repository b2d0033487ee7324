"""Activations in host memory between forward and backward: the same bits, and no weights among them."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from harness.analysis.plan.machine_memory import MachineMemory, check_memory
from harness.analysis.plan.memory import offloaded_bytes
from harness.analysis.plan.plan import plan
from harness.analysis.plan.plan_text import render
from harness.config.errors import ConfigError
from harness.config.parallel import DeviceKind
from harness.distributed import activation_offload
from harness.distributed.world import connect, disconnect
from harness.step import finish_step, forward_backward
from tests.composed import load
from tests.distributed import cases
from tests.distributed.pool import Pool

OVERRIDES = ("model.num_layers=4", "train.micro_batch_size=2")


@dataclass
class Trained:
    reports: list[list[float]]
    state: str
    host_bytes: int


def train(is_offloaded: bool, *overrides: str) -> Trained:
    """Three steps of two micro-batches and an evaluation between them."""
    cfg = cases.tiny(*OVERRIDES, f"parallel.activation_offload={is_offloaded}", *overrides)
    world = connect(cfg.parallel)
    with patch.object(activation_offload, "LEAST_BYTES", 4096):
        parts = cases._build(cfg, world)
        reports = []
        for index in range(3):
            forward_backward(parts, parts.batches[index], cfg=cfg, probe=index == 1)
            reports.append(finish_step(parts, cfg=cfg, probe=index == 1).tolist())
            with torch.no_grad():
                rows = parts.batches[index]
                parts.model(rows.inputs, rows.targets)
    offload = parts.model.offload
    trained = Trained(reports, cases.digest(parts.tensors()), 0 if offload is None else offload.host_bytes)
    disconnect()
    return trained


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ()),
        pytest.param(2, ("parallel.activation_checkpointing=full",), marks=pytest.mark.full),
        pytest.param(2, ("precision=fp8_emulated", "parallel.reshard_after_forward=true"), marks=pytest.mark.full),
    ],
    ids=["none", "full", "fp8"],
)
def test_a_run_with_offload_has_the_same_bits(ranks: Pool, size: int, overrides: tuple[str, ...]) -> None:
    plain, offloaded = (ranks.run(size, train, is_on, *overrides) for is_on in (False, True))
    for own, other in zip(offloaded, plain, strict=True):
        assert own.reports == other.reports
        assert own.state == other.state
        assert (other.host_bytes, own.host_bytes > 0) == (0, True)
    if "precision=fp8_emulated" not in overrides:
        cfg = cases.tiny(*OVERRIDES, "parallel.activation_offload=true", *overrides)
        cfg.parallel.device = DeviceKind.cuda
        planned = offloaded_bytes(cfg, world_size=size)
        assert offloaded[0].host_bytes == pytest.approx(planned, rel=0.35), "activations and no weights"


def test_selective_checkpointing_needs_compiled_blocks() -> None:
    selective = ["parallel.activation_checkpointing=selective", "parallel.activation_offload=true"]
    with pytest.raises(ConfigError, match=r"^parallel\.activation_offload: must be false with .*selective") as caught:
        load(selective)
    assert "\n" not in str(caught.value)
    assert load([*selective, "parallel.compile=true"]).parallel.activation_offload


def test_activations_that_exceed_the_host_are_rejected() -> None:
    cfg = load(["model=1b", "precision=bf16", "train.sequence_length=4096", "parallel.activation_offload=true"])
    cfg.parallel.device = DeviceKind.cuda
    needed = offloaded_bytes(cfg, world_size=1)

    def machine(host_bytes: int) -> MachineMemory:
        return MachineMemory(total_bytes=10**13, free_bytes=10**13, num_ranks=1, is_gpu=True, host_bytes=host_bytes)

    assert check_memory(cfg, machine(needed), world_size=1) == []
    with pytest.raises(ConfigError, match=r"^parallel\.activation_offload: 1 rank would keep .* is free; "):
        check_memory(cfg, machine(needed - 1), world_size=1)


def test_the_plan_moves_activations_to_the_host() -> None:
    common = ["model=1b", "precision=bf16", "cluster=h200", "parallel.compile=true", "train.sequence_length=4096"]
    on_device, on_host = (load([*common, f"parallel.activation_offload={is_on}"]) for is_on in (False, True))
    assert offloaded_bytes(on_device, world_size=1) == 0
    assert offloaded_bytes(on_host, world_size=1) > 0
    before, after = plan(on_device, world_size=1), plan(on_host, world_size=1)
    saved = before.memory.kept_bytes - after.memory.kept_bytes
    layers = on_host.model.num_layers
    assert saved == pytest.approx(after.offload_bytes * (layers - 2) / (layers - 1))
    assert after.memory.needed_bytes < before.memory.needed_bytes
    assert "activations in host memory" in render(after)
    assert "activations in host memory" not in render(before)
