"""Every numeric and data scenario of `conf/drill` on two NCCL ranks that share one GPU, at the tiny size and at 125m.

The ranks are processes that run one scenario after another. On 16 cores: `python -m tests.gpu -n 5 --dist loadgroup`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.config import compose
from harness.core.event_json import read
from harness.core.events import Action
from harness.core.rundir import RunDir
from harness.sentinel.policy.policy import replay_actions
from tests.analysis.postmortem.causes import INJECTED, blamed
from tests.distributed.pool import Pool
from tests.distributed.test_drills import SCENARIOS, assert_passed, run_drill
from tests.gpu.nccl import AT_125M

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = (
    "parallel.device=cuda",
    "parallel.compile=false",
    "launch.nproc=2",
    "launch.ranks_per_gpu=2",
    "checkpoint.every_steps=50",
    "telemetry=plain",
    "telemetry.picture=false",
    "telemetry.postmortem=false",
)
SIZES = {
    "tiny": (),
    "125m": AT_125M,
}
OWN_PRECISION = ("fp16_overflow", "fp8_outlier", "fp8_creep")
"""Scenarios that choose their precision; the others are trained in bf16."""
OWN_WARMUP = ("warmup_cut",)
"""Scenarios about the warm-up, which choose its length."""
FAULT_SIZES = {
    "125m": {
        "beta2_stale": {"factor": 20.0},
        "slow_gradient_growth": {"factor": 1.05, "growth": 1.05},
        "fp8_creep": {"factor": 112.0, "growth": 1.05},
    },
}
"""At 125m the gradients of the first steps are 50 times as large, and with beta2 = 0.999 the second moment
holds them. fp8_creep reaches its bound in 46 steps with the faults of the tiny size, before there are enough probes for
a trend."""
CALMER_TRAINING = {"125m": {"slow_gradient_growth": ("optim.lr=1e-4", "model.qk_norm=true")}}
"""slow_gradient_growth trains without clipping, at a constant learning rate: at 125m and 3e-4 the attention logits of
its clean twin grow from step 140 on."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nccl-drills")


def cases() -> Iterator[object]:
    """Every scenario at every size, in five groups of equal length: the scenarios of a group share ranks and twins."""
    for size in SIZES:
        for index, name in enumerate(SCENARIOS):
            group = f"{size}-{index * 5 // len(SCENARIOS)}"
            yield pytest.param(size, name, id=f"{size}-{name}", marks=pytest.mark.xdist_group(group))


@pytest.mark.parametrize(("size", "name"), list(cases()))
def test_a_drill_passes_its_score_card_on_nccl_ranks(nccl_ranks: Pool, runs: Path, size: str, name: str) -> None:
    precision = () if name in OWN_PRECISION else ("precision=bf16",)
    training = [key for key in SIZES[size] if name not in OWN_WARMUP or not key.startswith("optim.warmup_steps=")]
    directory = runs / size
    directory.mkdir(exist_ok=True)
    victim = RunDir(directory / f"drill-{name}")
    try:
        overrides = (*ON_GPU, *training, *precision, *CALMER_TRAINING.get(size, {}).get(name, ()))
        card = run_drill(nccl_ranks, directory, name, overrides, size=FAULT_SIZES.get(size, {}).get(name, {}))
    finally:
        for done in (victim.path, *directory.glob("twin-*")):  # 2 GB each at 125m: all of them would fill a disk
            shutil.rmtree(RunDir(done).checkpoints, ignore_errors=True)
    assert_passed(card)
    assert blamed(victim.path) is INJECTED[name], "the post-mortem blames what was injected"
    log, cfg = list(read(victim.events)), compose.read(victim.config)
    replayed = replay_actions(log, cfg.sentinel.policy, lag=cfg.sentinel.lag)
    assert replayed == [event for event in log if isinstance(event, Action)], "every decision can be replayed"
