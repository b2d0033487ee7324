"""Tests of a run over virtual hosts whose ranks are killed, or that are killed or cut off themselves: detected in time,
restarted inside the job on the same hosts, on a spare or on fewer, or resumed by another start, bit-identically."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from harness.checkpoint import catalog
from harness.config.compose import to_yaml
from harness.config.schema import Config
from harness.core import event_json
from harness.core.events import EndCause, Event, RunRestarted, RunStarted, StepRecord
from harness.core.rundir import RunDir, locate
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import Phase
from launch.drills.virtual_hosts import reason_against_hosts
from tests.cluster.hosts import Hosts
from tests.composed import load
from tests.distributed import cases
from tests.distributed.cases import TINY
from tests.distributed.pool import Pool
from tests.forks import Launched

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(reason_against_hosts()), reason=reason_against_hosts()),
    pytest.mark.timeout(600),
]

HANG_AFTER_S = 10.0
DETECTED_WITHIN_S = HANG_AFTER_S + 30.0
"""The promised time (hang_after_s and ten seconds), with a margin for a busy machine."""
STARTED_WITHIN_S = 200.0
POLL_S = 0.3
"""Not less: each look parses the whole log, and a test that looks all the time takes a core from the run."""
PORT = 29500
SECRET = "-".join(("hf", "fedcba9876543210"))
"""In two pieces: the manifest holds the uncommitted diff of the code, which may include this file."""
SLEEP_S = 0.2
"""Of each iteration, so that a run takes few steps between two looks at it."""
NUM_STEPS = 40
OVERRIDES = (
    "parallel.device=cpu",
    "model.num_layers=1",
    f"train.num_steps={NUM_STEPS}",
    "optim.warmup_steps=10",
    "checkpoint.every_steps=5",
    "checkpoint.good_after_steps=2",
)
LAUNCH = (
    "launch.nodes=2",
    "launch.nproc=1",
    "launch.threads=1",
    f"launch.hang_after_s={HANG_AFTER_S}",
)
RING_STEPS = 5
REPLICATED_S = 2.0
"""Within this time a snapshot is hashed and sent to the partner."""
COMPARED_STEPS = 24
CONSTANT = "optim.schedule=constant"
ELASTIC = (
    CONSTANT,
    "launch.spares=1",
    "launch.min_nodes=1",
    "train.num_steps=100000",
    "checkpoint.every_steps=20",
    "checkpoint.ring.shared_dir=/dev/shm",
    "checkpoint.ring.replicas=1",
    f"checkpoint.ring.every_steps={RING_STEPS}",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as three_hosts:
        yield three_hosts


def create_run(runs: Path, name: str, *more: str) -> RunDir:
    """A run directory with its configuration, as a launcher leaves it for the machines."""
    cfg: Config = load([*TINY, *OVERRIDES, *LAUNCH, *more, f"run.dir={runs}", f"run.name={name}"])
    run = locate(cfg)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(to_yaml(cfg))
    return run


def start(hosts: Hosts, run: RunDir, num_nodes: int = 2) -> list[Launched]:
    """`launch.local.node` on each host."""
    return [start_node(hosts, run, node, num_nodes=num_nodes) for node in range(num_nodes)]


def start_node(hosts: Hosts, run: RunDir, node: int, *, num_nodes: int) -> Launched:
    args = [str(run.path), "--nodes", str(num_nodes), "--rendezvous", f"{hosts.address(1)}:{PORT}"]
    return hosts.start(
        node + 1,
        "launch.local.node",
        *args,
        "--node-rank",
        str(node),
        output=run.path.parent / f"node-{node}",
        environment={"HUB_TOKEN": SECRET},
        sleep_s=SLEEP_S,
    )


def wait_until_trained(run: RunDir, num_steps: int, agents: list[Launched]) -> None:
    """Wait until both ranks are past their first iteration, the log has `num_steps` more steps, and one checkpoint is
    complete."""
    goal = len(steps(run)) + num_steps

    def has_trained() -> bool:
        is_starting = any(beat.phase is Phase.start for beat in heartbeat.read_all(run))
        return len(steps(run)) >= goal and not is_starting and bool(catalog.list_checkpoints(run.checkpoints))

    wait_for(has_trained, agents)


def wait_for(condition: Callable[[], bool], agents: Sequence[Launched]) -> None:
    """Wait for a condition while these launchers live."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, [agent.stderr for agent in agents]
        assert all(agent.poll() is None for agent in agents), [agent.stderr for agent in agents]
        time.sleep(POLL_S)


def steps(run: RunDir) -> list[StepRecord]:
    return [event for event in log_of(run) if isinstance(event, StepRecord)]


def log_of(run: RunDir) -> list[Event]:
    return list(event_json.read(run.events)) if run.events.exists() else []


def wait_for_end(agent: Launched, within_s: float) -> tuple[int, str]:
    return agent.wait(within_s), agent.stderr


def test_a_run_survives_a_lost_host_and_a_cut_cable_bit_identically(hosts: Hosts, ranks: Pool, tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")

    agents = start(hosts, run)
    wait_until_trained(run, 6, agents)
    hosts.crash(2)
    code, err = wait_for_end(agents[0], DETECTED_WITHIN_S)
    assert (code, err.splitlines()[-1]) == (1, "harness: node 0 (host1) stops: node 1 (host2) is gone")
    agents[1].wait(DETECTED_WITHIN_S)
    hosts.boot(2)

    agents = start(hosts, run)
    wait_until_trained(run, 6, agents)
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
    agents = start(hosts, run)
    wait_until_trained(run, 4, agents)
    (pid_file,) = (directory / "rank-1.pid" for directory in newest_logs(run))
    hosts.kill(2, int(pid_file.read_text()))
    ends = [wait_for_end(agent, STARTED_WITHIN_S) for agent in agents]
    assert [code for code, _ in ends] == [0, 0], "both launchers restarted their ranks"
    killed = "rank 1 on host2 was killed by SIGKILL"
    said = [[line for line in err.splitlines() if line.startswith("harness: ")] for _, err in ends]
    assert said[0] == [
        f"harness: node 0 (host1) stops: {killed}",
        "harness: node 0 (host1): restart 1: all ranks start again",
    ]
    assert said[1][-1] == "harness: node 1 (host2): restart 1: all ranks start again"
    (restarted,) = [event for event in event_json.read(run.events) if isinstance(event, RunRestarted)]
    assert (restarted.reason, restarted.cause) == (killed, EndCause.killed_rank)
    expected = reference(ranks, tmp_path, *OVERRIDES)
    assert {record.step for record in steps(run)} == set(expected)
    assert [record.loss for record in steps(run)] == [expected[record.step] for record in steps(run)]
    begun = [event for event in event_json.read(run.events) if isinstance(event, RunStarted)]
    assert [event.world_size for event in begun] == [2, 2, 2, 2]
    assert all(event.resumed_from for event in begun[1:])
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    create_run(tmp_path / "single", "run", "launch.min_nodes=1")
    (agent,) = start(hosts, single, num_nodes=1)
    assert wait_for_end(agent, STARTED_WITHIN_S)[0] == 0
    *_, last = [event for event in event_json.read(single.events) if isinstance(event, RunStarted)]
    assert (last.world_size, bool(last.resumed_from)) == (1, True)
    assert steps(single)[-1].loss == pytest.approx(expected[NUM_STEPS], rel=1e-3)
    assert [beat.rank for beat in heartbeat.read_all(single)] == [0], "the heartbeat file of the lost rank is deleted"


def test_a_spare_replaces_a_lost_host_and_a_host_that_returns_is_taken_back(
    hosts: Hosts, ranks: Pool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Host 2 is killed and host 3 takes over its ranks; host 3 is killed and the run continues on host 1; host 2
    returns, and the run takes it back after a checkpoint."""
    alerts = tmp_path / "alerts"
    send = f"telemetry.alerts.command.run=[tee,-a,{alerts}]"
    run = create_run(tmp_path, "run", *ELASTIC, send, "telemetry.alerts.command.events=[node_out]")
    first, _, spare = start(hosts, run, num_nodes=3)
    wait_for(lambda: len(steps(run)) >= COMPARED_STEPS // 2 and spans(steps(run), REPLICATED_S), [first, spare])
    assert "harness: host3 is a spare: it waits to replace a lost node\n" in spare.stderr
    killed, logged = time.time(), steps(run)
    hosts.crash(2)
    wait_for(lambda: has_updated_since_restart(run, 1), [first, spare])
    next_update = next(record for record in steps_since_restart(run))
    record_property("seconds from the kill to the next update", round(next_update.time - killed, 2))
    print(
        f"next update {next_update.time - killed:.1f} s after the kill, step {logged[-1].step}, then {next_update.step}"
    )
    restarted, started = restarts(run)[0], starts(run)[-1]
    assert (restarted.cause, restarted.out) == (EndCause.lost_node, {"host2": "node 1 (host2) is gone"})
    assert (restarted.replaced_by, restarted.num_nodes) == ({"host2": "host3"}, 2)
    assert (started.world_size, started.in_memory, started.fetched_ranks) == (2, True, [1]), "from the partner's memory"
    num_recent = sum(record.time > killed - REPLICATED_S for record in logged)
    assert restarted.step - started.step <= RING_STEPS + max(RING_STEPS, num_recent), "and those while it was sent"
    assert next_update.time - killed < 200.0

    wait_for(
        lambda: steps(run)[-1].step >= COMPARED_STEPS and bool(catalog.list_checkpoints(run.checkpoints)),
        [first, spare],
    )
    hosts.crash(3)
    wait_for(lambda: has_updated_since_restart(run, 2), [first])
    assert (restarts(run)[1].replaced_by, restarts(run)[1].num_nodes, starts(run)[-1].world_size) == ({}, 1, 1)

    hosts.boot(2)
    returned = start_node(hosts, run, 1, num_nodes=3)
    wait_for(lambda: has_updated_since_restart(run, 3), [first, returned])
    assert (restarts(run)[2].cause, restarts(run)[2].num_nodes) == (EndCause.planned, 2)
    assert starts(run)[-1].world_size == 2
    record = json.loads((run.path / "nodes.json").read_text())
    assert [(fault["node"], fault["kind"], bool(fault["returned"])) for fault in record["faults"]] == [
        ("host2", "lost", True),
        ("host3", "lost", False),
    ]
    assert [(node["node"], node["reason"]) for node in record["out"]] == [("host3", "node 1 (host3) is gone")]
    run.stop.touch()
    assert [wait_for_end(agent, STARTED_WITHIN_S)[0] for agent in (first, returned)] == [75, 75]
    hosts.boot(3)
    expected = reference(ranks, tmp_path, *OVERRIDES, CONSTANT, f"train.num_steps={COMPARED_STEPS}")
    on_two = [record for record in steps(run) if record.step in expected and record.time < restarts(run)[1].time]
    assert {record.step for record in on_two} == set(expected)
    assert [record.loss for record in on_two] == [expected[record.step] for record in on_two], "bit-identical"
    assert [alert["text"].splitlines()[0] for alert in map(json.loads, alerts.read_text().splitlines())] == [
        "[run] machine host2 is out: node 1 (host2) is gone; host3 replaces it",
        "[run] machine host3 is out: node 1 (host3) is gone",
    ]


def spans(records: list[StepRecord], seconds: float) -> bool:
    """Whether these steps took at least this time."""
    return records[-1].time - records[0].time >= seconds


def restarts(run: RunDir) -> list[RunRestarted]:
    return [event for event in log_of(run) if isinstance(event, RunRestarted)]


def starts(run: RunDir) -> list[RunStarted]:
    return [event for event in log_of(run) if isinstance(event, RunStarted)]


def steps_since_restart(run: RunDir) -> list[StepRecord]:
    """The steps after the last restart."""
    log = log_of(run)
    (*_, last) = (place for place, event in enumerate(log) if isinstance(event, RunRestarted))
    return [event for event in log[last:] if isinstance(event, StepRecord)]


def has_updated_since_restart(run: RunDir, number: int) -> bool:
    return len(restarts(run)) >= number and bool(steps_since_restart(run))


def newest_logs(run: RunDir) -> list[Path]:
    """Directory with the logs of the newest start."""
    return sorted((path for path in run.logs.iterdir() if path.is_dir()), key=lambda path: path.name)[-1:]


def reference(ranks: Pool, directory: Path, *overrides: str) -> dict[int, float]:
    """Loss by step of an undisturbed run, on two ranks of one machine. It saves at its end only."""
    last = "checkpoint.every_steps=0"
    (code, records), _ = ranks.run(2, cases.run, str(directory / "reference"), *overrides, "run.name=run", last)
    assert code == 0
    return {record.step: record.loss for record in records}
