"""A real Slurm cluster on this machine: four virtual nodes on the loopback address, started in a second.

One controller and one slurmd per node are children of the test, with their own directory, key and ports, so several
clusters can run on one machine. So can their jobs, whose ports follow from their job ids. All nodes share one network
and one process table; only Slurm distinguishes them. A requeued job waits a few seconds in the queue (cred_expire: at
least 5, by default 120).
All processes of a cluster have its configuration in their environment; `stop` finds and kills them by it.
Left out: accounting (`sacct`), control groups, and hosts that can be cut off (`tests.cluster.hosts` has those).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from launch.local.ports import reserved_port

NUM_NODES = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
UP_WITHIN_S = 30.0
POLL_S = 0.5
"""Not less: a look often starts a client of Slurm, which costs the cluster the cores that its jobs need."""
CONFIGURATION = """\
ClusterName=lab
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={path}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool/%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
SlurmdParameters=config_overrides
KillWait=120
SlurmdTimeout=10
SlurmctldTimeout=20
MessageTimeout=10
InactiveLimit=0
MinJobAge=600
{nodes}
PartitionName=main Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str:
    """Why this machine cannot run Slurm; empty if it can."""
    if os.geteuid() != 0:
        return "a real Slurm needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"a real Slurm needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge" * bool(
        missing
    )


def wait_until(ready: Callable[[], bool], what: Callable[[], str], *, within_s: float) -> None:
    """Wait for a condition; fails after `within_s` seconds with a description."""
    deadline_s = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what()}"
        time.sleep(POLL_S)


@final
@dataclass
class LocalSlurm:
    """A cluster that runs from `start` to `stop`."""

    path: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="lab-")))
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def configuration(self) -> Path:
        return self.path / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Environment with which Slurm commands use this cluster."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return inherited | {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        self.path.chmod(0o755)
        for name in ("munge", "state", *(f"spool/n{number}" for number in range(1, NUM_NODES + 1))):
            (self.path / name).mkdir(parents=True)
        self._configure()
        munge = self.path / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        self._spawn("munged", "--foreground", *(f"--{option}={munge / name}" for option, name in files.items()))
        wait_until((munge / "socket").exists, lambda: self.log("munged"), within_s=UP_WITHIN_S)
        self._spawn("slurmctld", "-D", "-c")
        for number in range(1, NUM_NODES + 1):
            self.boot(f"n{number}")
        wait_until(
            self._is_idle, lambda: f"{self.command('sinfo', '-N', '-l')}\n{self.log('slurmctld')}", within_s=UP_WITHIN_S
        )

    def boot(self, node: str) -> None:
        """Start the daemon of a node, also again after it was killed."""
        self._spawn("slurmd", "-D", "-N", node)

    def command(self, *args: str | Path, cwd: Path | None = None) -> str:
        """Output of a Slurm command; fails the test if the command fails."""
        done = subprocess.run(
            [str(arg) for arg in args], env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{args}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def log(self, daemon: str) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.path.glob(f"{daemon}*.log")))

    def stop(self) -> None:
        """End the cluster: jobs first, then daemons, then all remaining processes."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.command("scancel", "--signal=KILL", "--full", "--user=root")
            self.command("scancel", "--user=root")
            wait_until(lambda: not self.command("squeue", "-h"), lambda: "jobs end", within_s=5)
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.resources.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def processes(self) -> list[int]:
        """Pids of all processes started in this cluster, without those in the session of the test."""
        mark = f"SLURM_CONF={self.configuration}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                pid = int(path.parent.name)
                if mark in path.read_bytes().split(b"\0") and os.getsid(pid) != os.getsid(0):
                    found.append(pid)
        return found

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        controller_port, *ports = (self.resources.enter_context(reserved_port()) for _ in range(NUM_NODES + 1))
        nodes = (
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000"
            for number, port in enumerate(ports, start=1)
        )
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host,
                first_job=random.randrange(1, 1_000_000),
                path=self.path,
                controller_port=controller_port,
                nodes="\n".join(nodes),
                num_nodes=NUM_NODES,
            )
        )

    def _spawn(self, *args: str) -> None:
        """Start a daemon that is killed with the test."""
        log = self.path / f"{args[0]}{'-' + args[-1] if args[0] == 'slurmd' else ''}.log"
        with log.open("ab") as file:
            command: Sequence[str] = ("setpriv", "--pdeathsig", "KILL", *args)
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            )

    def _is_idle(self) -> bool:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], env=self.environment, capture_output=True, text=True)
        return done.stdout.split() == ["idle"] * NUM_NODES
