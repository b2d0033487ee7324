"""When a job begins again, without which nodes, and what its book says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.control import stop_requests
from harness.core.locking import directory_lease, lease_holder
from harness.core.locking.run_lease import FOLDER
from harness.core.rundir import RunDir
from launch.slurm import controller, job_directory, requeue
from launch.slurm.node_exclusion import Exclusion
from launch.slurm.requeue import Age, Decision, End, Ended, decide, is_stall, last_progress, update_of

ROOT = Path(__file__).parents[3]
COMPOSED = compose.load(["model=tiny", "launch=slurm"])
LIMITS = replace(COMPOSED.launch.slurm, max_requeues=5, max_stalled=3)


def config(directory: Path, name: str | None = "first") -> Config:
    cfg = deepcopy(COMPOSED)
    cfg.run.dir, cfg.run.name = str(directory), name
    cfg.launch.slurm = replace(LIMITS, max_requeues=4)
    return cfg


HERE = Ended(75, "RUNNING", "None", "")
CODES = (1, 75, 69, 137, None)


def end(saved: Age | None = None, *, code: int | None = 75, requeued: bool = True) -> End:
    return End(time=0.0, job="7", start=1, exit_code=code, good=None, requeued=requeued, reason="", saved=saved)


@pytest.mark.parametrize(
    ("ended", "decision"),
    [
        (HERE, Decision(True, "asked to leave")),
        (HERE._replace(exit_code=1), Decision(True, "crashed with exit code 1")),
        (HERE._replace(exit_code=69), Decision(True, "a node failed its health check")),
        (HERE._replace(exit_code=None), Decision(True, requeue.BY_SLURM)),
        (HERE._replace(exit_code=0), Decision(False, "all steps done")),
        (
            HERE._replace(exit_code=2),
            Decision(False, "bad configuration, or another start of this run is alive"),
        ),
        (HERE._replace(exit_code=3), Decision(False, "halted by the sentinel")),
        (HERE._replace(state=""), Decision(False, "Slurm does not say how the job stands")),
        (
            HERE._replace(state="COMPLETING"),
            Decision(False, "ended from outside, by scancel or by a requeue that is not this one's"),
        ),
        (HERE._replace(because="TimeLimit"), Decision(True, "asked to leave")),
        (HERE._replace(state="COMPLETING", because="TimeLimit"), Decision(True, "asked to leave")),
        (
            HERE._replace(stopped_by="asked by ada: lunch"),
            Decision(False, "stopped on purpose, asked by ada: lunch"),
        ),
    ],
)
def test_which_ends_begin_again(ended: Ended, decision: Decision) -> None:
    assert decide(ended, [], None, LIMITS) == decision
    assert decide(ended, [end((0, 10))], (0, 20), LIMITS) == decision


@pytest.mark.parametrize("code", CODES)
def test_a_run_that_advances_is_never_ended_by_a_limit(code: int | None) -> None:
    history: list[End] = []
    for number in range(1, 100):
        assert decide(HERE._replace(exit_code=code), history, (0, 10 * number), LIMITS).again
        history.append(end((0, 10 * number), code=code))


@pytest.mark.parametrize("code", [69, None])
def test_nodes_that_fail_cost_a_run_no_more_than_max_requeues(code: int | None) -> None:
    """The starts in which a node failed do not count as the run's own."""
    history = [end((0, 20))]
    ended = HERE._replace(exit_code=code)
    for _ in range(LIMITS.max_requeues - 1):
        assert decide(ended, history, (0, 20), LIMITS).again
        history.append(end((0, 20), code=code))
    assert decide(ended, history, (0, 20), LIMITS) == Decision(
        False, "begun again 5 times without a newer checkpoint (the newest is of step 20), launch.slurm.max_requeues=5"
    )
    assert decide(ended, history, (0, 21), LIMITS).again, "progress resets the count"
    assert decide(ended, [*history, end((0, 30))], (0, 30), LIMITS).again


@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_run_that_stalls_is_ended_sooner(code: int) -> None:
    ended = HERE._replace(exit_code=code)
    stalled = [end((0, 20), code=code), end((0, 20), code=code)]
    assert decide(ended, [end((0, 20)), stalled[0]], (0, 20), LIMITS).again
    reason = "3 starts in a row ended without a newer checkpoint (the newest is of step 20), launch.slurm.max_stalled=3"
    assert decide(ended, [end((0, 20)), *stalled], (0, 20), LIMITS) == Decision(False, reason)
    assert decide(ended, [end((0, 20)), *stalled], (0, 30), LIMITS).again, "progress resets the count"
    assert decide(ended, [*stalled, end((0, 30))], (0, 30), LIMITS).again
    with_health = [end((0, 20)), stalled[0], end((0, 20), code=69), end((0, 20), code=None)]
    assert decide(ended, with_health, (0, 20), LIMITS).again, "a node's failure is no stall"
    assert not decide(ended, [*with_health, stalled[0]], (0, 20), LIMITS).again, "and does not hide one"


def test_a_run_without_any_checkpoint_is_ended_too() -> None:
    crashed = HERE._replace(exit_code=1)
    assert decide(crashed, [end(code=1)], None, LIMITS).again
    assert decide(crashed, [end(code=1), end(code=1)], None, LIMITS) == Decision(
        False, "3 starts in a row ended without a newer checkpoint (there is none), launch.slurm.max_stalled=3"
    )
    sick = HERE._replace(exit_code=69)
    assert decide(sick, [end(code=69)] * 4, None, LIMITS).again
    assert decide(sick, [end(code=69)] * 5, None, LIMITS) == Decision(
        False, "begun again 5 times without a newer checkpoint (there is none), launch.slurm.max_requeues=5"
    )


def test_only_requeues_are_counted_as_such() -> None:
    sick = HERE._replace(exit_code=69)
    assert decide(sick, [end(code=69, requeued=False), *[end(code=69)] * 4], None, LIMITS).again


def test_no_requeue_at_all() -> None:
    limits = replace(LIMITS, max_requeues=0)
    assert decide(HERE, [], (0, 10), limits) == Decision(False, "launch.slurm.max_requeues=0 allows no requeue")
    once = replace(LIMITS, max_requeues=1)
    assert decide(HERE, [], None, once).again
    assert not decide(HERE, [end()], None, once).again
    assert decide(HERE, [end((0, 10))], (0, 20), once).again


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(CODES)), max_size=8), st.sampled_from(CODES))
def test_no_job_begins_again_for_ever(before: list[tuple[int, int | None]], code: int | None) -> None:
    """Whatever happened, a job that makes no newer checkpoint ends within `max_requeues` more starts."""
    history = [end((0, step), code=each) for step, each in before]
    newest = max((each.saved for each in history if each.saved), default=None)
    for _ in range(LIMITS.max_requeues + 1):
        if not decide(HERE._replace(exit_code=code), history, newest, LIMITS).again:
            return
        history.append(end(newest, code=code))
    pytest.fail("began again too often")


def test_progress_is_a_newer_checkpoint_than_ever_before() -> None:
    ages: list[Age | None] = [None, (0, 5), (0, 5), (0, 3), (0, 5), (1, 3), None, (1, 3), (0, 9), (1, 4)]
    assert [last_progress(ages[:length]) for length in range(11)] == [-1, -1, 1, 1, 1, 1, 5, 5, 5, 5, 9]
    assert [is_stall(code) for code in CODES] == [True, True, False, True, False]


def test_what_an_end_reached() -> None:
    assert end().reached is None
    assert end((0, 30)).reached == (0, 30)
    assert replace(end(), good=(0, 20)).reached == (0, 20), "of a line that was written before `saved`"
    assert replace(end((0, 30)), good=(0, 20)).reached == (0, 30)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return job_directory.lay_out(config(tmp_path))


def make_checkpoint(run: RunDir, step: int, health: Health) -> None:
    path = run.checkpoints / catalog.name_of(step, 0)
    path.mkdir(parents=True)
    catalog.mark(path, health, "by the test")


def test_a_start_by_slurm_itself_is_written_down_and_counts(run: RunDir) -> None:
    requeue.settle(run, HERE, job="7", start=1)
    assert requeue.begin(run, "7", 2) == Decision(True, "")
    assert requeue.begin(run, "7", 3) == Decision(True, requeue.BY_SLURM)
    with requeue.book(run).open("a") as book:
        book.write('{"half a li\n["a", "list"]\n')
    make_checkpoint(run, 20, Health.candidate)
    assert requeue.begin(run, "7", 4) == Decision(True, requeue.BY_SLURM)
    assert not requeue.begin(run, "7", 9).again
    assert requeue.begin(run, "8", 1) == Decision(True, ""), "another job has a book of its own"
    assert [(end.start, end.exit_code, end.saved) for end in requeue.read(run)] == [
        (1, 75, None),
        (2, None, None),
        *[(start, None, (0, 20)) for start in range(3, 9)],
    ]


def test_a_first_start_that_nobody_saw_the_end_of(run: RunDir) -> None:
    assert requeue.begin(run, "7", 1) == Decision(True, "")
    assert requeue.begin(run, "7", 2) == Decision(True, requeue.BY_SLURM)
    assert [(end.start, end.exit_code) for end in requeue.read(run)] == [(1, None)]


def test_the_command_counts_the_restarts_of_slurm(run: RunDir, stand_ins: Path) -> None:
    """`python -m launch.slurm.requeue begin`, as the job's script runs it after Slurm restarted the job twice."""
    assert stand_ins
    ended = subprocess.run(
        [sys.executable, "-m", "launch.slurm.requeue", "begin", str(run.path), "7"],
        cwd=ROOT,
        env=os.environ | {"SLURM_RESTART_COUNT": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, f"harness: job 7 goes on: {requeue.BY_SLURM}\n")
    assert [(end.start, end.exit_code) for end in requeue.read(run)] == [(1, None), (2, None)]


def test_the_checkpoint_that_a_start_resumes_from_is_progress(run: RunDir) -> None:
    """A run that is told to leave more often than a checkpoint needs to become good advances all the same."""
    for number in range(1, 6):
        make_checkpoint(run, 10 * number, Health.candidate)
        assert requeue.settle(run, HERE, job="7", start=number).requeued
    make_checkpoint(run, 500, Health.tainted)
    last = requeue.settle(run, HERE, job="7", start=6)
    assert (last.saved, last.good) == ((0, 50), None)
    make_checkpoint(run, 5, Health.good)
    assert requeue.settle(run, HERE, job="7", start=7).good == (0, 5)


def test_a_book_of_before_can_be_read(run: RunDir) -> None:
    line = {"time": 1.0, "job": "7", "start": 1, "exit_code": 75, "good": [0, 20], "requeued": True, "reason": "asked"}
    requeue.book(run).write_text(json.dumps(line) + "\n")
    (known,) = requeue.read(run)
    assert (known.good, known.reached, known.unhealthy, known.excluded) == ((0, 20), (0, 20), {}, ())


SICK = {"n2": "GPU 0 has 2 uncorrected ECC errors"}


def test_a_node_that_failed_twice_is_excluded_and_the_book_says_so(run: RunDir) -> None:
    ended = HERE._replace(exit_code=69)
    first = requeue.settle(run, ended, job="7", start=1, unhealthy=SICK)
    assert (first.requeued, first.excluded) == (True, ())
    second = requeue.settle(run, ended, job="7", start=2, unhealthy=SICK)
    (exclusion,) = second.excluded
    assert (exclusion.node, exclusion.reason, exclusion.num_failures) == ("n2", SICK["n2"], 2)
    assert exclusion.until == pytest.approx(second.time + 24 * 3600.0)
    assert requeue.read(run)[-1] == second
    assert requeue.settle(run, HERE, job="8", start=1).excluded == (exclusion,), "also for the next job of the run"


def test_slurm_is_asked_whether_the_job_could_start(run: RunDir, stand_ins: Path) -> None:
    (stand_ins / "sbatch").write_text('#!/bin/sh\necho "$@" >> "$0.log"\ntest "$2" != --exclude=n1,n2\n')
    ended = HERE._replace(exit_code=69)
    both = {"n1": "a", **SICK}
    requeue.settle(run, ended, job="7", start=1, unhealthy=both)
    second = requeue.settle(run, ended, job="7", start=2, unhealthy=both, sbatch=["--nodes=3", "script"])
    assert [exclusion.node for exclusion in second.excluded] == ["n1"]
    assert (stand_ins / "sbatch.log").read_text() == (
        "--test-only --exclude=n1,n2 --nodes=3 script\n--test-only --exclude=n1 --nodes=3 script\n"
    )


def test_what_the_job_is_told_to_leave_out() -> None:
    ends = [replace(end(), unhealthy={"n2": "old"}), replace(end(), unhealthy={"n3": "new"})]
    third = Exclusion(node="n3", reason="new", num_failures=2, until=0.0)
    assert update_of([], ends, []) == update_of(["n3"], ends, [third]) == update_of(["n9"], ends, []) == ""
    assert update_of([], ends, [third]) == "ExcNodeList=n3"
    assert update_of(["n9", "n2"], ends, [third]) == "ExcNodeList=n9,n3", "the user's stays, what expired goes"
    assert update_of(["n2"], ends, []) == "ExcNodeList="


def scontrol(state: str = "RUNNING", excluded: str = "(null)") -> str:
    shown = f"JobId=7 JobState={state} Reason=None ExcNodeList={excluded}"
    return f'#!/bin/sh\nif [ "$2" = hostnames ]; then echo "$3" | tr , "\\n"; else echo "{shown}"; fi\n'


def test_the_script_is_told_what_to_update(
    run: RunDir, stand_ins: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (stand_ins / "scontrol").write_text(scontrol(excluded="n9"))
    (stand_ins / "sbatch").write_text("#!/bin/sh\n")
    log = tmp_path / "complaints"
    log.write_text("harness: health: node n2: broken\nsrun: error: n2: task 0: Exited with exit code 69\n")
    words = ["end", str(run.path), "7", "69", str(log), "script"]
    assert requeue.main(words) == 0
    assert capsys.readouterr() == ("", "harness: job 7 begins again: a node failed its health check\n")
    assert requeue.main(words) == 0
    out, err = capsys.readouterr()
    assert out == "ExcNodeList=n9,n2"
    assert err.splitlines()[0].startswith("harness: node n2 is excluded until ")
    assert err.splitlines()[0].endswith(": failed 2 health checks, last: broken")
    assert requeue.main(["end", str(run.path), "7", "0", "", "script"]) == 1
    assert capsys.readouterr().out == "", "a job that ends needs no update"


def test_a_silent_controller_ends_the_job(
    run: RunDir, stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stand_ins
    monkeypatch.setattr(controller, "ASK_AGAIN_S", (0.0,))
    assert requeue.main(["end", str(run.path), "7", "75", ""]) == 1
    assert capsys.readouterr().err == "harness: job 7 ends here: Slurm does not say how the job stands\n"


def test_a_run_belongs_to_one_job(run: RunDir, stand_ins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two submissions of the same sweep, both waiting: the second to begin leaves the run alone."""
    (stand_ins / "squeue").write_text('#!/bin/sh\ntest "$2" = --jobs=7_1 && echo RUNNING\n')
    assert requeue.main(["begin", str(run.path), "7_1"]) == 0
    known = job_directory.recall(run)
    assert known is not None
    assert known.job == "7_1", "a run that nobody remembered is taken"
    assert requeue.main(["begin", str(run.path), "7_1"]) == 0
    assert requeue.main(["begin", str(run.path), "8_1"]) == 2
    line = f"harness: {run.path}: belongs to job 7_1, which is running; job 8_1 leaves it alone\n"
    assert capsys.readouterr().err == line
    assert job_directory.recall(run) == known
    assert requeue.read(run) == []
    (stand_ins / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n")
    assert requeue.main(["begin", str(run.path), "8_1"]) == 0, "the other one is gone"
    (stand_ins / "squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n")
    assert requeue.main(["begin", str(run.path), "9_1"]) == 2, "who knows whether the other one is gone"
    assert "cannot tell whether job 8_1 is alive: squeue: Unable to contact" in capsys.readouterr().err


def test_a_job_leaves_a_run_alone_that_a_living_process_writes(
    run: RunDir, stand_ins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was started by hand, and belongs to no job: a signal to this job must not become a STOP for that run."""
    assert stand_ins
    with subprocess.Popen(["sleep", "60"]) as other:
        start = lease_holder.start_of(other.pid)
        assert start is not None
        me = replace(lease_holder.this_process(), pid=other.pid, started=start)
        held = directory_lease.acquire(run.path / FOLDER, me, on_lost=lambda _: None)
        try:
            assert requeue.main(["begin", str(run.path), "7"]) == 2
        finally:
            other.kill()
    line = capsys.readouterr().err
    assert line.startswith(f"harness: run.name: {run.path} is in use by pid {other.pid} on ")
    assert line.count("\n") == 1
    assert job_directory.recall(run) is None, "the run is not this job's"
    held.release()
    assert requeue.main(["begin", str(run.path), "7"]) == 0


def test_a_person_who_stops_a_run_means_it_and_a_job_that_leaves_does_not(run: RunDir) -> None:
    assert requeue.stopped_by(run) == ""
    stop_requests.ask(run, who="ada", reason="lunch")
    assert requeue.stopped_by(run) == "asked by ada: lunch"
    stop_requests.ask(run, who="slurm", reason="the time of job 7 is nearly up")
    assert requeue.stopped_by(run) == ""
    run.stop.write_text("")
    assert requeue.stopped_by(run) == "by the file STOP"
    job_directory.lay_out(config(run.path.parent))
    assert requeue.stopped_by(run) == "", "who asks for a start takes the stop back"


def test_a_plain_job_leaves_the_run_of_another_alone(stand_ins: Path, tmp_path: Path) -> None:
    (stand_ins / "squeue").write_text('#!/bin/sh\ntest "$2" = --jobs=12 && echo RUNNING\n')
    run, _ = job_directory.lay_out_in_job(config(tmp_path), "12", 1)
    stop_requests.ask(RunDir(run), who="ada", reason="lunch")
    with pytest.raises(ConfigError, match="belongs to job 12, which is running; job 13 leaves it alone"):
        job_directory.lay_out_in_job(config(tmp_path), "13", 1)
    assert requeue.stopped_by(RunDir(run)) == "asked by ada: lunch"


def test_a_task_of_an_array_goes_by_its_own_name() -> None:
    assert job_directory.job_of({"SLURM_JOB_ID": "12"}) == "12"
    assert (
        job_directory.job_of({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}) == "11_3"
    )
