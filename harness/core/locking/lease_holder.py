"""A process as the holder of a lease: where it runs, whether it still runs, and for which job.

A pid says nothing on another machine, in another container, or after a reboot, and it is used again. A process is
therefore identified by the boot id, the pid namespace, the pid and its start time.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import final

DEFAULT_LEASE_S = 60.0
BEAT_S = 2.0
"""How often a holder renews its lease; a sixth of a short lease."""
BEATS_TO_BE_SURE = 3
"""After so many missing beats a holder looks before it writes, and a requeued job takes over from its earlier start."""
HIDDEN = -1
"""The start of a process that exists and shows no more than that."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The first line of a lease: who holds it."""

    owner: str
    """Unique for each time that a lease is taken."""
    host: str
    machine: str
    """Where a pid identifies a process: boot id and pid namespace."""
    pid: int
    started: int
    """When the process started, in clock ticks since boot; tells it from a later one with the same pid."""
    launcher_pid: int = 0
    """The parent of rank 0, which takes the other ranks down; 0: there are no other ranks."""
    launcher_started: int = 0
    job: str = ""
    """Slurm's name for the job; empty outside Slurm."""
    restart: int = 0
    """How often Slurm has requeued the job."""
    lease_s: float = DEFAULT_LEASE_S
    since: float = 0.0
    """Seconds since 1970, by the holder's clock; only to be shown."""

    @property
    def every_s(self) -> float:
        return min(BEAT_S, self.lease_s / 6)

    @property
    def sure_s(self) -> float:
        return BEATS_TO_BE_SURE * self.every_s

    def is_same_process(self, other: Holder) -> bool:
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)


def this_process(lease_s: float = DEFAULT_LEASE_S) -> Holder:
    """This process, as the holder of a lease."""
    environment = os.environ
    has_peers = int(environment.get("WORLD_SIZE", "1")) > 1
    launcher = os.getppid() if has_peers else 0
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return Holder(
        owner=uuid.uuid4().hex,
        host=gethostname(),
        machine=this_machine(),
        pid=os.getpid(),
        started=start_of(os.getpid()) or 0,
        launcher_pid=launcher,
        launcher_started=start_of(launcher) or 0,
        job=f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", ""),
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        lease_s=lease_s,
        since=time.time(),
    )


def this_machine() -> str:
    """Boot id and pid namespace; the host's name where the system has neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return gethostname()


def start_of(pid: int) -> int | None:
    """When a process of this machine started; None if it is gone or a zombie, HIDDEN where the system does not say."""
    if pid <= 0:
        return None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except OSError:  # gone, of another user, or a system without /proc
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return HIDDEN
