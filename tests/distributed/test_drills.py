"""Every numeric and data scenario of `conf/drill` on two real ranks: injected, detected, handled and scored.

A victim and its twin are equal until the fault. That part is trained once for all scenarios with the same config, until
shortly before the earliest of their faults. It is stopped, copied, and continued with and without the fault.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from harness.config.errors import EXIT_DONE
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from harness.drills.scenario import Scenario
from harness.drills.score import BoundStatus, Card, score_run
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
SHORT_SEQUENCES = "train.sequence_length=32"
"""For scenarios with a training config of their own, which cost most: each has its own common part and twin. The others
share those of poisoned_burst, which is rewound only with the 64 tokens of `conf/drill/base.yaml`."""
QUICK = "replica_mismatch"
"""The drill of the quick tier: with its common part and its twin it trains 80 steps, on two replicas."""
CONSTANT = "optim.schedule=constant"
"""With this override the length of a run changes no step: a longer twin continues a shorter one."""
LENGTH = "train.num_steps="
MARGIN = 8
"""Fewest steps between the common part and the fault: for two snapshots, and for the checkpoint to become good."""


@dataclass(frozen=True)
class Table:
    """How scenarios are trained here, where that is not as in `conf/drill`."""

    num_steps: int
    """Of scenarios that keep the length of `conf/drill/base.yaml`."""
    lengths: Mapping[str, int]
    """Number of steps of others."""
    trained_as: Mapping[str, str]
    """Scenario -> one whose training config it has instead of its own, to share its common part and its twin."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What such a scenario keeps of its own config: a policy, which changes nothing before the fault."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Iteration of the fault of a scenario that strikes earlier here."""

    def drill(self, name: str) -> Scenario:
        """The scenario, with the start of its fault."""
        drill = load(name)
        return replace(drill, fault=replace(drill.fault, at=self.starts.get(name, drill.fault.at)))


LONG = Table(
    num_steps=88,  # the longest fault ends at 85
    lengths={"warmup_cut": 66, "fp8_outlier": 64},  # the warm-up ends at 60, and the outlier at 58
    trained_as={"slow_logit_growth": "rising_lr"},
)
"""For models that are not tiny, which find some faults later."""
SHORT = Table(
    num_steps=80,  # the last fault is found at 78
    lengths={
        **dict.fromkeys(("corrupt_activation", "corrupt_weight_read", "corrupt_gradient"), 88),
        **dict.fromkeys(("corrupting_rank", "stuck_bit"), 88),  # one training config; the last one is checked at 80
        "data_shift_planned": 88,  # the fault ends at 85
        "warmup_cut": 66,
        "fp8_outlier": 64,
        "fp8_creep": 130,  # found at 111, and bf16 from 122 on
        "rising_lr": 165,  # found at 151
        "slow_logit_growth": 165,  # found at 151, and clipped from 152 on
        "slow_gradient_growth": 175,  # found at 161
    },
    trained_as={
        "slow_logit_growth": "rising_lr",
        "beta2_stale": "slow_gradient_growth",
        "fp8_outlier": "fp8_creep",
    },
    kept={"fp8_outlier": ("sentinel.policy.precision_iterations=8",)},
    starts={"fp8_creep": 40},
)
"""For the tiny model on CPU ranks: the runs end soon after what they prove."""
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
def load(name: str) -> Scenario:
    return scenario.load_scenario(name)


@cache
def cached_config(overrides: tuple[str, ...]) -> Config:
    """Cached: composed once for all scenarios with the same training config."""
    return directories.configure(overrides, ())


@dataclass(frozen=True)
class Training:
    """How one scenario is trained."""

    overrides: tuple[str, ...]
    """Of the common part and the twin, without the length."""
    kept: tuple[str, ...]
    """Further ones of the victim."""
    num_steps: int
    num_common_steps: int

    def common_config(self) -> Config:
        """With a constant learning rate, one for runs of all lengths."""
        num_steps = 1000 if CONSTANT in self.overrides else self.num_steps
        return cached_config((*self.overrides, f"train.num_steps={num_steps}"))

    def config(self, *, is_victim: bool) -> Config:
        return cached_config((*self.overrides, *self.kept * is_victim, f"train.num_steps={self.num_steps}"))

    def twin(self, runs: Path) -> RunDir:
        return RunDir(runs / f"twin-{abs(hash(self.overrides))}-{self.num_common_steps}-{self.num_steps}")


def plan_training(name: str, run_overrides: Sequence[str], table: Table) -> Training:
    """The common part ends before the first fault of all scenarios that share it."""
    shared = shared_config(name, run_overrides, table)
    faults = [table.drill(each).fault.at for each in SCENARIOS if shared_config(each, run_overrides, table) == shared]
    return Training(
        overrides=shared[0],
        kept=table.kept.get(name, ()),
        num_steps=length_of(name, table),
        num_common_steps=(min(faults) - MARGIN) // 5 * 5,
    )


def shared_config(name: str, run_overrides: Sequence[str], table: Table) -> tuple[tuple[str, ...], int | None]:
    """The overrides of the common part of a scenario, and its length unless that changes no step."""
    train = load(table.trained_as.get(name, name)).train
    overrides = (*(override for override in train if not override.startswith(LENGTH)), *run_overrides)
    return overrides, None if CONSTANT in overrides else length_of(name, table)


def length_of(name: str, table: Table) -> int:
    _, *own = (int(override.removeprefix(LENGTH)) for override in load(name).train if override.startswith(LENGTH))
    return table.lengths.get(name) or (own[-1] if own else table.num_steps)


def run_drill(
    ranks: Pool,
    runs: Path,
    name: str,
    run_overrides: Sequence[str],
    *,
    size: Mapping[str, Any] = MappingProxyType({}),
    rank: int | None = None,
    table: Table = LONG,
) -> Card:
    """The score card of a scenario on two ranks, from the two run directories; `size`: another factor or growth of its
    fault, `rank`: another place."""
    drill = table.drill(name)
    drill = replace(drill, fault=replace(drill.fault, **size))
    victim = RunDir(runs / f"drill-{name}")
    if rank is not None:
        drill = replace(drill, fault=replace(drill.fault, rank=rank))
        victim = RunDir(runs / f"drill-{name}-on-{rank}")
    # two starts, and the time between them means nothing
    drill = replace(drill, expected=replace(drill.expected, starts=2), bounds=replace(drill.bounds, seconds=None))
    training = plan_training(name, run_overrides, table)
    twin = train_twin(ranks, runs, training)
    copy_common_part(ranks, runs, training.common_config(), training.num_common_steps, victim)
    DrillRecord(name=name, scenario=drill, plan=drill.plan, twin=twin.path.name).write(victim)
    codes = continue_run(ranks, victim, training.config(is_victim=True))
    assert codes == [drill.expected.exit_code] * 2
    return score_run(victim)


def train_twin(ranks: Pool, runs: Path, training: Training) -> RunDir:
    """The run without the fault, trained if `runs` has none. It continues a shorter one that has the same steps."""
    twin = training.twin(runs)
    if not twin.path.exists():
        shorter = [replace(training, num_steps=num_steps).twin(runs) for num_steps in range(training.num_steps)]
        found = [each for each in shorter if CONSTANT in training.overrides and each.checkpoints.exists()]
        if found:
            shutil.copytree(found[-1].path, twin.path, ignore=shutil.ignore_patterns(twin.config.name))
        else:
            copy_common_part(ranks, runs, training.common_config(), training.num_common_steps, twin)
        assert continue_run(ranks, twin, training.config(is_victim=False)) == [EXIT_DONE] * 2
    return twin


def continue_run(ranks: Pool, run: RunDir, cfg: Config) -> list[int]:
    """Continue a copied run; returns the exit codes."""
    directories.write_config(cfg, run)
    return ranks.run(2, drill_cases.run, str(run.path))


def cpu_overrides(name: str) -> tuple[str, ...]:
    """Overrides of a scenario on CPU ranks."""
    is_shared = load(name).train == load("poisoned_burst").train
    return RUN_OVERRIDES if is_shared else (*RUN_OVERRIDES, SHORT_SEQUENCES)


def assert_passed(card: Card) -> None:
    """Every bound of the card holds; otherwise the message has all of the card that explains it."""
    broken = [bound for bound in card.bounds if bound.verdict not in (BoundStatus.held, BoundStatus.free)]
    lines = [f"{bound.name}: {bound.measured}, wanted {bound.wanted}" for bound in broken]
    assert not broken, "\n".join([*lines, *card.score.remarks])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in SCENARIOS]
)
def test_a_drill_passes_its_score_card(ranks: Pool, runs: Path, name: str) -> None:
    card = run_drill(ranks, runs, name, cpu_overrides(name), table=SHORT)
    assert_passed(card)
    assert blamed(runs / f"drill-{name}") is INJECTED[name], "the post-mortem blames what was injected"
