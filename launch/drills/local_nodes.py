"""Rehearses the nodes of a cluster on this machine: one launcher for each node and spare, as on a real cluster.

How: as root the nodes are virtual hosts with their own network, process table and shared memory
(`launch.drills.virtual_hosts`). Otherwise they are launchers on loopback, each with a node name of its own
(`harness.core.node_name`): processes can die and hang there, but no network can fail. A launcher that was killed can be
started again after some seconds, as operators would boot its machine; it then joins as a spare.
The ranks run on CPU, because the nodes share the devices of this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from harness.config.errors import require
from harness.config.launch import LaunchKind
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.core import processes
from harness.core.event_json import to_json
from harness.core.events import FaultInjected
from harness.core.node_name import NODE_NAME
from harness.core.rundir import RunDir, append_line
from harness.drills.drill_record import Start
from harness.faults.fault_plan import LINK_VARIABLE, FaultKind, read_plan
from launch.drills.virtual_hosts import LINK, VirtualHosts, reason_against_hosts
from launch.local.ports import reserved_port
from launch.local.thread_count import num_cores

POLL_S = 0.1
PORT = 29500
"""Of the rendezvous, in the network of the virtual hosts."""
STOP_WITHIN_S = 60.0
"""How long the other launchers may take to end after that of node 0."""


def rehearses_nodes(cfg: Config) -> bool:
    """Whether a run has several nodes, and all of them are on this machine."""
    return cfg.launch.kind is LaunchKind.local and cfg.launch.nodes > 1


def local_node_overrides(cfg: Config) -> list[str]:
    """What a run over nodes of this machine needs: CPU ranks that share its cores."""
    message = "must be cpu or auto: nodes that are rehearsed on one machine have no GPUs of their own"
    require(cfg.parallel.device is not DeviceKind.cuda, "parallel.device", message)
    nproc = cfg.launch.nproc or 1
    threads = cfg.launch.threads or max(1, num_cores() // (cfg.launch.nodes * nproc))
    return ["parallel.device=cpu", f"launch.nproc={nproc}", f"launch.threads={threads}"]


def on_one_node(cfg: Config) -> Config:
    """The config of a twin: as many ranks, on one node without spares."""
    if not rehearses_nodes(cfg):
        return cfg
    num_ranks = cfg.launch.nodes * (cfg.launch.nproc or 1)
    launch = replace(cfg.launch, nodes=1, spares=0, min_nodes=None, replace_running=False, nproc=num_ranks)
    ring = replace(cfg.checkpoint.ring, replicas=0)
    return replace(cfg, launch=launch, checkpoint=replace(cfg.checkpoint, ring=ring))


@final
@dataclass(slots=True)
class LocalNode:
    """One node: its launcher, and how it is started."""

    number: int
    command: list[str]
    environment: dict[str, str]
    output: Path
    """Path of its output files, without their suffix."""
    process: subprocess.Popen[bytes] | None = None
    ended_s: float | None = None
    """When its launcher was first seen dead, by the monotonic clock."""
    said: list[str] = field(default_factory=list)

    def start(self) -> None:
        paths = [self.output.with_name(f"{self.output.name}.{stream}") for stream in ("stdout", "stderr")]
        with paths[0].open("ab") as out, paths[1].open("ab") as err:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.ended_s = None

    @property
    def exit_code(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher and everything in its session."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill what is left, and read what the launcher said."""
        if self.process is None:
            return
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        text = self.output.with_name(f"{self.output.name}.stderr").read_text(encoding="utf-8", errors="replace")
        self.said = [line for line in text.splitlines() if line.startswith("harness: ")]


@contextmanager
def open_nodes(cfg: Config, run: RunDir, *, number: int) -> Iterator[tuple[list[LocalNode], VirtualHosts | None]]:
    """The nodes of a start, not started yet, and the virtual hosts that they are on; None: they are on loopback."""
    count = cfg.launch.nodes + cfg.launch.spares
    with ExitStack() as stack:
        hosts = None if reason_against_hosts() else stack.enter_context(VirtualHosts(count))
        if hosts is not None:
            address = f"{hosts.address(1)}:{PORT}"
        else:
            address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        nodes = []
        for node in range(count):
            arguments = ("--nodes", str(count), "--node-rank", str(node), "--rendezvous", address)
            command = processes.command("launch.local.node", str(run.path.resolve()), *arguments)
            own = {NODE_NAME: f"node{node}"} if hosts is None else {LINK_VARIABLE: LINK}
            output = run.logs / (f"start-{number}" if node == 0 else f"start-{number}-node-{node}")
            wrap = [] if hosts is None else hosts.wrap(node + 1)
            nodes.append(LocalNode(node, [*wrap, *command], processes.child_environment() | own, output))
        if hosts is not None:
            break_nodes(cfg, run, hosts)
        try:
            yield nodes, hosts
        finally:
            for each in nodes:
                each.end()


def break_nodes(cfg: Config, run: RunDir, hosts: VirtualHosts) -> None:
    """Inject the faults of machines that strike before they run a rank: a run directory that cannot be written."""
    plan, nproc = read_plan(run), cfg.launch.nproc or 1
    num_ranks = cfg.launch.nodes * nproc
    for number, fault in plan or ():
        if fault.kind is FaultKind.unhealthy_node:
            rank = fault.rank_of(num_ranks)
            host, where = rank // nproc + 1, str(run.path.resolve())
            message = f"makes the run directory read-only on host{host}"
            strike = FaultInjected(
                time=time.time(), iteration=0, number=number, kind=fault.kind, rank=rank, message=message
            )
            append_line(run.faults, to_json(strike))
            hosts.run_on(host, "mount", "--bind", where, where)
            hosts.run_on(host, "mount", "-o", "remount,ro,bind", where)


def start_nodes(run: RunDir, cfg: Config, *, limit_s: float, reboot_after_s: float | None = None) -> Start:
    """Run all launchers of a run to their end; they are killed after `limit_s` seconds.

    The exit code is that of the first launcher, or of the next one if that was killed and another has taken over.

    reboot_after_s: a launcher that was killed by a signal is started again after this time; None: never.
    """
    number = sum("-node-" not in path.name for path in run.logs.glob("start-*.stderr"))
    begun_s, notes = time.monotonic(), list[str]()
    with open_nodes(cfg, run, number=number) as (nodes, hosts):
        for node in nodes:
            node.start()
        try:
            while (first := find_first(nodes)).exit_code is None and time.monotonic() - begun_s < limit_s:
                time.sleep(POLL_S)
                if reboot_after_s is not None:
                    reboot_killed(nodes[1:], hosts, after_s=reboot_after_s)
        except KeyboardInterrupt:
            for node in nodes:
                node.send_signal(signal.SIGTERM)
            await_end(nodes)
            raise
        ended = time.time()
        if first.exit_code is None:
            notes.append(f"harness: did not end within {limit_s:g} s and was killed")
        else:
            await_end(nodes)
    assert first.process is not None
    said = notes + [line for node in nodes for line in node.said]
    seconds = round(time.monotonic() - begun_s, 3)
    return Start(exit_code=first.process.returncode, said=said, seconds=seconds, ended=ended)


def find_first(nodes: Sequence[LocalNode]) -> LocalNode:
    """The first node whose launcher was not killed by a signal; node 0 if all were."""
    return next((node for node in nodes if node.exit_code is None or node.exit_code >= 0), nodes[0])


def await_end(nodes: Sequence[LocalNode]) -> None:
    """Wait until all launchers have ended, or STOP_WITHIN_S."""
    deadline_s = time.monotonic() + STOP_WITHIN_S
    while any(node.exit_code is None for node in nodes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def reboot_killed(nodes: Sequence[LocalNode], hosts: VirtualHosts | None, *, after_s: float) -> None:
    """Start launchers again that were killed some time ago, each on an empty host."""
    for node in nodes:
        code = node.exit_code
        if code is None or code >= 0:
            continue
        node.ended_s = node.ended_s or time.monotonic()
        if time.monotonic() - node.ended_s >= after_s:
            node.end()
            if hosts is not None:
                hosts.crash(node.number + 1)
                hosts.boot(node.number + 1)
                module = node.command.index(processes.command("")[0])
                node.command = [*hosts.wrap(node.number + 1), *node.command[module:]]
            node.start()
