"""Many runs on one machine: each a process of its own, so many at a time as the machine has room for.

Why: a sweep must outlive its worst job, and a machine with eight GPUs must not train one small model at a time.
How: `python -m launch.local.node RUN` for each run, in a session of its own, so that a Ctrl-C at the terminal reaches
this process alone, which passes it on; a second one is passed on too, and kills. GPUs and cores are shared out in equal
parts. What a run prints lies in its `logs/console.txt`. All of them hold the lock of the sweep: should this process be
killed, the same words are refused until the last run it started has ended. Where the file system has no file locks,
this process alone holds it, and runs that outlive it are protected by their own leases.
Left out: moving a run to a part of the machine that has become free, and runs of different sizes side by side.
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
NUM_CPU_RANKS = 2
"""Of a run on CPU that does not say how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one run has to itself."""

    threads: int
    """CPU threads of one rank, where the run does not say."""
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; empty: the run sees what this process sees."""

    def environment(self) -> dict[str, str]:
        shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads))}
        return shared | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})


def num_ranks(cfg: Config, gpus: Sequence[str]) -> int:
    """Ranks that a run will have on this machine, told without torch."""
    usable = 0 if cfg.parallel.device is DeviceKind.cpu else len(gpus)
    return cfg.launch.nproc or usable or NUM_CPU_RANKS


def rooms(cfgs: Sequence[Config], *, num_cores: int, gpus: Sequence[str]) -> list[Room]:
    """The machine in equal parts, one for each run that goes on at the same time; at most as many as there are runs."""
    if not cfgs:
        return []
    ranks = max(num_ranks(cfg, gpus) for cfg in cfgs)
    on_gpus = bool(gpus) and any(cfg.parallel.device is not DeviceKind.cpu for cfg in cfgs)
    threads = max(cfg.launch.threads or 1 for cfg in cfgs)
    fitting = len(gpus) // ranks if on_gpus else num_cores // (ranks * threads)
    at_once = min(cfgs[0].launch.at_once or max(1, fitting), len(cfgs))
    share = max(1, num_cores // (at_once * ranks))
    if not on_gpus or ranks > len(gpus):
        return [Room(threads=share)] * at_once
    parts = [tuple(gpus[first : first + ranks]) for first in range(0, len(gpus) - ranks + 1, ranks)]
    return [Room(threads=share, gpus=parts[place % len(parts)]) for place in range(at_once)]


def visible_gpus() -> list[str]:
    """The GPUs that runs started here would see; asking torch would take seconds and hold one of them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() and name.strip() != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return [str(number) for number, _ in enumerate(listed.stdout.splitlines())] if listed.returncode == 0 else []


@final
@dataclass(slots=True, kw_only=True)
class Member:
    """A run that goes on."""

    run: RunDir
    room: Room
    process: subprocess.Popen[bytes]
    began_s: float


Told = Callable[[RunDir, int | None, float], None]
"""Hears of a run that begins (no exit code, 0 seconds) and of one that ended (its exit code, how long it took)."""


def work_off(runs: Sequence[RunDir], free: Sequence[Room], lock: IO[str], tell: Told) -> tuple[dict[str, int], bool]:
    """Start every run once, as rooms become free; exit codes by the name of the run, and whether it was stopped.

    After a stop request no further run is started, and those that go on are waited for.
    """
    waiting, idle = list(runs), list(free)
    crew: list[Member] = []
    codes: dict[str, int] = {}
    with stop_signals() as asked:
        num_passed_on = 0
        while crew or (waiting and not asked):
            while waiting and idle and not asked:
                crew.append(start(waiting.pop(0), idle.pop(0), lock))
                tell(crew[-1].run, None, 0.0)
            for number in asked[num_passed_on:]:
                num_passed_on += 1
                for member in crew:  # as SIGTERM: a process that has only just begun would take SIGINT for an error
                    member.process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
            for member in [each for each in crew if each.process.poll() is not None]:
                crew.remove(member)
                idle.append(member.room)
                code = contract(member.process.returncode, is_stopping=bool(asked))
                codes[member.run.path.name] = code
                tell(member.run, code, time.monotonic() - member.began_s)
            time.sleep(POLL_S)
    return codes, bool(asked)


def start(run: RunDir, room: Room, lock: IO[str]) -> Member:
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / "console.txt").open("ab") as console:
        process = subprocess.Popen(
            processes.command("launch.local.node", str(run.path)),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=processes.environment() | room.environment(),
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )
    return Member(run=run, room=room, process=process, began_s=time.monotonic())


def contract(returncode: int, *, is_stopping: bool) -> int:
    """The exit code of a run; one that a signal killed was interrupted, if that was asked for, or crashed."""
    if returncode >= 0:
        return returncode
    return EXIT_INTERRUPTED if is_stopping else EXIT_CRASHED


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The stop signals that arrived so far, to be passed on; the handler only writes them down."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: asked.append(number)) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sole_sweeper(sweep: Path) -> Iterator[IO[str]]:
    """Hold the sweep's directory against a second launcher; what is started with the lock holds it too."""
    with exclusive(sweep / LOCK, keep_trying=lambda: False) as lock:
        if lock is None:
            raise ConfigError("run.name", f"{sweep} is being swept, or a job of it goes on; wait, or stop it")
        yield lock
