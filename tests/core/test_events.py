"""Events survive the trip through a line of JSON, whatever their numbers."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from harness.core import events
from harness.core.events import EvalRecord, Intervention, ReducedRecord, RunEnded, StepRecord, from_json, to_json

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


def test_every_field_of_a_record_is_known_to_all_ranks_or_decides_nothing() -> None:
    """A new field of `StepRecord` is named here; what decides comes from the all-reduce, and goes into
    `ReducedRecord`."""
    shared = {each.name for each in fields(ReducedRecord)}
    of_one_rank = {each.name for each in fields(StepRecord)} - shared
    assert of_one_rank == {"tokens_per_s", "step_time_s", "flops_per_s", "mfu", "memory_bytes", "batch"}


def test_what_ranks_share_is_read_from_logs_that_held_it_elsewhere() -> None:
    old = json.loads(to_json(record(1.0, {}))) | {"batch": {"fingerprint": "00ff"}}
    for name in ("median_step_s", "fingerprint", "other_data"):
        del old[name]
    again = from_json(json.dumps(old))
    assert isinstance(again, StepRecord)
    assert (again.median_step_s, again.fingerprint, again.other_data) == (0.1, "00ff", {})


@given(numbers, st.dictionaries(st.text(), numbers))
def test_a_record_comes_back_equal(loss: float, groups: dict[str, float]) -> None:
    line = to_json(record(loss, groups))
    assert "\n" not in line
    assert from_json(line) == record(loss, groups)


def test_what_json_cannot_say_is_a_string() -> None:
    data = json.loads(to_json(record(math.nan, {"a": math.inf, "b": -math.inf})))
    assert data["loss"] == "nan"
    assert data["group_grad_norms"] == {"a": "inf", "b": "-inf"}
    back = from_json(json.dumps(data))
    assert isinstance(back, StepRecord)
    assert math.isnan(back.loss)
    assert back.group_grad_norms == {"a": math.inf, "b": -math.inf}


def test_the_contract_of_a_step() -> None:
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


def test_a_log_is_read_around_its_wounds(tmp_path: Path) -> None:
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
    assert list(events.read(log)) == [first, second, third]
