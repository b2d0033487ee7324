"""Identifies the process that holds a lease: machine, pid, start time and Slurm job.

A pid means nothing on another machine, in another container or after a reboot, and the kernel reuses it. A process is
therefore identified by boot id, pid namespace, pid and start time.
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
"""Seconds between renewals of a lease; a sixth of `lease_s` if that is shorter."""
MISSED_BEATS = 3
"""After this many missed renewals a holder checks before it writes, and a requeued job takes over from its earlier
start."""
HIDDEN = -1
"""Start time of a process that exists but whose start time cannot be read."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The first line of a lease: the process that holds it."""

    owner: str
    """Unique id of this acquisition."""
    host: str
    machine: str
    """Scope in which a pid is unique: boot id and pid namespace."""
    pid: int
    started: int
    """Start time of the process, in clock ticks since boot; distinguishes processes that reuse a pid."""
    launcher_pid: int = 0
    """Parent of rank 0, which terminates the other ranks; 0: there are no other ranks."""
    launcher_started: int = 0
    job: str = ""
    """Slurm job id; empty outside Slurm."""
    restart: int = 0
    """How often Slurm has requeued the job."""
    lease_s: float = DEFAULT_LEASE_S
    """Seconds without renewal after which the lease is stale."""
    since: float = 0.0
    """When the lease was taken, by the holder's clock, in seconds since 1970; for display only."""

    @property
    def renew_every_s(self) -> float:
        """Seconds between renewals."""
        return min(BEAT_S, self.lease_s / 6)

    @property
    def overdue_s(self) -> float:
        """Seconds without renewal after which the holder is suspected to be dead."""
        return MISSED_BEATS * self.renew_every_s

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
    """Boot id and pid namespace; the host name if the system has neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return gethostname()


def start_of(pid: int) -> int | None:
    """Start time of a process on this machine; None if it is gone or a zombie, HIDDEN if it cannot be read."""
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
