"""A batch-size warm-up on real ranks: order of the data, resume, skip and rewind across the start of a larger batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.core.batch_sizes import BatchSize
from harness.core.events import Action, ActionKind, ChangePlanned, Event, Finding, Outcome, StepRecord
from harness.core.rundir import RunDir
from tests.distributed import cases, faulty_runs
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

STAGES = "train.batch_size_warmup=[{until_batch: 4, batch_size: 4}, {until_batch: 8, batch_size: 8}]"
SIZES = [4] * 4 + [8] * 4 + [16] * 4
SMALL = ("model.num_layers=1", "train.batch_size=16", "train.micro_batch_size=2", "optim.schedule=constant", STAGES)

LATER = (
    "train.batch_size=16",
    "train.micro_batch_size=4",
    "train.batch_size_warmup=[{until_batch: 40, batch_size: 8}]",
    "train.num_steps=48",
    "optim.warmup_steps=5",
    "optim.schedule=constant",
    "checkpoint.every_steps=0",
    "checkpoint.good_after_steps=3",
    "checkpoint.ring.every_steps=7",
    "sentinel.policy.rollback_margin_steps=2",
    "sentinel.policy.rollback_window_batches=6",
)


def events_of(kind: Any, log: list[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def run(ranks: Pool, directory: Path, name: str, fault: Fault | None, *overrides: str, size: int = 2) -> RankResult:
    results = ranks.run(size, faulty_runs.run, str(directory), fault, f"run.name={name}", *overrides)
    assert len({(result.code, result.state) for result in results}) == 1
    first: RankResult = results[0]
    return first


def test_the_batch_grows_and_a_resume_on_fewer_ranks_continues_the_order(ranks: Pool, tmp_path: Path) -> None:
    for size, until in ((2, 3), (1, 6), (2, 12)):
        steps = (f"train.num_steps={until}", "checkpoint.every_steps=20", "run.resume=changed")
        resumed = run(ranks, tmp_path, "resumed", None, *SMALL, *steps, size=size)
        assert resumed.code == 0
    whole = run(ranks, tmp_path, "whole", None, *SMALL, "train.num_steps=12")
    records, expected = events_of(StepRecord, resumed.log), events_of(StepRecord, whole.log)
    assert [record.cursor for record in records] == [record.cursor for record in expected] == list(range(12))
    tokens = [32 * sum(SIZES[: number + 1]) for number in range(12)]
    assert [record.tokens for record in records] == [record.tokens for record in expected] == tokens
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


def test_accumulation_over_micro_batches_gives_the_gradient_of_the_whole_batch(ranks: Pool, tmp_path: Path) -> None:
    """Loss and gradient norm of every stage equal those of one forward pass over the whole share."""
    steps = ("run.name=a", *SMALL, "train.num_steps=12")
    code, small = ranks.run(2, cases.run, str(tmp_path / "micro"), *steps)[0]
    whole_code, whole = ranks.run(2, cases.run, str(tmp_path / "whole"), *steps, "train.micro_batch_size=null")[0]
    assert code == whole_code == 0
    assert [record.loss for record in small] == pytest.approx([record.loss for record in whole], rel=2e-5)
    assert [record.grad_norm for record in small] == pytest.approx([record.grad_norm for record in whole], rel=1e-3)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("gradient", 1, factor=float("nan"), batch=40), ActionKind.skip),
        (Fault("weights", 1, factor=30.0, iteration=41), ActionKind.rewind),
        (Fault("weights", 1, factor=30.0, iteration=5), ActionKind.rollback),
    ],
    ids=["skip", "rewind", "rollback"],
)
def test_a_skip_and_a_restore_across_the_boundary_end_like_a_run_without_those_batches(
    ranks: Pool, tmp_path: Path, fault: Fault, kind: ActionKind
) -> None:
    overrides: tuple[str, ...] = ()
    if kind is ActionKind.rollback:  # a new process has no snapshot in memory
        overrides = ("checkpoint.ring.slots=0", "run.resume=changed")
        run(ranks, tmp_path, "victim", None, *LATER, *overrides, "train.num_steps=36")
    victim = run(ranks, tmp_path, "victim", fault, *LATER, *overrides)
    assert victim.code == 0
    assert kind in [action.kind for action in events_of(Action, victim.log)]
    entries = [json.loads(line) for line in (tmp_path / "victim" / "ledger.jsonl").read_text().splitlines()]
    assert any(entry["first"] <= 41 <= entry["last"] + 1 for entry in entries)
    if kind is not ActionKind.skip:
        check_tokens_after_restore(victim.log, kind)
    faulty_runs.copy_ledger(tmp_path / "victim", tmp_path / "twin")
    twin = run(ranks, tmp_path, "twin", None, *LATER, *overrides)
    assert not [record for record in events_of(StepRecord, twin.log) if record.refused]
    assert (twin.code, twin.state) == (0, victim.state)
    records = events_of(StepRecord, twin.log)
    num_small = sum(record.cursor < 40 for record in records)
    assert records[-1].tokens == 32 * (8 * num_small + 16 * (48 - num_small))
    assert events_of(StepRecord, victim.log)[-1].tokens == records[-1].tokens + 32 * 16 * (kind is ActionKind.skip)


def check_tokens_after_restore(log: list[Event], kind: ActionKind) -> None:
    """The restore goes back to small batches, and every later record counts the tokens of its own batch."""
    (restored,) = [each for each in events_of(Outcome, log) if each.kind is kind]
    assert restored.succeeded
    records = events_of(StepRecord, log)
    before = [record for record in records if record.iteration <= restored.iteration]
    after = records[len(before) :]
    assert before[-1].cursor >= 40 > after[0].cursor
    tokens = before[-1].tokens - restored.tokens_lost
    for record in after:
        tokens += 32 * (8 if record.cursor < 40 else 16)
        assert record.tokens == tokens


def test_a_number_of_ranks_that_the_smallest_batch_cannot_feed_is_one_line_and_loses_nothing(
    ranks: Pool, tmp_path: Path
) -> None:
    stages = STAGES.replace("batch_size: 4}", "batch_size: 2}")
    overrides = (*SMALL, stages, "checkpoint.every_steps=20", "run.resume=changed")
    first = run(ranks, tmp_path, "kept", None, *overrides, "train.num_steps=3")
    assert first.code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    results = ranks.run(4, cases.start_run, str(tmp_path), "run.name=kept", *overrides, "train.num_steps=12")
    message = "train.batch_size_warmup[0].batch_size: must be at least the number of ranks (4), got 2"
    assert [(result.code, result.problem) for result in results] == [(2, message)] * 4
    assert {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()} == files


def test_ranks_that_do_not_divide_the_batch_share_it_and_continue_the_order(ranks: Pool, tmp_path: Path) -> None:
    for size, until in ((2, 3), (3, 10), (2, 12)):
        steps = (f"train.num_steps={until}", "checkpoint.every_steps=20", "run.resume=changed")
        resumed = run(ranks, tmp_path, "resumed", None, *SMALL, *steps, size=size)
        assert resumed.code == 0
    whole = run(ranks, tmp_path, "whole", None, *SMALL, "train.num_steps=12")
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
        assert run(ranks, tmp_path, "resumed", None, *small, *kept, size=size).code == 0
    directory = RunDir(tmp_path / "resumed")
    for step in (6, 7):
        shutil.rmtree(directory.checkpoints / f"step-{step:08d}-gen-0")
    files = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    last = (*small, "train.batch_size=8", "checkpoint.every_steps=20", "train.num_steps=8")
    results = ranks.run(4, cases.start_run, str(tmp_path), "run.name=resumed", *last)
    message = "train.batch_size: batches from 4 on have 2 sequences, from an earlier start; too few for 4 ranks; "
    message += "use fewer ranks until they are consumed"
    assert [(result.code, result.problem) for result in results] == [(2, message)] * 4
    assert {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()} == files
    resumed = run(ranks, tmp_path, "resumed", None, *last)
    assert resumed.code == 0
    records = events_of(StepRecord, resumed.log)
    assert [each.cursor for each in records] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    assert [each.tokens for each in records[7:]] == [32 * rows for rows in (10, 12, 20, 28)]
