from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import compose
from harness.core.event_json import to_json
from harness.core.events import Action, ActionKind, Event, Intervention
from launch.cli.main import main
from tests.analysis.postmortem import stories
from tests.sentinel.series import losses, norms, records


def csv(path: Path, values: list[float]) -> str:
    path.write_text("step,train/loss\n" + "".join(f"{step},{value}\n" for step, value in enumerate(values)))
    return str(path)


def test_a_run_directory_with_its_numbers_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(stories.write(tmp_path / "run", stories.one_rank()).path)
    assert main(["diagnose", run]) == 10
    shown = capsys.readouterr().out
    assert "Q1.2  What was the dtype regime in the run?\n      fp32 " in shown
    *_, conclusion, replay, stop, train = shown.splitlines()
    assert conclusion == "=> non-finite from step 149: ranks 1; layer groups not in the log"
    assert replay == f"   harness replay {run} --incident 1"
    assert stop == f"   harness ctl {run} stop --reason 'non-finite from step 149' --wait"
    changes = f"optim.clip_value=100 run.dir={tmp_path} run.name=run run.resume=changed"
    reason = "(its configuration cannot be written as overrides)"
    assert train == f"   # run the command of this run again with {changes} {reason}"
    assert main(["diagnose", run, "--json"]) == 10
    result = json.loads(capsys.readouterr().out)
    assert (result["finds"], result["exit_code"]) == ("not_finite", 10)
    assert [node["question"] for node in result["nodes"]] == ["Q1.1", "Q1.2", "Q1.3", "Q1.4"]


@pytest.mark.parametrize("overrides", [[], ["optim.lr=0.004"]])
def test_the_command_of_the_fix_keeps_the_configuration_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    cfg = compose.load([*overrides, f"run.dir={tmp_path}", "run.name=run"])
    run = stories.write(tmp_path / "run", stories.one_rank(), compose.to_yaml(cfg))
    assert main(["diagnose", str(run.path)]) == 10
    *_, train = capsys.readouterr().out.splitlines()
    changes = ["optim.clip_value=100", f"run.dir={tmp_path}", "run.name=run", "run.resume=changed"]
    assert train.split() == ["harness", "train", *overrides, *changes]


def test_a_csv_of_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spiked = losses(600)
    spiked[400:403] = [9.0, 8.0, 7.0]
    assert main(["diagnose", csv(tmp_path / "a.csv", losses(600))]) == 0
    assert main(["diagnose", csv(tmp_path / "b.csv", spiked)]) == 20
    assert "back at step 403" in capsys.readouterr().out
    assert main(["diagnose", csv(tmp_path / "c.csv", [*losses(300), math.nan]), "--precision", "bf16"]) == 10
    shown = capsys.readouterr().out
    assert "as for fp32, an exponent overflow near 1e38" in shown
    assert "restore a checkpoint from before it, if there is one" in shown


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("command", ["judge", "diagnose"])
def test_a_learning_rate_that_was_changed_on_purpose_is_no_jump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, is_planned: bool
) -> None:
    """An operator halves the rate before step 200; a resume with another schedule doubles it before step 400."""
    log: list[Event] = [
        replace(row, time=float(row.step), lr=0.001 if 200 <= row.step < 400 else 0.002)
        for row in records(losses(600), norms(600))
    ]
    cool = Action(
        time=199.5,
        iteration=199,
        kind=ActionKind.cool,
        step=199,
        incident=0,
        reason="try",
        onset=199,
        lr_scale=0.5,
    )
    changes = {"optim.lr": [0.001, 0.002]}
    resumed = Intervention(time=399.5, iteration=399, who="ada", reason="run.resume=changed", changes=changes)
    if is_planned:
        log[400:400], log[200:200] = [resumed], [cool]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{to_json(event)}\n" for event in log))
    main([command, str(path)])
    assert ("lr_jump" in capsys.readouterr().out) is not is_planned


def test_a_run_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stories.write(tmp_path / "run", [])
    assert main(["diagnose", str(run.path)]) == 0
    assert capsys.readouterr().out == "=> the log has no steps yet\n"


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd.csv"
    empty.mkdir()
    odd.write_text("a,b\n1,2\n")
    for args, line in (
        ([str(tmp_path / "gone")], f"harness: {tmp_path / 'gone'}: no such run directory or file\n"),
        ([str(empty)], f"harness: {empty}: is not a run directory: it has no events.jsonl\n"),
        ([str(odd)], f"harness: {odd}: no column for the loss; choose one with --column loss=NAME, from 'a', 'b'\n"),
        ([], "harness: diagnose: the following arguments are required: RUN; see --help\n"),
    ):
        assert main(["diagnose", *args]) == 2
        assert capsys.readouterr().err == line
    assert main(["diagnose", str(odd), "--precision", "fp9"]) == 2
    assert capsys.readouterr().err.startswith("harness: diagnose: argument --precision: invalid choice: 'fp9'")
