"""Virtual hosts for tests: their processes are forked from a process that has imported torch (`tests.forks`)."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import final

from launch.drills.virtual_hosts import VirtualHosts
from tests.forks import Launched


def enter_host(first: int, environment: Mapping[str, str]) -> None:
    """Continue as a process of a host, given the pid of its first process; the parent waits, like nsenter."""
    spaces = [os.open(f"/proc/{first}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "pid", "mnt")]
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")
        os.close(space)
    os.environ.update(environment)
    inside = os.fork()
    if inside:
        code = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


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
