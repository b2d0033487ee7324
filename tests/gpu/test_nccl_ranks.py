"""Whole drills on two NCCL ranks that share one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.drills import layout, scenario
from harness.drills.evidence import Dossier
from harness.events import Finding, FindingKind, StepRecord, read
from harness.rundir import RunDir
from tests.gpu.nccl import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ON_ONE_GPU = ("parallel.device=cuda", "parallel.compile=false", "precision=bf16", "launch.nproc=2")


def drill(tmp_path: Path, name: str, *overrides: str) -> RunDir:
    """A victim of this drill, trained; every rank ended with 0."""
    planned = scenario.load(name, overrides)
    cfg = layout.configure(planned.train, [*ON_ONE_GPU, *(each for each in overrides if not each.startswith("drill."))])
    run = RunDir(tmp_path / "victim")
    layout.lay_out(cfg, run)
    Dossier(name=name, scenario=planned, plan=planned.plan, twin="").write(run)
    codes = run_ranks(run.path, num_ranks=2)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(run.logs.glob("rank-*.txt")))
    assert codes == [0, 0], logs
    return run


def test_a_busy_device_is_named_by_the_time_of_its_kernels(tmp_path: Path) -> None:
    run = drill(tmp_path, "slow_device", "drill.fault.factor=0.5", "train.num_steps=100")
    events = list(read(run.events))
    (slow,) = [event for event in events if isinstance(event, Finding) and event.kind is FindingKind.slow]
    assert slow.ranks == [1]
    assert 60 <= slow.iteration <= 80
    struck = [event for event in events if isinstance(event, StepRecord) and 65 <= event.iteration < 90]
    for record in struck:
        (first, second) = (dict(map(tuple, record.ranks["device_time_s"]["worst"]))[rank] for rank in (0, 1))
        assert second > 0.4 > first, "only the device that works is slow"
    assert any(event.kind is FindingKind.speed_recovered for event in events if isinstance(event, Finding))
