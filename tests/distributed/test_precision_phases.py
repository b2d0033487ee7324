"""Planned changes between fp8 and bf16 on real ranks: which steps are in fp8, and a resume inside each phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core.events import ChangePlanned, Finding, StepRecord
from harness.core.rundir import RunDir
from tests.distributed import faulty_runs
from tests.distributed.faulty_runs import RankResult
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

PHASES = "precision.phases=[{from_batch: 2, kind: bf16}, {from_fraction: 0.75, kind: fp8}]"
OVERRIDES = ("precision=fp8_emulated", "optim.schedule=constant", "optim.warmup_steps=0", "train.num_steps=8", PHASES)
IN_FP8 = [True, True, False, False, False, False, True, True]


def run(ranks: Pool, directory: Path, name: str, *overrides: str) -> RankResult:
    results = ranks.run(2, faulty_runs.run, str(directory), None, f"run.name={name}", *OVERRIDES, *overrides)
    assert len({(result.code, result.state) for result in results}) == 1
    first: RankResult = results[0]
    assert first.code == 0
    return first


def test_a_run_changes_its_precision_at_the_planned_batches_and_resumes_inside_each_phase(
    ranks: Pool, tmp_path: Path
) -> None:
    whole = run(ranks, tmp_path, "whole")
    fixed = PHASES.replace("from_fraction: 0.75", "from_batch: 6")
    for until in (1, 4, 8):
        resumed = run(ranks, tmp_path, "resumed", fixed, f"train.num_steps={until}", "run.resume=changed")
    for log in (whole.log, resumed.log):
        assert [event.in_fp8 for event in log if isinstance(event, StepRecord)] == IN_FP8
        assert not [event for event in log if isinstance(event, Finding)]
        planned = [(event.cursor, event.reason) for event in log if isinstance(event, ChangePlanned)]
        assert (2, "precision.phases switches to bf16") in planned
        assert (6, "precision.phases switches to fp8") in planned
    assert resumed.weights == whole.weights, "bit for bit"
    dtype = json.loads(RunDir(tmp_path / "whole").manifest.read_text())["dtype"]
    assert dtype["phases"] == [{"from_batch": 2, "compute": "bf16"}, {"from_batch": 6, "compute": "fp8"}]
