"""Tests that every scenario in `conf/drill` loads, and that every error is one line about its key."""

from __future__ import annotations

import pytest
import yaml

from harness.config import conf_files
from harness.config.errors import ConfigError
from harness.drills import directories, scenario
from harness.faults.fault_plan import FaultKind

SHARED = "drill.bounds has latency_steps, steps_lost, seconds, loss_gap, identical, false_alarms, excluded"


@pytest.mark.parametrize("name", scenario.names())
@pytest.mark.usefixtures("composed_once")
def test_every_scenario_loads(name: str) -> None:
    loaded = scenario.load_scenario(name)
    assert loaded.summary
    assert "\n" not in loaded.summary
    assert scenario.scenario_from_tree(loaded.as_dict()) == loaded
    cfg = directories.configure(loaded.train, ())
    assert loaded.fault.at + loaded.fault.duration <= cfg.train.num_steps + 20
    assert not cfg.telemetry.mlflow


def test_every_kind_of_fault_has_a_scenario() -> None:
    assert {scenario.load_scenario(name).fault.kind for name in scenario.names()} == set(FaultKind)


def test_overrides_of_a_scenario_follow_those_of_the_base() -> None:
    base = yaml.safe_load((conf_files.conf_dir() / "drill/base.yaml").read_text())["train"]
    hung = scenario.load_scenario("hung_rank").train
    assert hung[: len(base)] == base
    assert hung[len(base) :] == ["launch.hang_after_s=30", "parallel.timeout_s=60"]


def test_overrides_of_the_scenario_are_separated_from_those_of_the_training() -> None:
    overrides = ["drill.fault.at=40", "optim.lr=1e-3", "drill.bounds.seconds=null", "drill.train=[a=b]"]
    loaded = scenario.load_scenario("kill_rank", overrides)
    assert (loaded.fault.at, loaded.bounds.seconds, loaded.train) == (40, None, ["a=b"])
    assert [scenario.changes_scenario(override) for override in overrides] == [True, False, True, True]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drill.bounds.second=5", f"drill.bounds.second: no such key; {SHARED}; did you mean seconds?"),
        (
            "drill.nope=5",
            "drill.nope: no such key; drill has summary, fault, expected, bounds, train, needs, ",
        ),
        ("drill.bounds.seconds=abc", "drill.bounds.seconds: must be a number, got 'abc'"),
        ("drill.bounds.seconds=-1", "drill.bounds.seconds: must be 0 or more, or null, got -1.0"),
        ("drill.bounds=3", "drill.bounds: must be a section of keys, got 3; its keys are latency_steps, "),
        ("drill.fault.kind=flood", "drill.fault.kind: must be one of nan_loss, nan_activation, "),
        ("drill.fault.rank=abc", "drill.fault.rank: must be an integer, got 'abc'"),
        ("drill.fault.at=-1", "drill.fault.at: must be 0 or more, got -1"),
        ("drill.fault.bit=77", "drill.fault.bit: must be from 0 to 31, got 77"),
        ("drill.expected.findings=[odd]", "drill.expected.findings[0]: must be one of nonfinite, "),
        ("drill.expected.actions=skip", "drill.expected.actions: must be a list: [...]"),
        ("drill.expected.starts=0", "drill.expected.starts: must be at least 1, got 0"),
        ("drill.expected.notices=[]", "drill.expected.names_rank: must be false without drill.expected.findings"),
        ("drill.seed=1.5", "drill.seed: must be an integer, got '1.5'"),
        ("drill.train=null", "drill.train: must not be null"),
        ("drill.limit_s=0", "drill.limit_s: must be positive, got 0.0"),
        ("drill.seed", "drill.seed: cannot be parsed; write key=value"),
        ("drill.fault.at=[1", "drill.fault.at=[1: cannot be parsed; write key=value"),
    ],
)
def test_a_bad_override_is_one_line(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario.load_scenario("kill_rank", [override])
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_an_unknown_scenario_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^drill: no scenario 'kil_rank'; choose one of .*, or all; did you mean kill_rank\?$"
    ):
        scenario.load_scenario("kil_rank")


def test_expectations_in_words() -> None:
    killed, broken, planned = (scenario.load_scenario(name) for name in ("kill_rank", "nan_grad", "data_shift_planned"))
    assert killed.expected.describe() == "no finding, the rank is named, no action, 2 starts"
    assert killed.bounds.describe() == (
        "at most 20 steps lost, at most 180 s to recover, last losses equal to those of a run without the fault"
    )
    assert broken.expected.describe().startswith("finding nonfinite, the rank is named, ")
    assert planned.expected.describe() == "no finding, action accept"
    assert "at most 0 batches excluded" in planned.bounds.describe()
