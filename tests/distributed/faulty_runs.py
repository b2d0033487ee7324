"""Whole runs with one fault: one tensor of one rank is corrupted; everything else is the real code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import train
from harness.build import Parts
from harness.core import events
from harness.core.events import Event
from harness.core.rundir import RunDir, locate
from harness.distributed.shards import local
from harness.faults.bad_batches import corrupt_batches
from harness.faults.fault_plan import Fault as Shift
from harness.faults.fault_plan import FaultKind
from tests.distributed.cases import digest, tiny

GUILTY_LAYER = "blocks.1.mlp.up"
BROKEN_WEIGHT = "norm.weight"
SHIFTED = 100
"""Number of batches that a data fault lasts."""


@dataclass(frozen=True)
class Fault:
    """What is corrupted, where and when."""

    kind: str
    """gradient: of this rank, before the reduction; weights: after an update; digest: of the rank's decisions; data:
    from a batch on, in a language that the model has not seen."""
    rank: int
    factor: float = 1.0
    """Factor on the tensor; may be NaN or Inf."""
    batch: int | None = None
    """The batch index at which the fault occurs, each time it is seen."""
    iteration: int | None = None
    """Or the iteration of this process, counted from 1, once."""


@dataclass
class Ended:
    """The result of a run, on one rank."""

    code: int
    state: str
    """Digest of all tensors that a checkpoint would hold."""
    log: list[Event]
    weights: str = ""
    """Digest of weights and moments only."""


def run(directory: str, fault: Fault | None, *overrides: str) -> Ended:
    """A run through `run_worker`, with or without a fault."""
    cfg = tiny(*overrides, directory=directory)
    held: list[Parts] = []
    with installed(fault, held):
        code = train.run_worker(cfg)
    log = list(events.read(locate(cfg).events)) if held[0].world.is_first else []
    return Ended(code, held[0].final, log, held[0].weights)  # type: ignore[attr-defined]


@contextmanager
def installed(fault: Fault | None, held: list[Parts]) -> Iterator[None]:
    """Wrap functions of the loop; the harness has no hook for this."""
    genuine = {name: getattr(train, name) for name in ("build", "forward_backward", "apply_update", "leave")}
    calls = 0
    cursor = -1

    def build(*arguments: Any, **options: Any) -> Parts:
        parts: Parts = genuine["build"](*arguments, **options)
        held.append(_Witness(parts))  # type: ignore[arg-type]
        batches = parts.batches
        if fault is not None and fault.kind == "data":
            assert fault.batch is not None
            shift = Shift(kind=FaultKind.data_shift, at=fault.batch, duration=SHIFTED, factor=fault.factor)
            corrupt_batches(batches, shift, seed=0, world_size=parts.world.size)
        parts.batches = _Seen(batches, note)  # type: ignore[assignment]
        return parts

    def note(index: int) -> None:
        nonlocal cursor
        cursor = index

    def strikes(parts: Parts) -> bool:
        if fault is None or parts.world.rank != fault.rank:
            return False
        return cursor == fault.batch or calls == fault.iteration

    def forward_backward(parts: Parts, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        assert fault is None or fault.kind in ("gradient", "weights", "digest", "data")
        with (
            spoiled_gradient(parts, fault.factor) if fault and fault.kind == "gradient" and strikes(parts) else _calm()
        ):
            genuine["forward_backward"](parts, *arguments, **options)

    def apply_update(parts: Parts, *arguments: Any) -> Tensor:
        report: Tensor = genuine["apply_update"](parts, *arguments)
        if fault and fault.kind == "weights" and strikes(parts):
            with torch.no_grad():
                local(parts.update.parameters[BROKEN_WEIGHT]).mul_(fault.factor)
        if fault and fault.kind == "digest" and strikes(parts):
            parts.sentinel.digest += 1
        return report

    def leave(run: Any, ending: Any) -> Any:
        left = genuine["leave"](run, ending)
        held[0].final = digest(run.parts.tensors())  # type: ignore[attr-defined]
        learned = {name: each for name, each in run.parts.tensors().items() if not name.startswith("device.")}
        held[0].weights = digest(learned)  # type: ignore[attr-defined]
        return left

    for name, replacement in (
        ("build", build),
        ("forward_backward", forward_backward),
        ("apply_update", apply_update),
        ("leave", leave),
    ):
        setattr(train, name, replacement)
    try:
        yield
    finally:
        for name, original in genuine.items():
            setattr(train, name, original)


class _Witness:
    """The parts of a run and its final digest."""

    def __init__(self, parts: Parts) -> None:
        self.world = parts.world
        self.final = self.weights = ""


class _Seen:
    """Batches that report the last requested index."""

    def __init__(self, batches: Any, note: Callable[[int], None]) -> None:
        self._batches, self._note = batches, note

    def __getitem__(self, index: int) -> Any:
        self._note(index)
        return self._batches[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


@contextmanager
def spoiled_gradient(parts: Parts, factor: float) -> Iterator[None]:
    """Corrupt this rank's gradient of one matrix before the reduction."""
    module = parts.model.get_submodule(GUILTY_LAYER)
    hooks: list[Any] = []

    def arm(layer: Any, _inputs: Any) -> None:
        hooks.append(layer.weight.register_hook(lambda gradient: gradient * factor))

    arming = module.register_forward_pre_hook(arm)
    try:
        yield
    finally:
        arming.remove()
        for hook in hooks:
            hook.remove()


@contextmanager
def _calm() -> Iterator[None]:
    yield


def with_ledger_of(other: Path, directory: Path) -> None:
    """Prepare a run directory with the ledger of another run, so that its batches are excluded from the start."""
    run = RunDir(directory)
    run.path.mkdir(parents=True)
    run.ledger.write_bytes(RunDir(other).ledger.read_bytes())
