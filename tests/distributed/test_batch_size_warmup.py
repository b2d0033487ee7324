"""A batch-size warm-up on real ranks: order of the data, resume, skip and rewind across the start of a larger batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.core.batch_sizes import BatchSize
from harness.core.events import Action, ActionKind, ChangePlanned, Event, Finding, StepRecord
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
    "checkpoint.every_steps=0",
    "checkpoint.good_after_steps=3",
    "checkpoint.ring.every_steps=4",
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
    ],
    ids=["skip", "rewind"],
)
def test_a_skip_and_a_rewind_across_the_boundary_end_like_a_run_without_those_batches(
    ranks: Pool, tmp_path: Path, fault: Fault, kind: ActionKind
) -> None:
    victim = run(ranks, tmp_path, "victim", fault, *LATER)
    assert victim.code == 0
    assert kind in [action.kind for action in events_of(Action, victim.log)]
    entries = [json.loads(line) for line in (tmp_path / "victim" / "ledger.jsonl").read_text().splitlines()]
    assert any(entry["first"] <= 41 <= entry["last"] + 1 for entry in entries)
    faulty_runs.copy_ledger(tmp_path / "victim", tmp_path / "twin")
    twin = run(ranks, tmp_path, "twin", None, *LATER)
    assert not [record for record in events_of(StepRecord, twin.log) if record.refused]
    assert (twin.code, twin.state) == (0, victim.state)
    records = events_of(StepRecord, twin.log)
    num_small = sum(record.cursor < 40 for record in records)
    assert records[-1].tokens == 32 * (8 * num_small + 16 * (48 - num_small))
