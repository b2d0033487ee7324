"""Commands that read a run change nothing in it; those that write a file write nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pytest

from harness.analysis.dashboard.serve import open_server
from harness.checkpoint import catalog
from harness.core.rundir import RunDir
from launch.cli import main
from tests.checkpoint.storage import tree
from tests.distributed import faulty_runs
from tests.distributed.pool import Pool
from tests.forks import Launched

RUN = (
    "train.num_steps=40",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=10",
    "checkpoint.good_after_steps=3",
    "checkpoint.keep=100",
    "checkpoint.ring.every_steps=4",
)
FAULT_AT = 36


@pytest.fixture(scope="module")
def trained(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an incident; rank 1's gradient is NaN once."""
    directory = tmp_path_factory.mktemp("readers")
    fault = faulty_runs.Fault("gradient", 1, factor=float("nan"), iteration=FAULT_AT)
    ranks.run(2, faulty_runs.run, str(directory), fault, "run.name=victim", *RUN)
    return directory


@pytest.fixture
def complete_run(trained: Path, tmp_path: Path) -> RunDir:
    """A copy of the run."""
    shutil.copytree(trained, tmp_path / "runs", copy_function=shutil.copy2)
    return RunDir(tmp_path / "runs" / "victim")


@pytest.fixture
def run(complete_run: RunDir) -> RunDir:
    """With leftovers: an unfinished save and deletion, a damaged checkpoint, and one whose health is unreadable."""
    first, second, *_ = (each.path for each in catalog.list_checkpoints(complete_run.checkpoints))
    shutil.copytree(first, complete_run.checkpoints / ".step-00000050-gen-0.part")
    shutil.copytree(first, complete_run.checkpoints / ".step-00000005-gen-0.gone-0a1b")
    os.truncate(first / "__0_0.distcp", 100)
    (second / catalog.HEALTH).unlink(missing_ok=True)
    (second / catalog.HEALTH).mkdir()
    return complete_run


READERS = {
    "status": (["status", "RUN"], 0),
    "status-json": (["status", "RUN", "--json"], 0),
    "watch": (["watch", "RUN", "--once"], 0),
    "diagnose": (["diagnose", "RUN"], None),
    "judge": (["judge", "RUN/events.jsonl"], 0),
    "list": (["checkpoint", "list", "RUN"], 0),
    "list-json": (["checkpoint", "list", "RUN", "--json"], 0),
    "verify": (["checkpoint", "verify", "RUN"], 1),
    "prune-dry": (["checkpoint", "prune", "RUN", "--dry-run"], 75),
    "prune-unread": (["checkpoint", "prune", "RUN", "--keep", "1"], 75),
    "export-elsewhere": (["checkpoint", "export", "RUN", "--output", "OUT"], 0),
    "export-damaged": (["checkpoint", "export", "RUN", "--step", "10", "--output", "OUT"], 2),
    "dashboard-elsewhere": (["dashboard", "RUN", "--output", "OUT"], 0),
    "report-elsewhere": (["report", "RUN", "--output", "OUT"], 0),
    "sweep-elsewhere": (["sweep", "report", "RUN/..", "--output", "OUT"], 0),
}


@pytest.mark.parametrize("command", READERS)
def test_a_reader_does_not_change_the_run(
    run: RunDir, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args, code = READERS[command]
    before = tree(tmp_path / "runs")
    paths = {"RUN": str(run.path), "OUT": str(tmp_path / "out")}
    args = [arg.replace("RUN", paths["RUN"]).replace("OUT", paths["OUT"]) for arg in args]
    exit_code = main.main(args)
    output = capsys.readouterr()
    assert code is None or exit_code == code, output.err
    assert "Traceback" not in output.err
    assert tree(tmp_path / "runs") == before


def test_a_served_page_does_not_change_the_run(run: RunDir, tmp_path: Path) -> None:
    before = tree(tmp_path / "runs")
    with open_server(run, host="127.0.0.1", port=0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
                assert b"victim" in answer.read()
        finally:
            server.shutdown()
            thread.join()
    assert tree(tmp_path / "runs") == before


WRITERS = {
    "dashboard": (["dashboard", "RUN"], ["dashboard.html"]),
    "report": (["report", "RUN"], ["index.html"]),
    "postmortem": (["postmortem", "RUN"], ["incidents"]),
}


@pytest.mark.full
@pytest.mark.parametrize("command", WRITERS)
def test_a_command_that_writes_a_page_writes_nothing_else(run: RunDir, command: str) -> None:
    args, written = WRITERS[command]
    before = tree(run.path)
    assert main.main([arg.replace("RUN", str(run.path)) for arg in args]) == 0
    after = tree(run.path)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed
    assert {name.partition("/")[0] for name in changed} == set(written)


def run_replay(run: RunDir, output: Path) -> tuple[int, str]:
    with Launched("launch.cli.main", "replay", str(run.path), "--iteration", str(FAULT_AT), output=output) as process:
        return process.wait(timeout=120), process.stderr


@pytest.mark.full
def test_a_replay_writes_its_result_and_nothing_else(complete_run: RunDir, tmp_path: Path) -> None:
    shutil.copytree(
        catalog.list_checkpoints(complete_run.checkpoints)[0].path,
        complete_run.checkpoints / ".step-00000050-gen-0.part",
    )
    before = tree(complete_run.path)
    code, stderr = run_replay(complete_run, tmp_path / "output")
    assert code == 0, stderr
    after = tree(complete_run.path)
    folder = f"incidents/iteration-{FAULT_AT}"
    assert set(after) - set(before) <= {"incidents", folder, f"{folder}/replay.json"}
    assert before.items() - {("incidents", before.get("incidents"))} <= after.items()


@pytest.mark.full
def test_a_replay_from_a_damaged_checkpoint_fails_and_changes_nothing(run: RunDir, tmp_path: Path) -> None:
    before = tree(run.path)
    code, stderr = run_replay(run, tmp_path / "output")
    assert code == 2
    assert "step-00000010-gen-0 is damaged" in stderr
    assert tree(run.path) == before
