"""Tokens of the batches of a run: from its record, from its configuration, and ahead of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.compose import plain
from harness.core.batch_sizes import TokenSchedule, read_token_schedule
from harness.core.rundir import RunDir
from tests.composed import load

WARMUP = "train.batch_size_warmup=[{until_batch: 4, batch_size: 2}, {until_batch: 9, batch_size: 4}]"
SIZES = [2] * 4 + [4] * 5 + [8] * 100


def schedule_of(run: RunDir, train: dict[str, Any]) -> TokenSchedule:
    schedule = read_token_schedule(run, train)
    assert schedule is not None
    return schedule


def test_tokens_follow_the_warmup_of_the_configuration(tmp_path: Path) -> None:
    cfg = load(["train.batch_size=8", "train.sequence_length=32", "train.num_steps=20", WARMUP])
    schedule = schedule_of(RunDir(tmp_path), plain(cfg.train))
    for first in range(12):
        for count in range(12):
            assert schedule.tokens_ahead(first, count) == 32 * sum(SIZES[first : first + count])
    assert schedule.tokens_ahead(3, -1) == 0
    assert schedule.tokens_ahead(0, 20) == cfg.train.num_tokens()
    assert schedule.tokens_of([3, 4, 8, 9, 9]) == 32 * (2 + 4 + 4 + 8 + 8)


def test_recorded_sizes_win_over_the_configuration(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.corpus.write_text(json.dumps({"batch_sizes": [[0, 2], [5, 6]]}))
    schedule = schedule_of(run, {"batch_size": 6, "sequence_length": 10})
    assert schedule.tokens_ahead(4, 2) == 10 * (2 + 6)


@pytest.mark.parametrize("corpus", ["", "[]", '{"batch_sizes": []}', '{"batch_sizes": [[1, 2]]}', '{"batch_sizes": 3}'])
def test_an_unreadable_record_leaves_the_configuration(tmp_path: Path, corpus: str) -> None:
    run = RunDir(tmp_path)
    run.corpus.write_text(corpus)
    assert schedule_of(run, {"batch_size": 6, "sequence_length": 10}).tokens_of([7]) == 60


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"batch_size": 4},
        {"sequence_length": 4},
        {"batch_size": 0, "sequence_length": 4},
        {"batch_size": "x", "sequence_length": 4},
        {"batch_size": 4, "sequence_length": 4, "batch_size_warmup": [{"until_batch": 0, "batch_size": 2}]},
    ],
)
def test_a_configuration_that_does_not_say_has_no_schedule(tmp_path: Path, train: dict[str, Any]) -> None:
    assert read_token_schedule(RunDir(tmp_path), train) is None
