"""Virtual hosts for tests: their processes are forked from a process that has imported torch (`tests.forks`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import final

from launch.drills.virtual_hosts import VirtualHosts
from tests.cluster.namespaces import enter_namespaces
from tests.forks import Launched


def enter_host(first: int, environment: Mapping[str, str]) -> None:
    """Continue as a process of a host, given the pid of its first process; the parent waits, like nsenter."""
    enter_namespaces([f"/proc/{first}/ns/{kind}" for kind in ("net", "uts", "pid", "mnt")])
    os.environ.update(environment)


@final
class Hosts(VirtualHosts):
    """Hosts whose processes start fast."""

    def start(self, host: int, module: str, *args: str, output: Path, environment: Mapping[str, str]) -> Launched:
        """`python -m MODULE ARGS` on a host."""
        return Launched(module, *args, output=output, first=partial(enter_host, self.first_process(host), environment))

    def kill(self, host: int, pid: int) -> None:
        """Send SIGKILL to one process of a host, by its pid there."""
        subprocess.run(
            ["nsenter", "-t", str(self.first_process(host)), "-p", "bash", "-c", f"kill -9 {pid}"], check=True
        )
