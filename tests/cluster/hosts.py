"""Virtual hosts on one machine: each has its own network, host name and process table, and can be killed or cut off.

An outer process has its own network namespace with a bridge. Each host is a pid and network namespace inside it,
connected to the bridge by a virtual cable (veth). Killing the first process of a host kills everything on it, and the
kernel still closes its connections; taking its cable down gives the others no sign. Files are shared, as on a cluster,
except /dev/shm, which is memory of the host and lost with it.
Nothing outside is changed, and the end of the outer process ends all hosts.
Processes of a host are forked from a process that has imported torch (`tests.forks`) and then enter its namespaces.
Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self, final

from tests.forks import Launched

NETWORK = "10.77.0"
UP_WITHIN_S = 20.0
OUTER = f"""
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for host in $(seq $1); do
    ip netns add host$host
    ip link add cable$host type veth peer name eth0 netns host$host
    ip link set cable$host master bridge up
    ip -n host$host link set lo up
    ip -n host$host addr add {NETWORK}.$host/24 dev eth0
    ip -n host$host link set eth0 up
done
echo ready
read -r forever
"""
INNER = "hostname host$1; mount -t tmpfs tmpfs /dev/shm; echo $$; exec sleep infinity"


def reason_to_skip() -> str:
    """Why this machine cannot run virtual hosts; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "cannot create network namespaces"


def only_child(pid: int) -> int:
    """The process that `unshare --fork` started."""
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError(f"process {pid} did not start its child")


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
class Hosts:
    """Hosts 1, 2, ... with the addresses 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, count: int) -> None:
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        self._outer = subprocess.Popen(
            [*unshare, "bash", "-c", OUTER, "bash", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n"
        self._inside = only_child(self._outer.pid)
        self._hosts: dict[int, subprocess.Popen[str]] = {}
        for host in range(1, count + 1):
            self.boot(host)

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host}"

    def boot(self, host: int) -> None:
        """Start a host, empty."""
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        process = subprocess.Popen(
            [*self._enter(), "ip", "netns", "exec", f"host{host}", *unshare, "bash", "-c", INNER, "bash", str(host)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n", "the first process of the pid namespace"
        self._hosts[host] = process

    def start(self, host: int, module: str, *args: str, output: Path, environment: Mapping[str, str]) -> Launched:
        """`python -m MODULE ARGS` on a host."""
        return Launched(module, *args, output=output, first=partial(enter_host, self._first_process(host), environment))

    def crash(self, host: int) -> None:
        """Kill everything on a host."""
        process = self._hosts.pop(host)
        os.kill(self._first_process_of(process), 9)
        process.communicate()

    def kill(self, host: int, pid: int) -> None:
        """Send SIGKILL to one process of a host, by its pid there."""
        subprocess.run(
            ["nsenter", "-t", str(self._first_process(host)), "-p", "bash", "-c", f"kill -9 {pid}"], check=True
        )

    def cut(self, host: int) -> None:
        """Take its cable down, without closing connections."""
        self._link(host, "down")

    def join(self, host: int) -> None:
        self._link(host, "up")

    def _link(self, host: int, state: str) -> None:
        subprocess.run([*self._enter(), "ip", "link", "set", f"cable{host}", state], check=True)

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._inside), "-m", "-n", "-p", "--"]

    def _first_process(self, host: int) -> int:
        return self._first_process_of(self._hosts[host])

    def _first_process_of(self, process: subprocess.Popen[str]) -> int:
        """nsenter forks into the pid namespace, then unshare forks the host's first process."""
        return only_child(only_child(process.pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outer.kill()
        self._outer.communicate()
        for process in self._hosts.values():
            process.communicate()
