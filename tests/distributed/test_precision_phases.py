"""Planned changes between fp8 and bf16 on real ranks: which steps are in fp8, also after a resume, skip, rewind,
rollback or with the sentinel's own fallback to bf16 under way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core.events import Action, ActionKind, ChangePlanned, Event, Finding, HeldOutMeasured, StepRecord
from harness.core.rundir import RunDir
from tests.distributed.boundary_faults import BOUNDARY, each_fault, run_on_ranks, run_victim_and_twin, split_at_restore
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

PHASES = "precision.phases=[{from_batch: 2, kind: bf16}, {from_fraction: 0.75, kind: fp8}]"
OVERRIDES = (
    *("model.num_layers=1", "precision=fp8_emulated", "optim.schedule=constant", "optim.warmup_steps=0"),
    *("train.num_steps=8", "checkpoint.every_steps=4", PHASES),
)
IN_FP8 = [True, True, False, False, False, False, True, True]

FAULTY = (
    "precision=fp8_emulated",
    f"precision.phases=[{{from_batch: {BOUNDARY}, kind: bf16}}]",
    f"train.num_steps={BOUNDARY + 6}",
)
FALLBACK = (
    "sentinel.detect.fp8_underflow=1e-9",
    "sentinel.probe_every=4",
    "sentinel.policy.precision_iterations=6",
    "sentinel.planned_batches=0",
)
"""Every probe in fp8 finds some underflow. The first one makes iterations 3 to 8 run in bf16."""


def run(ranks: Pool, directory: Path, name: str, *overrides: str, size: int = 2) -> RankResult:
    result = run_on_ranks(ranks, directory, name, None, *OVERRIDES, *overrides, size=size)
    assert result.code == 0
    return result


def steps_of(log: list[Event]) -> list[StepRecord]:
    return [event for event in log if isinstance(event, StepRecord)]


def measured_at(log: list[Event], step: int) -> list[float]:
    """The held-out losses of a step."""
    return [event.loss for event in log if isinstance(event, HeldOutMeasured) and event.step == step]


def test_a_run_changes_its_precision_at_the_planned_batches_and_resumes_anywhere(ranks: Pool, tmp_path: Path) -> None:
    whole = run(ranks, tmp_path, "whole")
    fixed = PHASES.replace("from_fraction: 0.75", "from_batch: 6")
    for until in (1, 2, 4, 6, 8):  # inside each phase, and right before each change
        resumed = run(ranks, tmp_path, "resumed", fixed, f"train.num_steps={until}", "run.resume=changed")
    for log in (whole.log, resumed.log):
        assert [event.in_fp8 for event in log if isinstance(event, StepRecord)] == IN_FP8
        assert not [event for event in log if isinstance(event, Finding)]
        planned = [(event.cursor, event.reason) for event in log if isinstance(event, ChangePlanned)]
        assert (2, "precision.phases switches to bf16") in planned
        assert (6, "precision.phases switches to fp8") in planned
    assert resumed.weights == whole.weights, "bit for bit"
    measured = [measured_at(log, 4) for log in (whole.log, resumed.log)]
    assert len(measured[0]) == 1
    assert measured[1] == measured[0], "the first held-out check of a start is in the precision of its first step"
    dtype = json.loads(RunDir(tmp_path / "whole").manifest.read_text())["dtype"]
    assert dtype["phases"] == [{"from_batch": 2, "compute": "bf16"}, {"from_batch": 6, "compute": "fp8"}]


@each_fault
def test_a_skip_and_a_restore_across_the_boundary_compute_each_batch_in_its_planned_precision(
    ranks: Pool, tmp_path: Path, fault: Fault, kind: ActionKind
) -> None:
    """The boundary is a batch index. A twin without the excluded batches has the same bits."""
    victim, _ = run_victim_and_twin(ranks, tmp_path, fault, kind, *FAULTY)
    records = steps_of(victim.log)
    assert [record.in_fp8 for record in records] == [record.cursor < BOUNDARY for record in records]
    if kind is not ActionKind.skip:
        _, before, after = split_at_restore(victim, kind)
        assert before[-1].in_fp8 is False, "the run was in bf16"
        assert after[0].in_fp8 is True, "and goes on in fp8"
        assert after[-1].in_fp8 is False


@pytest.mark.parametrize(
    ("phases", "in_fp8", "stops"),
    [
        # The window of the fallback ends in the bf16 phase, which goes on to batch 10; a probe falls back again.
        (
            "[{from_batch: 5, kind: bf16}, {from_batch: 11, kind: fp8}]",
            [True] * 2 + [False] * 9 + [True] * 3 + [False] * 2,
            (5, 11),
        ),
        # The bf16 phase begins and ends within the window, which goes on to iteration 8.
        (
            "[{from_batch: 3, kind: bf16}, {from_batch: 5, kind: fp8}]",
            [True] * 2 + [False] * 6 + [True] * 2 + [False] * 6,
            (3, 5),
        ),
    ],
    ids=["the phase outlasts the fallback", "the fallback outlasts the phase"],
)
def test_a_fallback_that_is_under_way_when_the_phase_changes(
    ranks: Pool, tmp_path: Path, phases: str, in_fp8: list[bool], stops: tuple[int, ...]
) -> None:
    """fp8 needs both: the phase, and no fallback. A resume at each change has the bits of the run in one piece.
    One rank is enough: the drill fp8_outlier falls back on two."""
    overrides = (*FALLBACK, f"precision.phases={phases}")
    whole = run(ranks, tmp_path, "whole", *overrides, "train.num_steps=16", size=1)
    for until in (*stops, 16):
        steps = (f"train.num_steps={until}", "run.resume=changed")
        resumed = run(ranks, tmp_path, "resumed", *overrides, *steps, size=1)
    for log in (whole.log, resumed.log):
        assert [record.in_fp8 for record in steps_of(log)] == in_fp8
    assert resumed.weights == whole.weights, "bit for bit"
    decided = [
        [(each.iteration, each.in_fp8, each.until) for each in log if isinstance(each, Action)]
        for log in (whole.log, resumed.log)
    ]
    assert decided[0] == decided[1]
    assert decided[0][:2] == [(1, False, 8), (7, True, None)]
