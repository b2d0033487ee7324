"""The rules on logs that they were not written from: real runs of other sizes, seeds and rates than the stories."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.postmortem.rules.causes import Cause
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from tests.analysis.postmortem.causes import INJECTED, blamed
from tests.distributed import drill_cases, faulty_runs
from tests.distributed.cases import tiny
from tests.distributed.common_part import copy_common_part, run_until
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

SIZE = ("model.dim=48", "model.num_layers=2", "model.num_heads=6", "model.num_kv_heads=3", "model.ffn_dim=80")
QUIET = ("telemetry=plain", "telemetry.picture=false", "telemetry.postmortem=false", "parallel.device=cpu")
FAULT_AT = 46
OTHER_DRILLS = ("nan_grad", "poisoned_batch", "scrambled_batch", "lr_spike", "bit_flip")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drills share the part before their fault."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("name", OTHER_DRILLS)
def test_a_drill_of_another_size_and_seed_has_the_same_cause(ranks: Pool, runs: Path, name: str) -> None:
    drill = scenario.load_scenario(name, ["drill.seed=11", f"drill.fault.at={FAULT_AT}"])
    victim = RunDir(runs / name)
    overrides = [*drill.train, *SIZE, *QUIET, "run.seed=5", "train.batch_size=12", "checkpoint.every_steps=30"]
    overrides += [f"train.num_steps={FAULT_AT + 6}", "train.sequence_length=32"]
    cfg = directories.configure(overrides, ())
    copy_common_part(ranks, runs, cfg, FAULT_AT - 4, victim)
    directories.write_config(cfg, victim)
    DrillRecord(name=name, scenario=drill, plan=drill.plan, twin="").write(victim)
    ranks.run(2, drill_cases.run, str(victim.path))
    assert blamed(victim.path) is INJECTED[name]


def test_a_rate_far_too_high_from_the_first_step(ranks: Pool, tmp_path: Path) -> None:
    overrides = ("run.seed=3", "run.name=hot", "optim.lr=3", "optim.warmup_steps=5", "train.num_steps=60")
    ranks.run(1, faulty_runs.run, str(tmp_path), None, *overrides, *SIZE, *QUIET)
    assert blamed(tmp_path / "hot") is Cause.lr_too_high


def test_a_resume_that_moves_the_schedule(ranks: Pool, tmp_path: Path) -> None:
    """A cosine schedule at its end, and a resume with four times the steps: the rate is ten times as high at once."""
    common = ("run.name=longer", "run.seed=4", "optim.warmup_steps=5", "optim.lr=0.003", *SIZE, *QUIET)
    ranks.run(1, faulty_runs.run, str(tmp_path), None, *common, "train.num_steps=50")
    longer = tiny(*common, "train.num_steps=200", "run.resume=changed", directory=str(tmp_path))
    ranks.run(1, run_until, longer, 65)
    assert blamed(tmp_path / "longer") is Cause.lr_discontinuity
