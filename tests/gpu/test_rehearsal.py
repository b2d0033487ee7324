"""`launch.ranks_per_gpu`: runs and drills of several NCCL ranks on one GPU, started with the commands of a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.core.event_json import read
from harness.core.events import RunEnded, StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
SMALL = ("parallel.compile=false", "precision=bf16", "telemetry=plain", "telemetry.picture=false")


def harness(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.cli.main", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_the_gpu_and_the_manifest_says_so(tmp_path: Path, num_ranks: int) -> None:
    sharing = (f"launch.ranks_per_gpu={num_ranks}", "train.num_steps=20", "run.name=shared")
    done = harness("train", *SMALL, *sharing, f"launch.nproc={num_ranks}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{num_ranks} ranks, {num_ranks} on each GPU: a rehearsal" in done.stdout
    log = list(read(tmp_path / "runs/shared/events.jsonl"))
    assert isinstance(log[-1], RunEnded)
    losses = [event.loss for event in log if isinstance(event, StepRecord)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    hardware = json.loads((tmp_path / "runs/shared/manifest.json").read_text())["hardware"]
    assert (hardware["world_size"], hardware["ranks_per_gpu"]) == (num_ranks, num_ranks)


def test_a_drill_on_shared_ranks_names_the_rank(tmp_path: Path) -> None:
    done = harness("drill", "nan_grad", "--no-mlflow", *SMALL, "launch.ranks_per_gpu=2", "launch.nproc=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((tmp_path / "runs/drill-nan_grad/score.json").read_text())
    assert card["passed"]
    assert card["score"]["right_rank"]


def test_a_campaign_on_shared_ranks_survives(tmp_path: Path) -> None:
    sharing = ("launch.ranks_per_gpu=2", "launch.nproc=2")
    done = harness("drill", "campaign", "--minutes", "0.2", "--seed", "11", *SMALL, *sharing, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    campaign = json.loads((tmp_path / "runs/campaign-11/campaign.json").read_text())
    print(done.stdout)
    assert campaign["rounds"]


def test_more_ranks_than_allowed_are_refused(tmp_path: Path) -> None:
    done = harness("train", *SMALL, "launch.nproc=64", cwd=tmp_path)
    assert done.returncode == 2
    assert "launch.nproc: must not exceed the" in done.stderr
    assert "launch.ranks_per_gpu" in done.stderr
