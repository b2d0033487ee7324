"""`python -m launch.local.node`: where this machine stands, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import compose
from harness.config.compose import to_yaml
from harness.config.errors import ConfigError
from launch.local import node
from launch.local.node import place_of
from launch.local.node_group import ALONE, Place

SLURM = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_ID": "7"}


def test_alone_is_the_loopback() -> None:
    assert place_of(None, None, None, {}) == ALONE
    assert (ALONE.nodes, ALONE.host) == (1, "127.0.0.1")


def test_an_allocation_alone_is_no_reason_to_wait_for_others() -> None:
    assert place_of(None, None, None, SLURM) == ALONE


def test_slurm_says_what_is_not_given() -> None:
    environment = SLURM | {"HARNESS_RENDEZVOUS": "first-host:29512"}
    assert place_of(None, None, None, environment) == Place(nodes=4, node=2, host="first-host", port=29512)
    assert place_of(2, 0, None, environment) == Place(nodes=2, node=0, host="first-host", port=29512)
    older = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0", "HARNESS_RENDEZVOUS": "a:1"}
    assert place_of(None, None, None, older) == Place(nodes=3, node=0, host="a", port=1)


def test_words_come_before_slurm() -> None:
    environment = SLURM | {"HARNESS_RENDEZVOUS": "first-host:29512"}
    assert place_of(2, 1, "other:99", environment) == Place(nodes=2, node=1, host="other", port=99)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((0, None, None), r"^--nodes: must be at least 1, got 0$"),
        ((2, 2, "a:1"), r"^--node-rank: must be from 0 to 1, got 2$"),
        ((2, -1, "a:1"), r"^--node-rank: must be from 0 to 1, got -1$"),
        ((2, 0, None), r"^--rendezvous: 2 machines need a HOST:PORT at which they meet$"),
        ((2, 0, "host"), r"^--rendezvous: must be HOST:PORT, got 'host'$"),
        ((2, 0, "host:0"), r"^--rendezvous: must be HOST:PORT"),
        ((2, 0, "host:65536"), r"^--rendezvous: must be HOST:PORT"),
        ((2, 0, ":29500"), r"^--rendezvous: must be HOST:PORT"),
    ],
)
def test_a_place_that_cannot_be(words: tuple[int | None, int | None, str | None], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place_of(*words, {})


def test_a_job_that_does_not_say_how_many() -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_NNODES or SLURM_JOB_NUM_NODES: must be a number"):
        place_of(None, None, None, {"HARNESS_RENDEZVOUS": "a:1", "SLURM_NODEID": "0"})


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["launch.nodes=3", "launch.nproc=1"], "launch.min_nodes: 2 of 3 machines are there"),
        (["launch.nodes=2", "launch.nproc=5"], "train.batch_size: must be at least the number of ranks (10)"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], complaint: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    cfg = compose.load([*overrides, "parallel.device=cpu", "train.batch_size=8", f"run.dir={tmp_path}"])
    (run / "config.yaml").write_text(to_yaml(cfg))
    assert node.main([str(run), "--nodes", "2", "--node-rank", "1", "--rendezvous", "nowhere.invalid:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harness: {complaint}")
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
