"""The environment that some faults need: a small disk, a network and a tracking server that a fault can break.

`open_environment` yields the `FaultEnvironment` of a victim: its configuration, the setup before its first start, the
wrapper of its command, and the clean-up after its last start. Disk and network are in namespaces of the victim's own:
no other process sees them, and they outlive its starts, so a launcher that is killed finds its checkpoints again. The
small disk is a tmpfs; its content is copied out at the end. The tracking server is MLflow's, on the loopback device,
with the store that all runs of the directory share.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import final

from harness.config.errors import ConfigError, require
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core import processes
from harness.core.events import CheckpointSaved
from harness.core.rundir import RunDir
from harness.drills.drill_record import DrillEvidence, gather
from harness.faults.fault_plan import FaultKind
from harness.telemetry.sinks.sink_process import SINK_MODULE
from harness.telemetry.sinks.store_uri import tracking_uri
from launch.drills.local_nodes import rehearses_nodes
from launch.drills.virtual_hosts import IN_DIRECTORY, reason_against_hosts
from launch.local.ports import reserved_port

CHECKPOINTS_ON_DISK = 3
"""Checkpoints that fit on the small disk beyond those that a run keeps: one being written, one being deleted, one
spare."""
LEAST_DISK_BYTES = 1 << 22
SERVER_WITHIN_S = 120.0
SERVER_ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Job execution would start half a dozen unused processes and double the start time of MLflow's server."""
NAMESPACE_FAULTS = (FaultKind.full_disk, FaultKind.network_down)
"""Faults that need a mount or a network namespace."""
HOST_FAULTS = (FaultKind.network_down, FaultKind.unhealthy_node)
"""Faults that need virtual hosts if there are several nodes."""
WAIT = 'if [ "$1" = -n ]; then ip link set lo up || exit 2; fi; echo ready; read -r _'
"""Keeps namespaces open until its standard input is closed."""


class UnavailableError(ConfigError):
    """This machine or this configuration does not have what a drill needs."""


def require_environment(kind: FaultKind, cfg: Config) -> None:
    """Raise UnavailableError if this machine cannot provide the environment of a fault."""
    require(cfg.launch.kind is not LaunchKind.k8s, "launch", "must be local or slurm for a drill, got k8s")
    if kind not in (*NAMESPACE_FAULTS, FaultKind.tracking_down, FaultKind.unhealthy_node):
        return
    if rehearses_nodes(cfg):
        reason = reason_against_hosts()
        if kind in HOST_FAULTS and reason:
            raise UnavailableError(kind, f"with several nodes: {reason}")
        if kind not in HOST_FAULTS:
            raise UnavailableError("launch.nodes", f"{kind} needs launch.nodes=1, got {cfg.launch.nodes}")
    elif kind in NAMESPACE_FAULTS:
        find_unshare(kind)
    elif kind is FaultKind.unhealthy_node:
        raise UnavailableError(
            "launch.nodes", f"{kind} needs launch=local and at least 2 nodes, got {cfg.launch.nodes}"
        )
    elif find_spec("mlflow") is None:
        raise UnavailableError(kind, "needs the package mlflow")
    if cfg.launch.kind is not LaunchKind.local:
        raise UnavailableError("launch", f"{kind} needs launch=local, got {cfg.launch.kind}")


def find_unshare(kind: FaultKind) -> list[str]:
    """Command prefix that gives the namespace of a fault. Raises UnavailableError if this machine allows none."""
    if kind is FaultKind.full_disk:
        spaces, probe = "-m", ["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", "/mnt"]
    else:
        spaces, probe = "-n", ["ip", "link", "set", "lo", "up"]
    for command in (["unshare", spaces], ["unshare", "-r", spaces]):
        with suppress(OSError):
            if subprocess.run([*command, *probe], capture_output=True, check=False).returncode == 0:
                return command
    name = "mount" if kind is FaultKind.full_disk else "network"
    needs = f"needs a {name} namespace and {probe[0]}: run as root, or allow user namespaces (unshare -r {spaces})"
    raise UnavailableError(kind, needs)


@final
class Namespaces:
    """Mount and network namespaces, kept open by a process that waits until they are closed."""

    def __init__(self, kinds: Collection[FaultKind]) -> None:
        found = [find_unshare(kind) for kind in NAMESPACE_FAULTS if kind in kinds]
        flags = list(dict.fromkeys(flag for command in found for flag in command[1:]))
        network = "-n" if "-n" in flags else ""
        self._holder = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", WAIT, "sh", network], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise UnavailableError("drill", f"cannot create namespaces with unshare {' '.join(flags)}")
        enter = [{"-r": "-U"}.get(flag, flag) for flag in flags]
        preserve = ["--preserve-credentials"] if "-r" in flags else []
        self.wrap = ["nsenter", "-t", str(self._holder.pid), *enter, *preserve]
        self.wrap += ["sh", "-c", IN_DIRECTORY, "sh", str(Path.cwd())]
        """Command prefix that enters them, in this working directory."""

    def run(self, *command: str) -> None:
        """Run a command inside."""
        subprocess.run([*self.wrap, *command], check=True, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """Leave them to the processes inside; the kernel removes them with the last one."""
        self._holder.communicate()


@final
@dataclass(slots=True, kw_only=True)
class SmallDisk:
    """Puts the victim's checkpoints on a small tmpfs."""

    namespaces: Namespaces
    victim: RunDir
    size_bytes: int

    @property
    def kept(self) -> Path:
        return self.victim.path / "checkpoints.kept"

    def mount(self) -> None:
        for path in (self.victim.checkpoints, self.kept):
            path.mkdir()
        where = str(self.victim.checkpoints.resolve())
        self.namespaces.run("mount", "-t", "tmpfs", "-o", f"size={self.size_bytes}", "tmpfs", where)

    def copy_out(self) -> None:
        """Replace the empty directory that other processes see by what is on the disk."""
        source, target = (str(path.resolve()) for path in (self.victim.checkpoints, self.kept))
        self.namespaces.run("cp", "-a", f"{source}/.", target)
        self.victim.checkpoints.rmdir()
        self.kept.rename(self.victim.checkpoints)


@final
@dataclass(slots=True, kw_only=True)
class TrackingServer:
    """An MLflow server that the fault kills."""

    cfg: Config
    victim: RunDir
    port: int
    store: str
    """Backend store of the server."""
    wrap: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    num_killed: int = 0
    """How often it was found dead."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.victim.logs / "tracking-server.log"

    def start(self) -> None:
        artifacts = Path(self.cfg.run.dir).resolve() / "mlartifacts"
        command = processes.command("mlflow", "server", "--backend-store-uri", self.store, "--workers", "1")
        command += ["--artifacts-destination", str(artifacts), "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                # in the directory of its log, because MLflow imports modules from its working directory
                [*self.wrap, "sh", "-c", IN_DIRECTORY, "sh", str(self.victim.logs.resolve()), *command],
                env=os.environ | SERVER_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.victim.tracking_pid.write_text(f"{self.process.pid}\n", encoding="utf-8")

    def await_answer(self) -> None:
        deadline_s = time.monotonic() + SERVER_WITHIN_S
        while fetch(f"{self.address}/health", wrap=self.wrap) is None:
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError("tracking_down", f"the tracking server did not start; see {self.log}")
            time.sleep(0.1)

    def restart_if_dead(self) -> None:
        """Start it again if it was killed, as its operators would."""
        if self.process is not None and self.process.poll() is not None:
            self.num_killed += 1
            self.start()

    def send_rest(self) -> list[str]:
        """Restart the server, send what it missed, and count the stored iterations; returns notes."""
        assert self.process is not None
        self.num_killed += self.process.poll() is not None
        self.stop()
        self.start()
        self.await_answer()
        command = processes.command(SINK_MODULE, str(self.victim.path.resolve()), "--only", "mlflow")
        subprocess.run(
            [*self.wrap, *command],
            env=processes.child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        wanted = {record.iteration for record in gather(self.victim).records}
        held = wanted & self.stored_iterations()
        notes = [] if self.num_killed else ["the tracking server was not killed"]
        share = "all" if held == wanted else f"{len(held)} of"
        return [*notes, f"MLflow holds the losses of {share} {len(wanted)} iterations"]

    def stored_iterations(self) -> set[int]:
        """Iterations whose loss the server has for the victim, by its REST API."""
        run_id = json.loads(self.victim.mlflow.read_text(encoding="utf-8"))["run_id"]
        url = f"{self.address}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=loss&max_results=25000"
        reply = fetch(url, wrap=self.wrap)
        return set() if reply is None else {int(metric["step"]) for metric in json.loads(reply).get("metrics", [])}

    def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.victim.tracking_pid.unlink(missing_ok=True)


def fetch(url: str, *, wrap: Sequence[str]) -> str | None:
    """What a URL answers to a process inside the wrapper; None if it does not answer."""
    reply = subprocess.run(
        [*wrap, *processes.command("launch.drills.fetch_url", url)],
        env=processes.child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    return reply.stdout if reply.returncode == 0 else None


@final
@dataclass(slots=True, kw_only=True)
class FaultEnvironment:
    """The environment of a victim; without any of its parts it is that of a normal run."""

    cfg: Config
    """The victim's configuration."""
    wrap: list[str] = field(default_factory=list)
    """Command prefix of each start."""
    disk: SmallDisk | None = None
    server: TrackingServer | None = None

    def set_up(self) -> None:
        """Called after the victim's directory is created, before its first start."""
        if self.disk is not None:
            self.disk.mount()
        if self.server is not None:
            self.server.start()
            self.server.await_answer()

    def clean_up(self) -> list[str]:
        """Called after its last start; returns notes for the score card."""
        if self.disk is not None:
            self.disk.copy_out()
        return [] if self.server is None else self.server.send_rest()


@contextmanager
def open_environment(
    kinds: Collection[FaultKind], cfg: Config, victim: RunDir, *, twin: DrillEvidence
) -> Iterator[FaultEnvironment]:
    """Open the environment that faults of these kinds need."""
    needs_namespaces = any(kind in NAMESPACE_FAULTS for kind in kinds) and not rehearses_nodes(cfg)
    namespaces = Namespaces(kinds) if needs_namespaces else None
    environment = FaultEnvironment(cfg=cfg, wrap=[] if namespaces is None else namespaces.wrap)
    try:
        if namespaces is not None and FaultKind.full_disk in kinds:
            size_bytes = small_disk_bytes(cfg, twin)
            environment.disk = SmallDisk(namespaces=namespaces, victim=victim, size_bytes=size_bytes)
        if FaultKind.tracking_down not in kinds:
            yield environment
            return
        with reserved_port() as port:
            telemetry = replace(cfg.telemetry, mlflow=True, tracking_uri=f"http://127.0.0.1:{port}")
            environment.cfg = replace(cfg, telemetry=telemetry)
            environment.server = TrackingServer(
                cfg=environment.cfg, victim=victim, port=port, store=tracking_uri(cfg), wrap=environment.wrap
            )
            yield environment
    finally:
        if environment.server is not None:
            environment.server.stop()
        if namespaces is not None:
            namespaces.close()


def small_disk_bytes(cfg: Config, twin: DrillEvidence) -> int:
    """Room for the checkpoints that a run keeps, and a few more."""
    largest = max((event.bytes for event in twin.of(CheckpointSaved)), default=0)
    return max(LEAST_DISK_BYTES, (cfg.checkpoint.keep + CHECKPOINTS_ON_DISK) * (largest + LEAST_DISK_BYTES // 8))
