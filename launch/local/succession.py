"""Finds another coordinator after that of an elastic run was lost, so that the run goes on without launcher 0.

Why: launcher 0 hosts the rendezvous and torch's store and decides about restarts. Without it the others cannot go on.
How: every other launcher of an elastic run listens at a port of its own. The coordinator sends all of them who is in
line, nodes before spares, and again whenever that changes. A launcher that has lost the coordinator stops its ranks and
connects to the first in line that answers. That one admits the others for some seconds, counts those that do not come
as lost, and decides as the first coordinator would have: a spare takes over the node of the lost machine, or the run
goes on with fewer (`launch.local.restart`). The next start has its store at the address of the new coordinator.
The lost coordinator may still live, cut off from the others. The lease of the run decides. A coordinator holds it while
no rank 0 does, and only its holder writes to the run. The new coordinator takes it once three renewals were missed, and
gives up if it is renewed. A launcher that was cut off and comes when the run has ended without it gives up too: it
would train on a run that was halted.
Left out: the restart budget of the lost coordinator; the count begins anew. Launcher 0 cannot join again as a spare.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from harness.config.errors import ConfigError
from harness.core.events import RunRestarted
from harness.core.locking.directory_lease import Lease, read_newest
from harness.core.locking.run_lease import FOLDER, take_over_lease
from harness.core.rundir import RunDir
from harness.core.transient_io import retry_transient
from harness.telemetry.event_log import read_non_step_events
from launch.local.file_limit import warn_about_files
from launch.local.node_group import NodeGroup
from launch.local.node_link import Link
from launch.node_record import NodeRecord

CONNECT_S = 5.0
FOLLOW_WITHIN_S = 10.0
"""How long a new coordinator waits for the launchers that were connected to the last one."""
SAME_LOSS_S = 120.0
"""Within how many seconds all launchers notice a loss, with the differences of their clocks."""

Admit = Callable[[socket.socket], Link | None]


def find_coordinator(group: NodeGroup, hello: Mapping[str, Any], admit: Admit, record: NodeRecord) -> bool:
    """Follow the first launcher in line that answers, or become the coordinator; False if there is none.

    Call it when the ranks of this node are gone. `hello` identifies this launcher.
    """
    for number, address, port in group.successors:
        if number == group.number:
            warn_about_files(hello["nodes"], hello["nproc"])
            return become_coordinator(group, address, str(hello["host"]), admit, record)
        if number in group.lost:
            continue
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
            link = Link(number, address, connection, time.monotonic())
            link.send(**hello, stopped=group.restarts)
            group.follow(link, address)
            return True
    return False


def take_over_run(group: NodeGroup, run: RunDir) -> Lease:
    """Take the lease of the run. Raises ConfigError if another process has it, or has ended the run in order after it
    went on without this launcher."""
    seen = retry_transient(partial(read_newest, run.path / FOLDER))
    lease = take_over_lease(run.path)
    if seen is not None and seen.released and has_gone_on(group, run):
        lease.release()
        raise ConfigError("", "it went on without this machine, and has ended")
    return lease


def has_gone_on(group: NodeGroup, run: RunDir) -> bool:
    """Whether another coordinator has restarted the ranks of this job since this launcher lost its own. If storage
    fails, the lease alone decides."""
    try:
        events = retry_transient(lambda: read_non_step_events(run.events))
    except OSError:
        return False
    restarts = [event for event in events if isinstance(event, RunRestarted)]
    return any(event.number > group.restarts and event.time > group.noticed - SAME_LOSS_S for event in restarts)


def become_coordinator(group: NodeGroup, address: str, host: str, admit: Admit, record: NodeRecord) -> bool:
    """Take over from the lost coordinator; False if it still writes the run.

    This launcher is not the coordinator before it holds the lease: only the coordinator writes to the run.
    """
    lost = set(group.lost)
    group.admit_followers(admit)
    expected = set(group.members) - lost - {group.number}
    with ThreadPoolExecutor(max_workers=1) as executor:
        taken = executor.submit(take_over_run, group, record.run)
        with group.changed:
            group.hosts[group.number] = host
            group.changed.wait_for(lambda: expected <= set(group.links), timeout=FOLLOW_WITHIN_S)
            for number in group.roster:
                group.hosts.setdefault(number, f"machine of launcher {number}")
                if number not in (group.number, *group.links, *group.lost):
                    group.add_lost(number, group.hosts[number], "is gone")
        try:
            group.lease = taken.result()
        except (ConfigError, OSError) as error:
            print(f"harness: the run cannot be taken over: {error}", file=sys.stderr, flush=True)
            return False
    record.read_again()
    group.coordinate(address)
    for link in group.links.values():
        record.mark_returned(link.host)
    print(f"harness: {host} coordinates the run from now on", file=sys.stderr, flush=True)
    return True
