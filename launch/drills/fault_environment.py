"""The environment that some faults need: a small disk that can be filled, a tracking server that can be killed.

`open_environment` yields a `FaultEnvironment`. It provides the victim's configuration, the setup before its first
start, the wrapper of its command, and the clean-up after its last start. The small disk is a tmpfs in the victim's own
mount namespace: no other process sees it, and the kernel removes it with the victim; its content is copied out at the
end. The tracking server is MLflow's, on the loopback interface, with the store that all runs of the directory share.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, final

from harness.config.errors import ConfigError
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core import processes
from harness.core.events import CheckpointSaved
from harness.core.rundir import RunDir
from harness.drills.drill_record import DrillEvidence, gather
from harness.faults.fault_plan import FaultKind
from harness.telemetry.tracking.sink_process import SINK_MODULE
from harness.telemetry.tracking.store_uri import tracking_uri
from launch.local.ports import reserved_port

CHECKPOINTS_ON_DISK = 3
"""Checkpoints that fit on the small disk beyond those that a run keeps: one being written, one being deleted, one
spare."""
LEAST_DISK_BYTES = 1 << 22
SERVER_WITHIN_S = 120.0
SERVER_ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Job execution would start half a dozen unused processes and double the start time of MLflow's server."""
ON_SMALL_DISK = """\
mount -t tmpfs -o size="$1" tmpfs "$2" || exit 2
disk=$2 kept=$3; shift 3
"$@"; code=$?
cp -a "$disk/." "$kept/"
exit $code
"""


class FaultEnvironment(Protocol):
    """The environment of a victim."""

    cfg: Config
    """The victim's configuration."""
    wrap: list[str]
    """Command prefix of each start."""

    def set_up(self) -> None:
        """Called after the victim's directory is created, before its first start."""

    def clean_up(self) -> list[str]:
        """Called after its last start; returns notes for the score card."""


@final
@dataclass(slots=True, kw_only=True)
class PlainEnvironment:
    """No special environment; enough for most faults."""

    cfg: Config
    wrap: list[str] = field(default_factory=list)

    def set_up(self) -> None:
        """Nothing to set up."""

    def clean_up(self) -> list[str]:
        return []


@contextmanager
def open_environment(
    kind: FaultKind, cfg: Config, victim: RunDir, *, twin: DrillEvidence
) -> Iterator[FaultEnvironment]:
    """Open the environment that a fault of this kind needs."""
    match kind:
        case FaultKind.full_disk:
            largest = max((event.bytes for event in twin.of(CheckpointSaved)), default=0)
            num = cfg.checkpoint.keep + CHECKPOINTS_ON_DISK
            size_bytes = max(LEAST_DISK_BYTES, num * (largest + LEAST_DISK_BYTES // 8))
            yield SmallDiskEnvironment(cfg=cfg, victim=victim, wrap=namespace(), size_bytes=size_bytes)
        case FaultKind.tracking_down:
            with tracking_server(cfg, victim) as environment:
                yield environment
        case _:
            yield PlainEnvironment(cfg=cfg)


class UnavailableError(ConfigError):
    """This machine cannot provide the environment of a drill."""


def require_environment(kind: FaultKind, cfg: Config) -> None:
    """Raise UnavailableError if this machine cannot provide the environment of a fault."""
    if kind not in (FaultKind.full_disk, FaultKind.tracking_down):
        return
    if kind is FaultKind.full_disk:
        namespace()
    if cfg.launch.kind is not LaunchKind.local:
        raise UnavailableError("launch", f"{kind} needs launch=local, got {cfg.launch.kind}")


def namespace() -> list[str]:
    """Command prefix that gives a mount namespace. Raises UnavailableError if this machine allows none."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        probe = [*command, "mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", "/mnt"]
        with suppress(OSError):
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return command
    raise UnavailableError("full_disk", "needs a mount namespace: run as root, or allow user namespaces (unshare -rm)")


@final
@dataclass(slots=True, kw_only=True)
class SmallDiskEnvironment:
    """Puts the victim's checkpoints on a small tmpfs."""

    cfg: Config
    victim: RunDir
    wrap: list[str]
    size_bytes: int

    @property
    def kept(self) -> Path:
        return self.victim.path / "checkpoints.kept"

    def set_up(self) -> None:
        for path in (self.victim.checkpoints, self.kept):
            path.mkdir()
        paths = [str(path.resolve()) for path in (self.victim.checkpoints, self.kept)]
        self.wrap += ["sh", "-c", ON_SMALL_DISK, "sh", str(self.size_bytes), *paths]

    def clean_up(self) -> list[str]:
        self.victim.checkpoints.rmdir()
        self.kept.rename(self.victim.checkpoints)
        return []


@contextmanager
def tracking_server(cfg: Config, victim: RunDir) -> Iterator[FaultEnvironment]:
    """Context with a tracking server for this drill only; the victim sends to it."""
    with reserved_port() as port:
        telemetry = replace(cfg.telemetry, mlflow=True, tracking_uri=f"http://127.0.0.1:{port}")
        own_cfg = replace(cfg, telemetry=telemetry)
        environment = TrackingEnvironment(cfg=own_cfg, victim=victim, port=port, store=tracking_uri(cfg))
        try:
            yield environment
        finally:
            environment.stop()


@final
@dataclass(slots=True, kw_only=True)
class TrackingEnvironment:
    """Runs a tracking server that the fault kills."""

    cfg: Config
    victim: RunDir
    port: int
    store: str
    """Backend store of the server."""
    wrap: list[str] = field(default_factory=list)
    server: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_up(self) -> None:
        self.start()

    def clean_up(self) -> list[str]:
        """Restart the server, send what it missed, and count the stored iterations."""
        assert self.server is not None
        was_killed = self.server.poll() is not None
        self.stop()
        self.start()
        command = processes.command(SINK_MODULE, str(self.victim.path))
        subprocess.run(
            command, env=processes.child_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        wanted = {record.iteration for record in gather(self.victim).records}
        held = wanted & stored_iterations(self.address, self.victim)
        notes = [] if was_killed else ["the tracking server was not killed"]
        share = "all" if held == wanted else f"{len(held)} of"
        return [*notes, f"MLflow holds the losses of {share} {len(wanted)} iterations"]

    def start(self) -> None:
        artifacts = Path(self.cfg.run.dir).resolve() / "mlartifacts"
        command = processes.command("mlflow", "server", "--backend-store-uri", self.store, "--workers", "1")
        command += ["--artifacts-destination", str(artifacts), "--host", "127.0.0.1", "--port", str(self.port)]
        log = self.victim.logs / "tracking-server.log"
        with log.open("ab") as output:
            self.server = subprocess.Popen(
                command,
                cwd=self.victim.logs,  # MLflow imports modules from its working directory
                env=os.environ | SERVER_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.victim.tracking_pid.write_text(f"{self.server.pid}\n", encoding="utf-8")
        deadline_s = time.monotonic() + SERVER_WITHIN_S
        while not responds(f"{self.address}/health"):
            if self.server.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError("tracking_down", f"the tracking server did not start; see {log}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self.server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            self.victim.tracking_pid.unlink(missing_ok=True)


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stored_iterations(address: str, run: RunDir) -> set[int]:
    """Iterations whose loss the server has for a run, by its REST API."""
    run_id = json.loads(run.mlflow.read_text(encoding="utf-8"))["run_id"]
    url = f"{address}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=loss&max_results=25000"
    with urllib.request.urlopen(url, timeout=30) as reply:
        return {int(metric["step"]) for metric in json.load(reply)["metrics"]}
