"""Messages between launchers over a real connection."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

from launch.local.node_link import Link

NUM_MESSAGES = 20
HOSTS = ["host" * 16] * 500
"""Makes a message larger than the buffer of the connection."""


def test_messages_of_several_threads_stay_whole() -> None:
    """A thread sends heartbeats, and another one the decision about a restart."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.settimeout(5.0)
    sender, reader = Link(0, "a", ours, 0.0), Link(1, "b", theirs, 0.0)

    def send_decisions() -> None:
        for _ in range(NUM_MESSAGES):
            sender.send(hosts=HOSTS)

    def send_beats() -> None:
        for _ in range(NUM_MESSAGES):
            sender.send(beat=True)
            time.sleep(0.001)

    with ThreadPoolExecutor(2) as pool, ours, theirs:
        calls = [pool.submit(send_decisions), pool.submit(send_beats)]
        received: list[dict[str, object]] = []
        while len(received) < 2 * NUM_MESSAGES:
            messages = reader.read_messages()
            assert messages is not None, "the connection is of no use any more"
            received += messages
        for call in calls:
            call.result()
    assert received.count({"beat": True}) == NUM_MESSAGES
