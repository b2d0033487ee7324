"""Every numeric and data scenario of `conf/drill` on two real ranks: injected, detected, handled and scored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from harness.drills.score import BoundStatus, Card, score_run
from tests.analysis.postmortem.causes import INJECTED, blamed
from tests.distributed import drill_cases
from tests.distributed.pool import Pool

RARE_CHECKPOINTS = "checkpoint.every_steps=50"
"""Checkpoints are off: writing them costs more than the steps."""
MORE_CHECKPOINTS = {"optimizer_reset": ["checkpoint.every_steps=25"]}
"""The one scenario that rolls back to a checkpoint."""
RUN_OVERRIDES = (
    RARE_CHECKPOINTS,
    "parallel.device=cpu",
    "telemetry=plain",
    "telemetry.picture=false",
    "telemetry.postmortem=false",
)
SCENARIOS = (
    "nan_loss",
    "nan_grad",
    "inf_grad",
    "big_grad",
    "bit_flip",
    "bit_flip_weight",
    "replica_mismatch",
    "poisoned_batch",
    "poisoned_burst",
    "scrambled_batch",
    "duplicate_batch",
    "repeated_batch",
    "data_shift",
    "data_shift_planned",
    "lr_spike",
    "warmup_cut",
    "beta2_stale",
    "optimizer_reset",
    "fp16_overflow",
    "fp8_outlier",
    "logit_growth",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@cache
def cached_config(overrides: tuple[str, ...]) -> Config:
    """Cached: composed once for all scenarios with the same training config."""
    return directories.configure(overrides, ())


def twin_of(ranks: Pool, runs: Path, overrides: Sequence[str]) -> str:
    """The name of the clean twin, one for all scenarios with the same training config."""
    clean_run = RunDir(runs / f"twin-{abs(hash(tuple(overrides)))}")
    if not clean_run.path.exists():
        directories.create_directory(cached_config(tuple(overrides)), clean_run)
        assert ranks.run(2, drill_cases.run, str(clean_run.path)) == [0, 0]
    return clean_run.path.name


def run_drill(ranks: Pool, runs: Path, name: str) -> Card:
    """The score card of a scenario, from the two run directories."""
    drill = scenario.load_scenario(name)
    victim = RunDir(runs / f"drill-{name}")
    overrides = [*drill.train, *RUN_OVERRIDES]
    twin = twin_of(ranks, runs, overrides)
    directories.create_directory(cached_config((*overrides, *MORE_CHECKPOINTS.get(name, ()))), victim)
    DrillRecord(name=name, scenario=drill, plan=drill.plan, twin=twin).write(victim)
    codes = ranks.run(2, drill_cases.run, str(victim.path))
    assert codes == 2 * [drill.expected.exit_code]
    return score_run(victim)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "nan_grad" else pytest.mark.full) for name in SCENARIOS]
)
def test_a_drill_passes_its_score_card(ranks: Pool, runs: Path, name: str) -> None:
    card = run_drill(ranks, runs, name)
    broken = {bound.name: bound for bound in card.bounds if bound.verdict not in (BoundStatus.held, BoundStatus.free)}
    assert not broken, card.score.remarks
    assert blamed(runs / f"drill-{name}") is INJECTED[name], "the post-mortem blames what was injected"
