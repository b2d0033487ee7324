"""Connects the nodes of a running job, so that each of them detects the failure of another within seconds.

Why: without this, torch's elastic agent waits minutes for a lost node, and a collective waits `parallel.timeout_s`.
How: every launcher keeps the TCP connection to node 0 that it opened at the rendezvous (`launch.local.rendezvous`).
Both sides send a heartbeat every second. A failure is sent at once. A process that dies closes its connection. A node
or cable that is lost goes silent and counts as failed after `silent_s`. All nodes report the first failure that was
sent, which names the cause and not its victims. Messages are JSON lines, never pickles.
After a failure the connections stay open. Node 0 waits until every node has stopped its ranks, decides whether all
ranks start again and which launcher runs which node (`launch.local.restart`), and sends the decision. Each start has a
number, that of its restart. The decision has the number of the next start. A failure of an earlier start is ignored. In
an elastic run (`launch.spares`,
`launch.min_nodes`) node 0 keeps its listener open: a launcher that joins later becomes a spare.
The launcher that decides is the coordinator: launcher 0, and in an elastic run the next in line if that one is lost
(`launch.local.succession`). "Node 0" in this package is the coordinator.
"""

from __future__ import annotations

import math
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Condition, Thread
from typing import Any, Self, final

from harness.core.events import EndCause
from harness.core.locking.directory_lease import Lease
from launch.local.node_link import Link, encode_message
from launch.local.roster import Roster, pack_roster, unpack_roster

HEARTBEAT_S = 1.0
POLL_S = 0.2
LINGER_S = 2.0
"""How long to wait at exit for the last messages to reach the other nodes."""
FENCE_S = 3.0
"""How long a silent node may need to notice the silence as well and to kill its ranks, beyond `silent_s`."""
LOOPBACK = "127.0.0.1"
SPARE = -1
"""Node rank of a launcher that runs no ranks."""
MAX_SUCCESSORS = 8
"""Launchers that are in line to coordinate the run."""
MAX_HOSTS = 512
"""Launchers whose machines all others know by name; the message must stay short."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSpec:
    """The number of this launcher, the number of launchers, and the address where they meet."""

    num_nodes: int = 1
    """Launchers, spares included."""
    node_rank: int = 0
    """Number of this launcher: the rank of its node at the start, unless it is a spare."""
    host: str = LOOPBACK
    """Host name or address of node 0."""
    port: int = 0
    """Port on node 0; 0 lets the kernel choose, for a single node."""


SINGLE_NODE = RendezvousSpec()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """The failure that ends a run, with the node it happened on."""

    node_rank: int
    host: str
    exit_code: int
    line: str
    cause: str = ""
    """Kind of the failure, a value of `EndCause`."""
    step: int = -1
    """Updates that the failed rank had applied; -1: unknown."""
    error: str = ""
    """Type and place of the exception that the rank raised; empty: it raised none."""


@final
@dataclass(slots=True)
class NodeGroup:
    """All nodes of a running job, seen from this one."""

    spec: RendezvousSpec
    address: str
    """IP address of node 0."""
    start_name: str
    """Name of this start of the run, equal on all nodes and unique: two starts at the same moment share no logs."""
    store_port: int
    store_socket: socket.socket | None
    """Where torch's TCPStore will listen; only on node 0."""
    silent_s: float
    links: dict[int, Link] = field(default_factory=dict)
    """Node 0 has a link to every other launcher, by its number; the others have one to node 0. Replaced, not changed:
    other threads iterate over it."""
    roster: Roster = (0,)
    """Number of the launcher of each node, equal on all launchers."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Number -> machine of every launcher that has joined; on the other launchers at least that of the coordinator."""
    restarts: int = 0
    """How often the ranks were restarted inside this job, equal on all nodes."""
    failure: NodeFailure | None = None
    """The first failure of this start that was reported."""
    lost: dict[int, NodeFailure] = field(default_factory=dict)
    """Launchers that were lost in this start, by number. Without node 0, the others end."""
    noticed: float = 0.0
    """When that failure was reported, in seconds since 1970."""
    decision: dict[str, Any] | None = None
    """Message of node 0: what follows the last failure; None from that failure until the message arrives."""
    out: dict[str, str] = field(default_factory=dict)
    """Machines that the last restart left out because of their faults -> why."""
    end_code: int | None = None
    """Exit code of the run on node 0, once it has sent it; for the spares."""
    changed: Condition = field(default_factory=Condition)
    """Guards the fields above, and is notified when a message or a loss changes them."""
    coordinator: int = 0
    """Number of the launcher that decides for all."""
    successors: tuple[tuple[int, str, int], ...] = ()
    """Number, address and port of the launchers that are in line to coordinate the run, equal on all launchers."""
    members: Roster = ()
    """Numbers of all launchers that are connected, by the coordinator."""
    succession: socket.socket | None = None
    """Where this launcher would coordinate the run; not on the coordinator."""
    succeed: Callable[[bool], bool] | None = None
    """Finds another coordinator after the last one was lost, and says whether a stop was requested here; None: the run
    ends without it."""
    listener: socket.socket | None = None
    """Where later launchers join; only on node 0."""
    admit: Callable[[socket.socket], Link | None] | None = None
    """Identifies a launcher that joins later; None rejects it."""
    lease: Lease | None = None
    """Lease of the run, held between two starts until rank 0 takes it; only on the coordinator of an elastic run."""
    lease_offered_by: str = ""
    """Owner of the lease that rank 0 of this start takes over; empty: none."""
    fenced_s: float = 0.0
    """Ranks of a silent node may run until then, by the monotonic clock."""
    _closing_s: float = math.inf
    _threads: list[Thread] = field(default_factory=list)
    _joined: list[Link] = field(default_factory=list)
    """Later launchers whose messages are not read yet."""

    def __enter__(self) -> Self:
        if self.links or self.listener is not None:
            self._start_thread(self._listen, "node-group")
        if self.listener is not None:
            self._start_thread(self._admit_later, "node-admission")
        return self

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        self._threads.append(Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    @property
    def number(self) -> int:
        """Number of this launcher."""
        return self.spec.node_rank

    @property
    def node_rank(self) -> int:
        """Rank of the node that this launcher runs; SPARE if it runs none."""
        return self.roster.index(self.number) if self.number in self.roster else SPARE

    @property
    def num_nodes(self) -> int:
        """Nodes that run ranks."""
        return len(self.roster)

    @property
    def is_spare(self) -> bool:
        return self.number not in self.roster

    @property
    def is_coordinator(self) -> bool:
        """Whether this launcher decides for all."""
        return self.number == self.coordinator

    @property
    def has_lost_coordinator(self) -> bool:
        return self.coordinator in self.lost

    @property
    def has_coordinator_ended(self) -> bool:
        """Whether the launcher that decides has ended without an error; then there is no other decision."""
        link = self.links.get(self.coordinator)
        return link is not None and link.is_closed

    def active_links(self) -> dict[int, Link]:
        """Links to the launchers that run ranks, by number."""
        return {number: self.links[number] for number in self.roster if number in self.links}

    def host_of(self, node_rank: int) -> str:
        """Machine of a node; only on node 0."""
        return self.hosts[self.roster[node_rank]]

    def report_failure(self, failure: NodeFailure) -> NodeFailure:
        """Send a failure to all nodes; returns the one that all report, which is the first."""
        with self.changed:
            if self.failure is None:
                self.failure, self.noticed = failure, time.time()
                if self.decision is not None and self.decision["again"]:
                    self.decision = None  # it followed an earlier failure
                self.send_all(failure=asdict(failure), restarts=self.restarts)
            return self.failure

    def send_all(self, **message: Any) -> None:
        line = encode_message(message)
        for link in self.links.values():
            link.send_line(line)

    def take_decision(self, decision: dict[str, Any]) -> None:
        """Keep what follows the last failure. If the ranks start again, this is the next start from here on: a failure
        of it may follow at once."""
        with self.changed:
            self.decision, self.out, self.lease_offered_by = decision, decision["out"], decision["lease"]
            if decision["again"]:
                self._begin_restart(decision["restarts"], decision["store_port"], unpack_roster(decision["roster"]))

    def _begin_restart(self, restarts: int, store_port: int, roster: Roster) -> None:
        """Forget the failure of the last start; the ranks of the next one meet at another store."""
        with self.changed:
            for number in set(self.roster) - set(roster) & set(self.links):
                self.links[number].problems = None  # it is used again only after another health check
            for link in self.links.values():
                link.is_done = link.is_closed
            self.restarts, self.store_port, self.roster = restarts, store_port, roster
            self.failure, self.end_code = None, None
            self.lost = {number: failure for number, failure in self.lost.items() if number in roster}

    @property
    def attempt_name(self) -> str:
        """Name of this start and its restart: the directory of its logs."""
        return f"{self.start_name}-restart-{self.restarts}" if self.restarts else self.start_name

    def go_message(self) -> dict[str, Any]:
        """What a launcher that joins must know; hold `changed`, so that no restart comes between."""
        return {
            "go": True,
            "start": self.start_name,
            "store_port": self.store_port,
            "roster": pack_roster(self.roster),
            "restarts": self.restarts,
            "succession": self.describe_succession(),
        }

    def describe_succession(self) -> dict[str, Any]:
        """Who is in line to coordinate the run, nodes before spares; only on the coordinator."""
        order = [*self.roster, *sorted(set(self.links) - set(self.roster))]
        line = [(number, *at) for number in order if (link := self.links.get(number)) and (at := link.listens_at)]
        members = sorted({self.number, *self.links})
        named = members if len(members) <= MAX_HOSTS else [self.number]
        return {
            "successors": line[:MAX_SUCCESSORS],
            "members": pack_roster(tuple(members)),
            "hosts": [[number, self.hosts[number]] for number in named if number in self.hosts],
        }

    def learn_succession(self, message: Mapping[str, Any]) -> None:
        """Keep what the coordinator sent about those in line."""
        self.successors = tuple((int(number), str(host), int(port)) for number, host, port in message["successors"])
        self.members, self.hosts = unpack_roster(message["members"]), dict(message["hosts"])

    def follow(self, link: Link, address: str) -> None:
        """Take another launcher as the coordinator."""
        with self.changed:
            self.coordinator, self.address, self.links = link.number, address, {link.number: link}
            self._joined.append(link)

    def admit_followers(self, admit: Callable[[socket.socket], Link | None]) -> None:
        """Admit the launchers that lost the coordinator too, before this one may take its place."""
        with self.changed:
            self.links, self.listener, self.succession, self.admit = {}, self.succession, None, admit
        self._start_thread(self._admit_later, "node-admission")

    def coordinate(self, address: str) -> None:
        """Become the coordinator."""
        with self.changed:
            self.coordinator, self.address = self.number, address

    def report_success(self, exit_code: int = 0) -> None:
        """Send that the ranks of this node ended without an error."""
        self.send_all(done=True, exit_code=exit_code)

    def __exit__(self, *_: object) -> None:
        """Disconnect after the reachable nodes have read our last message, or after LINGER_S."""
        if self.lease is not None:
            self.lease.release()
        now_s = time.monotonic()
        reachable = any(now_s - link.last_seen_s < self.silent_s for link in self.links.values())
        self._closing_s = now_s + (LINGER_S if reachable else 0.0)
        for opened in (self.store_socket, self.listener, self.succession):
            if opened is not None:
                opened.close()
        for link in self.links.values():
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        for thread in self._threads:
            thread.join(LINGER_S + HEARTBEAT_S)

    def _admit_later(self) -> None:
        """Thread of node 0: every launcher that joins after the start becomes a spare. One that has lost the last
        coordinator knows everything, and waits for the decision. If that was taken before it came, it is a spare."""
        assert self.listener is not None
        assert self.admit is not None
        while math.isinf(self._closing_s):
            try:
                connection = self.listener.accept()[0]
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            link = self.admit(connection)
            if link is not None:
                with self.changed:
                    self.links = {**self.links, link.number: link}
                    self.hosts[link.number] = link.host
                    if answer := self._answer_joined(link):
                        link.send(**answer)
                        self.send_all(succession=self.describe_succession())
                    self._joined.append(link)
                    self.changed.notify_all()
                if answer:
                    line = f"node {link.number} ({link.host}) has joined as a spare"
                    print(f"harness: {line}", file=sys.stderr, flush=True)

    def _answer_joined(self, link: Link) -> dict[str, Any]:
        """What makes a spare of a launcher that has joined; empty for one that will get a decision with all others.

        If it has a node in this start, the start has failed: it has no ranks, and keeps its node for the next start.
        """
        is_new = link.stopped < 0
        self.lost.pop(link.number, None)
        link.stopped = max(link.stopped, self.restarts)  # it has no ranks, whatever start it knows of
        if is_new:
            others = tuple(number for number in self.roster if number != link.number)
            return self.go_message() | {"roster": pack_roster(others)}
        return {} if self.decision is None else {"decision": self.decision}

    def _listen(self) -> None:
        next_beat_s = 0.0
        self._joined += self.links.values()
        with selectors.DefaultSelector() as selector:
            while time.monotonic() < self._closing_s and (selector.get_map() or self._is_waiting()):
                while self._joined:
                    link = self._joined.pop()
                    selector.register(link.connection, selectors.EVENT_READ, link)
                ready = [key.data for key, _ in selector.select(timeout=POLL_S)]
                gone = [link for link in ready if not self._receive(link)]
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + HEARTBEAT_S
                    gone += self._send_heartbeats()
                for link in {link.number: link for link in gone}.values():
                    self._drop_link(link, selector)
        for link in self.links.values():
            link.connection.close()

    def _is_waiting(self) -> bool:
        """Whether there are connections to read from, or others may come."""
        is_open = self.listener is not None or self.succession is not None
        return bool(self._joined) or (is_open and math.isinf(self._closing_s))

    def _drop_link(self, link: Link, selector: selectors.BaseSelector) -> None:
        """Close a connection. One whose ranks have ended stays known, so that it does not count as lost."""
        selector.unregister(link.connection)
        link.connection.close()
        with self.changed:
            if link.is_done:
                link.is_closed = True
            else:
                self.links = {number: other for number, other in self.links.items() if other is not link}
            self.changed.notify_all()

    def _receive(self, link: Link) -> bool:
        """Process what a node sent; returns False once it has disconnected."""
        messages = link.read_messages()
        link.last_seen_s = time.monotonic()
        for message in messages or ():
            self._process_message(link, message)
        if messages is None and not link.is_done:
            self._report_lost(link, "is gone")
        return messages is not None

    def _process_message(self, link: Link, message: dict[str, Any]) -> None:
        with self.changed:
            if "failure" in message and message["restarts"] == self.restarts:
                self.report_failure(NodeFailure(**message["failure"]))
            if "stopped" in message:
                link.stopped, link.is_stopping = max(link.stopped, message["stopped"]), message["stopping"]
            if "problems" in message:
                link.problems = message["problems"]
            if "succession" in message:
                self.learn_succession(message["succession"])
                link.host = self.hosts.get(link.number, link.host)
            if "decision" in message:
                self.take_decision(message["decision"])
            link.is_done = link.is_done or "done" in message
            self.end_code = message.get("exit_code", self.end_code)
            self.changed.notify_all()

    def _send_heartbeats(self) -> list[Link]:
        """Send a heartbeat to every launcher; returns those that have been silent for too long."""
        silent = []
        for link in self.links.values():
            silent_s = time.monotonic() - link.last_seen_s
            if link.is_closed:
                continue
            if silent_s > self.silent_s:
                if not link.is_done:
                    self.fenced_s = time.monotonic() + FENCE_S
                    self._report_lost(link, f"has been silent for {silent_s:.0f} s")
                silent.append(link)
            else:
                link.send(beat=True)
        return silent

    def _report_lost(self, link: Link, problem: str) -> None:
        """Report a launcher that is gone. A spare is no loss for the run."""
        if not math.isinf(self._closing_s):
            return
        with self.changed:
            if link.number not in self.roster and link.number != self.coordinator:
                line = f"the spare node {link.number} ({link.host}) {problem}"
                print(f"harness: {line}", file=sys.stderr, flush=True)
                return
            self.report_failure(self.add_lost(link.number, link.host, problem))
            self.changed.notify_all()

    def add_lost(self, number: int, host: str, problem: str) -> NodeFailure:
        """Remember that a launcher is lost; returns the failure. The caller holds `changed`."""
        node_rank = self.roster.index(number) if number in self.roster else SPARE
        line = f"node {node_rank} ({host}) {problem}" if node_rank != SPARE else f"launcher {number} ({host}) {problem}"
        lost = NodeFailure(node_rank=node_rank, host=host, exit_code=1, line=line, cause=EndCause.lost_node)
        self.lost[number] = lost
        return lost
