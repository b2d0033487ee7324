"""Known stories of runs that ended without an incident: the cause that a post-mortem must name first."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from harness.analysis.postmortem.endings import ADVICE, find_ending
from harness.config.errors import EXIT_INTERRUPTED, StorageError
from harness.core.events import EndCause, RunEnded, RunStarted
from harness.core.rundir import RunDir
from harness.telemetry.event_log import record_crash, tail
from launch.cli.main import main
from launch.local.ranks import RankFailure
from launch.local.worker_pool import describe_error
from tests.analysis.postmortem import stories

STARTED = RunStarted(time=5.0, iteration=0, world_size=2, num_steps=400, step=0)


def raised(error: Exception) -> RankFailure:
    """The failure of a rank that raises this error, as its launcher reads it."""
    try:
        raise error
    except Exception as caught:
        return RankFailure(rank=1, log="", **({"exit_code": 1} | describe_error(caught)))


def lost_mount() -> RankFailure:
    return raised(StorageError(errno.ESTALE, "cannot read it: Stale file handle", "/data/web.bin"))


def out_of_memory() -> RankFailure:
    failure = raised(MemoryError("Unable to allocate 7.45 GiB for an array"))
    assert failure.shortage["kind"] == "memory"
    return RankFailure(rank=1, exit_code=1, log="", shortage=failure.shortage, explanation="ran out of memory")


STORIES = [
    (out_of_memory, EndCause.out_of_memory),
    (lost_mount, EndCause.lost_storage),
    (lambda: RankFailure(rank=1, exit_code=-9, log=""), EndCause.killed_rank),
    (lambda: raised(ZeroDivisionError("a bug")), EndCause.error),
    (lambda: RankFailure(rank=1, exit_code=EXIT_INTERRUPTED, log=""), EndCause.unknown),
]
"""A failure of a rank, and the cause that must come first."""


@pytest.mark.parametrize(("story", "cause"), STORIES, ids=["memory", "mount", "killed", "bug", "stopped"])
def test_the_cause_of_a_failure(story: object, cause: EndCause) -> None:
    assert callable(story)
    assert story().cause is cause


@pytest.mark.parametrize("cause", [EndCause.out_of_memory, EndCause.lost_storage])
def test_the_post_mortem_of_a_crashed_run_names_its_cause(
    tmp_path: Path, cause: EndCause, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stories.write(tmp_path / "run", [STARTED, *stories.log_of({})])
    record_crash(run, 1, "rank 1 on a is gone", cause)
    assert main(["postmortem", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(
        f"{run.path}: no incidents; ended at step {stories.NUM_ROWS - 1} with exit code 1; cause: {cause}; rank 1 on a"
    )


def test_every_cause_has_an_advice() -> None:
    assert set(ADVICE) == set(EndCause) - {EndCause.unknown}


@pytest.mark.full
def test_a_crash_after_an_incident_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stories.write(tmp_path / "run", stories.poisoned())
    record_crash(run, 75, "/data/web.bin: cannot read it: Stale file handle", EndCause.lost_storage)
    assert main(["postmortem", str(run.path), "--incident", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "with exit code 75; cause: lost storage; /data/web.bin: cannot read it" in last


def test_runs_that_ended_by_themselves_have_no_ending() -> None:
    def ended(**changes: object) -> RunEnded:
        values = {"time": 6.0, "iteration": 9, "step": 9, "exit_code": 0, "reason": "all steps done"} | changes
        return RunEnded(**values)  # type: ignore[arg-type]

    crash = ended(exit_code=1, cause="out of memory")
    assert find_ending([STARTED]) is None
    assert find_ending([STARTED, ended()]) is None
    assert find_ending([STARTED, ended(exit_code=3, reason="halted")]) is None
    assert find_ending([STARTED, crash, STARTED]) is None, "it runs again"
    found = find_ending([STARTED, crash])
    assert found is not None
    assert found.cause is EndCause.out_of_memory
    newer = find_ending([STARTED, ended(exit_code=1, cause="cosmic ray")])
    assert newer is not None
    assert newer.cause is EndCause.unknown, "a newer version knows more causes"


def test_a_crash_has_the_time_and_the_place_of_the_last_event(tmp_path: Path) -> None:
    """So that the time until the crash was noticed counts as stopped, not as saving."""
    run = stories.write(tmp_path / "run", stories.log_of({}))
    last = tail(run.events)[-1]
    record_crash(run, 1, "gone", EndCause.killed_rank)
    ended = tail(run.events)[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.time, ended.iteration, ended.step) == (last.time, last.iteration, stories.NUM_ROWS - 1)
    empty = RunDir(tmp_path / "new")
    empty.path.mkdir()
    empty.config.touch()
    record_crash(empty, 1, "gone", EndCause.killed_rank)
    (first,) = tail(empty.events)
    assert isinstance(first, RunEnded)
    assert (first.step, first.cause) == (0, "killed rank")
