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
from unittest.mock import patch

import pytest

from harness.config import compose
from harness.config.errors import EXIT_DONE
from harness.config.schema import Config
from harness.core import event_json
from harness.core.events import RunStarted
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from harness.drills.scenario import Scenario
from harness.drills.score import BoundStatus, Card, score_run
from tests import composed
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
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Another size of a fault: for one that grows, what it would have reached by then."""
    common: Mapping[str, int] = field(default_factory=dict)
    """Scenario -> number of common steps of those that are trained as it is, if that is not `MARGIN` before the first
    fault: a rejected update needs no snapshot."""
    stops: tuple[int, ...] = ()
    """With a constant learning rate a victim continues a twin that ended this early, if that is nearer to its fault
    than the common part."""

    def drill(self, name: str) -> Scenario:
        """The scenario, with the start of its fault."""
        drill = load(name)
        return replace(
            drill, fault=replace(drill.fault, at=self.starts.get(name, drill.fault.at), **self.sizes.get(name, {}))
        )


LONG = Table(
    num_steps=88,  # the longest fault ends at 85
    lengths={"warmup_cut": 66, "fp8_outlier": 64},  # the warm-up ends at 60, and the outlier at 58
    trained_as={"slow_logit_growth": "rising_lr"},
)
"""For models that are not tiny, which find some faults later."""
SHARED = "corrupt_activation"
"""The scenario whose training config most others have here. It computes every tenth step twice; faults that this must
not find strike in another step."""
SKIPPED = (
    "nan_loss",
    "nan_activation",
    "nan_grad",
    "inf_grad",
    "big_grad",
    "bit_flip",
    "poisoned_batch",
    "scrambled_batch",
    "duplicate_batch",
)
CORRUPTED = ("corrupt_activation", "corrupt_weight_read", "corrupt_gradient")
CORRUPTING = ("corrupting_rank", "stuck_bit")
LASTING = ("bit_flip_weight", "poisoned_burst", "data_shift", "lr_spike")
SETTLED = ("optimizer_reset", "logit_growth")
SLOW = ("rising_lr", "slow_logit_growth")
SHORT = Table(
    num_steps=80,
    lengths={
        **dict.fromkeys((*SKIPPED, *CORRUPTED), 73),  # at most one update is rejected, at 70
        **dict.fromkeys(("repeated_batch", *LASTING), 84),  # the last one is restored or accepted at 78
        **dict.fromkeys(CORRUPTING, 95),  # both halt before
        **dict.fromkeys(SETTLED, 115),  # found at 111
        **dict.fromkeys(SLOW, 146),  # found at 131 and 141, and clipped from 142 on
        "data_shift_planned": 66,  # the fault ends at 65
        "warmup_cut": 34,  # the warm-up ends
        "fp16_overflow": 22,
        "fp8_outlier": 54,  # found for the third time at 49
        "fp8_creep": 124,  # found at 111, and bf16 from 122 on
        "beta2_stale": 114,  # found at 111
        "slow_gradient_growth": 133,  # found at 121
    },
    trained_as={
        **dict.fromkeys(("repeated_batch", *SKIPPED, *CORRUPTED, *CORRUPTING, *LASTING), SHARED),
        **dict.fromkeys((*SETTLED, *SLOW), SHARED),
        "beta2_stale": "slow_gradient_growth",
        "fp8_outlier": "fp8_creep",
    },
    kept={"fp8_outlier": ("sentinel.policy.precision_iterations=4",)},
    starts={
        **dict.fromkeys(("repeated_batch", *SKIPPED, *CORRUPTING), 68),
        **dict.fromkeys(LASTING, 74),
        **dict.fromkeys(SLOW, 92),
        "optimizer_reset": 106,
        "data_shift_planned": 50,
        "warmup_cut": 22,
        "fp16_overflow": 18,
        "slow_gradient_growth": 60,
        "fp8_creep": 62,
    },
    sizes={"fp8_creep": {"factor": 700.0}, "logit_growth": {"factor": 1.4}},
    common={SHARED: 66},
    stops=(54, 84, 95),
)
"""For the tiny model on CPU ranks: the runs end soon after what they prove."""
OWN_OVERRIDES = {
    "warmup_cut": (CONSTANT, "optim.warmup_steps=34"),
    "data_shift_planned": ("data.phases=[{from_batch: 50, weights: {synthetic: 0.01}}]",),
}
"""Of scenarios whose training config knows the iteration of the fault. Other data does less damage at the end of a
cosine schedule, so that it is accepted at once."""
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
    with patch.object(compose, "load", composed.load):
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
    stop: int | None = None
    """Length of the twin that the victim continues; None: it continues the common part."""

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
    num_common_steps = table.common.get(table.trained_as.get(name, name), (min(faults) - MARGIN) // 5 * 5)
    stops = [stop for stop in table.stops if num_common_steps < stop <= table.drill(name).fault.at - MARGIN]
    return Training(
        overrides=shared[0],
        kept=table.kept.get(name, ()),
        num_steps=length_of(name, table),
        num_common_steps=num_common_steps,
        stop=max(stops, default=None) if CONSTANT in shared[0] else None,
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
    training = plan_training(name, run_overrides, table)
    copy_part_before_fault(ranks, runs, training, victim)
    twin = train_twin(ranks, runs, training)
    # the time between the starts means nothing
    num_starts = 1 + sum(isinstance(event, RunStarted) for event in event_json.read(victim.events))
    drill = replace(
        drill,
        expected=replace(drill.expected, starts=num_starts),
        bounds=replace(drill.bounds, seconds=None),
    )
    DrillRecord(name=name, scenario=drill, plan=drill.plan, twin=twin.path.name).write(victim)
    codes = continue_run(ranks, victim, training.config(is_victim=True))
    assert codes == [drill.expected.exit_code] * 2
    return score_run(victim)


def copy_part_before_fault(ranks: Pool, runs: Path, training: Training, run: RunDir) -> None:
    """The part of a run that its twin has too: the common part, or a twin that ended before the fault."""
    if training.stop is None:
        copy_common_part(ranks, runs, training.common_config(), training.num_common_steps, run)
    else:
        copy_run(train_twin(ranks, runs, replace(training, num_steps=training.stop, stop=None)), run)


def copy_run(source: RunDir, target: RunDir) -> None:
    """Copy a run without its config, because the copy has another name."""
    shutil.copytree(source.path, target.path, ignore=shutil.ignore_patterns(source.config.name))


def train_twin(ranks: Pool, runs: Path, training: Training) -> RunDir:
    """The run without the fault, trained if `runs` has none. It continues a shorter one that has the same steps."""
    twin = training.twin(runs)
    if not twin.path.exists():
        shorter = [replace(training, num_steps=num_steps).twin(runs) for num_steps in range(training.num_steps)]
        found = [each for each in shorter if CONSTANT in training.overrides and each.checkpoints.exists()]
        if found:
            copy_run(found[-1], twin)
        else:
            copy_part_before_fault(ranks, runs, training, twin)
        assert continue_run(ranks, twin, training.config(is_victim=False)) == [EXIT_DONE] * 2
    return twin


def continue_run(ranks: Pool, run: RunDir, cfg: Config) -> list[int]:
    """Continue a copied run; returns the exit codes."""
    directories.write_config(cfg, run)
    return ranks.run(2, drill_cases.run, str(run.path))


def cpu_overrides(name: str) -> tuple[str, ...]:
    """Overrides of a scenario on CPU ranks."""
    if SHORT.trained_as.get(name, name) == SHARED:
        return (*RUN_OVERRIDES, CONSTANT)
    return (*RUN_OVERRIDES, SHORT_SEQUENCES, *OWN_OVERRIDES.get(name, (CONSTANT,)))


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
