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
from tests.slow_steps import slow_steps


def enter_host(first: int, environment: Mapping[str, str], sleep_s: float) -> None:
    """Continue as a process of a host, given the pid of its first process; the parent waits, like nsenter. Each
    iteration of a run sleeps `sleep_s` seconds."""
    slow_steps(sleep_s)
    enter_namespaces([f"/proc/{first}/ns/{kind}" for kind in ("net", "uts", "pid", "mnt")])
    os.environ.update(environment)


@final
class Hosts(VirtualHosts):
    """Hosts whose processes start fast."""

    def start(
        self, host: int, module: str, *args: str, output: Path, environment: Mapping[str, str], sleep_s: float
    ) -> Launched:
        """`python -m MODULE ARGS` on a host."""
        first = partial(enter_host, self.first_process(host), environment, sleep_s)
        return Launched(module, *args, output=output, first=first)

    def kill(self, host: int, pid: int) -> None:
        """Send SIGKILL to one process of a host, by its pid there."""
        subprocess.run(
            ["nsenter", "-t", str(self.first_process(host)), "-p", "bash", "-c", f"kill -9 {pid}"], check=True
        )
