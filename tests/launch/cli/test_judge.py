from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.judge.judge_picture import MOST_COLUMNS, Trace
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.policy.policy import Policy
from launch.cli.judge import detect_config, find_incidents, policy_config
from launch.cli.main import main
from tests.sentinel.series import losses, record


def write(path: Path, values: list[float]) -> str:
    path.write_text("step,loss\n" + "".join(f"{step},{value}\n" for step, value in enumerate(values)))
    return str(path)


def losses_with_spike() -> list[float]:
    values = losses(1500)
    values[1000:1030] = [1.4 * value for value in values[1000:1030]]
    return values


def incidents(output: str) -> list[dict[str, Any]]:
    found = json.loads(output.splitlines()[-1])["incidents"]
    assert isinstance(found, list)
    return found


def test_incidents_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", write(tmp_path / "log.csv", losses_with_spike()), "--json"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("1,500 rows, steps 0 to 1,499: 1 incident\nkind ")
    (incident,) = incidents(output)
    assert (incident["kind"], incident["onset_step"], incident["spike_type"]) == ("loss_spike", 1000, 1)
    assert incident["severity"] == "low"
    assert 1000 <= incident["detected_step"] <= incident["end_step"] <= 1045


def test_a_clean_log_and_one_full_of_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", write(tmp_path / "clean.csv", losses(500)), "--json"]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0].endswith("nothing found")
    assert incidents(output) == []
    assert main(["judge", write(tmp_path / "nan.csv", [math.nan] * 30), "--json"]) == 0
    (incident,) = incidents(capsys.readouterr().out)
    assert (incident["kind"], incident["onset_step"], incident["end_step"]) == ("nonfinite", 0, None)
    assert incident["peak_loss"] is None


def test_a_batch_without_a_token_to_predict_is_a_gap_in_the_plot() -> None:
    rows = [replace(record(at, 3.0), refused=at == 4) for at in range(8)]
    rows[4] = replace(rows[4], loss=0.0, grad_norm=0.0)
    trace = Trace()
    find_incidents(rows, Detectors(detect_config([])), Policy.start(policy_config(), lag=0), trace)
    assert [math.isnan(low) for _, low, _ in trace.columns] == [at == 4 for at in range(8)]


def test_columns_and_options_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a,b\n" + "".join(f"{step},{value}\n" for step, value in enumerate(losses_with_spike())))
    options = ["--column", "step=a", "--column", "loss=b", "--json"]
    assert main(["judge", str(path), *options]) == 0
    assert len(incidents(capsys.readouterr().out)) == 1
    assert main(["judge", str(path), *options, "--set", "spike_sigmas=1e9"]) == 0
    assert incidents(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.csv"], "absent.csv: no such file"),
        (
            ["directory"],
            "directory: is a directory; give a log such as directory/events.jsonl, or use harness diagnose directory",
        ),
        (
            ["log.csv", "--column", "loss=c"],
            "log.csv: no column for the loss; choose one with --column loss=NAME, from 'a', 'b'",
        ),
        (["log.csv", "--column", "speed=a"], "--column: must be NAME=COLUMN"),
        (["log.csv", "--set", "speed=1"], "--set: must be NAME=VALUE"),
        (["log.csv", "--set", "spike_sigmas=much"], "--set spike_sigmas: must be a number"),
        (["log.csv", "--set", "spike_sigmas=-1"], "sentinel.detect.spike_sigmas: must be positive"),
        (["none.csv"], "none.csv: has no row with a loss"),
        (["long.csv"], "long.csv: is neither CSV nor JSON lines: field larger than field limit"),
        (["/proc/self/mem"], "/proc/self/mem: cannot be read: Input/output error"),
        (["log.csv", "--plot", "absent/out.png"], "--plot: absent is not a directory"),
        (["good.csv", "--plot", "directory"], "--plot: directory cannot be written: Is a directory"),
        (["large.csv", "--plot", "out.png"], "--plot: cannot draw steps above 9.22e+18, got 1e+300"),
        ([], "judge: the following arguments are required: FILE"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.csv").write_text("a,b\n1,2\n")
    Path("none.csv").write_text("step,loss\n1,\n")
    Path("good.csv").write_text("step,loss\n1,2\n")
    Path("large.csv").write_text("step,loss\n1,2\n1e300,2\n")
    Path("long.csv").write_text("step,loss\n1," + "2" * 200_000)
    Path("directory").mkdir()
    assert main(["judge", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_plot_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    assert main(["judge", write(tmp_path / "log.csv", losses_with_spike()), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_long_log_is_thinned_without_losing_its_spikes() -> None:
    trace = Trace()
    for step in range(50_000):
        trace.add(step, 9.0 if step == 31_234 else math.nan if step == 7 else 3.0)
    assert len(trace.columns) < MOST_COLUMNS
    (spike,) = [step for step, _, high in trace.columns if high == 9.0]
    assert 0 <= 31_234 - spike < trace.rows_each
    assert (trace.num_rows, trace.first_step, trace.last_step) == (50_000, 0, 49_999)
    assert all(low == 3.0 for _, low, _ in trace.columns)
