"""Runs many runs on one machine, each in its own process, as many at a time as fit.

Why: a sweep must survive the crash of a job, and a machine with eight GPUs must not train one small model at a time.
How: each run is a `python -m launch.local.node RUN` in its own session, so that a Ctrl-C at the terminal reaches only
this process, which forwards it; a second one is forwarded too, and kills. GPUs and cores are divided into equal
parts. The output of a run is in its `logs/console.txt`. All runs hold the lock of the sweep: if this process is
killed, the same command is rejected until the last run it started has ended. On file systems without file locks only
this process holds the lock, and runs that outlive it are protected by their own leases.
Left out: moving a run to resources that became free, and runs of different sizes at the same time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from harness.config.errors import EXIT_CRASHED, EXIT_INTERRUPTED, ConfigError
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.control.stop_requests import STOP_SIGNALS
from harness.core import processes
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir

POLL_S = 0.2
LOCK = ".lock"
DEFAULT_CPU_RANKS = 2
"""Ranks of a run on CPU without `launch.nproc`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSlot:
    """The part of the machine that one run uses."""

    threads: int
    """CPU threads of one rank, unless the run sets them."""
    gpus: tuple[str, ...] = ()
    """As in CUDA_VISIBLE_DEVICES; empty: all GPUs visible to this process."""

    def environment(self) -> dict[str, str]:
        shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads))}
        return shared | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})


def ranks_of_job(cfg: Config, gpus: Sequence[str]) -> int:
    """Ranks that a run will have on this machine, determined without torch."""
    usable = 0 if cfg.parallel.device is DeviceKind.cpu else len(gpus)
    return cfg.launch.nproc or usable * cfg.launch.ranks_per_gpu or DEFAULT_CPU_RANKS


def split_machine(cfgs: Sequence[Config], *, num_cores: int, gpus: Sequence[str]) -> list[ResourceSlot]:
    """Divide the machine into equal slots, one for each concurrent run; at most one for each run."""
    if not cfgs:
        return []
    ranks = max(ranks_of_job(cfg, gpus) for cfg in cfgs)
    num_gpus = max(-(-ranks_of_job(cfg, gpus) // cfg.launch.ranks_per_gpu) for cfg in cfgs)
    on_gpus = bool(gpus) and any(cfg.parallel.device is not DeviceKind.cpu for cfg in cfgs)
    threads = max(cfg.launch.threads or 1 for cfg in cfgs)
    fitting = len(gpus) // num_gpus if on_gpus else num_cores // (ranks * threads)
    at_once = min(cfgs[0].launch.at_once or max(1, fitting), len(cfgs))
    share = max(1, num_cores // (at_once * ranks))
    if not on_gpus or num_gpus > len(gpus):
        return [ResourceSlot(threads=share)] * at_once
    parts = [tuple(gpus[first : first + num_gpus]) for first in range(0, len(gpus) - num_gpus + 1, num_gpus)]
    return [ResourceSlot(threads=share, gpus=parts[place % len(parts)]) for place in range(at_once)]


def visible_gpus() -> list[str]:
    """The GPUs that a run started here would see; torch would take seconds to answer and hold one of them."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        return [name for name in variable.split(",") if name.strip() and name.strip() != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return [str(number) for number, _ in enumerate(listed.stdout.splitlines())] if listed.returncode == 0 else []


@final
@dataclass(slots=True, kw_only=True)
class SweepProcess:
    """A run that is in progress."""

    run: RunDir
    slot: ResourceSlot
    process: subprocess.Popen[bytes]
    started_s: float


JobCallback = Callable[[RunDir, int | None, float], None]
"""Called when a run starts (exit code None, 0 s) and when it ends (exit code, duration)."""


def run_jobs(
    runs: Sequence[RunDir], slots: Sequence[ResourceSlot], lock: IO[str], on_change: JobCallback
) -> tuple[dict[str, int], bool]:
    """Start every run once, as slots become free; returns exit codes by run name, and whether it was stopped.

    After a stop signal no further run is started, and the running ones are waited for.
    """
    waiting, free_slots = list(runs), list(slots)
    running: list[SweepProcess] = []
    codes: dict[str, int] = {}
    with signals_to_forward() as stop_signals:
        num_forwarded = 0
        while running or (waiting and not stop_signals):
            while waiting and free_slots and not stop_signals:
                running.append(start_sweep_process(waiting.pop(0), free_slots.pop(0), lock))
                on_change(running[-1].run, None, 0.0)
            for number in stop_signals[num_forwarded:]:
                num_forwarded += 1
                for job in running:  # SIGINT as SIGTERM: a process that has just started would raise KeyboardInterrupt
                    job.process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                free_slots.append(job.slot)
                code = job_exit_code(job.process.returncode, is_stopping=bool(stop_signals))
                codes[job.run.path.name] = code
                on_change(job.run, code, time.monotonic() - job.started_s)
            time.sleep(POLL_S)
    return codes, bool(stop_signals)


def start_sweep_process(run: RunDir, slot: ResourceSlot, lock: IO[str]) -> SweepProcess:
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / "console.txt").open("ab") as console:
        process = subprocess.Popen(
            processes.command("launch.local.node", str(run.path)),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=processes.child_environment() | slot.environment(),
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )
    return SweepProcess(run=run, slot=slot, process=process, started_s=time.monotonic())


def job_exit_code(returncode: int, *, is_stopping: bool) -> int:
    """The exit code of a run; killed by a signal means interrupted during a stop, and crashed otherwise."""
    if returncode >= 0:
        return returncode
    return EXIT_INTERRUPTED if is_stopping else EXIT_CRASHED


@contextmanager
def signals_to_forward() -> Iterator[list[int]]:
    """The stop signals received so far, to be forwarded; the handler only records them."""
    stop_signals: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: stop_signals.append(number)) for number in STOP_SIGNALS
    }
    try:
        yield stop_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def lock_sweep(sweep: Path) -> Iterator[IO[str]]:
    """Lock the directory of the sweep against a second launcher; started processes hold the lock too."""
    with exclusive(sweep / LOCK, keep_trying=lambda: False) as lock:
        if lock is None:
            raise ConfigError("run.name", f"{sweep} is being swept, or one of its jobs still runs; wait, or stop it")
        yield lock
