"""`python -m launch.local.node`: the rendezvous options, and what is rejected before anything starts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.compose import to_yaml
from harness.config.errors import ConfigError
from harness.control.stop_requests import STOP_CLEARED
from harness.core.locking import directory_lease
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir
from launch.local import exit_file, node, start
from launch.local.node import parse_rendezvous
from launch.local.node_group import SINGLE_NODE, RendezvousSpec
from launch.local.ports import reserved_port
from tests import composed

SLURM = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_ID": "7"}


def test_a_single_node_uses_the_loopback() -> None:
    assert parse_rendezvous(None, None, None, {}) == SINGLE_NODE
    assert (SINGLE_NODE.num_nodes, SINGLE_NODE.host) == (1, "127.0.0.1")


def test_slurm_variables_are_ignored_without_a_rendezvous() -> None:
    assert parse_rendezvous(None, None, None, SLURM) == SINGLE_NODE


def test_slurm_variables_replace_missing_options() -> None:
    environment = SLURM | {"HARNESS_RENDEZVOUS": "first-host:29512"}
    assert parse_rendezvous(None, None, None, environment) == RendezvousSpec(
        num_nodes=4, node_rank=2, host="first-host", port=29512
    )
    assert parse_rendezvous(2, 0, None, environment) == RendezvousSpec(
        num_nodes=2, node_rank=0, host="first-host", port=29512
    )
    older = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0", "HARNESS_RENDEZVOUS": "a:1"}
    assert parse_rendezvous(None, None, None, older) == RendezvousSpec(num_nodes=3, node_rank=0, host="a", port=1)


def test_options_override_slurm_variables() -> None:
    environment = SLURM | {"HARNESS_RENDEZVOUS": "first-host:29512"}
    assert parse_rendezvous(2, 1, "other:99", environment) == RendezvousSpec(
        num_nodes=2, node_rank=1, host="other", port=99
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, None, None), r"^--nodes: must be at least 1, got 0$"),
        ((2, 2, "a:1"), r"^--node-rank: must be from 0 to 1, got 2$"),
        ((2, -1, "a:1"), r"^--node-rank: must be from 0 to 1, got -1$"),
        ((2, 0, None), r"^--rendezvous: 2 nodes need the HOST:PORT of node 0$"),
        ((2, 0, "host"), r"^--rendezvous: must be HOST:PORT, got 'host'$"),
        ((2, 0, "host:0"), r"^--rendezvous: must be HOST:PORT"),
        ((2, 0, "host:65536"), r"^--rendezvous: must be HOST:PORT"),
        ((2, 0, ":29500"), r"^--rendezvous: must be HOST:PORT"),
    ],
)
def test_invalid_options_name_the_option(options: tuple[int | None, int | None, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rendezvous(*options, {})


def test_a_missing_slurm_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_NNODES or SLURM_JOB_NUM_NODES: must be a number"):
        parse_rendezvous(None, None, None, {"HARNESS_RENDEZVOUS": "a:1", "SLURM_NODEID": "0"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launch.nodes=3", "launch.nproc=1"], "launch.min_nodes: 2 of 3 nodes are available"),
        (["launch.nodes=4", "launch.spares=1", "launch.nproc=1"], "launch.min_nodes: 2 of 4 nodes are available"),
        (["launch.nodes=2", "launch.nproc=5"], "train.batch_size: must be at least the number of ranks (10)"),
    ],
)
def test_an_invalid_run_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    cfg = composed.load([*overrides, "parallel.device=cpu", "train.batch_size=8", f"run.dir={tmp_path}"])
    (run / "config.yaml").write_text(to_yaml(cfg))
    assert node.main([str(run), "--nodes", "2", "--node-rank", "1", "--rendezvous", "nowhere.invalid:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harness: {message}")
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_more_nodes_than_the_run_has_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    cfg = composed.load(["launch.nodes=2", "launch.spares=1", "launch.nproc=1", f"run.dir={tmp_path}"])
    (run / "config.yaml").write_text(to_yaml(cfg))
    assert node.main([str(run), "--nodes", "4", "--node-rank", "3", "--rendezvous", "nowhere.invalid:1"]) == 2
    assert capsys.readouterr().err == "harness: --nodes: 4 nodes are more than launch.nodes=2 and launch.spares=1\n"


def test_node_0_of_a_job_leaves_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(exit_file.EXIT_FILE, str(tmp_path / "exit"))
    others = ["--nodes", "2", "--node-rank", "1", "--rendezvous", "nowhere.invalid:1"]
    assert node.main([str(tmp_path / "none"), *others]) == 2
    assert not (tmp_path / "exit").exists()
    assert node.main([str(tmp_path / "none")]) == 2
    assert (tmp_path / "exit").read_text() == "2\n"


def test_a_run_that_is_in_use_can_be_joined_only_if_it_listens(tmp_path: Path) -> None:
    run, elastic = RunDir(tmp_path), composed.load(["launch.nodes=2", "launch.spares=1"])
    holder = replace(this_process(lease_s=0.6), machine="another machine")
    lease = directory_lease.acquire(run.lease, holder, on_lost=lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server, reserved_port() as closed:
        listening = RendezvousSpec(num_nodes=3, node_rank=1, port=server.getsockname()[1])
        assert node.joins_running(elastic, run, listening)
        for cfg, spec in (
            (composed.load(["launch.nodes=2"]), listening),
            (elastic, replace(listening, port=closed)),
            (elastic, replace(listening, node_rank=0)),
        ):
            with pytest.raises(ConfigError, match="is in use by"):
                node.joins_running(cfg, run, spec)
    lease.release()


@pytest.mark.parametrize("node_rank", [0, 1])
def test_node_0_removes_the_stop_of_an_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_rank: int
) -> None:
    """Launchers restart no ranks while there is one. The others leave it: the run may already be in progress."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    cfg = composed.load(["launch.nodes=2", "launch.nproc=1", "parallel.device=cpu", "model=tiny"])
    run.config.write_text(to_yaml(cfg))
    run.stop.touch()
    monkeypatch.setattr(start, "launch", lambda *_, **__: 1 if run.stop.exists() else 0)
    spec = RendezvousSpec(num_nodes=2, node_rank=node_rank, host="nowhere.invalid", port=1)
    assert node.run_node(str(run.path), spec) == node_rank
    run.stop.touch()
    monkeypatch.setenv(STOP_CLEARED, "1")
    assert node.run_node(str(run.path), spec) == 1, "the job has removed it, so this one is a new request"


def test_a_directory_without_a_config_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
