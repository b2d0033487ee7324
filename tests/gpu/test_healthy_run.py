"""8,000 steps of the small default on a GPU: no finding and no rejected update. Every seed takes a few minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from harness.core.event_json import read
from harness.core.events import Finding, FindingKind, StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 8000
OF_THE_MACHINE = (FindingKind.slow, FindingKind.speed_recovered)
"""Findings that other programs on the same machine may cause."""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_run_of_the_small_default_has_no_finding(tmp_path: Path, seed: int) -> None:
    overrides = (f"train.num_steps={NUM_STEPS}", f"run.seed={seed}", "run.name=healthy", "telemetry=plain")
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli.main", "train", *overrides],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = list(read(tmp_path / "runs/healthy/events.jsonl"))
    rows = [event for event in log if isinstance(event, StepRecord)]
    found = [event for event in log if isinstance(event, Finding)]
    print(f"seed {seed}: {len(rows)} rows, loss {rows[0].loss:.4g} to {rows[-1].loss:.4g}")
    print(f"findings: {dict(Counter(finding.kind.value for finding in found))}")
    assert len(rows) == NUM_STEPS
    assert not any(row.refused for row in rows)
    assert rows[-1].loss < 0.3 * rows[0].loss
    assert [f"{each.step} {each.message}" for each in found if each.kind not in OF_THE_MACHINE] == []
