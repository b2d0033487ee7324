from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.analysis.judge.foreign_logs import find_columns, read_log
from harness.config.errors import ConfigError
from harness.core.event_json import to_json
from harness.core.events import StepRecord
from tests.sentinel.series import record

Row = tuple[int, float, float]


def records_of(path: Path, wanted: Mapping[str, str]) -> Iterator[StepRecord]:
    return (event for event in read_log(path, wanted) if isinstance(event, StepRecord))


def rows(path: Path, text: str, **wanted: str) -> list[Row]:
    path.write_text(text)
    return [(each.step, each.loss, each.grad_norm) for each in records_of(path, wanted)]


WANT = [(1, 3.0, 0.5), (2, 2.5, 0.4)]


@pytest.mark.parametrize(
    "text",
    [
        "step,loss,grad_norm\n1,3.0,0.5\n2,2.5,0.4\n",
        "iteration, lm loss, grad norm\n1,3.0,0.5\n2,2.5,0.4\n",
        '"Step","run-a - _step","run-a - train/loss","run-a - train/loss__MIN","run-a - train/grad_norm"\n'
        '"1","1","3.0","2.9","0.5"\n"2","2","2.5","2.4","0.4"\n',
        "_step,train/loss,val/loss,train/grad_norm\n1,3.0,9.0,0.5\n2,2.5,,0.4\n",
        "run_id,key,value,step,timestamp\na,loss,2.5,2,0\na,loss,3.0,1,0\na,grad_norm,0.5,1,0\na,grad_norm,0.4,2,0\n",
        '{"_step": 1, "train/loss": 3.0, "grad_norm": 0.5}\n{"_step": 2, "train/loss": "2.5", "grad_norm": 0.4}\n',
        '{"lr": 0.1}\n{"step": 1, "loss": 3.0, "gnorm": 0.5}\nnot json\n{"step": 2, "loss": 2.5, "gnorm": 0.4}\n',
        '{"event": "train", "iteration": 1, "loss": 3.0, "grad_norm": 0.5}\n'
        '{"event": "step", "iteration": 2, "time": 9, "loss": 2.5, "grad_norm": 0.4, "batch": 7}\n',
        '{"log_history": [{"step": 1, "loss": 3.0, "grad_norm": 0.5}, {"step": 2, "loss": 2.5, "grad_norm": 0.4}]}',
        '{\n "log_history": [\n  {"step": 1, "loss": 3.0, "grad_norm": 0.5},\n  {"step": 1, "eval_loss": 4.0},\n'
        '  {"step": 2, "loss": 2.5, "grad_norm": 0.4},\n  {"step": 2, "train_loss": 2.7}\n ]\n}\n',
        '[\n {"step": 1, "loss": 3.0, "grad_norm": 0.5},\n {"step": 2, "loss": 2.5, "grad_norm": 0.4}\n]\n',
        '[{"step": 1, "loss": 3.0, "grad_norm": 0.5}, {"step": 2, "loss": 2.5, "grad_norm": 0.4}]',
        "\n\nstep,loss,gnorm\n1,3.0,0.5\n\n2,2.5,0.4\n3,,0.4\n4\n",
    ],
)
def test_exports_of_other_programs_are_recognized(tmp_path: Path, text: str) -> None:
    assert rows(tmp_path / "log", text) == WANT


def test_tensorboard_export_has_one_metric_per_file(tmp_path: Path) -> None:
    assert rows(tmp_path / "log", "Wall time,Step,Value\n1e9,1,3.0\n1e9,2,2.5\n") == [(1, 3.0, 0.0), (2, 2.5, 0.0)]


def test_own_event_log_gives_full_records(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_json(record(7, math.nan, 0.5, refused=True, nonfinite_ranks=[3])) + "\n")
    (row,) = records_of(path, {})
    assert math.isnan(row.loss)
    assert (row.step, row.refused, row.nonfinite_ranks) == (7, True, [3])


def test_a_row_of_an_own_log_with_an_unknown_event_is_no_step(tmp_path: Path) -> None:
    unknown = '{"event": "later", "time": 1, "iteration": 8, "loss": 9.0}\n'
    text = unknown.replace("loss", "lost") + to_json(record(7, 3.0, 0.5)) + "\n" + unknown
    assert rows(tmp_path / "events.jsonl", text) == [(7, 3.0, 0.5)]


def test_nan_and_inf_are_valid_values(tmp_path: Path) -> None:
    found = rows(tmp_path / "log", "step,loss\n1,nan\n2,Infinity\n3,-inf\n")
    assert [str(loss) for _, loss, _ in found] == ["nan", "inf", "-inf"]


def test_a_json_integer_above_the_range_is_inf(tmp_path: Path) -> None:
    large = "1" + "0" * 400
    text = "".join(
        f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in ((large, 2.0), (1, large), (2, f"-{large}"))
    )
    assert [(step, loss) for step, loss, _ in rows(tmp_path / "log", text)] == [(0, 2.0), (1, math.inf), (2, -math.inf)]


def test_columns_can_be_named(tmp_path: Path) -> None:
    text = "when,objective,loss\n5,3.0,1\n6,2.5,1\n"
    assert rows(tmp_path / "log", text, step="when", loss="objective") == [(5, 3.0, 0.0), (6, 2.5, 0.0)]


def test_training_loss_is_preferred() -> None:
    header = ["step", "eval/loss", "valid_loss", "train_loss", "test loss"]
    assert find_columns(header, {}) == {"step": "step", "loss": "train_loss"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("step,accuracy\n1,0.5\n", "no column for the loss.*'step', 'accuracy'"),
        ('{"step": 1, "accuracy": 0.5}\n', "no column for the loss.*'step', 'accuracy'"),
        ("step,a - loss,b - loss\n1,2,3\n", "'a - loss', 'b - loss'"),
        ('{\n "loss": 1\n}\n', "is one JSON object without the list log_history"),
        ('{\n "log_history": [\n', "is neither JSON lines nor one JSON value: Expecting value"),
        ("key,value,step\naccuracy,1,1\n", "no column for the loss.*'accuracy'"),
    ],
)
def test_log_without_a_loss_is_an_error_that_lists_columns(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        rows(tmp_path / "log", text)


def test_one_invalid_line_costs_one_row(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 3.0}) for step in range(5)]
    lines[2] = lines[2][:-4]
    assert [step for step, _, _ in rows(tmp_path / "log", "\n".join(lines))] == [0, 1, 3, 4]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_a_byte_order_mark_hides_no_column(name: str, tmp_path: Path) -> None:
    text = "step,loss\n70,2\n80,3\n" if name == "log.csv" else '{"step": 70, "loss": 2}\n{"step": 80, "loss": 3}\n'
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    assert [(record.step, record.loss) for record in records_of(path, {})] == [(70, 2.0), (80, 3.0)]


def test_a_step_that_is_no_finite_number_is_the_number_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n10,1\ninf,2\n1e400,3\nnan,4\n")
    assert [record.step for record in records_of(path, {})] == [10, 1, 2, 3]
    path.write_text("key,value,step\nloss,2,5\nloss,3,unknown\nloss,4,6\n")
    assert [record.step for record in records_of(path, {})] == [5, 6]
