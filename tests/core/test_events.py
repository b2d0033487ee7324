"""Tests of events: JSON round trips, also with NaN and Inf, and damaged logs."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from harness.core import event_json
from harness.core.event_json import from_json, to_json
from harness.core.events import EvalRecord, Intervention, ReducedRecord, RunEnded, StepRecord

numbers = st.floats(allow_nan=False)


def record(loss: float, groups: dict[str, float]) -> StepRecord:
    return StepRecord(
        time=1.5,
        iteration=3,
        step=2,
        cursor=2,
        tokens=64,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens_per_s=10.0,
        refused=False,
        stop_requested=False,
        step_time_s=0.1,
        flops_per_s=1e9,
        group_grad_norms=groups,
    )


def test_only_these_fields_of_a_record_differ_between_ranks() -> None:
    """A new rank-local field of `StepRecord` is added here. Input of decisions comes from the all-reduce and belongs in
    `ReducedRecord`."""
    shared = {field.name for field in fields(ReducedRecord)}
    rank_local = {field.name for field in fields(StepRecord)} - shared
    assert rank_local == {"tokens_per_s", "step_time_s", "flops_per_s", "mfu", "memory_bytes", "loader_wait_s", "batch"}


def test_reduced_fields_are_filled_from_old_logs() -> None:
    old = json.loads(to_json(record(1.0, {}))) | {"batch": {"fingerprint": "00ff"}}
    for name in ("median_step_s", "fingerprint", "other_data"):
        del old[name]
    again = from_json(json.dumps(old))
    assert isinstance(again, StepRecord)
    assert (again.median_step_s, again.fingerprint, again.other_data) == (0.1, "00ff", {})


@given(numbers, st.dictionaries(st.text(), numbers))
def test_a_record_survives_a_round_trip(loss: float, groups: dict[str, float]) -> None:
    line = to_json(record(loss, groups))
    assert "\n" not in line
    assert from_json(line) == record(loss, groups)


def test_nan_and_inf_are_written_as_strings() -> None:
    data = json.loads(to_json(record(math.nan, {"a": math.inf, "b": -math.inf})))
    assert data["loss"] == "nan"
    assert data["group_grad_norms"] == {"a": "inf", "b": "-inf"}
    back = from_json(json.dumps(data))
    assert isinstance(back, StepRecord)
    assert math.isnan(back.loss)
    assert back.group_grad_norms == {"a": math.inf, "b": -math.inf}


def test_a_step_record_has_the_documented_keys() -> None:
    keys = {
        "event",
        "time",
        "iteration",
        "step",
        "cursor",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "refused",
    }
    assert keys <= json.loads(to_json(record(1.0, {}))).keys()


def test_damaged_and_unknown_lines_are_skipped(tmp_path: Path) -> None:
    first = EvalRecord(time=1.0, iteration=1, step=1, loss=2.0, tokens=8)
    second = Intervention(time=2.0, iteration=1, who="a", reason="b", changes={"k": [1, 2]})
    third = RunEnded(time=3.0, iteration=2, step=2, exit_code=0, reason="done")
    log = tmp_path / "events.jsonl"
    lines = [
        to_json(first),
        '{"event": "eval", "ti',
        '{"event": "of the future", "x": 1}',
        to_json(second),
        to_json(third),
    ]
    log.write_text("\n".join(lines) + '\n{"event": "eval", "time"', encoding="utf-8")
    assert list(event_json.read(log)) == [first, second, third]
