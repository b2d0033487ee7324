"""What some faults need around the run: a disk small enough to be filled, a tracking server that can be killed.

How: `stage_for` yields a `Stage` that the runner asks at four moments: which configuration the victim gets, what to do
before its first start, what its command is wrapped in, and what to look at after its last. The small disk is a tmpfs in
a mount namespace of the victim's own, so nothing is mounted for anybody else and nothing is left when it is killed;
what lies on it in the end is copied out. The tracking server is MLflow's own, on the loopback, over the store that all
runs of the directory share.
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
from harness.faults.plan import FaultKind
from harness.telemetry.tracking.sink_process import SINK_MODULE
from harness.telemetry.tracking.store_uri import tracking_uri
from launch.local.ports import reserved_port

CHECKPOINTS_ON_DISK = 3
"""Room on the small disk beyond what a run keeps: one that is written, one that is deleted, one to spare."""
LEAST_DISK_BYTES = 1 << 22
SERVER_WITHIN_S = 120.0
SERVER_ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""MLflow's server would start half a dozen processes for jobs that no run has, and be twice as slow to come up."""
ON_SMALL_DISK = """\
mount -t tmpfs -o size="$1" tmpfs "$2" || exit 2
disk=$2 kept=$3; shift 3
"$@"; code=$?
cp -a "$disk/." "$kept/"
exit $code
"""


class Stage(Protocol):
    """What stands around a victim."""

    cfg: Config
    """How the victim trains."""
    wrap: list[str]
    """What its command is wrapped in."""

    def set_up(self) -> None:
        """After the victim's directory is laid out, before its first start."""

    def look_after(self) -> list[str]:
        """After its last start; what the card must tell."""


@final
@dataclass(slots=True, kw_only=True)
class Bare:
    """Nothing: what most faults need."""

    cfg: Config
    wrap: list[str] = field(default_factory=list)

    def set_up(self) -> None:
        """There is nothing to set up."""

    def look_after(self) -> list[str]:
        return []


@contextmanager
def stage_for(kind: FaultKind, cfg: Config, victim: RunDir, *, twin: DrillEvidence) -> Iterator[Stage]:
    """What a fault of this kind needs around the victim."""
    match kind:
        case FaultKind.full_disk:
            largest = max((event.bytes for event in twin.of(CheckpointSaved)), default=0)
            num = cfg.checkpoint.keep + CHECKPOINTS_ON_DISK
            size_bytes = max(LEAST_DISK_BYTES, num * (largest + LEAST_DISK_BYTES // 8))
            yield SmallDisk(cfg=cfg, victim=victim, wrap=namespace(), size_bytes=size_bytes)
        case FaultKind.tracking_down:
            with tracking_server(cfg, victim) as stage:
                yield stage
        case _:
            yield Bare(cfg=cfg)


class UnavailableError(ConfigError):
    """This machine cannot give a drill what it needs."""


def check_stage(kind: FaultKind, cfg: Config) -> None:
    """Refuse at once what this machine cannot give a fault of this kind."""
    if kind not in (FaultKind.full_disk, FaultKind.tracking_down):
        return
    if kind is FaultKind.full_disk:
        namespace()
    if cfg.launch.kind is not LaunchKind.local:
        raise UnavailableError("launch", f"{kind} needs launch=local, got {cfg.launch.kind}")


def namespace() -> list[str]:
    """How to get a mount namespace here; refuses where there is none to be had."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        probe = [*command, "mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", "/mnt"]
        with suppress(OSError):
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return command
    raise UnavailableError("full_disk", "needs a small disk: root, or unshare -rm with user namespaces allowed")


@final
@dataclass(slots=True, kw_only=True)
class SmallDisk:
    """The checkpoints of the victim lie on a tmpfs."""

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

    def look_after(self) -> list[str]:
        self.victim.checkpoints.rmdir()
        self.kept.rename(self.victim.checkpoints)
        return []


@contextmanager
def tracking_server(cfg: Config, victim: RunDir) -> Iterator[Stage]:
    """A server for this drill alone; the victim reports to it."""
    with reserved_port() as port:
        telemetry = replace(cfg.telemetry, mlflow=True, tracking_uri=f"http://127.0.0.1:{port}")
        told = replace(cfg, telemetry=telemetry)
        stage = Tracked(cfg=told, victim=victim, port=port, store=tracking_uri(cfg))
        try:
            yield stage
        finally:
            stage.stop()


@final
@dataclass(slots=True, kw_only=True)
class Tracked:
    """The victim sends to a server that the fault will kill."""

    cfg: Config
    victim: RunDir
    port: int
    store: str
    """Where the server keeps what it is sent."""
    wrap: list[str] = field(default_factory=list)
    server: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_up(self) -> None:
        self.start()

    def look_after(self) -> list[str]:
        """Start the server again, send what it missed, and count what it holds."""
        assert self.server is not None
        was_killed = self.server.poll() is not None
        self.stop()
        self.start()
        command = processes.command(SINK_MODULE, str(self.victim.path))
        subprocess.run(command, env=processes.environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        wanted = {record.iteration for record in gather(self.victim).records}
        held = wanted & losses_held(self.address, self.victim)
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
                cwd=self.victim.logs,  # it looks for modules where it is started, whatever it is told
                env=os.environ | SERVER_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.victim.tracking_pid.write_text(f"{self.server.pid}\n", encoding="utf-8")
        deadline_s = time.monotonic() + SERVER_WITHIN_S
        while not answers(f"{self.address}/health"):
            if self.server.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError("tracking_down", f"no tracking server came up; {log} says why")
            time.sleep(0.1)

    def stop(self) -> None:
        if self.server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            self.victim.tracking_pid.unlink(missing_ok=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def losses_held(address: str, run: RunDir) -> set[int]:
    """Iterations whose loss a server holds for a run, by its own interface."""
    run_id = json.loads(run.mlflow.read_text(encoding="utf-8"))["run_id"]
    url = f"{address}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=loss&max_results=25000"
    with urllib.request.urlopen(url, timeout=30) as reply:
        return {int(metric["step"]) for metric in json.load(reply)["metrics"]}
