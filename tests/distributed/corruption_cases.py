"""Steps that compute a micro-batch twice on real ranks, with and without a flipped bit; run on every rank by name."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from harness.core.node_name import NODE_NAME
from harness.faults import drill_worker
from harness.faults.fault_plan import Fault, FaultKind, FaultPlan
from harness.run import Run
from harness.sentinel.device.slots import find_corrupted
from harness.step import finish_step, forward_backward
from tests.distributed import cases
from tests.distributed.drill_cases import inject


@dataclass
class CheckedSteps:
    """What some steps reported, equal on all ranks."""

    ranks: list[list[int]] = field(default_factory=list)
    """Ranks that each step names."""
    stages: list[str] = field(default_factory=list)
    """The first stage that differs in each step; empty: none."""
    refused: list[bool] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Digest of weights and moments before the first step and after each one."""
    losses: list[float] = field(default_factory=list)


def checked_steps(run: Run, fault: dict[str, Any] | None, distances: list[int | None]) -> CheckedSteps:
    """One step for each distance; a fault begins in the first one."""
    parts, cfg, seen = run.parts, run.cfg, CheckedSteps()
    injector = None
    if fault is not None:
        kind = FaultKind(fault.pop("kind"))
        injector = inject(run, 0, Fault(kind=kind, at=1, **fault))
    seen.digests.append(cases.digest(parts.tensors()))
    for number, distance in enumerate(distances):
        if injector is not None:
            injector.before(number + 1)
        probe = number % 2 == 1
        forward_backward(parts, parts.batches[number], cfg=cfg, probe=probe, recompute=distance)
        layout = parts.signals.layout
        report = finish_step(parts, cfg=cfg, probe=probe).cpu()
        codes = layout.slot(report[: layout.size], "corruption")
        first = int(codes[codes > 0].min()) if codes.any() else 0
        seen.ranks.append(find_corrupted(codes.numpy(), distance=distance or 0) if first else [])
        seen.stages.append(layout.describe_stage(first - 1)[0] if first else "")
        seen.refused.append(bool(report[layout.size + 2]))
        seen.losses.append(float(layout.scalar(report[: layout.size], "loss")))
        seen.digests.append(cases.digest(parts.tensors()))
        run.state.iteration += 1
    return seen


def run_with_flip(directory: str, at: int = 3, num_steps: int = 7, machine: str = "") -> int:
    """A whole run with a flip in one pass of rank 1, in iterations that check own rows; returns the exit code."""
    steps = (f"train.num_steps={num_steps}", "run.resume=changed")
    cfg = cases.tiny(*steps, "sentinel.sdc.every=3", "run.name=flipped", directory=directory)
    flip = Fault(kind=FaultKind.bit_flip_activation, at=at, rank=1, layer="blocks.1", bit=12)
    plan = FaultPlan(seed=0, faults=[flip])
    with patch.object(drill_worker, "read_plan", lambda _: plan), patch.dict(os.environ, {NODE_NAME: machine}):
        return drill_worker.run_drill_worker(cfg)
