"""Faults at a planned change: a skip, a rewind and a rollback that cross the batch at which a setting changes.

Each run has a twin without the batches that it excluded; both must end with the same bits. Both continue a copy of the
part before the fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.events import Action, ActionKind, Outcome, StepRecord
from harness.core.rundir import RunDir
from tests.distributed import faulty_runs
from tests.distributed.cases import tiny
from tests.distributed.common_part import copy_common_part
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.pool import Pool

BOUNDARY = 30
"""The batch at which the setting changes. The overrides of a test must say so, and train some steps more."""
COMMON_STEPS = 20
"""All runs with the same overrides have them in common. A snapshot follows before the boundary."""
OVERRIDES = (
    "model.num_layers=1",
    "optim.warmup_steps=5",
    "optim.schedule=constant",
    "checkpoint.every_steps=0",
    "checkpoint.good_after_steps=3",
    "checkpoint.ring.every_steps=7",
    "sentinel.policy.rollback_margin_steps=2",
    "sentinel.policy.rollback_window_batches=6",
)
each_fault = pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("gradient", 1, factor=float("nan"), batch=BOUNDARY, layer="blocks.0.mlp.up"), ActionKind.skip),
        (Fault("weights", 1, factor=30.0, iteration=BOUNDARY + 1 - COMMON_STEPS), ActionKind.rewind),
        (Fault("weights", 1, factor=30.0, iteration=BOUNDARY + 1 - COMMON_STEPS), ActionKind.rollback),
    ],
    ids=["skip", "rewind", "rollback"],
)
"""The faults and the actions that answer them."""


def run_on_ranks(
    ranks: Pool, directory: Path, name: str, fault: Fault | None, *overrides: str, size: int = 2
) -> RankResult:
    """A run in `directory`; all ranks must end alike. Returns the result of rank 0, which has the log."""
    results = ranks.run(size, faulty_runs.run, str(directory), fault, f"run.name={name}", *overrides)
    assert len({(result.code, result.state) for result in results}) == 1
    first: RankResult = results[0]
    return first


def run_victim_and_twin(
    ranks: Pool, directory: Path, fault: Fault, kind: ActionKind, *overrides: str
) -> tuple[RankResult, RankResult]:
    """The runs `victim`, with the fault, and `twin`, which has the ledger of the victim from the start."""
    overrides = (*OVERRIDES, *overrides)
    common = tiny(*overrides)
    if kind is ActionKind.rollback:  # a new process has no snapshot in memory
        overrides = (*overrides, "checkpoint.ring.slots=0")
    copy_common_part(ranks, directory.parent, common, COMMON_STEPS, RunDir(directory / "victim"))
    victim = run_on_ranks(ranks, directory, "victim", fault, *overrides)
    assert kind in [event.kind for event in victim.log if isinstance(event, Action)]
    faulty_runs.copy_ledger(directory / "victim", directory / "twin")
    copy_common_part(ranks, directory.parent, common, COMMON_STEPS, RunDir(directory / "twin"))
    twin = run_on_ranks(ranks, directory, "twin", None, *overrides)
    assert not [event for event in twin.log if isinstance(event, StepRecord) and event.refused]
    assert victim.code == twin.code == 0
    assert twin.state == victim.state, "bit for bit"
    return victim, twin


def split_at_restore(victim: RankResult, kind: ActionKind) -> tuple[Outcome, list[StepRecord], list[StepRecord]]:
    """The only restore of this kind, which succeeded, and the step records before and after it."""
    (restored,) = [event for event in victim.log if isinstance(event, Outcome) and event.kind is kind]
    assert restored.succeeded
    records = [event for event in victim.log if isinstance(event, StepRecord)]
    before = [record for record in records if record.iteration <= restored.iteration]
    return restored, before, records[len(before) :]
