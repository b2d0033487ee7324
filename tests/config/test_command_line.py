"""Tests of printed commands: a shell and Hydra together read the value that was written."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.config.command_line import override, run_overrides, shell_command
from tests.composed import load

SWEEP_JOB = "optim.lr=10,optim.beta2=0.99"
names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1).filter(
    lambda name: not name.startswith(".") and name != "???" and len(name.encode()) <= 255
)
"""What `run.name` allows. OmegaConf reads ??? as a missing value."""
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names
values = st.recursive(scalars, lambda items: st.lists(items) | st.dictionaries(st.sampled_from(["web", "kind"]), items))


def shell(command: str) -> list[str]:
    """The arguments that a shell passes on for a command line."""
    shown = subprocess.run(["sh", "-c", f"set -- {command}; printf '%s\\0' \"$@\""], check=True, capture_output=True)
    return shown.stdout.decode().split("\0")[:-1]


@settings(max_examples=30)
@given(names)
@example(SWEEP_JOB)
@example("with space")
@example("名前")
@example("1.10")
@example("null")
@example('it\'s "odd" $HOME `ls` \\')
@example("\\'\\\"\\\\\n")
@example("${a} \\${b} $${")
def test_any_name_of_a_run_survives_shell_and_hydra(name: str) -> None:
    run = Path("/runs") / name / name
    command, *overrides = shell(shell_command("train", *run_overrides(run)))
    cfg = load(overrides)
    assert command == "train"
    assert (cfg.run.dir, cfg.run.name) == (str(run.parent), name)


@given(values)
def test_values_of_every_kind_survive_hydra(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(override("key", value)).value()
    assert OmegaConf.to_object(OmegaConf.create({"key": parsed})) == {"key": value}


def test_plain_values_have_no_quotes() -> None:
    assert shell_command("harness", "train", *run_overrides("../runs/first-2"), override("optim.lr", 1e-5)) == (
        "harness train run.dir=../runs run.name=first-2 optim.lr=1e-05"
    )
    assert shell_command(override("run.name", SWEEP_JOB)) == f"""'run.name="{SWEEP_JOB}"'"""


def test_the_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "logs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "first" / "logs")
    assert run_overrides("..") == [f"run.dir={tmp_path}", "run.name=first"]
    monkeypatch.chdir(tmp_path / "first")
    assert run_overrides(".") == [f"run.dir={tmp_path}", "run.name=first"]
