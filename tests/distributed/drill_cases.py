"""Functions that the drill tests run on every rank: whole runs in prepared directories, and single faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import train
from harness.config import compose
from harness.core import event_json
from harness.core.events import FaultInjected
from harness.core.rundir import RunDir
from harness.distributed.shards import local
from harness.faults.fault_plan import Fault, FaultKind
from harness.faults.injectors import make_injector
from harness.faults.site import FaultInjector, Site, earlier_strikes
from harness.run import Run
from harness.sentinel.device.slots import SLOTS
from harness.step import forward_backward
from launch.local.worker import select_worker
from tests.distributed.cases import Snapshot, tiny

FAULT_ITERATION = 2
"""The iteration at which single faults are injected."""
LAYER = "blocks.1.mlp.up"


def run(directory: str) -> int:
    """Run one rank of a prepared run directory; returns the exit code."""
    prepared = RunDir(Path(directory))
    return select_worker(prepared)(compose.read(prepared.config))


class _EndRun(Exception):  # noqa: N818 -- not an error
    """Ends a run before its first step; only its parts are needed."""


def inspect_run(directory: str, inspect: Callable[..., Any], *arguments: Any) -> Any:
    """Call `inspect` on a run that is about to start, and end it."""
    return inspect_run_with(directory, (), inspect, *arguments)


def inspect_run_with(directory: str, overrides: Sequence[str], inspect: Callable[..., Any], *arguments: Any) -> Any:
    """The same with another config."""
    cfg = tiny("optim.warmup_steps=4", "run.name=victim", *overrides, directory=directory)
    found: list[Any] = []

    def wrap(run: Run) -> Run:
        found.append(inspect(run, *arguments))
        raise _EndRun

    with suppress(_EndRun):
        train.run_worker(cfg, wrap)
    return found[0]


def inject(run: Run, number: int, fault: Fault) -> FaultInjector:
    """Inject one fault."""
    return make_injector(Site(run=run, fault=fault, number=number, seed=0, struck=earlier_strikes(run, number, fault)))


def logged_injections(run: Run) -> list[tuple[int, int]]:
    """Iteration and fault number of each injection that this rank recorded."""
    if not run.directory.faults.exists():
        return []
    rank = run.parts.world.rank
    log = [event for event in event_json.read(run.directory.faults) if isinstance(event, FaultInjected)]
    return [(event.iteration, event.number) for event in log if event.rank == rank]


def num_differing_bits(before: Tensor, after: Tensor) -> int:
    """Number of bits in which two tensors differ."""
    xor = before.view(torch.int32) ^ after.view(torch.int32)
    return sum(int(((xor >> bit) & 1).sum()) for bit in range(32))


def flipped_weights(run: Run) -> dict[str, Any]:
    """Number of weight bits that differ after each of three iterations."""
    fault = Fault(kind=FaultKind.bit_flip_weight, at=FAULT_ITERATION, rank=1, layer=LAYER, bit=30)
    injector = inject(run, 0, fault)
    counts = []
    for iteration in (1, 2, 3):
        before = Snapshot.of(run.parts)
        injector.before(iteration)
        run.state.iteration = iteration
        injector.after(iteration)
        after = Snapshot.of(run.parts)
        differ = {name: num_differing_bits(before.weights[name], after.weights[name]) for name in before.weights}
        counts.append({name: count for name, count in differ.items() if count})
    return {"counts": counts, "logged": logged_injections(run)}


def faulty_rank_grad_squares(run: Run, kinds: list[str]) -> list[float]:
    """Square sums of the faulty rank's gradient in each of three iterations; all faults hit one layer."""
    faults = [
        Fault(kind=FaultKind(kind), at=FAULT_ITERATION, rank=-1, layer=LAYER, factor=100.0, bit=30) for kind in kinds
    ]
    injectors = [inject(run, number, fault) for number, fault in enumerate(faults)]
    squares = []
    for iteration in (1, 2, 3):
        for each in injectors:
            each.before(iteration)
        forward_backward(run.parts, run.parts.batches[0], cfg=run.cfg, probe=False)
        run.parts.signals.add_gradients()
        table = run.parts.signals.layout.slots(run.parts.signals.reduce())
        squares.append(float(table[SLOTS.index("grad_square"), -1]))
        run.parts.update.clear_gradients()
        run.state.iteration = iteration
        for each in injectors:
            each.after(iteration)
    return squares


def outlier(run: Run) -> dict[str, Any]:
    """Loss and gradient norm of three iterations; the second has the fault."""
    injector = inject(
        run, 0, Fault(kind=FaultKind.fp8_outlier, at=FAULT_ITERATION, layer="blocks.1.mlp", factor=2.0**20)
    )
    steps = []
    for iteration in (1, 2, 3):
        injector.before(iteration)
        forward_backward(run.parts, run.parts.batches[0], cfg=run.cfg, probe=False)
        run.parts.signals.add_gradients()
        layout, reduced = run.parts.signals.layout, run.parts.signals.reduce()
        steps.append([float(layout.scalar(reduced, "loss")), *layout.group_squares(reduced).tolist()])
        run.parts.update.clear_gradients()
        run.state.iteration = iteration
        injector.after(iteration)
    return {"steps": steps, "logged": logged_injections(run)}


def optimizer_faults(run: Run) -> dict[str, Any]:
    """Learning rates, moments and weights after optimizer faults."""
    parts = run.parts
    scheduled = parts.update.rates.clone()
    spike = inject(run, 0, Fault(kind=FaultKind.lr_spike, at=FAULT_ITERATION, factor=8.0))
    spike.before(1)
    untouched = torch.equal(parts.update.rates, scheduled)
    spike.before(FAULT_ITERATION)
    spiked = (parts.update.rates / scheduled).tolist()
    spike.after(FAULT_ITERATION)
    restored = torch.equal(parts.update.rates, scheduled)
    inject(run, 1, Fault(kind=FaultKind.warmup_cut, at=FAULT_ITERATION)).before(FAULT_ITERATION)
    cut = parts.update.rates.tolist()

    for moments in parts.update.state().values():
        local(moments["exp_avg_sq"]).fill_(1.0)
    before = Snapshot.of(parts)
    inject(run, 2, Fault(kind=FaultKind.optimizer_reset, at=FAULT_ITERATION)).before(FAULT_ITERATION)
    after = Snapshot.of(parts)
    same_weights = all(torch.equal(before.weights[name], after.weights[name]) for name in before.weights)
    empty = all(not after.moments[name].any() for name in after.moments if not name.endswith("step"))

    growth = inject(
        run, 3, Fault(kind=FaultKind.logit_growth, at=FAULT_ITERATION, layer="blocks.0.attention", factor=2.0)
    )
    growth.before(1)
    growth.before(FAULT_ITERATION)
    grown = Snapshot.of(parts)
    changed = {
        name: grown.weights[name] for name in grown.weights if not torch.equal(grown.weights[name], after.weights[name])
    }
    doubled = all(torch.equal(weight, 2 * after.weights[name]) for name, weight in changed.items())
    return {
        "untouched": untouched,
        "spiked": spiked,
        "restored": restored,
        "scheduled": scheduled.tolist(),
        "cut": cut,
        "reset": (same_weights, empty),
        "grown": (sorted(changed), doubled),
        "logged": logged_injections(run),
    }


def forward_faults(run: Run) -> dict[str, Any]:
    """Losses of the rows of one batch, with and without the fault, with and without gradients."""
    batch = run.parts.batches[0]

    def losses() -> Tensor:
        losses: Tensor = run.parts.model(batch.inputs, batch.targets).row_losses
        return losses

    clean = losses()
    loss = inject(run, 0, Fault(kind=FaultKind.nan_loss, at=FAULT_ITERATION, rank=1))
    overflow = inject(run, 1, Fault(kind=FaultKind.fp16_overflow, at=FAULT_ITERATION + 1, layer=LAYER, factor=1e30))
    in_place = losses()
    run.state.iteration = 1
    loss.before(FAULT_ITERATION)
    with torch.no_grad():
        evaluated = losses()
    faulty, second = losses(), losses()
    overflow.before(FAULT_ITERATION + 1)
    overflown = losses()
    overflow.after(FAULT_ITERATION + 1)
    return {
        "in_place": torch.equal(clean, in_place),
        "evaluated": torch.equal(clean, evaluated),
        "num_nan": int(faulty.isnan().sum()),
        "second": torch.equal(clean, second),
        "overflown": torch.equal(clean, overflown),
        "restored": torch.equal(clean, losses()),
    }
