"""Replays after the end of a run: the guilty step is measured, or the report says why not."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.postmortem.write import MARKDOWN, write_folder
from harness.analysis.replay import after_run
from harness.analysis.replay.after_run import (
    SKIPPED_FILE,
    ReplayTimeoutError,
    check_cost,
    replay_after_run,
    time_limit,
)
from harness.config.errors import ConfigError
from harness.core.events import Incident
from tests.analysis.postmortem import stories
from tests.composed import load
from tests.distributed.cases import TINY


def test_a_replay_that_takes_too_long_is_not_begun() -> None:
    cfg = load(TINY)
    check_cost(cfg, 10, within_s=60, memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"100000 steps would take about [0-9]+ s on the CPU"):
        check_cost(cfg, 100_000, within_s=60, memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"of memory, and 0\.0 GB are free"):
        check_cost(cfg, 10, within_s=60, memory_bytes=1e6)
    large = replace(cfg, model=load(["model=1b"]).model)
    with pytest.raises(ConfigError, match="on the CPU"):
        check_cost(large, 10, within_s=60, memory_bytes=1e15)


def test_time_limit() -> None:
    with time_limit(30):
        pass
    with pytest.raises(ReplayTimeoutError, match=r"did not finish within 0\.05 s"), time_limit(0.05):
        time.sleep(5)


def test_a_limit_that_python_dropped_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __del__(self) -> None:
            time.sleep(0.3)

    def work() -> None:
        Slow()
        time.sleep(30)

    monkeypatch.setattr(after_run, "REPEAT_S", 0.2)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with pytest.raises(ReplayTimeoutError), time_limit(0.05):
        work()


def test_report_says_why_the_step_was_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_run, "CPU_FLOPS", 1.0)
    log = stories.one_rank()
    run = stories.write(tmp_path / "run", log)
    assert not replay_after_run(run, 1, within_s=60)
    reason = (run.incidents / "001" / SKIPPED_FILE).read_text()
    assert reason.startswith("The step was not replayed after the run: ")
    assert reason.endswith(f"; run `harness replay {run.path} --incident 1`.\n")
    assert len(reason.splitlines()) == 1
    (incident,) = [event for event in log if isinstance(event, Incident)]
    assert reason in (write_folder(run, incident) / MARKDOWN).read_text()
