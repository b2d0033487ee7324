"""Every numeric and data scenario of `conf/drill` on two real ranks: injected, detected, handled and scored.

A victim and its twin are equal until the fault. That part is trained once for all scenarios with the same config, until
shortly before the earliest of their faults. It is stopped, copied, and continued with and without the fault.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from harness.config.errors import EXIT_DONE
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from harness.drills.score import Bound, BoundStatus, Card, score_run
from tests.analysis.postmortem.causes import INJECTED, blamed
from tests.distributed import drill_cases
from tests.distributed.common_part import copy_common_part
from tests.distributed.pool import Pool

RUN_OVERRIDES = (
    "checkpoint.every_steps=50",  # one that ends the common part is enough, and writing costs more than a step
    "parallel.device=cpu",
    "model.num_layers=2",
    "telemetry=plain",
    "telemetry.picture=false",
    "telemetry.postmortem=false",
)
SHORT = "train.num_steps=88"
"""For scenarios that keep the length of `conf/drill/base.yaml`: the longest fault ends at 85."""
OWN_LENGTHS = {"warmup_cut": "train.num_steps=66", "fp8_outlier": "train.num_steps=64"}
"""Shorter than in `conf/drill`: the warm-up ends at 60, and the outlier at 58."""
SHORT_SEQUENCES = "train.sequence_length=32"
"""For scenarios with a training config of their own, which cost most: each has its own common part and twin. The others
share those of poisoned_burst, which is rewound only with the 64 tokens of `conf/drill/base.yaml`."""
QUICK = "replica_mismatch"
"""The drill of the quick tier: with its common part and its twin it trains 80 steps, on two replicas."""
SHORTER = {"slow_logit_growth": "rising_lr"}
"""Scenario -> one that trains the same for fewer steps: the learning rate is constant, so the length changes no step.
The longer one continues the common part and the twin of the shorter one."""
MARGIN = 8
"""Fewest steps between the common part and the fault: for two snapshots, and for the checkpoint to become good."""
SCENARIOS = (
    "nan_loss",
    "nan_activation",
    "nan_grad",
    "inf_grad",
    "big_grad",
    "bit_flip",
    "bit_flip_weight",
    "replica_mismatch",
    "corrupt_activation",
    "corrupt_weight_read",
    "corrupt_gradient",
    "corrupting_rank",
    "stuck_bit",
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
    "slow_logit_growth",
    "rising_lr",
    "slow_gradient_growth",
    "fp8_creep",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@cache
def cached_config(overrides: tuple[str, ...]) -> Config:
    """Cached: composed once for all scenarios with the same training config."""
    return directories.configure(overrides, ())


def run_drill(
    ranks: Pool,
    runs: Path,
    name: str,
    run_overrides: Sequence[str],
    *,
    factor: float | None = None,
    rank: int | None = None,
) -> Card:
    """The score card of a scenario on two ranks, from the two run directories; `factor`: another size of its fault,
    `rank`: another place."""
    drill = scenario.load_scenario(name)
    if factor is not None:
        drill = replace(drill, fault=replace(drill.fault, factor=factor))
    if rank is not None:
        drill = replace(drill, fault=replace(drill.fault, rank=rank))
    # two starts, and the time between them means nothing
    drill = replace(drill, expected=replace(drill.expected, starts=2), bounds=replace(drill.bounds, seconds=None))
    twin, victim = train_twin(ranks, runs, name, run_overrides), RunDir(runs / f"drill-{name}")
    record = DrillRecord(name=name, scenario=drill, plan=drill.plan, twin=twin.path.name)
    assert continue_common_part(ranks, name, victim, run_overrides, record) == [drill.expected.exit_code] * 2
    return score_run(victim)


def train_twin(ranks: Pool, runs: Path, name: str, run_overrides: Sequence[str]) -> RunDir:
    """The run without the fault, trained if `runs` has none."""
    overrides = train_overrides(name, run_overrides)
    twin = RunDir(runs / f"twin-{abs(hash(overrides))}-{num_common_steps(name)}")
    if not twin.path.exists():
        if name in SHORTER:
            shorter = train_twin(ranks, runs, SHORTER[name], run_overrides)
            shutil.copytree(shorter.path, twin.path, ignore=shutil.ignore_patterns(shorter.config.name))
            codes = continue_run(ranks, name, twin, run_overrides)
        else:
            codes = continue_common_part(ranks, name, twin, run_overrides, None)
        assert codes == [EXIT_DONE] * 2
    return twin


def train_overrides(name: str, run_overrides: Sequence[str]) -> tuple[str, ...]:
    """All overrides of a scenario's training config."""
    train = scenario.load_scenario(name).train
    has_own_length = sum(override.startswith("train.num_steps=") for override in train) > 1
    length = [OWN_LENGTHS[name]] if name in OWN_LENGTHS else [SHORT] * (not has_own_length)
    return (*train, *run_overrides, *length)


def continue_common_part(
    ranks: Pool, name: str, run: RunDir, run_overrides: Sequence[str], record: DrillRecord | None
) -> list[int]:
    """Continue a copy of the common part to its end, as a drill or as a twin; returns the exit codes."""
    common = cached_config(train_overrides(SHORTER.get(name, name), run_overrides))
    copy_common_part(ranks, run.path.parent, common, num_common_steps(name), run)
    if record is not None:
        record.write(run)
    return continue_run(ranks, name, run, run_overrides)


def continue_run(ranks: Pool, name: str, run: RunDir, run_overrides: Sequence[str]) -> list[int]:
    """Continue a copied run with the config of a scenario; returns the exit codes."""
    directories.write_config(cached_config(train_overrides(name, run_overrides)), run)
    return ranks.run(2, drill_cases.run, str(run.path))


@cache
def first_faults() -> dict[tuple[str, ...], int]:
    """Training config of the scenarios -> iteration of the earliest of their faults."""
    found: dict[tuple[str, ...], int] = {}
    for name in SCENARIOS:
        at, config = scenario.load_scenario(name).fault.at, common_config(name)
        found[config] = min(at, found.get(config, at))
    return found


def common_config(name: str) -> tuple[str, ...]:
    """The training config of the common part of a scenario."""
    return tuple(scenario.load_scenario(SHORTER.get(name, name)).train)


def num_common_steps(name: str) -> int:
    """Steps that a scenario has in common with all others with its training config."""
    return (first_faults()[common_config(name)] - MARGIN) // 5 * 5


def cpu_overrides(name: str) -> tuple[str, ...]:
    """Overrides of a scenario on CPU ranks."""
    is_shared = scenario.load_scenario(name).train == scenario.load_scenario("poisoned_burst").train
    return RUN_OVERRIDES if is_shared else (*RUN_OVERRIDES, SHORT_SEQUENCES)


def broken_bounds(card: Card) -> dict[str, Bound]:
    return {bound.name: bound for bound in card.bounds if bound.verdict not in (BoundStatus.held, BoundStatus.free)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in SCENARIOS]
)
def test_a_drill_passes_its_score_card(ranks: Pool, runs: Path, name: str) -> None:
    card = run_drill(ranks, runs, name, cpu_overrides(name))
    assert not broken_bounds(card), card.score.remarks
    assert blamed(runs / f"drill-{name}") is INJECTED[name], "the post-mortem blames what was injected"
