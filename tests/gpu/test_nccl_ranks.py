"""Whole runs and drills on several NCCL ranks that share one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.core.event_json import read
from harness.core.events import Action, ActionKind, Finding, FindingKind, StepRecord
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from tests.gpu.nccl import read_logs, run_case, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ON_ONE_GPU = ("parallel.device=cuda", "parallel.compile=false")


def run_drill(tmp_path: Path, name: str, *overrides: str, num_ranks: int = 2) -> RunDir:
    """Run the faulted run of a drill; asserts that every rank exits with 0."""
    planned = scenario.load_scenario(name, overrides)
    train_overrides = [override for override in overrides if not override.startswith("drill.")]
    cfg = directories.configure(planned.train, [*ON_ONE_GPU, f"launch.nproc={num_ranks}", *train_overrides])
    run = RunDir(tmp_path / "victim")
    directories.create_directory(cfg, run)
    DrillRecord(name=name, scenario=planned, plan=planned.plan, twin="").write(run)
    train_on_ranks(run, num_ranks=num_ranks)
    return run


def train_on_ranks(run: RunDir, *, num_ranks: int) -> None:
    codes = run_ranks(run.path, num_ranks=num_ranks)
    assert codes == [0] * num_ranks, read_logs(run.path)


def read_findings(run: RunDir) -> list[Finding]:
    return [event for event in read(run.events) if isinstance(event, Finding)]


@pytest.mark.alone
def test_a_slow_device_is_found_by_its_kernel_time(tmp_path: Path) -> None:
    run = run_drill(tmp_path, "slow_device", "drill.fault.factor=0.5", "precision=bf16")
    events = list(read(run.events))
    (slow,) = [event for event in events if isinstance(event, Finding) and event.kind is FindingKind.slow]
    assert slow.ranks == [1]
    assert 60 <= slow.iteration <= 80
    slowed = [event for event in events if isinstance(event, StepRecord) and 65 <= event.iteration < 90]
    for record in slowed:
        (first, second) = (dict(map(tuple, record.ranks["device_time_s"]["worst"]))[rank] for rank in (0, 1))
        assert second > 0.4 > first, "only the loaded device is slow"
    assert any(event.kind is FindingKind.speed_recovered for event in events if isinstance(event, Finding))


def test_a_bad_gradient_is_attributed_under_hsdp_with_accumulation(tmp_path: Path) -> None:
    replicas = ("parallel.replicate=2", "train.micro_batch_size=2", "train.num_steps=90", "precision=bf16")
    run = run_drill(tmp_path, "nan_grad", *replicas, "drill.fault.rank=2", num_ranks=4)
    (finding,) = [event for event in read_findings(run) if event.kind is FindingKind.nonfinite]
    assert finding.ranks == [2]
    assert [event.kind for event in read(run.events) if isinstance(event, Action)] == [ActionKind.skip]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [(), ("parallel.replicate=2", "train.micro_batch_size=4")])
def test_a_bad_gradient_is_attributed_with_own_kernels(tmp_path: Path, replicas: tuple[str, ...]) -> None:
    """Compiled: FSDP's copy measures the gradients of all layers but the one that the fault changes. With replicas the
    shard axis has size 1."""
    run = run_drill(tmp_path, "nan_grad", "precision=bf16", "parallel.compile=true", "train.num_steps=90", *replicas)
    (finding,) = [event for event in read_findings(run) if event.kind is FindingKind.nonfinite]
    assert finding.ranks == [1]
    assert [event.kind for event in read(run.events) if isinstance(event, Action)] == [ActionKind.skip]


def test_uneven_shares_give_the_same_loss(tmp_path: Path) -> None:
    """16 rows on 2 and on 3 ranks, in fp32: the same batches, and losses equal up to rounding."""
    planned = scenario.load_scenario("nan_grad")
    losses = []
    for num_ranks in (2, 3):
        cfg = directories.configure(planned.train, [*ON_ONE_GPU, f"launch.nproc={num_ranks}", "train.num_steps=30"])
        run = RunDir(tmp_path / f"ranks-{num_ranks}")
        directories.create_directory(cfg, run)
        train_on_ranks(run, num_ranks=num_ranks)
        records = [event for event in read(run.events) if isinstance(event, StepRecord)]
        losses.append([(record.fingerprint, record.loss) for record in records])
    assert [fingerprint for fingerprint, _ in losses[0]] == [fingerprint for fingerprint, _ in losses[1]]
    assert [loss for _, loss in losses[0]] == pytest.approx([loss for _, loss in losses[1]], rel=2e-5)


def test_different_data_is_accepted_and_nothing_is_rolled_back(tmp_path: Path) -> None:
    run = run_drill(tmp_path, "data_shift")
    kinds = [event.kind for event in read(run.events) if isinstance(event, Action)]
    assert ActionKind.check in kinds
    assert not {ActionKind.rewind, ActionKind.rollback, ActionKind.halt} & set(kinds)


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_the_forward_pass_after_a_restore_uses_the_restored_weights(tmp_path: Path, reshard: str) -> None:
    overrides = (*ON_ONE_GPU, f"parallel.reshard_after_forward={reshard}")
    for before, after, restored in run_case(tmp_path / "ranks", "losses_around_restore", *overrides, num_ranks=2):
        assert after != before
        assert restored == before
