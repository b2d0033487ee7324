"""Which ends of a job are requeued, which nodes are excluded, and what is recorded."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.control import stop_requests
from harness.core.locking import directory_lease, lease_holder
from harness.core.locking.run_lease import FOLDER
from harness.core.rundir import RunDir
from launch.node_record import NodeRecord
from launch.restart_budget import Reached, RestartDecision, last_progress
from launch.slurm import controller, job_directory, requeue
from launch.slurm.node_exclusion import NodeExclusion, NodeFault, NodeFaultKind
from launch.slurm.requeue import (
    JobEnd,
    JobExit,
    decide_requeue,
    exclusion_update,
    is_stall,
    list_user_excluded,
    read_ends,
)
from tests import composed
from tests.full_disk import fill, may_mount, small_disk

ROOT = Path(__file__).parents[3]
COMPOSED = composed.load(["model=tiny", "launch=slurm"])
LIMITS = replace(COMPOSED.launch.slurm, max_requeues=5, max_stalled=3)


def config(directory: Path, name: str | None = "first") -> Config:
    cfg = deepcopy(COMPOSED)
    cfg.run.dir, cfg.run.name = str(directory), name
    cfg.launch.slurm = replace(LIMITS, max_requeues=4)
    return cfg


HERE = JobExit(75, "RUNNING", "None", "")
CODES = (1, 75, 69, 137, None)


def end(saved: Reached | None = None, *, code: int | None = 75, requeued: bool = True) -> JobEnd:
    return JobEnd(time=0.0, job="7", start=1, exit_code=code, good=None, requeued=requeued, reason="", saved=saved)


@pytest.mark.parametrize(
    ("ended", "decision"),
    [
        (HERE, RestartDecision(True, "interrupted, resumable")),
        (HERE._replace(exit_code=1), RestartDecision(True, "crashed with exit code 1")),
        (HERE._replace(exit_code=69), RestartDecision(True, "a node failed its health check")),
        (HERE._replace(exit_code=None), RestartDecision(True, requeue.RESTARTED_BY_SLURM)),
        (HERE._replace(exit_code=0), RestartDecision(False, "all steps done")),
        (
            HERE._replace(exit_code=2),
            RestartDecision(False, "invalid config, or another process trains this run"),
        ),
        (HERE._replace(exit_code=3), RestartDecision(False, "halted by the sentinel")),
        (HERE._replace(state=""), RestartDecision(False, "Slurm does not report the state of the job")),
        (
            HERE._replace(state="COMPLETING"),
            RestartDecision(False, "ended by scancel or by another requeue"),
        ),
        (HERE._replace(slurm_reason="TimeLimit"), RestartDecision(True, "interrupted, resumable")),
        (HERE._replace(state="COMPLETING", slurm_reason="TimeLimit"), RestartDecision(True, "interrupted, resumable")),
        (
            HERE._replace(stopped_by="asked by ada: lunch"),
            RestartDecision(False, "stopped on purpose, asked by ada: lunch"),
        ),
    ],
)
def test_which_ends_are_requeued(ended: JobExit, decision: RestartDecision) -> None:
    assert decide_requeue(ended, [], None, LIMITS) == decision
    assert decide_requeue(ended, [end((0, 10))], (0, 20), LIMITS) == decision


@pytest.mark.parametrize("code", CODES)
def test_a_run_with_progress_never_hits_a_limit(code: int | None) -> None:
    history: list[JobEnd] = []
    for number in range(1, 100):
        assert decide_requeue(HERE._replace(exit_code=code), history, (0, 10 * number), LIMITS).again
        history.append(end((0, 10 * number), code=code))


@pytest.mark.parametrize("code", [69, None])
def test_node_failures_count_only_against_max_requeues(code: int | None) -> None:
    """Starts in which a node failed are no stalls of the run."""
    history = [end((0, 20))]
    ended = HERE._replace(exit_code=code)
    for _ in range(LIMITS.max_requeues - 1):
        assert decide_requeue(ended, history, (0, 20), LIMITS).again
        history.append(end((0, 20), code=code))
    assert decide_requeue(ended, history, (0, 20), LIMITS) == RestartDecision(
        False, "requeued 5 times without a newer checkpoint (the newest is of step 20), launch.slurm.max_requeues=5"
    )
    assert decide_requeue(ended, history, (0, 21), LIMITS).again, "progress resets the count"
    assert decide_requeue(ended, [*history, end((0, 30))], (0, 30), LIMITS).again


@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_run_that_stalls_ends_after_max_stalled(code: int) -> None:
    ended = HERE._replace(exit_code=code)
    stalled = [end((0, 20), code=code), end((0, 20), code=code)]
    assert decide_requeue(ended, [end((0, 20)), stalled[0]], (0, 20), LIMITS).again
    reason = "3 starts in a row ended without a newer checkpoint (the newest is of step 20), launch.slurm.max_stalled=3"
    assert decide_requeue(ended, [end((0, 20)), *stalled], (0, 20), LIMITS) == RestartDecision(False, reason)
    assert decide_requeue(ended, [end((0, 20)), *stalled], (0, 30), LIMITS).again, "progress resets the count"
    assert decide_requeue(ended, [*stalled, end((0, 30))], (0, 30), LIMITS).again
    with_health = [end((0, 20)), stalled[0], end((0, 20), code=69), end((0, 20), code=None)]
    assert decide_requeue(ended, with_health, (0, 20), LIMITS).again, "a node failure is no stall"
    assert not decide_requeue(ended, [*with_health, stalled[0]], (0, 20), LIMITS).again, "and does not hide one"


def test_the_limits_hold_without_any_checkpoint() -> None:
    crashed = HERE._replace(exit_code=1)
    assert decide_requeue(crashed, [end(code=1)], None, LIMITS).again
    assert decide_requeue(crashed, [end(code=1), end(code=1)], None, LIMITS) == RestartDecision(
        False, "3 starts in a row ended without a newer checkpoint (there is none), launch.slurm.max_stalled=3"
    )
    sick = HERE._replace(exit_code=69)
    assert decide_requeue(sick, [end(code=69)] * 4, None, LIMITS).again
    assert decide_requeue(sick, [end(code=69)] * 5, None, LIMITS) == RestartDecision(
        False, "requeued 5 times without a newer checkpoint (there is none), launch.slurm.max_requeues=5"
    )


def test_ends_without_a_requeue_are_not_counted() -> None:
    sick = HERE._replace(exit_code=69)
    assert decide_requeue(sick, [end(code=69, requeued=False), *[end(code=69)] * 4], None, LIMITS).again


def test_max_requeues_0_allows_no_requeue() -> None:
    limits = replace(LIMITS, max_requeues=0)
    assert decide_requeue(HERE, [], (0, 10), limits) == RestartDecision(
        False, "launch.slurm.max_requeues=0 allows no requeue"
    )
    once = replace(LIMITS, max_requeues=1)
    assert decide_requeue(HERE, [], None, once).again
    assert not decide_requeue(HERE, [end()], None, once).again
    assert decide_requeue(HERE, [end((0, 10))], (0, 20), once).again


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(CODES)), max_size=8), st.sampled_from(CODES))
def test_no_job_is_requeued_for_ever(before: list[tuple[int, int | None]], code: int | None) -> None:
    """Whatever happened before, a job without a newer checkpoint ends within `max_requeues` more starts."""
    history = [end((0, step), code=each) for step, each in before]
    newest = max((each.saved for each in history if each.saved), default=None)
    for _ in range(LIMITS.max_requeues + 1):
        if not decide_requeue(HERE._replace(exit_code=code), history, newest, LIMITS).again:
            return
        history.append(end(newest, code=code))
    pytest.fail("requeued too often")


def test_progress_is_a_checkpoint_newer_than_all_before() -> None:
    ages: list[Reached | None] = [None, (0, 5), (0, 5), (0, 3), (0, 5), (1, 3), None, (1, 3), (0, 9), (1, 4)]
    assert [last_progress(ages[:length]) for length in range(11)] == [-1, -1, 1, 1, 1, 1, 5, 5, 5, 5, 9]
    assert [is_stall(code) for code in CODES] == [True, True, False, True, False]


def test_newest_checkpoint_of_an_end() -> None:
    assert end().reached is None
    assert end((0, 30)).reached == (0, 30)
    assert replace(end(), good=(0, 20)).reached == (0, 20), "a line of a version without `saved`"
    assert replace(end((0, 30)), good=(0, 20)).reached == (0, 30)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return job_directory.prepare_job_run(config(tmp_path))


def make_checkpoint(run: RunDir, step: int, health: Health) -> None:
    path = run.checkpoints / catalog.name_of(step, 0)
    path.mkdir(parents=True)
    catalog.mark(path, health, "by the test")


def test_a_restart_by_slurm_is_recorded_and_counts(run: RunDir) -> None:
    requeue.record_end(run, HERE, job="7", start=1)
    assert requeue.record_missed_ends(run, "7", 2) == RestartDecision(True, "")
    assert requeue.record_missed_ends(run, "7", 3) == RestartDecision(True, requeue.RESTARTED_BY_SLURM)
    with requeue.requeue_log(run).open("a") as book:
        book.write('{"half a li\n["a", "list"]\n')
    make_checkpoint(run, 20, Health.candidate)
    assert requeue.record_missed_ends(run, "7", 4) == RestartDecision(True, requeue.RESTARTED_BY_SLURM)
    assert not requeue.record_missed_ends(run, "7", 9).again
    assert requeue.record_missed_ends(run, "8", 1) == RestartDecision(True, ""), "other jobs of the run do not count"
    assert [(end.start, end.exit_code, end.saved) for end in requeue.read_ends(run)] == [
        (1, 75, None),
        (2, None, None),
        *[(start, None, (0, 20)) for start in range(3, 9)],
    ]


def test_the_missed_end_of_a_first_start_is_recorded(run: RunDir) -> None:
    assert requeue.record_missed_ends(run, "7", 1) == RestartDecision(True, "")
    assert requeue.record_missed_ends(run, "7", 2) == RestartDecision(True, requeue.RESTARTED_BY_SLURM)
    assert [(end.start, end.exit_code) for end in requeue.read_ends(run)] == [(1, None)]


def test_the_command_reads_the_restart_count_of_slurm(run: RunDir, fake_slurm_bin: Path) -> None:
    """`python -m launch.slurm.requeue begin`, as the job script runs it after two restarts by Slurm."""
    assert fake_slurm_bin
    ended = subprocess.run(
        [sys.executable, "-m", "launch.slurm.requeue", "begin", str(run.path), "7"],
        cwd=ROOT,
        env=os.environ | {"SLURM_RESTART_COUNT": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, f"harness: job 7 continues: {requeue.RESTARTED_BY_SLURM}\n")
    assert [(end.start, end.exit_code) for end in requeue.read_ends(run)] == [(1, None), (2, None)]


def test_a_candidate_checkpoint_is_progress(run: RunDir) -> None:
    """A run that is interrupted before any checkpoint becomes good still advances."""
    for number in range(1, 6):
        make_checkpoint(run, 10 * number, Health.candidate)
        assert requeue.record_end(run, HERE, job="7", start=number).requeued
    make_checkpoint(run, 500, Health.tainted)
    last = requeue.record_end(run, HERE, job="7", start=6)
    assert (last.saved, last.good) == ((0, 50), None)
    make_checkpoint(run, 5, Health.good)
    assert requeue.record_end(run, HERE, job="7", start=7).good == (0, 5)


def test_a_record_of_an_older_version_can_be_read(run: RunDir) -> None:
    line = {"time": 1.0, "job": "7", "start": 1, "exit_code": 75, "good": [0, 20], "requeued": True, "reason": "asked"}
    requeue.requeue_log(run).write_text(json.dumps(line) + "\n")
    (known,) = requeue.read_ends(run)
    assert (known.good, known.reached, known.unhealthy, known.excluded) == ((0, 20), (0, 20), {}, ())


SICK = {"n2": "GPU 0 has 2 uncorrected ECC errors"}


def test_a_node_that_failed_twice_is_excluded_and_recorded(run: RunDir) -> None:
    ended = HERE._replace(exit_code=69)
    first = requeue.record_end(run, ended, job="7", start=1, unhealthy=SICK)
    assert (first.requeued, first.excluded) == (True, ())
    second = requeue.record_end(run, ended, job="7", start=2, unhealthy=SICK)
    (exclusion,) = second.excluded
    assert (exclusion.node, exclusion.reason, exclusion.num_failures) == ("n2", SICK["n2"], 2)
    assert exclusion.until == pytest.approx(second.time + 24 * 3600.0)
    assert requeue.read_ends(run)[-1] == second
    assert requeue.record_end(run, HERE, job="8", start=1).excluded == (exclusion,), "also for the next job of the run"


def test_faults_in_the_job_exclude_like_failed_health_checks(run: RunDir) -> None:
    now = time.time()
    faults = [NodeFault(now, "n3", "node 1 (n3) is gone", NodeFaultKind.lost), NodeFault(now, "n2", SICK["n2"])]
    NodeRecord(run, hours=24.0).add(faults)
    first = requeue.record_end(run, HERE, job="7", start=1)
    assert [(exclusion.node, exclusion.kind) for exclusion in first.excluded] == [("n3", "lost")]
    second = requeue.record_end(run, HERE._replace(exit_code=69), job="7", start=2, unhealthy=SICK)
    assert [exclusion.node for exclusion in second.excluded] == ["n2", "n3"], "one check in the job, one before it"
    assert list_user_excluded(["n9", "n3"], [first], job="7") == ["n9"]


def test_a_node_that_the_user_excludes_is_never_freed(
    run: RunDir, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not if one check failed there before, not if the run has reasons of its own, and not when these have expired."""
    (fake_slurm_bin / "sbatch").write_text("#!/bin/sh\n")
    log = tmp_path / "complaints"
    log.write_text("harness: health: node n2: broken\n")
    args = ["end", str(run.path), "7", "69", str(log), "script"]
    (fake_slurm_bin / "scontrol").write_text(scontrol())
    assert requeue.main(args) == 0
    (fake_slurm_bin / "scontrol").write_text(scontrol(excluded="n2"))  # the user does not wait for a second failure
    args[4] = ""
    assert requeue.main(args) == 0
    NodeRecord(run, hours=24.0).add([NodeFault(time.time(), "n2", "gone", NodeFaultKind.lost)])
    assert requeue.main(args) == 0
    assert read_ends(run)[-1].excluded == ()
    later = replace(end(), excluded=(NodeExclusion(node="n2", reason="", num_failures=2, until=0.0),), job="6")
    with requeue.requeue_log(run).open("a") as file:  # an earlier job of the run has excluded it, for some time
        file.write(json.dumps(asdict(later)) + "\n")
    (run.path / "nodes.json").unlink()
    assert requeue.main(args) == 0
    assert capsys.readouterr().out == ""


def test_exclusions_are_limited_to_what_slurm_can_start(run: RunDir, fake_slurm_bin: Path) -> None:
    (fake_slurm_bin / "sbatch").write_text('#!/bin/sh\necho "$@" >> "$0.log"\ntest "$2" != --exclude=n1,n2\n')
    ended = HERE._replace(exit_code=69)
    both = {"n1": "a", **SICK}
    requeue.record_end(run, ended, job="7", start=1, unhealthy=both)
    second = requeue.record_end(run, ended, job="7", start=2, unhealthy=both, sbatch=["--nodes=3", "script"])
    assert [exclusion.node for exclusion in second.excluded] == ["n1"]
    assert (fake_slurm_bin / "sbatch.log").read_text() == (
        "--test-only --exclude=n1,n2 --nodes=3 script\n--test-only --exclude=n1 --nodes=3 script\n"
    )


def test_slurm_is_asked_with_the_exclusions_of_the_user(
    run: RunDir, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without n9, which the user excludes, the cluster can spare one more node but not two."""
    (fake_slurm_bin / "scontrol").write_text(scontrol(excluded="n9"))
    (fake_slurm_bin / "sbatch").write_text('#!/bin/sh\necho "$@" >> "$0.log"\ntest "$2" != --exclude=n9,n1,n2\n')
    log = tmp_path / "complaints"
    log.write_text("harness: health: node n1: broken\nharness: health: node n2: broken\n")
    args = ["end", str(run.path), "7", "69", str(log), "script"]
    assert [requeue.main(args), requeue.main(args)] == [0, 0]
    assert capsys.readouterr().out == "ExcNodeList=n9,n1"
    asked = [line.split()[1] for line in (fake_slurm_bin / "sbatch.log").read_text().splitlines()]
    assert asked == ["--exclude=n9,n1,n2", "--exclude=n9,n1"]


def test_update_of_the_excluded_nodes() -> None:
    third = NodeExclusion(node="n3", reason="new", num_failures=2, until=0.0)
    ends = [replace(end(), excluded=(third, replace(third, node="n2"))), replace(end(), exit_code=None)]

    def update(present: list[str], wanted: list[NodeExclusion]) -> str:
        return exclusion_update(present, list_user_excluded(present, ends, job="7"), wanted)

    assert update([], []) == update(["n3"], [third]) == update(["n9"], []) == ""
    assert update([], [third]) == "ExcNodeList=n3"
    assert update(["n9", "n2"], [third]) == "ExcNodeList=n9,n3", "the user's exclusion stays, an expired one goes"
    assert update(["n2"], []) == "ExcNodeList="


@pytest.mark.parametrize(
    ("job", "until", "freed"), [("7_0", 0.0, "ExcNodeList=n9"), ("7_0", math.inf, ""), ("6_0", 0.0, "")]
)
def test_a_node_that_the_submission_excluded_for_another_task_is_freed_in_time(
    run: RunDir, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str], job: str, until: float, freed: str
) -> None:
    (fake_slurm_bin / "scontrol").write_text(scontrol(excluded="n9,n3"))
    job_directory.slurm_folder(run).mkdir(parents=True, exist_ok=True)
    job_directory.write_job(run, job_directory.SlurmJob(job=job, code="", excluded={"n3": until}))
    assert requeue.main(["end", str(run.path), "7_0", "75", ""]) == 0
    assert capsys.readouterr().out == freed


def scontrol(state: str = "RUNNING", excluded: str = "(null)") -> str:
    shown = f"JobId=7 JobState={state} Reason=None ExcNodeList={excluded}"
    return f'#!/bin/sh\nif [ "$2" = hostnames ]; then echo "$3" | tr , "\\n"; else echo "{shown}"; fi\n'


def test_end_prints_the_update_for_the_script(
    run: RunDir, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (fake_slurm_bin / "scontrol").write_text(scontrol(excluded="n9"))
    (fake_slurm_bin / "sbatch").write_text("#!/bin/sh\n")
    log = tmp_path / "complaints"
    log.write_text("harness: health: node n2: broken\nsrun: error: n2: task 0: Exited with exit code 69\n")
    args = ["end", str(run.path), "7", "69", str(log), "script"]
    assert requeue.main(args) == 0
    assert capsys.readouterr() == ("", "harness: job 7 is requeued: a node failed its health check\n")
    assert requeue.main(args) == 0
    out, err = capsys.readouterr()
    assert out == "ExcNodeList=n9,n2"
    assert err.splitlines()[0].startswith("harness: node n2 is excluded until ")
    assert err.splitlines()[0].endswith(": failed 2 health checks, last: broken")
    assert requeue.main(["end", str(run.path), "7", "0", "", "script"]) == 1
    assert capsys.readouterr().out == "", "a job that is not requeued needs no update"


def test_a_job_is_not_requeued_if_the_controller_does_not_answer(
    run: RunDir, fake_slurm_bin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_slurm_bin
    monkeypatch.setattr(controller, "RETRY_PAUSES_S", (0.0,))
    assert requeue.main(["end", str(run.path), "7", "75", ""]) == 1
    assert capsys.readouterr().err == "harness: job 7 ends: Slurm does not report the state of the job\n"


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_full_disk_requeues_the_job_within_its_limits(tmp_path: Path, fake_slurm_bin: Path) -> None:
    """The end, the record and the log of the job, which is standard error, have no room."""
    (fake_slurm_bin / "scontrol").write_text(scontrol())
    run = RunDir(tmp_path / "disk" / "first")

    def run_command(verb: str, start: int, *more: str) -> int:
        with (run.logs / "slurm-7.log").open("ab", buffering=0) as log:
            return subprocess.run(
                [sys.executable, "-m", "launch.slurm.requeue", verb, str(run.path), "7", *more],
                cwd=ROOT,
                env=os.environ | {"SLURM_RESTART_COUNT": str(start - 1)},
                stdout=subprocess.DEVNULL,
                stderr=log,
                check=False,
            ).returncode

    with small_disk(tmp_path / "disk") as disk:
        job_directory.prepare_job_run(config(disk))
        assert requeue.main(["begin", str(run.path), "7"]) == 0
        fill(disk)
        assert [run_command("end", start, "75", "") for start in (1, 5)] == [0, 1], "max_requeues=4"
        assert run_command("begin", 2) == 0
        assert requeue.read_ends(run) == []
        assert (run.logs / "slurm-7.log").read_bytes() == b""


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_full_disk_at_the_first_start_requeues_a_plain_job_within_its_limits(tmp_path: Path) -> None:
    """There is no run directory yet, and the log of the job has no room either."""
    with small_disk(tmp_path / "disk") as disk:
        log = (disk / "slurm-7.log").open("ab", buffering=0)
        fill(disk)
        codes = [
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "launch.slurm.job_directory",
                    f"run.dir={disk}/runs",
                    "launch.slurm.max_requeues=4",
                ],
                cwd=ROOT,
                env=os.environ
                | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": str(restarts)},
                stdout=subprocess.DEVNULL,
                stderr=log,
                check=False,
            ).returncode
            for restarts in (0, 3, 4)
        ]
        log.close()
        assert codes == [75, 75, 1]


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_record_that_cannot_be_written_is_a_warning(
    tmp_path: Path, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake_slurm_bin / "scontrol").write_text(scontrol())
    with small_disk(tmp_path / "disk") as disk:
        run = job_directory.prepare_job_run(config(disk))
        fill(disk)
        assert requeue.main(["end", str(run.path), "7", "75", str(tmp_path / "no-log")]) == 0
        problem = f"{requeue.requeue_log(run)}: cannot write it: No space left on device"
        assert capsys.readouterr().err.splitlines() == [
            f"harness: warning: {problem}; the number of starts limits the requeues",
            "harness: job 7 is requeued: interrupted, resumable",
        ]
        assert requeue.main(["begin", str(run.path), "7"]) == 75, "the run cannot be claimed"
        assert capsys.readouterr().err == f"harness: {run.path}: cannot write it: No space left on device\n"


def test_starts_without_a_record_count_as_requeues(run: RunDir) -> None:
    """They are assumed to have reached what there is now, so that a checkpoint resets the count only once."""
    assert requeue.record_end(run, HERE, job="7", start=1).requeued
    make_checkpoint(run, 20, Health.candidate)
    for start, again in ((2, True), (5, True), (6, False)):
        before = requeue.requeue_log(run).read_bytes()
        assert requeue.record_end(run, HERE, job="7", start=start).requeued is again, start
        requeue.requeue_log(run).write_bytes(before)


def test_a_run_is_owned_by_one_job(run: RunDir, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two submissions of the same sweep, both waiting: the second to start does not touch the run."""
    (fake_slurm_bin / "squeue").write_text('#!/bin/sh\ntest "$2" = --jobs=7_1 && echo RUNNING\n')
    assert requeue.main(["begin", str(run.path), "7_1"]) == 0
    known = job_directory.read_job(run)
    assert known is not None
    assert known.job == "7_1", "a run without an owner is claimed"
    assert requeue.main(["begin", str(run.path), "7_1"]) == 0
    assert requeue.main(["begin", str(run.path), "8_1"]) == 2
    line = f"harness: {run.path}: belongs to job 7_1, which is running; job 8_1 does not start it\n"
    assert capsys.readouterr().err == line
    assert job_directory.read_job(run) == known
    assert requeue.read_ends(run) == []
    (fake_slurm_bin / "squeue").write_text(
        "#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n"
    )
    assert requeue.main(["begin", str(run.path), "8_1"]) == 0, "the other job is gone"
    (fake_slurm_bin / "squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n")
    assert requeue.main(["begin", str(run.path), "9_1"]) == 2, "unknown whether the other job is gone"
    assert "cannot tell whether job 8_1 is alive: squeue: Unable to contact" in capsys.readouterr().err


def test_a_job_does_not_start_a_run_whose_lease_is_held(
    run: RunDir, fake_slurm_bin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was started by hand and has no job: a signal to this job must not write STOP for it."""
    assert fake_slurm_bin
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
    assert job_directory.read_job(run) is None, "the run is not claimed"
    held.release()
    assert requeue.main(["begin", str(run.path), "7"]) == 0


def test_a_stop_by_a_person_counts_and_one_by_the_job_script_does_not(run: RunDir) -> None:
    assert requeue.find_stop_request(run) == ""
    stop_requests.ask(run, who="ada", reason="lunch")
    assert requeue.find_stop_request(run) == "asked by ada: lunch"
    stop_requests.ask(run, who="slurm", reason="job 7 is near its time limit")
    assert requeue.find_stop_request(run) == ""
    run.stop.write_text("")
    assert requeue.find_stop_request(run) == "by the file STOP"
    job_directory.prepare_job_run(config(run.path.parent))
    assert requeue.find_stop_request(run) == "", "a new start clears the stop request"


def test_a_start_removes_the_stop_of_the_last_one(run: RunDir, fake_slurm_bin: Path) -> None:
    """The job script writes STOP near the time limit; a rank that dies early in the next start is restarted."""
    assert fake_slurm_bin
    requeue.record_end(run, HERE, job="7", start=1)
    stop_requests.ask(run, who="slurm", reason="job 7 is near its time limit")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("SLURM_RESTART_COUNT", "1")
        assert requeue.main(["begin", str(run.path), "7"]) == 0
        assert not run.stop.exists()
        stop_requests.ask(run, who="ada", reason="lunch")
        changed.setenv("SLURM_RESTART_COUNT", "2")
        assert requeue.main(["begin", str(run.path), "7"]) == 1, "a person stopped the start whose node failed"
        assert run.stop.exists()


def test_a_plain_job_does_not_start_the_run_of_another(fake_slurm_bin: Path, tmp_path: Path) -> None:
    (fake_slurm_bin / "squeue").write_text('#!/bin/sh\ntest "$2" = --jobs=12 && echo RUNNING\n')
    run, _ = job_directory.prepare_in_job(config(tmp_path), "12", 1)
    stop_requests.ask(RunDir(run), who="ada", reason="lunch")
    with pytest.raises(ConfigError, match="belongs to job 12, which is running; job 13 does not start it"):
        job_directory.prepare_in_job(config(tmp_path), "13", 1)
    assert requeue.find_stop_request(RunDir(run)) == "asked by ada: lunch"


def test_job_id_of_an_array_task() -> None:
    assert job_directory.job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert (
        job_directory.job_id({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}) == "11_3"
    )
