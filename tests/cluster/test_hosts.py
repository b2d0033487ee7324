"""Tests of a run over two virtual hosts that are killed or cut off: detected in time, resumed bit-identically."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.config.compose import to_yaml
from harness.config.schema import Config
from harness.core import events
from harness.core.events import RunStarted, StepRecord
from harness.core.rundir import RunDir, locate
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import Phase
from tests.cluster.hosts import Hosts, reason_to_skip
from tests.composed import load
from tests.distributed import cases
from tests.distributed.cases import TINY
from tests.distributed.pool import Pool
from tests.forks import Launched

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
    pytest.mark.timeout(600),
]

HANG_AFTER_S = 10.0
DETECTED_WITHIN_S = HANG_AFTER_S + 30.0
"""The promised time (hang_after_s and ten seconds), with a margin for a busy machine."""
STARTED_WITHIN_S = 200.0
PORT = 29500
SECRET = "-".join(("hf", "fedcba9876543210"))
"""In two pieces: the manifest holds the uncommitted diff of the code, which may include this file."""
OVERRIDES = (
    "parallel.device=cpu",
    "model.num_layers=1",
    "train.num_steps=80",
    "optim.warmup_steps=10",
    "checkpoint.every_steps=10",
    "checkpoint.good_after_steps=2",
)
LAUNCH = (
    "launch.nodes=2",
    "launch.min_nodes=1",
    "launch.nproc=1",
    "launch.threads=1",
    f"launch.hang_after_s={HANG_AFTER_S}",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as two_hosts:
        yield two_hosts


def create_run(runs: Path, name: str) -> RunDir:
    """A run directory with its configuration, as a launcher leaves it for the machines."""
    cfg: Config = load([*TINY, *OVERRIDES, *LAUNCH, f"run.dir={runs}", f"run.name={name}"])
    run = locate(cfg)
    run.path.mkdir(parents=True)
    run.config.write_text(to_yaml(cfg))
    return run


def start(hosts: Hosts, run: RunDir, num_nodes: int = 2) -> list[Launched]:
    """`launch.local.node` on each host."""
    args = [str(run.path), "--nodes", str(num_nodes), "--rendezvous", f"{hosts.address(1)}:{PORT}"]
    return [
        hosts.start(
            node + 1,
            "launch.local.node",
            *args,
            "--node-rank",
            str(node),
            output=run.path.parent / f"node-{node}",
            environment={"HUB_TOKEN": SECRET},
        )
        for node in range(num_nodes)
    ]


def wait_until_trained(run: RunDir, num_steps: int, agents: list[Launched]) -> None:
    """Wait until both ranks are past their first iteration and the log has `num_steps` more steps."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    goal = len(steps(run)) + num_steps
    while len(steps(run)) < goal or any(beat.phase is Phase.start for beat in heartbeat.read_all(run)):
        assert time.monotonic() < deadline, "the run did not train in time"
        assert all(agent.poll() is None for agent in agents), [agent.stderr for agent in agents]
        time.sleep(0.05)


def steps(run: RunDir) -> list[StepRecord]:
    if not run.events.exists():
        return []
    return [event for event in events.read(run.events) if isinstance(event, StepRecord)]


def wait_for_end(agent: Launched, within_s: float) -> tuple[int, str]:
    return agent.wait(within_s), agent.stderr


def test_a_run_survives_a_lost_host_and_a_cut_cable_bit_identically(hosts: Hosts, ranks: Pool, tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")

    agents = start(hosts, run)
    wait_until_trained(run, 15, agents)
    hosts.crash(2)
    code, err = wait_for_end(agents[0], DETECTED_WITHIN_S)
    assert (code, err.splitlines()[-1]) == (1, "harness: node 0 (host1) stops: node 1 (host2) is gone")
    agents[1].wait(DETECTED_WITHIN_S)
    hosts.boot(2)

    agents = start(hosts, run)
    wait_until_trained(run, 15, agents)
    hosts.cut(2)
    lines = []
    for agent in agents:
        code, err = wait_for_end(agent, DETECTED_WITHIN_S)
        assert code == 1
        lines.append(err.splitlines()[-1])
    assert lines[0].startswith("harness: node 0 (host1) stops: node 1 (host2) has been silent for ")
    assert lines[1].startswith("harness: node 1 (host2) stops: node 0 (10.77.0.1) has been silent for ")
    hosts.join(2)

    single = RunDir(tmp_path / "single" / "run")
    shutil.copytree(run.path, single.path)
    assert [wait_for_end(agent, STARTED_WITHIN_S)[0] for agent in start(hosts, run)] == [0, 0]
    expected = reference(ranks, tmp_path)
    assert {record.step for record in steps(run)} == set(expected)
    assert [record.loss for record in steps(run)] == [expected[record.step] for record in steps(run)]
    begun = [event for event in events.read(run.events) if isinstance(event, RunStarted)]
    assert [event.world_size for event in begun] == [2, 2, 2]
    assert all(event.resumed_from for event in begun[1:])
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    (agent,) = start(hosts, single, num_nodes=1)
    assert wait_for_end(agent, STARTED_WITHIN_S)[0] == 0
    *_, last = [event for event in events.read(single.events) if isinstance(event, RunStarted)]
    assert (last.world_size, bool(last.resumed_from)) == (1, True)
    assert steps(single)[-1].loss == pytest.approx(expected[80], rel=1e-3)
    assert [beat.rank for beat in heartbeat.read_all(single)] == [0], "the heartbeat file of the lost rank is deleted"


def reference(ranks: Pool, directory: Path) -> dict[int, float]:
    """Loss by step of an undisturbed run, on two ranks of one machine."""
    (code, records), _ = ranks.run(2, cases.run, str(directory / "reference"), *OVERRIDES, "run.name=run")
    assert code == 0
    return {record.step: record.loss for record in records}
