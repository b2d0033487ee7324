"""The sentinel on a GPU: no host sync in the loop, the gate agrees with the host, a rewind is bit-exact."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.build import Parts, build, build_meter
from harness.config.compose import load
from harness.config.errors import EXIT_DONE
from harness.config.schema import Config
from harness.config.sentinel import DetectConfig
from harness.control.stop_requests import StopRequest
from harness.core.event_json import read
from harness.core.events import Action, ActionKind, StepRecord
from harness.core.gc_schedule import GcSchedule
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from harness.precision.attention import fast_attention
from harness.recovery import recover
from harness.run import Run
from harness.sentinel.detect.baseline import FLOATS, advance, beyond, gate_bounds, initial_state
from harness.sentinel.device.gate import Gate
from harness.step import finish_step, forward_backward
from harness.telemetry.event_reporter import EventReporter
from harness.telemetry.heartbeat import Heartbeat
from harness.telemetry.step_profiler import StepProfiler
from harness.train import train
from tests.gpu.one_rank import SMALL
from tests.no_sync import host_syncs_fail
from tests.sentinel.series import config, losses, norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
]

QUIET = ("eval.every_steps=0", "checkpoint.every_steps=0", "telemetry=plain", "optim.warmup_steps=3")
NUM_WARM_STEPS = 12
"""Steps after which the gate has a baseline and refuses a gradient far beyond its cap."""


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    with fast_attention():
        yield
    disconnect()


def start(run: Path, *overrides: str) -> tuple[Parts, Config]:
    cfg = load([*SMALL, *QUIET, *overrides])
    run.mkdir(parents=True, exist_ok=True)
    return build(cfg, connect(cfg.parallel), RunDir(run)), cfg


@contextmanager
def open_run(cfg: Config, parts: Parts, directory: Path, state: RunState) -> Iterator[Run]:
    run = RunDir(directory)
    with (
        Heartbeat(run, rank=0, world_size=1, num_steps=cfg.train.num_steps) as heartbeat,
        EventReporter(cfg, run, world=parts.world, meter=build_meter(cfg, parts.world)) as reporter,
        GcSchedule() as gc_schedule,
        StepProfiler(
            run, cfg.profile, rank=0, world_size=1, device=parts.world.device, last_step=cfg.train.num_steps
        ) as profiler,
    ):
        yield Run(
            cfg=cfg,
            directory=run,
            parts=parts,
            state=state,
            reporter=reporter,
            stop=StopRequest(),
            inbox=None,
            heartbeat=heartbeat,
            gc_schedule=gc_schedule,
            profiler=profiler,
        )


def train_until(run: Run, num_steps: int) -> None:
    """Run the loop for some steps, with the schedule of the whole run."""
    cfg = replace(run.cfg, train=replace(run.cfg.train, num_steps=num_steps))
    assert train(replace(run, cfg=cfg)).exit_code == EXIT_DONE


def step(parts: Parts, cfg: Config, index: int, *, factor: float = 1.0) -> bool:
    """One step whose gradient is multiplied before it is measured; returns whether it was refused."""
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    for parameter in parts.update.parameters.values():
        assert parameter.grad is not None
        local(parameter.grad).mul_(factor)
    before = parts.update.step.clone()
    finish_step(parts, cfg=cfg, probe=False)
    return bool(parts.update.step == before)


def copy_tensors(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: local(tensor.detach()).clone() for name, tensor in parts.tensors().items()}


def differing_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("precision", "compiles"), [("bf16", "false"), ("bf16", "true"), ("fp16", "false"), ("fp8", "true")]
)
def test_the_loop_has_no_host_sync(precision: str, compiles: str, tmp_path: Path) -> None:
    """Probes, snapshots, reports, decisions and the log of several steps in a row."""
    if precision == "fp8" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    parts, cfg = start(
        tmp_path,
        f"precision={precision}",
        f"parallel.compile={compiles}",
        "train.micro_batch_size=4",
        "sentinel.probe_every=3",
        "checkpoint.ring.slots=2",
        "checkpoint.ring.every_steps=2",
    )
    with open_run(cfg, parts, tmp_path, RunState()) as run:
        train_until(run, 4)
        with host_syncs_fail():
            train_until(run, 12)
    records = [event for event in read(RunDir(tmp_path).events) if isinstance(event, StepRecord)]
    assert [record.iteration for record in records] == list(range(1, len(records) + 1))
    assert records[-1].step == 12
    assert all(record.bounds["loss"] > record.loss for record in records)
    assert [record.param_norm is not None for record in records[:6]] == [True, False, False] * 2
    assert sum(record.refused for record in records) == len(records) - 12
    parts.close()


def test_a_refused_gradient_changes_no_tensor(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path, "precision=bf16")
    for index in range(NUM_WARM_STEPS):
        assert not step(parts, cfg, index)
    parts.update.lr_scale.fill_(0.5)
    before = copy_tensors(parts)
    assert step(parts, cfg, NUM_WARM_STEPS, factor=1000.0)
    assert differing_tensors(copy_tensors(parts), before) == []
    assert not step(parts, cfg, NUM_WARM_STEPS + 1)
    changed = differing_tensors(copy_tensors(parts), before)
    assert {"device.step", "device.lr_scale", "device.gate", "model.norm.weight"} <= set(changed)
    parts.close()


def loss_and_norm_series(num: int) -> torch.Tensor:
    """Loss and gradient norm of a healthy run, with some values that the gate must refuse; float32 [rows, 2]."""
    rows = torch.tensor([losses(num), norms(num)], dtype=torch.float32).T.contiguous()
    for place, loss, grad_norm in (
        (3, 1.0, 1000.0),
        (60, 1.0, 1000.0),
        (90, math.nan, 1.0),
        (91, 1.0, math.nan),
        (92, math.inf, math.inf),
        (93, 1.0, -math.inf),
        (150, 5.0, 1.0),
        (151, 5.0, 1.0),
        (200, 1.3, 8.0),
        (240, 1.02, 2.0),
        (num - 1, 4.0, 400.0),
    ):
        rows[place] *= torch.tensor([loss, grad_norm])
    return rows


def gate_on_host(rows: torch.Tensor, warming: list[float], cfg: DetectConfig) -> tuple[list[bool], list[list[float]]]:
    """Which rows the baseline refuses in Python floats, and its final state for loss and gradient norm."""
    loss_state, grad_state = initial_state(), initial_state()
    refused = []
    for (loss, grad_norm), is_warming in zip(rows.tolist(), warming, strict=True):
        bounds = gate_bounds(loss_state, grad_state, cfg, FLOATS, warming=is_warming)
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        accept = is_finite and not beyond(loss, grad_norm, bounds)
        loss_state = advance(loss_state, loss, accept, cfg, FLOATS)
        grad_state = advance(grad_state, grad_norm, accept, cfg, FLOATS)
        refused.append(not accept)
    return refused, [list(loss_state), list(grad_state)]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_gate_agrees_with_the_host(is_compiled: bool) -> None:
    cfg, device = config(), torch.device("cuda")
    rows = loss_and_norm_series(300)
    warming = [float(place < 40) for place in range(len(rows))]
    on_device, is_warming = rows.to(device), torch.tensor(warming, dtype=torch.float64).to(device)
    gate = Gate(cfg, device=device, compiled=is_compiled)
    Gate(cfg, device=device, compiled=is_compiled).decide(
        loss=on_device[0, 0], grad_norm=on_device[0, 1], warming=is_warming[0]
    )
    decisions = []
    with host_syncs_fail():
        for row, is_warming_now in zip(on_device, is_warming, strict=True):
            decisions.append(gate.decide(loss=row[0], grad_norm=row[1], warming=is_warming_now))
    refused = [bool(bit) for bit in torch.stack([each.skip_mask for each in decisions]).tolist()]
    overflowed = [bool(bit) for bit in torch.stack([each.overflow for each in decisions]).tolist()]
    expected, history = gate_on_host(rows, warming, cfg)
    assert refused == expected
    assert {60, 90, 91, 92, 93, 150, 151, 200, 299} <= {place for place, bit in enumerate(refused) if bit}
    assert sum(refused) < 15
    # Rows 90 and 92 have a loss that is not finite: no overflow of gradients, so the loss scale stays.
    assert [place for place, bit in enumerate(overflowed) if bit] == [91, 93]
    for column, expected_state in zip(gate.history.T.tolist(), history, strict=True):
        assert column == pytest.approx(expected_state, rel=1e-9, abs=1e-12)


def test_a_rewind_equals_a_run_without_the_excluded_batches(tmp_path: Path) -> None:
    """Bit-equal at the snapshot, and some steps later bit-equal to a twin that excluded them from the start."""
    options = (
        "precision=bf16",
        "train.num_steps=16",
        "checkpoint.ring.slots=6",
        "checkpoint.ring.every_steps=2",
        "sentinel.probe_every=1",
    )
    parts, cfg = start(tmp_path / "run", *options)
    state = RunState()
    with open_run(cfg, parts, tmp_path / "run", state) as run:
        train_until(run, 6)
        snapshot, remembered = copy_tensors(parts), parts.sentinel.memory()
        train_until(run, 11)
        reason = "a test says so"
        action = Action(
            time=0.0,
            iteration=state.iteration,
            kind=ActionKind.rewind,
            step=state.step,
            incident=1,
            reason=reason,
            onset=8,
            exclude=[7, 8],
        )
        assert differing_tensors(copy_tensors(parts), snapshot)
        outcome = recover(action, parts, state, root=run.directory.checkpoints)
        assert (outcome.succeeded, outcome.steps_lost, outcome.target) == (True, 5, "snapshot of iteration 6")
        assert differing_tensors(copy_tensors(parts), snapshot) == []
        assert parts.sentinel.detectors.state() == remembered["detectors"]
        assert (state.step, state.cursor, state.iteration, state.generation) == (6, 6, 11, 1)
        train_until(run, 16)
    recovered, gate = copy_tensors(parts), parts.gate.history.tolist()
    parts.close()
    disconnect()

    parts, cfg = start(tmp_path / "twin", *options)
    parts.ledger.exclude(7, 8, reason)
    with open_run(cfg, parts, tmp_path / "twin", RunState()) as run:
        train_until(run, 16)
    assert differing_tensors(copy_tensors(parts), recovered) == []
    assert parts.gate.history.tolist() == gate
    parts.close()


def test_an_overflow_halves_the_loss_scale_and_a_large_gradient_does_not(tmp_path: Path) -> None:
    parts, cfg = start(tmp_path, "precision=fp16")
    index = 0
    while int(parts.update.step) < NUM_WARM_STEPS:
        step(parts, cfg, index)
        index += 1
    scale, clean_steps = parts.loss_scale.value.item(), int(parts.loss_scale.clean_steps)
    assert clean_steps > 0
    assert step(parts, cfg, index, factor=1000.0)
    assert (parts.loss_scale.value.item(), int(parts.loss_scale.clean_steps)) == (scale, clean_steps)
    before = copy_tensors(parts)
    assert step(parts, cfg, index + 1, factor=math.inf)
    assert (parts.loss_scale.value.item(), int(parts.loss_scale.clean_steps)) == (scale / 2, 0)
    assert sorted(differing_tensors(copy_tensors(parts), before)) == ["device.clean_steps", "device.scale"]
    assert not step(parts, cfg, index + 2)
    parts.close()
