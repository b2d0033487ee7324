"""`harness drill` with real runs: exit codes and files on disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core import event_json
from harness.core.events import DrillScored, EndCause, RunEnded, RunRestarted, StepRecord
from harness.core.rundir import RunDir
from harness.drills.scenario import names
from launch.cli import drill
from tests.forked_launchers import fork_launchers, harness

PATIENCE_S = 500
"""A drill starts torch several times, which takes long on a busy machine."""
SMALL = (
    "train.num_steps=12",
    "train.sequence_length=32",
    "model.num_layers=1",
    "parallel.device=cpu",
    "launch.nproc=2",
    "launch.threads=1",
)


pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * PATIENCE_S)]


def run_drill(
    *arguments: str, cwd: Path, first: Callable[[], None] = fork_launchers
) -> subprocess.CompletedProcess[str]:
    return harness("drill", *arguments, cwd=cwd, within_s=PATIENCE_S, first=first)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def killed(directory: Path) -> subprocess.CompletedProcess[str]:
    return run_drill("kill_rank", "drill.fault.at=9", "--no-mlflow", *SMALL, cwd=directory)


def test_a_killed_rank_is_survived_and_scored(killed: subprocess.CompletedProcess[str], directory: Path) -> None:
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert killed.stdout.startswith("drill kill_rank: one rank is killed with SIGKILL\n")
    assert "rank 1 was killed by SIGKILL" in killed.stderr
    run, twin = RunDir(directory / "runs/drill-kill_rank"), RunDir(directory / "runs/drill-kill_rank-twin")
    card = json.loads((run.path / "score.json").read_text())
    assert card["passed"]
    assert (card["score"]["starts"], card["score"]["identical"], card["score"]["right_rank"]) == (2, True, True)
    assert run.score_card.read_text().startswith("# Drill kill_rank: passed\n")
    assert [start["exit_code"] for start in json.loads(run.drill.read_text())["starts"]] == [0], "one launcher"
    (restarted,) = (event for event in event_json.read(run.events) if isinstance(event, RunRestarted))
    assert (restarted.number, restarted.cause) == (1, EndCause.killed_rank)
    assert step_results(run).items() == step_results(twin).items(), "bit-identical, step by step"
    times = [card["score"][name] for name in ("notice_s", "restart_s", "first_update_s")]
    assert 0 < times[0] < times[2]
    assert 0 < times[1] < times[2] < 120
    assert [type(event) for event in event_json.read(run.events)][-2:] == [RunEnded, DrillScored]
    assert not twin.drill.exists()
    assert run_drill("score", "runs/drill-kill_rank", cwd=directory).stdout == killed.stdout[:-1]


def step_results(run: RunDir) -> dict[int, tuple[float, float, int]]:
    """The exact results of each step; of repeated steps, the later."""
    records = (event for event in event_json.read(run.events) if isinstance(event, StepRecord))
    return {record.step: (record.loss, record.grad_norm, record.cursor) for record in records}


def test_a_bound_that_does_not_hold_is_exit_code_1(killed: subprocess.CompletedProcess[str], directory: Path) -> None:
    """Reuses the twin of the previous drill."""
    assert killed.returncode == 0
    args = ("clock_jump", "drill.fault.at=9", "drill.expected.notices=[all is well]", "--no-mlflow", *SMALL)
    done = run_drill(*args, cwd=directory)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "drill-clock_jump-twin: reused an equal twin, not trained again\n" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line.endswith("BROKEN")] == ["detected"]
    assert not json.loads((directory / "runs/drill-clock_jump/score.json").read_text())["passed"]
    assert not (directory / "runs/drill-clock_jump/mlflow.json").exists()


def test_all_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert drill.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == list(names())
    assert sum(line.startswith("    expects  ") for line in lines) == len(names())


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["kil_rank"], "drill: no scenario 'kil_rank'; choose one of "),
        (["optim.lr=1"], "drill: missing scenario; choose among "),
        (["kill_rank", "drill.bounds.second=1"], "drill.bounds.second: no such key; "),
        (["kill_rank", "optim.lrr=1"], "optim.lrr: no such key; "),
        (["kill_rank", "run.name=mine"], "run.name: must not be set"),
        (["kill_rank", "--fast"], "drill: unrecognized arguments: --fast; see --help"),
        (["score"], "drill score: give one run directory"),
        (["score", "nowhere"], "nowhere: is not a drill: it has no drill.json"),
        (["full_disk", "launch=slurm"], "launch: full_disk needs launch=local, got slurm"),
        (["full_disk", "launch.nodes=2"], "launch.nodes: full_disk needs launch.nodes=1, got 2"),
        (
            ["unhealthy_node", "launch.nodes=1", "launch.spares=0"],
            "launch.nodes: unhealthy_node needs launch=local and ",
        ),
        (
            ["nan_grad", "lost_node", "launch.nodes=1", "launch.spares=0"],
            "launch.spares: must be at least 1, got 0: the ",
        ),
        (["lost_partners", "launch.spares=1"], "launch.spares: must be at least 2, got 1: the drill lost_partners "),
        (["corrupting_node", "launch.replace_running=false"], "launch.replace_running: must be true, got false: "),
        (
            ["truncated_checkpoint", "checkpoint.ring.shared_dir=auto"],
            "checkpoint.ring.shared_dir: must be null, got auto: the drill truncated_checkpoint needs it",
        ),
        (
            ["mismatched_collective", "launch.nproc=1"],
            "launch.nproc: the drill mismatched_collective needs at least 2 ",
        ),
        (
            ["lost_node", "parallel.device=cuda"],
            "parallel.device: must be cpu or auto: nodes that are rehearsed on one ",
        ),
        (
            ["nan_grad", "drill.fault.rank=9", *SMALL],
            "drill.fault.rank: must be from -2 to 1, because the run has 2 ranks, got 9",
        ),
        (["campaign", "--minutes", "0"], "--minutes: must be positive, got 0"),
        (["campaign", "--seed", "x"], "drill campaign: argument --seed: invalid int value: 'x'"),
        (["campaign", "--fault", "1"], "--fault: needs --infrastructure; use --round"),
        (["campaign", "--infrastructure", "--round", "1"], "--round: is for a campaign without --infrastructure"),
        (["campaign", "--infrastructure", "--every", "0"], "--every: must be positive, got 0"),
        (["campaign", "--infrastructure", "--goal", "90"], "--goal: must be from 0 to 1, got 90"),
        (["campaign", "--infrastructure", "--fault", "99"], "--fault: must be from 0 to "),
        (["campaign", "--infrastructure", "launch=slurm"], "launch: must be local with --infrastructure, got slurm"),
        (["campaign", "train.num_steps=50"], "train.num_steps: must be at least 120 for a campaign, got 50"),
    ],
)
def test_usage_errors_are_one_line_and_leave_nothing_on_disk(
    args: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert drill.main(args) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"harness: {line}")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("composed_once")
def test_a_directory_that_is_not_a_drill_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "drill-kill_rank-twin" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    assert drill.main(["kill_rank", f"run.dir={tmp_path}"]) == 2
    assert "exists and is not a drill" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    (tmp_path / "campaign-3").mkdir()
    (tmp_path / "campaign-3" / "kept").write_text("mine")
    assert drill.main(["campaign", "--seed", "3", f"run.dir={tmp_path}"]) == 2
    assert "exists and is not a campaign" in capsys.readouterr().err


def test_a_killed_rank_that_shares_its_sequences_is_survived(tmp_path: Path) -> None:
    shared = run_drill("kill_rank", "drill.fault.at=9", "--no-mlflow", *SMALL, "parallel.context=2", cwd=tmp_path)
    assert shared.returncode == 0, shared.stdout + shared.stderr
    card = json.loads((tmp_path / "runs/drill-kill_rank/score.json").read_text())
    assert card["passed"]
    assert (card["score"]["starts"], card["score"]["identical"], card["score"]["right_rank"]) == (2, True, True)
