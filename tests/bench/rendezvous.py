"""Measures rendezvous and restart of many nodes: the launcher code of node 0, and simulated other nodes.

    python -m tests.bench.rendezvous --ranks 16 256 4096 16384

Node 0 runs the code of the launcher: `join_nodes`, the node group with its heartbeats, `agree_on_restart`, and torch's
TCPStore. The other nodes, 8 ranks each, are sockets in a few processes. They send the messages of a node: hello,
heartbeats, a failure, "my ranks have stopped"; the ranks stop at once. After the decision every launcher and every rank
opens its own client of the store. Each rank sends what `connect` sends (counted with gloo): two addresses, and the
lookup of its two neighbours in a ring; one more lookup stands for NCCL's id.
All nodes run on this machine. The times include the work of the simulated nodes, and no network. The processes have a
network of their own (`unshare`): torch looks up the host name of every connection, and no name server must answer.

Columns of the table, in seconds:
- join: from the first connection until all nodes know that all have joined
- failure known: from the message about a failed rank until all nodes have it
- may start: from the same message until all nodes have the decision to start again
- store: from then until all ranks are connected to the store and have found their neighbours
- node 0: CPU time of node 0 in those two columns, its store included. On a cluster the work of the other nodes runs
  in parallel; this is what cannot
- messages: received and sent by node 0 for join and restart, without heartbeats and the store
- growth: the sum of "may start" and "store" over that of the row above; beside it what the logarithm of the number of
  ranks would give, and what its first power would give
"""

from __future__ import annotations

import argparse
import math
import os
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.config.compose import load
from harness.core.events import EndCause
from harness.core.rundir import locate
from launch.local.agent import StaticRendezvous
from launch.local.file_limit import files_needed, raise_file_limit
from launch.local.node_group import HEARTBEAT_S, LOOPBACK, POLL_S, NodeFailure, RendezvousSpec
from launch.local.node_link import Link
from launch.local.ports import reserved_port
from launch.local.rendezvous import connect_to_node_0, join_nodes
from launch.local.restart import RestartHistory, agree_on_restart
from tests.forks import forks

RANKS_PER_NODE = 8
MOST_FILES = 1 << 20
NUM_PROCESSES = 4
"""That share the simulated nodes."""
NUM_THREADS = 8
"""That use clients of the store, in each process."""
WITHIN_S = 300.0
SILENT_S = 60.0
TIMEOUT = timedelta(seconds=WITHIN_S)
ADDRESS = "x" * 154
"""As long as gloo's address of a rank."""
NCCL_ID = "0//nccl//0"
RUN = "rendezvous"
ISOLATED = "RENDEZVOUS_BENCH_ISOLATED"
HEAD = """\
| ranks | nodes | join | failure known | may start | store | node 0 | messages | growth, log, linear |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


class Timing(NamedTuple):
    """Seconds of one size."""

    num_ranks: int
    num_nodes: int
    join_s: float
    failure_s: float
    restart_s: float
    store_s: float
    node_0_s: float
    num_messages: int

    @property
    def total_s(self) -> float:
        return self.restart_s + self.store_s


class Share(NamedTuple):
    """The nodes that one process simulates, and what they know of the run."""

    nodes: range
    num_nodes: int
    port: int
    keeps_agents: bool
    """Whether launchers keep their clients of the store, as real ones do."""


@dataclass(slots=True)
class Moments:
    """When the simulated nodes of one process did or got something; all processes share the clock."""

    began_s: float = math.inf
    joined_s: float = 0.0
    reported_s: float = math.inf
    known_s: float = 0.0
    decided_s: float = 0.0
    store_s: float = 0.0
    num_messages: int = 0

    def merge(self, other: Moments) -> Moments:
        """The first begin and the last arrival of both."""
        return Moments(
            began_s=min(self.began_s, other.began_s),
            joined_s=max(self.joined_s, other.joined_s),
            reported_s=min(self.reported_s, other.reported_s),
            known_s=max(self.known_s, other.known_s),
            decided_s=max(self.decided_s, other.decided_s),
            store_s=max(self.store_s, other.store_s),
            num_messages=self.num_messages + other.num_messages,
        )


@dataclass(slots=True)
class SimulatedNodes:
    """Some nodes of a run, in one process, with one thread for all connections."""

    share: Share
    links: list[Link] = field(default_factory=list)
    moments: Moments = field(default_factory=Moments)
    store: tuple[str, int] = ("", 0)
    next_beat_s: float = 0.0

    def join(self) -> None:
        """Connect every node to node 0, and wait until all have the message that all nodes have joined."""
        share = self.share
        self.moments.began_s = time.monotonic()
        deadline_s = time.monotonic() + WITHIN_S
        for node in share.nodes:
            spec = RendezvousSpec(num_nodes=share.num_nodes, node_rank=node, host=LOOPBACK, port=share.port)
            link = Link(0, LOOPBACK, connect_to_node_0(spec, LOOPBACK, deadline_s, lambda: False), 0.0)
            self.links.append(link)
            host = f"simulated-{node}"
            self.send(link, run=RUN, node=node, nodes=share.num_nodes, nproc=RANKS_PER_NODE, host=host)
        self.next_beat_s = time.monotonic() + HEARTBEAT_S
        self.receive("go")
        self.moments.joined_s = time.monotonic()

    def restart(self, *, fails: bool) -> None:
        """Report that the ranks have stopped when a failure is known, and wait for the decision of node 0."""
        if fails:
            node = self.share.nodes[-1]
            line = f"rank {node * RANKS_PER_NODE} was killed by SIGKILL"
            failure = NodeFailure(node_rank=node, host="simulated", exit_code=1, line=line, cause=EndCause.killed_rank)
            self.moments.reported_s = time.monotonic()
            self.send(self.links[-1], failure=asdict(failure), restarts=0)
        self.receive("decision")
        self.moments.decided_s = time.monotonic()

    def receive(self, last: str) -> None:
        """Process messages until every node has received one of a kind."""
        waiting = len(self.links)
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.connection, selectors.EVENT_READ, link)
            while waiting:
                for key, _ in selector.select(timeout=POLL_S):
                    messages = key.data.read_messages()
                    assert messages is not None, "node 0 has disconnected"
                    waiting -= sum(self.process(key.data, message) == last for message in messages)
                if time.monotonic() > self.next_beat_s:
                    self.next_beat_s = time.monotonic() + HEARTBEAT_S
                    for link in self.links:
                        link.send(beat=True)

    def process(self, link: Link, message: dict[str, Any]) -> str:
        """Answer a message of node 0 as a launcher does; returns its kind."""
        kind = next(kind for kind in ("beat", "go", "failure", "decision", "refused") if kind in message)
        assert kind != "refused", message
        self.moments.num_messages += kind != "beat"
        if kind == "failure":
            self.moments.known_s = time.monotonic()
            self.send(link, stopped=0, stopping=False)
        if kind == "decision":
            assert message["decision"]["again"], message
            self.store = (LOOPBACK, message["decision"]["store_port"])
        return kind

    def send(self, link: Link, **message: Any) -> None:
        self.moments.num_messages += 1
        link.send(**message)

    def start_ranks(self) -> None:
        """Open the store clients of all launchers and ranks, and exchange addresses."""
        share = self.share
        num_ranks = share.num_nodes * RANKS_PER_NODE
        nodes = range(share.nodes.stop) if share.nodes.start == 1 else share.nodes  # also the ranks of node 0
        ranks = range(nodes.start * RANKS_PER_NODE, nodes.stop * RANKS_PER_NODE)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            agents = list(threads.map(self.open_agent, share.nodes))
            if not share.keeps_agents:
                agents.clear()
            clients = list(threads.map(lambda rank: self.open_client(rank, num_ranks), ranks))
            for _ in threads.map(look_up, ranks, clients, [num_ranks] * len(ranks)):
                pass
        self.moments.store_s = time.monotonic()

    def open_agent(self, _node: int) -> TCPStore:
        """The client of a launcher."""
        return TCPStore(*self.store, wait_for_workers=False, timeout=TIMEOUT)

    def open_client(self, rank: int, num_ranks: int) -> TCPStore:
        """The client of a rank, with its addresses in both groups."""
        client = TCPStore(*self.store, num_ranks, is_master=False, timeout=TIMEOUT)
        if rank == 0:
            client.set(NCCL_ID, ADDRESS)
        client.set(f"0//cpu//0/{rank}", ADDRESS)
        client.set(f"0//1//cpu//0/{rank}", ADDRESS)
        return client


def look_up(rank: int, client: TCPStore, num_ranks: int) -> None:
    """Look up the neighbours of a rank."""
    for key in (f"0//cpu//0/{(rank + 1) % num_ranks}", f"0//cpu//0/{(rank - 1) % num_ranks}", NCCL_ID):
        client.wait([key])
        assert len(client.get(key)) == len(ADDRESS)


def simulate(pipe: Connection, share: Share) -> None:
    """One process with simulated nodes; `pipe` says when each phase begins, and gets the moments after it."""
    raise_file_limit(MOST_FILES)
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # if there is a name server after all
    nodes = SimulatedNodes(share)
    pipe.send(None)
    pipe.recv()
    nodes.join()
    pipe.send(nodes.moments)
    nodes.restart(fails=pipe.recv())
    pipe.send(nodes.moments)
    pipe.recv()
    nodes.start_ranks()
    pipe.send(nodes.moments)
    pipe.recv()


def measure(num_ranks: int, directory: Path) -> Timing:
    """Join, fail, restart and connect one simulated run."""
    num_nodes = num_ranks // RANKS_PER_NODE
    keeps_agents = files_needed(num_nodes, RANKS_PER_NODE) <= raise_file_limit(MOST_FILES)
    if not keeps_agents:
        print(f"{num_ranks} ranks: the launchers close their clients of the store at once", file=sys.stderr)
    cfg = load(["parallel.device=cpu", f"run.dir={directory}", f"run.name={RUN}"])
    run = locate(cfg)
    run.path.mkdir(parents=True)
    run.config.touch()
    with reserved_port() as port:
        count = min(NUM_PROCESSES, num_nodes - 1)
        bounds = [1 + (num_nodes - 1) * index // count for index in range(count + 1)]
        shares = [Share(range(low, high), num_nodes, port, keeps_agents) for low, high in pairwise(bounds)]
        others = [start_process(share) for share in shares]
        pipes = [pipe for _, pipe in others]
        collect(pipes)
        tell(pipes, None)
        spec = RendezvousSpec(num_nodes=num_nodes, node_rank=0, host=LOOPBACK, port=port)
        with join_nodes(
            spec, run=RUN, nproc=RANKS_PER_NODE, within_s=WITHIN_S, silent_s=SILENT_S, stop_requested=lambda: False
        ) as group:
            collect(pipes)
            history = RestartHistory.begin(cfg)
            cpu_s = time.process_time()
            for pipe in pipes:
                pipe.send(pipe is pipes[-1])
            with group.changed:
                group.changed.wait_for(lambda: group.failure is not None)
            decision = agree_on_restart(group, history, [])
            assert decision.again, decision.reason
            collect(pipes)
            store = StaticRendezvous(group).next_rendezvous().store
            begun_s = time.monotonic()
            tell(pipes, None)
            moments = Moments()
            for found in collect(pipes):
                moments = moments.merge(found)
            cpu_s = time.process_time() - cpu_s
            group.report_success()
            for link in group.links.values():
                link.is_done = True
            tell(pipes, None)
            for process, _ in others:
                process.join()
            del store
    return Timing(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        join_s=moments.joined_s - moments.began_s,
        failure_s=moments.known_s - moments.reported_s,
        restart_s=moments.decided_s - moments.reported_s,
        store_s=moments.store_s - begun_s,
        node_0_s=cpu_s,
        num_messages=moments.num_messages,
    )


def start_process(share: Share) -> tuple[BaseProcess, Connection]:
    ours, theirs = forks().Pipe()
    process = forks().Process(target=simulate, args=(theirs, share), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def tell(pipes: Sequence[Connection], message: object) -> None:
    for pipe in pipes:
        pipe.send(message)


def collect(pipes: Sequence[Connection]) -> list[Any]:
    """One answer of each process."""
    answers = []
    for pipe in pipes:
        assert pipe.poll(WITHIN_S), "a process with simulated nodes does not answer"
        answers.append(pipe.recv())
    return answers


def isolate(argv: Sequence[str]) -> None:
    """Replace this process by one with a network of its own; returns if that is not possible."""
    os.environ |= {ISOLATED: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], check=False).returncode:
        print("no network of its own: the times include the name server", file=sys.stderr)
        return
    command = shlex.join([sys.executable, "-m", "tests.bench.rendezvous", *argv])
    os.execvp("unshare", [*unshare, "sh", "-c", f"ip link set lo up && exec {command}"])


def render_row(timing: Timing, before: Timing | None) -> str:
    growth = ""
    if before is not None:
        logarithm = math.log2(timing.num_ranks) / math.log2(before.num_ranks)
        growth = f"{timing.total_s / before.total_s:.1f}, {logarithm:.1f}, {timing.num_ranks / before.num_ranks:.0f}"
    times = " | ".join(
        f"{seconds:.3f}"
        for seconds in (timing.join_s, timing.failure_s, timing.restart_s, timing.store_s, timing.node_0_s)
    )
    return f"| {timing.num_ranks:,} | {timing.num_nodes:,} | {times} | {timing.num_messages:,} | {growth} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.rendezvous")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 256, 4096, 16384], help="multiples of 8, from 16")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size; the median by total time is printed")
    args = parser.parse_args(argv)
    if any(ranks < 2 * RANKS_PER_NODE or ranks % RANKS_PER_NODE for ranks in args.ranks):
        parser.error(f"--ranks: multiples of {RANKS_PER_NODE}, from {2 * RANKS_PER_NODE}")
    if ISOLATED not in os.environ:
        isolate(sys.argv[1:] if argv is None else argv)
    print(HEAD, flush=True)
    before = None
    for num_ranks in args.ranks:
        timings = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as directory:
                timings.append(measure(num_ranks, Path(directory)))
        timing = sorted(timings, key=lambda timing: timing.total_s)[len(timings) // 2]
        print(render_row(timing, before), flush=True)
        before = timing
    return 0


if __name__ == "__main__":
    sys.exit(main())
