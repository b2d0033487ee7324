"""Virtual hosts on one machine: each has its own network, host name, process table and shared memory.

Why: a node that dies or loses its network must be rehearsed before a cluster is there.
How: an outer process has its own network namespace with a bridge. Each host is a pid, mount and network namespace
inside it, connected to the bridge by a virtual cable (veth). Killing the first process of a host kills everything on
it, and the kernel still closes its connections; taking its cable down gives the others no sign. Files are shared, as on
a cluster, except /dev/shm, which is memory of the host and lost with it. Nothing outside is changed, and the end of the
outer process ends all hosts.
Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

NETWORK = "10.77.0"
LINK = "eth0"
"""The network device of a host."""
UP_WITHIN_S = 20.0
OUTER = f"""
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for host in $(seq $1); do
    ip netns add host$host
    ip link add cable$host type veth peer name {LINK} netns host$host
    ip link set cable$host master bridge up
    ip -n host$host link set lo up
    ip -n host$host addr add {NETWORK}.$host/24 dev {LINK}
    ip -n host$host link set {LINK} up
done
echo ready
read -r forever
"""
INNER = "hostname host$1; mount -t tmpfs tmpfs /dev/shm; echo $$; exec sleep infinity"
IN_DIRECTORY = 'cd "$1" && shift && exec "$@"'


def reason_against_hosts() -> str:
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
    deadline_s = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline_s:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            return int(children[0])
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} did not start its child within {UP_WITHIN_S:.0f} s")


class VirtualHosts:
    """Hosts 1, 2, ... with the addresses 10.77.0.1, 10.77.0.2, ... and the names host1, host2, ..."""

    def __init__(self, count: int) -> None:
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        self._outer = subprocess.Popen(
            [*unshare, "bash", "-c", OUTER, "bash", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "ready\n":
            raise OSError("the network of the virtual hosts was not created")
        self._inside = only_child(self._outer.pid)
        self._hosts: dict[int, subprocess.Popen[str]] = {}
        for host in range(1, count + 1):
            self.boot(host)

    @staticmethod
    def address(host: int) -> str:
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
        if process.stdout.readline() != "1\n":  # the first process of a pid namespace
            raise OSError(f"virtual host {host} did not start")
        self._hosts[host] = process

    def wrap(self, host: int) -> list[str]:
        """Command prefix that enters a host, in this working directory."""
        enter = ["nsenter", "-t", str(self.first_process(host)), "-n", "-u", "-p", "-m"]
        return [*enter, "sh", "-c", IN_DIRECTORY, "sh", str(Path.cwd())]

    def run_on(self, host: int, *command: str) -> None:
        """Run a command on a host."""
        subprocess.run([*self.wrap(host), *command], check=True, stdin=subprocess.DEVNULL)

    def crash(self, host: int) -> None:
        """Kill everything on a host."""
        process = self._hosts.pop(host)
        os.kill(self._first_process_of(process), signal.SIGKILL)
        process.communicate()

    def cut(self, host: int) -> None:
        """Take its cable down, without closing connections."""
        self._set_cable(host, "down")

    def join(self, host: int) -> None:
        self._set_cable(host, "up")

    def first_process(self, host: int) -> int:
        """Pid of the first process of a host."""
        return self._first_process_of(self._hosts[host])

    def close(self) -> None:
        """End all hosts and everything on them."""
        self._outer.kill()
        self._outer.communicate()
        for process in self._hosts.values():
            process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_cable(self, host: int, state: str) -> None:
        subprocess.run([*self._enter(), "ip", "link", "set", f"cable{host}", state], check=True)

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._inside), "-m", "-n", "-p", "--"]

    @staticmethod
    def _first_process_of(process: subprocess.Popen[str]) -> int:
        """nsenter forks into the pid namespace, then unshare forks the first process of the host."""
        return only_child(only_child(process.pid))
