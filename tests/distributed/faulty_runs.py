"""Whole runs with one fault: one tensor of one rank is corrupted; everything else is the real code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import train
from harness.build import Parts
from harness.core import event_json
from harness.core.events import Event
from harness.core.rundir import RunDir, locate
from harness.distributed.shards import local
from harness.faults.bad_batches import corrupt_batches
from harness.faults.fault_plan import Fault as Shift
from harness.faults.fault_plan import FaultKind
from tests.distributed.cases import digest, tiny

FAULTY_LAYER = "blocks.1.mlp.up"
CORRUPTED_WEIGHT = "norm.weight"
SHIFT_DURATION = 100
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
    layer: str = FAULTY_LAYER
    """Of a gradient."""


@dataclass
class RankResult:
    """The result of a run, on one rank."""

    code: int
    state: str
    """Digest of all tensors that a checkpoint would hold."""
    log: list[Event]
    weights: str = ""
    """Digest of weights and moments only."""


def run(directory: str, fault: Fault | None, *overrides: str) -> RankResult:
    """A run through `run_worker`, with or without a fault."""
    cfg = tiny(*overrides, directory=directory)
    captured: list[Parts] = []
    with installed(fault, captured):
        code = train.run_worker(cfg)
    log = list(event_json.read(locate(cfg).events)) if captured[0].world.is_first else []
    return RankResult(code, captured[0].final, log, captured[0].weights)  # type: ignore[attr-defined]


@contextmanager
def installed(fault: Fault | None, captured: list[Parts]) -> Iterator[None]:
    """Patch functions of the training loop; the harness has no hook for this."""
    originals = {name: getattr(train, name) for name in ("build", "forward_backward", "apply_update", "finish_run")}
    calls = 0
    cursor = -1

    def build(*arguments: Any, **options: Any) -> Parts:
        parts: Parts = originals["build"](*arguments, **options)
        captured.append(_FinalState(parts))  # type: ignore[arg-type]
        batches = parts.batches
        if fault is not None and fault.kind == "data":
            assert fault.batch is not None
            shift = Shift(kind=FaultKind.data_shift, at=fault.batch, duration=SHIFT_DURATION, factor=fault.factor)
            corrupt_batches(batches, shift, seed=0, world_size=parts.world.size)
        parts.batches = _RecordedBatches(batches, record_cursor)  # type: ignore[assignment]
        return parts

    def record_cursor(index: int) -> None:
        nonlocal cursor
        cursor = index

    def is_faulty_step(parts: Parts) -> bool:
        if fault is None or parts.world.rank != fault.rank:
            return False
        return cursor == fault.batch or calls == fault.iteration

    def forward_backward(parts: Parts, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        assert fault is None or fault.kind in ("gradient", "weights", "digest", "data")
        with (
            corrupted_gradient(parts, fault)
            if fault and fault.kind == "gradient" and is_faulty_step(parts)
            else nullcontext()
        ):
            originals["forward_backward"](parts, *arguments, **options)

    def apply_update(parts: Parts, *arguments: Any) -> Tensor:
        report: Tensor = originals["apply_update"](parts, *arguments)
        if fault and fault.kind == "weights" and is_faulty_step(parts):
            with torch.no_grad():
                local(parts.update.parameters[CORRUPTED_WEIGHT]).mul_(fault.factor)
            parts.update.measure_digest()  # as if the update had done it
        if fault and fault.kind == "digest" and is_faulty_step(parts):
            parts.sentinel.digest += 1
        return report

    def finish_run(run: Any, ending: Any) -> Any:
        left = originals["finish_run"](run, ending)
        captured[0].final = digest(run.parts.tensors())  # type: ignore[attr-defined]
        trained = {name: each for name, each in run.parts.tensors().items() if not name.startswith("device.")}
        captured[0].weights = digest(trained)  # type: ignore[attr-defined]
        return left

    for name, replacement in (
        ("build", build),
        ("forward_backward", forward_backward),
        ("apply_update", apply_update),
        ("finish_run", finish_run),
    ):
        setattr(train, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(train, name, original)


class _FinalState:
    """The world of a run, and its final digests."""

    def __init__(self, parts: Parts) -> None:
        self.world = parts.world
        self.final = self.weights = ""


class _RecordedBatches:
    """Batches that record the last requested index."""

    def __init__(self, batches: Any, record_cursor: Callable[[int], None]) -> None:
        self._batches, self._record = batches, record_cursor

    def __getitem__(self, index: int) -> Any:
        self._record(index)
        return self._batches[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


@contextmanager
def corrupted_gradient(parts: Parts, fault: Fault) -> Iterator[None]:
    """Corrupt this rank's gradient of one matrix before the reduction."""
    module = parts.model.get_submodule(fault.layer)
    hooks: list[Any] = []

    def add_hook(layer: Any, _inputs: Any) -> None:
        hooks.append(layer.weight.register_hook(lambda gradient: gradient * fault.factor))

    handle = module.register_forward_pre_hook(add_hook)
    try:
        yield
    finally:
        handle.remove()
        for hook in hooks:
            hook.remove()


def copy_ledger(source: Path, directory: Path) -> None:
    """Prepare a run directory with the ledger of another run, so that its batches are excluded from the start."""
    run = RunDir(directory)
    run.path.mkdir(parents=True)
    run.ledger.write_bytes(RunDir(source).ledger.read_bytes())
