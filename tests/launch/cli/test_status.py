"""`harness status`: the text and the exit code for given heartbeat files."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from harness.core.event_json import to_json
from harness.core.events import Finding, FindingKind
from harness.core.rundir import RunDir, append_line
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import Beat, Phase
from launch.cli import main, status
from launch.cli.status import Life, find_life, read_run_status, render
from launch.node_record import NodeRecord
from launch.slurm import requeue
from launch.slurm.node_exclusion import NodeExclusion, NodeFault, NodeFaultKind
from launch.slurm.requeue import JobEnd

NOW = 1_800_000_000.0
BEAT = Beat(
    rank=0,
    world_size=3,
    host="host1",
    pid=500,
    phase=Phase.train,
    iteration=120,
    step=118,
    beats=240,
    writes=60,
    every_s=1.0,
    beat_time=NOW - 0.4,
    time=NOW - 0.3,
)
RUNNING = {
    "state": "running",
    "phase": "train",
    "step": 118,
    "num_steps": 2000,
    "iteration": 120,
    "loss": 2.34567,
    "eta_s": 5400.0,
    "exit_code": None,
    "reason": "",
    "world_size": 3,
    "time": NOW,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs/first"))
    run.heartbeat.mkdir(parents=True)
    run.config.touch()
    return run


def write_files(run: RunDir, *beats: Beat, **status_fields: object) -> None:
    for beat in beats:
        heartbeat.replace_file(heartbeat.heartbeat_file(run, beat.rank), asdict(beat))
    heartbeat.replace_file(run.status, RUNNING | status_fields)


def make_beats(**second_rank: object) -> list[Beat]:
    return [BEAT, replace(BEAT, rank=1, pid=501, **second_rank), replace(BEAT, rank=2, host="host2")]  # type: ignore[arg-type]


def test_all_alive(run: RunDir) -> None:
    write_files(run, *make_beats())
    found = read_run_status(run, now=NOW)
    assert found.status_exit_code() == 0
    assert render(found) == (
        "runs/first: running, step 118/2000 (5.9%), loss 2.3457, 90 min left, 3 of 3 ranks alive\n"
        "rank  host   pid  state  phase  iteration  progress  heartbeat\n"
        "   0  host1  500  fresh  train        120   0 s ago    0 s ago\n"
        "   1  host1  501  fresh  train        120   0 s ago    0 s ago\n"
        "   2  host2  500  fresh  train        120   0 s ago    0 s ago"
    )


def test_a_silent_rank_and_one_that_never_started(run: RunDir) -> None:
    first, second_rank, _ = make_beats(time=NOW - 300, beat_time=NOW - 301)
    write_files(run, first, second_rank)
    found = read_run_status(run, now=NOW)
    assert found.status_exit_code() == 1
    first_line, _, *rows = render(found).splitlines()
    assert first_line.endswith(", 1 of 3 ranks alive")
    assert rows == [
        "   0  host1  500  fresh   train        120    0 s ago    0 s ago",
        "   1  host1  501  silent  train        120  5 min ago  5 min ago",
        "   2  ?        ?  silent  ?              ?      never      never",
    ]
    assert [rank.life for rank in found.ranks] == [Life.fresh, Life.silent, Life.silent]


@pytest.mark.parametrize(
    ("changes", "life"),
    [
        ({}, Life.fresh),
        ({"beat_time": NOW - 31}, Life.late),
        ({"beat_time": NOW - 31, "phase": Phase.save}, Life.fresh),
        ({"beat_time": NOW - 500, "phase": Phase.start}, Life.fresh),
        ({"time": NOW - 31}, Life.silent),
        ({"time": NOW - 31, "every_s": 20.0}, Life.fresh),
        ({"time": NOW - 101, "every_s": 20.0}, Life.silent),
        ({"time": NOW - 1000, "exit_code": 0, "phase": Phase.end}, Life.ended),
        ({"time": NOW + 5, "beat_time": NOW + 5}, Life.fresh),
    ],
)
def test_life_of_a_rank_from_its_heartbeat(changes: dict[str, object], life: Life) -> None:
    assert find_life(replace(BEAT, **changes), now=NOW) is life  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (75, 0), (1, 1), (3, 1)])
def test_a_run_that_has_ended(run: RunDir, code: int, expected: int) -> None:
    gone = {"time": NOW - 1000, "beat_time": NOW - 1000}
    write_files(run, *make_beats(**gone), state="ended", exit_code=code, reason="all steps done", eta_s=None)
    found = read_run_status(run, now=NOW)
    assert found.status_exit_code() == expected
    first, *_ = render(found).splitlines()
    assert first == f"runs/first: ended, step 118/2000 (5.9%), loss 2.3457, exit code {code}: all steps done"


def test_a_run_that_is_being_restarted_is_alive(run: RunDir) -> None:
    """The launcher has removed the heartbeat files of the failed start."""
    reason = "rank 1 on host1 was killed by SIGKILL"
    write_files(run, state="restarting", reason=reason, eta_s=None)
    found = read_run_status(run, now=NOW + 100)
    assert found.status_exit_code() == 0
    assert render(found).splitlines()[0] == f"runs/first: restarting, step 118/2000 (5.9%), loss 2.3457, {reason}"
    assert read_run_status(run, now=NOW + 121).status_exit_code() == 1, "the launcher is gone"


def test_recent_findings_about_slow_ranks_are_shown(run: RunDir) -> None:
    write_files(run, *make_beats())
    with run.events.open("w") as log:
        for iteration in (5, 100):
            finding = Finding(
                time=NOW,
                iteration=iteration,
                kind=FindingKind.slow,
                step=iteration,
                onset=iteration,
                value=1.0,
                bound=2.0,
                message="rank 1 is slow",
                ranks=[1],
            )
            log.write(to_json(finding) + "\n")
    assert render(read_run_status(run, now=NOW)).splitlines()[-1] == "iteration 100: slow: rank 1 is slow"
    assert read_run_status(run, now=NOW).slow == ["iteration 100: slow: rank 1 is slow"]


def test_a_run_that_has_not_started(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", str(run.path)]) == 1
    assert capsys.readouterr().out == "runs/first: no rank has started yet\n"


def test_json_output_and_truncated_files(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    write_files(run, *(replace(beat, time=now, beat_time=now) for beat in make_beats()), loss="nan")
    heartbeat.heartbeat_file(run, 1).write_text("{")
    assert status.main([str(run.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [rank["life"] for rank in found["ranks"]] == ["fresh", "silent", "fresh"]
    for content, problem in (
        ("[]", "it is not a mapping"),
        ('{"step": ', "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"step": "118", "num_steps": 2000}', "step is '118'"),
        ('{"world_size": [3]}', "world_size is [3]"),
        ('{"state": 5}', "state is 5"),
    ):
        run.status.write_text(content)
        assert status.main([str(run.path)]) == 1
        shown = capsys.readouterr()
        assert shown.out.splitlines()[0] == "runs/first: starting, 2 of 3 ranks alive"
        (line,) = shown.err.splitlines()
        assert line.startswith(f"warning: {run.status} is left out, because it is damaged: ")
        assert problem in line


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"harness: {tmp_path}: is not a run directory: it has no config.yaml\n"


def test_a_rank_that_writes_rarely_is_not_late() -> None:
    """With 16,384 ranks each writes every 164 s, and progress is invisible in between."""
    beat = replace(BEAT, every_s=163.84, time=NOW, beat_time=NOW - 1.0)
    assert find_life(beat, now=NOW + 160.0) is Life.fresh
    assert find_life(beat, now=NOW + 320.0) is Life.fresh
    assert find_life(beat, now=NOW + 340.0) is Life.late
    assert find_life(replace(beat, every_s=1.0), now=NOW + 29.0) is Life.fresh
    assert find_life(replace(beat, every_s=1.0, time=NOW + 29.9), now=NOW + 29.9) is Life.late


def test_excluded_nodes_are_shown_until_they_expire(run: RunDir) -> None:
    write_files(run, *make_beats())
    assert read_run_status(run, now=NOW).excluded == []
    sick = NodeExclusion(node="n7", reason="has 7 GPUs, expected 8", num_failures=2, until=NOW + 60.0)
    gone = replace(sick, node="n8", until=NOW - 60.0)
    earlier = replace(sick, node="n9")
    for excluded in ((earlier,), (sick, gone)):
        end = JobEnd(time=NOW, job="7", start=1, exit_code=69, good=None, requeued=True, reason="", excluded=excluded)
        append_line(requeue.requeue_log(run), json.dumps(asdict(end)))
    found = read_run_status(run, now=NOW)
    assert found.excluded == [sick]
    assert found.status_exit_code() == 0
    last = render(found).splitlines()[-1]
    assert last.startswith("node n7 is excluded until 20")
    assert last.endswith(": failed 2 health checks, last: has 7 GPUs, expected 8")
    assert json.loads(json.dumps(asdict(found)))["excluded"][0]["node"] == "n7"
    lost = NodeFault(NOW, "n7", "node 1 (n7) is gone", NodeFaultKind.lost)
    NodeRecord(run, hours=24.0).add([lost, lost._replace(node="n5")])
    assert [(node.node, node.kind) for node in read_run_status(run, now=NOW).excluded] == [
        ("n5", "lost"),
        ("n7", "lost"),
    ]
    assert read_run_status(run, now=NOW + 25 * 3600.0).excluded == []
