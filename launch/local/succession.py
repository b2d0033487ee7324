"""Finds another coordinator after that of an elastic run was lost, so that the run goes on without launcher 0.

Why: launcher 0 hosts the rendezvous and torch's store and decides about restarts. Without it the others cannot go on.
How: every other launcher of an elastic run listens at a port of its own. The coordinator sends all of them who is in
line, nodes before spares, and again whenever that changes. A launcher that has lost the coordinator stops its ranks and
connects to the first in line that answers. That one admits the others for some seconds, counts those that do not come
as lost, and decides as the first coordinator would have: a spare takes over the node of the lost machine, or the run
goes on with fewer (`launch.local.restart`). The next start has its store at the address of the new coordinator.
The lost coordinator may still live, cut off from the others. The lease of the run decides. A coordinator holds it while
no rank 0 does, and only its holder writes to the run. The new coordinator takes it once three renewals were missed, and
gives up if it is renewed.
Left out: the restart budget of the lost coordinator; the count begins anew. Launcher 0 cannot join again as a spare.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from harness.config.errors import ConfigError, StorageError
from harness.core.locking.run_lease import take_over_lease
from launch.local.file_limit import warn_about_files
from launch.local.node_group import NodeGroup
from launch.local.node_link import Link
from launch.node_record import NodeRecord

CONNECT_S = 5.0
FOLLOW_WITHIN_S = 10.0
"""How long a new coordinator waits for the launchers that were connected to the last one."""

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


def become_coordinator(group: NodeGroup, address: str, host: str, admit: Admit, record: NodeRecord) -> bool:
    """Take over from the lost coordinator; False if it still writes the run.

    This launcher is not the coordinator before it holds the lease: only the coordinator writes to the run.
    """
    lost = set(group.lost)
    group.admit_followers(admit)
    expected = set(group.members) - lost - {group.number}
    with ThreadPoolExecutor(max_workers=1) as executor:
        taken = executor.submit(take_over_lease, record.run.path)
        with group.changed:
            group.hosts[group.number] = host
            group.changed.wait_for(lambda: expected <= set(group.links), timeout=FOLLOW_WITHIN_S)
            for number in group.roster:
                group.hosts.setdefault(number, f"machine of launcher {number}")
                if number not in (group.number, *group.links, *group.lost):
                    group.add_lost(number, group.hosts[number], "is gone")
        try:
            group.lease = taken.result()
        except (ConfigError, StorageError) as error:
            print(f"harness: the run cannot be taken over: {error}", file=sys.stderr, flush=True)
            return False
    record.read_again()
    group.coordinate(address)
    for link in group.links.values():
        record.mark_returned(link.host)
    print(f"harness: {host} coordinates the run from now on", file=sys.stderr, flush=True)
    return True
