"""What a start that failed prints, and what it removes."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.config.errors import ConfigError, StorageError
from harness.core.node_name import machine_name
from harness.core.rundir import RunDir
from launch.local import hang_report
from launch.local.hang_report import dump_file
from launch.local.node_group import LOOPBACK, SINGLE_NODE, NodeGroup
from launch.local.ranks import RankFailure, RankLogs, render_failure
from launch.local.start_failure import existing_parents, print_explanation, print_failure, remove_rejected_run
from launch.local.worker_pool import describe_error


def test_only_what_a_rejected_start_created_is_removed(tmp_path: Path) -> None:
    new, old, logged, shared = (RunDir(tmp_path / "runs" / name) for name in ("new", "old", "logged", "shared"))
    (old.path / "kept").mkdir(parents=True)
    existing = existing_parents(old.path)
    for run in (new, logged, shared):
        (run.logs / "mine-restart-1").mkdir(parents=True)
    logged.events.write_text("{}")
    (shared.logs / "theirs").mkdir()
    for run in (new, old, logged, shared):
        remove_rejected_run(run, existing, "mine")
    assert [run.path.exists() for run in (new, old, logged, shared)] == [False, True, True, True]
    assert [path.name for path in shared.logs.iterdir()] == ["theirs"], "another start, whose ranks have no lease yet"
    alone = RunDir(tmp_path / "elsewhere" / "runs" / "new")
    existing = existing_parents(alone.path)
    alone.logs.mkdir(parents=True)
    remove_rejected_run(alone, existing, "mine")
    assert not (tmp_path / "elsewhere").exists(), "the directories above it are new, too"
    assert tmp_path.exists()


@pytest.mark.parametrize(
    "error", [ConfigError("data.bin", "was removed"), StorageError(errno.EIO, "was removed", "data.bin")]
)
def test_an_error_in_the_data_of_one_rank_names_rank_and_machine(
    monkeypatch: pytest.MonkeyPatch, error: ConfigError | StorageError
) -> None:
    """A file may have changed on one machine only."""
    monkeypatch.setenv("RANK", "5")
    for is_shared, is_of_one_rank in ((False, False), (True, True), (False, True)):  # (True, True): world_size 1
        error.is_shared, error.is_of_one_rank = is_shared, is_of_one_rank
        try:
            raise error
        except (ConfigError, StorageError) as raised:
            failure = RankFailure(rank=5, log="", **describe_error(raised))
        named = f"rank 5 on {machine_name()}: " if is_of_one_rank and not is_shared else ""
        assert render_failure(failure, stopping=False) == f"harness: {named}data.bin: was removed"


def test_the_explanation_of_a_hang_delays_no_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a thousand ranks it takes longer than the other nodes wait for this one."""
    logs = RankLogs(tmp_path, range(2))
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:barrier", "collective_seq_id": 7}
    os.mkfifo(dump_file(tmp_path, 0))  # a read waits until this test writes
    dump_file(tmp_path, 1).write_text(json.dumps({"entries": []}))
    group = NodeGroup(SINGLE_NODE, LOOPBACK, "start", 0, None, 1.0)
    failure = RankFailure(rank=0, exit_code=-9, log="")
    with ThreadPoolExecutor() as explainer:
        assert print_failure(failure, logs, group, stopping=False, hung="rank 1 hangs", explainer=explainer) == 1
        assert capsys.readouterr().err == f"harness: rank 1 hangs; stacks of all threads: {tmp_path}/*.stacks\n"
        dump_file(tmp_path, 0).write_text(json.dumps({"entries": [entry]}))
    line = "rank 0 called barrier, number 7 of nccl default_pg 0; rank 1 did not, and waits for no collective"
    assert capsys.readouterr().err == f"harness: {line}\n"
    assert (tmp_path / "hang.txt").read_text() == f"{line}\n"


def test_a_hang_that_cannot_be_explained_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody reads the result of the thread that explains it."""

    def fail(answers: object) -> str:
        raise RuntimeError(f"no group in {answers}")

    monkeypatch.setattr(hang_report, "explain_hang", fail)
    print_explanation(RankLogs(tmp_path, range(1)), world_size=0)
    assert capfd.readouterr().err == "harness: warning: the hang cannot be explained: RuntimeError: no group in {}\n"
    assert not list(tmp_path.iterdir())
