"""A batch-size warm-up on real ranks: order of the data, resume, skip and rewind across the start of a larger batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.core.batch_sizes import BatchSize
from harness.core.events import ActionKind, ChangePlanned, Event, Finding, StepRecord
from harness.core.rundir import RunDir
from harness.drills.drill_record import gather
from harness.drills.score import score
from tests.distributed import cases
from tests.distributed.boundary_faults import (
    BOUNDARY,
    each_fault,
    run_on_ranks,
    run_victim_and_twin,
    split_at_restore,
)
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.pool import Pool
from tests.drills import logs

pytestmark = pytest.mark.full

STAGES = "train.batch_size_warmup=[{until_batch: 4, batch_size: 4}, {until_batch: 8, batch_size: 8}]"
SIZES = [4] * 4 + [8] * 4 + [16] * 4
SMALL = ("model.num_layers=1", "train.batch_size=16", "train.micro_batch_size=2", "optim.schedule=constant", STAGES)

LATER = (
    "train.batch_size=16",
    "train.micro_batch_size=4",
    f"train.batch_size_warmup=[{{until_batch: {BOUNDARY}, batch_size: 8}}]",
    f"train.num_steps={BOUNDARY + 8}",
)


def events_of(kind: Any, log: list[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


@pytest.fixture(scope="module")
def whole(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> RankResult:
    """The run in one piece, on two ranks."""
    return run_on_ranks(ranks, tmp_path_factory.mktemp("whole"), "whole", None, *SMALL, "train.num_steps=12")


def test_the_batch_grows_and_a_resume_on_fewer_ranks_continues_the_order(
    ranks: Pool, tmp_path: Path, whole: RankResult
) -> None:
    for size, until in ((2, 3), (1, 6), (2, 12)):
        steps = (f"train.num_steps={until}", "checkpoint.every_steps=20", "run.resume=changed")
        resumed = run_on_ranks(ranks, tmp_path, "resumed", None, *SMALL, *steps, size=size)
        assert resumed.code == 0
    records, expected = events_of(StepRecord, resumed.log), events_of(StepRecord, whole.log)
    assert [record.cursor for record in records] == [record.cursor for record in expected] == list(range(12))
    tokens = [32 * sum(SIZES[: number + 1]) for number in range(12)]
    assert [record.tokens for record in records] == [record.tokens for record in expected] == tokens
    assert [record.batch_tokens for record in records] == [32 * size for size in SIZES]
    assert [record.batch["fingerprint"] for record in records[:3]] == [
        record.batch["fingerprint"] for record in expected[:3]
    ]
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=2e-5)
    assert [record.grad_norm for record in records] == pytest.approx([each.grad_norm for each in expected], rel=1e-3)
    for log in (resumed.log, whole.log):
        planned = [event for event in events_of(ChangePlanned, log) if "batch_size_warmup" in event.reason]
        assert sorted({event.cursor for event in planned}) == ([4, 6, 8] if log is resumed.log else [4, 8])
        assert not events_of(Finding, log)
    recorded = json.loads(RunDir(tmp_path / "resumed").corpus.read_text())["batch_sizes"]
    assert [BatchSize(*each) for each in recorded] == [BatchSize(0, 4), BatchSize(4, 8), BatchSize(8, 16)]


def test_accumulation_over_micro_batches_gives_the_gradient_of_the_whole_batch(
    ranks: Pool, tmp_path: Path, whole: RankResult
) -> None:
    """Loss and gradient norm of every stage equal those of one forward pass over the whole share."""
    steps = ("run.name=a", *SMALL, "train.num_steps=12")
    code, at_once = ranks.run(2, cases.run, str(tmp_path), *steps, "train.micro_batch_size=null")[0]
    assert code == whole.code == 0
    small = events_of(StepRecord, whole.log)
    assert [record.loss for record in small] == pytest.approx([record.loss for record in at_once], rel=2e-5)
    assert [record.grad_norm for record in small] == pytest.approx([each.grad_norm for each in at_once], rel=1e-3)


@each_fault
def test_a_skip_and_a_restore_across_the_boundary_end_like_a_run_without_those_batches(
    ranks: Pool, tmp_path: Path, fault: Fault, kind: ActionKind
) -> None:
    victim, twin = run_victim_and_twin(ranks, tmp_path, fault, kind, *LATER)
    directory = RunDir(tmp_path / "victim")
    entries = [json.loads(line) for line in directory.ledger.read_text().splitlines()]
    assert any(entry["first"] <= BOUNDARY + 1 <= entry["last"] + 1 for entry in entries)
    if kind is not ActionKind.skip:
        check_tokens_after_restore(victim, kind)
    records = events_of(StepRecord, twin.log)
    num_small = sum(record.cursor < BOUNDARY for record in records)
    assert records[-1].tokens == 32 * (8 * num_small + 16 * (BOUNDARY + 8 - num_small))
    assert events_of(StepRecord, victim.log)[-1].tokens == records[-1].tokens + 32 * 16 * (kind is ActionKind.skip)
    consumed = sum(batch_tokens(record) for record in events_of(StepRecord, victim.log))
    measured = score(logs.scenario(), gather(directory), None)
    assert measured.tokens_lost == consumed - records[-1].tokens, "the twin has consumed what the victim has kept"
    assert (measured.tokens_lost == measured.steps_lost * 32 * 16) is (kind is ActionKind.skip)


def batch_tokens(record: StepRecord) -> int:
    return 32 * (8 if record.cursor < BOUNDARY else 16)


def check_tokens_after_restore(victim: RankResult, kind: ActionKind) -> None:
    """The restore goes back to small batches, and every later record counts the tokens of its own batch."""
    restored, before, after = split_at_restore(victim, kind)
    assert before[-1].cursor >= BOUNDARY > after[0].cursor
    tokens = before[-1].tokens - restored.tokens_lost
    for record in after:
        tokens += batch_tokens(record)
        assert record.tokens == tokens


def test_a_number_of_ranks_that_the_smallest_batch_cannot_feed_is_one_line_and_loses_nothing(
    ranks: Pool, tmp_path: Path
) -> None:
    stages = STAGES.replace("batch_size: 4}", "batch_size: 2}")
    overrides = (*SMALL, stages, "checkpoint.every_steps=20", "run.resume=changed")
    first = run_on_ranks(ranks, tmp_path, "kept", None, *overrides, "train.num_steps=3")
    assert first.code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    results = ranks.run(4, cases.start_run, str(tmp_path), "run.name=kept", *overrides, "train.num_steps=12")
    message = "train.batch_size_warmup[0].batch_size: must be at least the number of ranks (4), got 2"
    assert [(result.code, result.problem) for result in results] == [(2, message)] * 4
    assert {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()} == files


def test_ranks_that_do_not_divide_the_batch_share_it_and_continue_the_order(
    ranks: Pool, tmp_path: Path, whole: RankResult
) -> None:
    for size, until in ((2, 3), (3, 10), (2, 12)):
        steps = (f"train.num_steps={until}", "checkpoint.every_steps=20", "run.resume=changed")
        resumed = run_on_ranks(ranks, tmp_path, "resumed", None, *SMALL, *steps, size=size)
        assert resumed.code == 0
    records, expected = events_of(StepRecord, resumed.log), events_of(StepRecord, whole.log)
    assert [(each.cursor, each.tokens) for each in records] == [(each.cursor, each.tokens) for each in expected]
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=2e-5)
    assert [record.grad_norm for record in records] == pytest.approx([each.grad_norm for each in expected], rel=1e-3)


def test_a_resume_before_a_larger_batch_on_more_ranks_than_the_old_batch_had_sequences(
    ranks: Pool, tmp_path: Path
) -> None:
    """The sizes of the record count, not those of the configuration. It is said at the start, before anything is
    lost; fewer ranks resume."""
    small = ("model.num_layers=1", "train.micro_batch_size=2", "optim.schedule=constant", "run.resume=changed")
    for size, *steps in (
        (2, "train.batch_size=2", "train.num_steps=4"),
        (2, "train.batch_size=2", "train.num_steps=6"),
        (4, "train.batch_size=8", "train.num_steps=7"),
    ):
        kept = ("checkpoint.every_steps=20", *steps)
        assert run_on_ranks(ranks, tmp_path, "resumed", None, *small, *kept, size=size).code == 0
    directory = RunDir(tmp_path / "resumed")
    for step in (6, 7):
        shutil.rmtree(directory.checkpoints / f"step-{step:08d}-gen-0")
    files = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    last = (*small, "train.batch_size=8", "checkpoint.every_steps=20", "train.num_steps=8")
    results = ranks.run(4, cases.start_run, str(tmp_path), "run.name=resumed", *last)
    message = "train.batch_size: batches from 4 on have the size of an earlier start, 2 sequences for 4 ranks; "
    message += "use fewer ranks until they are consumed"
    assert [(result.code, result.problem) for result in results] == [(2, message)] * 4
    assert {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()} == files
    resumed = run_on_ranks(ranks, tmp_path, "resumed", None, *last)
    assert resumed.code == 0
    records = events_of(StepRecord, resumed.log)
    assert [each.cursor for each in records] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    assert [each.tokens for each in records[7:]] == [32 * rows for rows in (10, 12, 20, 28)]
