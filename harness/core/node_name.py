"""The name of this machine, and the name that a launcher was given for its node, where several nodes are rehearsed on
one machine.

A node with a name of its own has its own faults, and its own folder of snapshots in shared memory.
"""

from __future__ import annotations

import os
from socket import gethostname

NODE_NAME = "HARNESS_NODE_NAME"
"""Environment variable of a launcher and its ranks."""


def given_node_name() -> str:
    """The given name; empty: the node is the machine."""
    return os.environ.get(NODE_NAME, "")


def machine_name() -> str:
    """Name of this machine: the name that the launcher was given, Slurm's name of the node, or the host name."""
    return given_node_name() or os.environ.get("SLURMD_NODENAME") or gethostname()
