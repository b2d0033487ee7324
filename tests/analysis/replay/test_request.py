"""The configuration of a replayed step: that of its start, whatever later resumes have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.replay import history
from harness.analysis.replay.request import choose_path, config_of_path, plan_replay
from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core import rundir
from harness.core.event_json import to_json
from harness.core.rundir import RunDir
from tests.analysis.replay.test_history import PLAIN, saved, started, step
from tests.composed import load
from tests.distributed.cases import TINY

RESUMED_AFTER = 8


def resume(directory: Path, *changes: str, source: str = "at-8", num_ranks: int = 2) -> RunDir:
    """A run that was resumed with another configuration, or on another number of ranks."""
    place = [*TINY, f"run.dir={directory}", "run.name=first"]
    run = rundir.locate(load(place))
    rundir.prepare_run_dir(load(place), run)
    log = [*PLAIN[:-1], started(RESUMED_AFTER, source, num_ranks), *map(step, range(9, 13)), saved(12)]
    run.events.write_text("".join(f"{to_json(event)}\n" for event in log))
    rundir.prepare_run_dir(load([*place, *changes, "run.resume=changed"]), run, iteration=RESUMED_AFTER)
    return run


def config_of(run: RunDir, iteration: int, *available: str) -> Config:
    log = history.read(run.events)
    path = history.find_path(log, iteration, available) if available else choose_path(run, log, iteration)
    return config_of_path(run, compose.read(run.config), log, path)


def test_a_step_before_a_resume_has_the_configuration_of_its_start(tmp_path: Path) -> None:
    run = resume(tmp_path, "precision=bf16", "train.num_steps=90")
    before, after = config_of(run, RESUMED_AFTER), config_of(run, 9, "at-8")
    assert (before.precision.kind, after.precision.kind) == (PrecisionKind.fp32, PrecisionKind.bf16)
    assert (before.train.num_steps, after.train.num_steps) == (load(TINY).train.num_steps, 90)
    message = f"^{run.path}: iteration 9 cannot be replayed: the resume after iteration 8 changed precision.kind from"
    with pytest.raises(ConfigError, match=f"{message} fp32 to bf16"):
        config_of(run, 9)


def test_a_resume_with_another_schedule_can_be_crossed(tmp_path: Path) -> None:
    """The learning rate of each step is in the log, and a resume keeps the batches before it."""
    run = resume(tmp_path, "train.num_steps=90", "train.batch_size=16")
    assert config_of(run, 9).train.num_steps == 90
    assert config_of(run, 3).train.batch_size == 16


def test_a_step_whose_batch_another_one_has_replaced_is_rejected(tmp_path: Path) -> None:
    run = resume(tmp_path, "train.batch_size=16", source="at-4")
    config_of(run, 4)
    with pytest.raises(ConfigError, match=r"iteration 5 cannot be replayed: .* changed train.batch_size from 8 to 16"):
        config_of(run, 5)


@pytest.mark.parametrize(("available", "ranks", "exactly"), [("at-8", 1, True), ("at-4", 1, False), ("at-4", 2, False)])
def test_bits_are_compared_only_if_all_steps_had_the_same_number_of_ranks(
    tmp_path: Path, available: str, ranks: int, exactly: bool
) -> None:
    """The run continued on one rank after iteration 8."""
    run = resume(tmp_path, num_ranks=1)
    log, cfg = history.read(run.events), compose.read(run.config)
    path = history.find_path(log, 9, [available])
    assert plan_replay(run, cfg, log, path, ranks=ranks, report=tmp_path / "report").exactly is exactly
