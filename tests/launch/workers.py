"""Worker functions for the launcher's tests; `main` launches one of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import ConfigError, StorageError
from harness.config.schema import Config
from harness.control.stop_requests import STOP_SIGNALS, StopRequest, signals_to
from harness.core.rundir import locate
from harness.core.state import RunState
from harness.distributed.world import connect, disconnect
from harness.telemetry.heartbeat import Heartbeat
from tests import composed
from tests.full_disk import fill

PATIENCE_S = 60.0
LISTENING = "0A"
RESTARTED = ("raise_always", "die_once", "halt_later", "die_while_stopping")
"""Workers whose launcher may restart them; the other tests are about one start."""


def rank() -> int:
    return int(os.environ["RANK"])


def halt_on_one(_cfg: Config) -> int:
    print(f"rank {rank()} of {os.environ['WORLD_SIZE']} with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    return 3 if rank() == 1 else 0


def print_everything(_cfg: Config) -> int:
    for stream in (sys.stdout, sys.stderr):
        print(f"rank {rank()}", file=stream, flush=True)
    return 3


def halt_without_logs(cfg: Config) -> int:
    """The directory of the logs is gone at the end."""
    (locate(cfg).path / f"ready-{rank()}").touch()
    while not all((locate(cfg).path / f"ready-{each}").exists() for each in (0, 1)):
        time.sleep(0.01)
    shutil.rmtree(locate(cfg).logs, ignore_errors=True)
    return 3


def crash(cfg: Config) -> int:
    if rank() == 1:
        raise ZeroDivisionError("the first failure")
    while not list(locate(cfg).path.glob("logs/*/rank-1.fall.json")):
        time.sleep(0.01)
    raise ConnectionError("a victim of the first")


def killed(cfg: Config) -> int:
    killed_file = locate(cfg).path / "killed-1"
    if rank() == 1:
        killed_file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not killed_file.exists():
        time.sleep(0.01)
    raise ConnectionError("a victim of the kill")


def vanish(_cfg: Config) -> int:
    if rank() == 1:
        os._exit(0)
    time.sleep(PATIENCE_S)
    return 0


def refuse(_cfg: Config) -> int:
    raise ConfigError("data.path", "no such file")


def refuse_late(cfg: Config) -> int:
    """Is rejected once another start has the run."""
    run = locate(cfg).path
    (run / f"ready-{rank()}").touch()
    while not (run / "go").exists():
        time.sleep(0.01)
    raise ConfigError("run.name", "is in use")


def fill_up(cfg: Config) -> int:
    """Both ranks find the disk full, and cannot even write down why they end."""
    run = locate(cfg).path
    (run / f"ready-{rank()}").touch()
    while not all((run / f"ready-{number}").exists() for number in range(2)):
        time.sleep(0.01)
    fill(Path(cfg.run.dir))
    raise StorageError(errno.ENOSPC, "cannot write it: No space left on device", str(run / "config.yaml"))


def exit_late(_cfg: Config) -> int:
    sys.exit(75)


def patient(cfg: Config) -> int:
    """Runs until a stop request, then takes two seconds, like a run that saves a checkpoint."""
    stop = StopRequest()
    with signals_to(stop):
        (locate(cfg).path / f"ready-{rank()}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not stop:
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.05)
        time.sleep(2.0)
        (locate(cfg).path / f"saved-{rank()}").write_text(stop.reason)
    return 75


def slow(_cfg: Config) -> int:
    """Has not reached the point where it could stop gracefully."""
    time.sleep(PATIENCE_S)
    return 0


def stubborn(cfg: Config) -> int:
    """Ignores stop signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    (locate(cfg).path / f"ready-{rank()}").touch()
    time.sleep(PATIENCE_S)
    return 0


def hang(cfg: Config) -> int:
    """Both loops stall, and rank 1's process is stopped."""
    state = RunState()
    with Heartbeat(locate(cfg), rank=rank(), world_size=2, num_steps=10) as heart:
        for state.iteration in range(4):
            heart.beat(state)
        time.sleep(1.5)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(PATIENCE_S)
    return 0


def count_starts(cfg: Config) -> int:
    """How often this rank was started, including this time."""
    starts = locate(cfg).path / f"starts-{rank()}"
    with starts.open("a") as file:
        file.write(f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    return len(starts.read_text().splitlines())


def wait_for_first_rank(cfg: Config, num_starts: int) -> None:
    """Wait until rank 0 has been started as often: its launcher ends it as soon as this rank fails."""
    starts = locate(cfg).path / "starts-0"
    while not starts.exists() or len(starts.read_text().splitlines()) < num_starts:
        time.sleep(0.01)


def raise_always(cfg: Config) -> int:
    """Rank 1 raises the same error in every start, each with another message."""
    num_starts = count_starts(cfg)
    wait_for_first_rank(cfg, num_starts)
    state = RunState(step=4 if rank() == 1 else 9)
    with Heartbeat(locate(cfg), rank=rank(), world_size=2, num_steps=10) as heart:
        heart.beat(state)
        if rank() == 1:
            raise ZeroDivisionError(f"in start {num_starts}")
        time.sleep(PATIENCE_S)
    return 0


def die_once(cfg: Config) -> int:
    """Rank 1 is killed in the first start; the process group works in the second."""
    num_starts = count_starts(cfg)
    if num_starts == 1:
        if rank() == 1:
            wait_for_first_rank(cfg, num_starts)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_S)
    connect(cfg.parallel)
    disconnect()
    return 0


def halt_later(cfg: Config) -> int:
    """Rank 1 is killed in the first start, and the second ends with a halt."""
    num_starts = count_starts(cfg)
    if num_starts == 1:
        if rank() == 1:
            wait_for_first_rank(cfg, num_starts)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_S)
    return 3


def die_while_stopping(cfg: Config) -> int:
    """Rank 1 is killed after a stop request."""
    count_starts(cfg)
    stop = StopRequest()
    with signals_to(stop):
        (locate(cfg).path / f"ready-{rank()}").touch()
        while not stop:
            time.sleep(0.05)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_S)
    return 0


def listening(cfg: Config) -> int:
    """Prints the addresses on which this process and the launcher listen, in the notation of /proc/net."""
    connect(cfg.parallel)
    if rank() == 0:
        inodes = sockets_of(os.getpid()) | sockets_of(os.getppid())
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = row.split()
                if state == LISTENING and rest[5] in inodes:
                    print(local.partition(":")[0], flush=True)
    disconnect()
    return 0


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def config(runs: Path, name: str) -> Config:
    return composed.load([f"run.dir={runs}", f"run.name={name}", "launch.nproc=2", "parallel.device=cpu"])


def main(args: Sequence[str]) -> int:
    from launch.local import start

    name, runs = args
    cfg = config(Path(runs), name)
    cfg.launch.hang_after_s = 2.0 if name == "hang" else cfg.launch.hang_after_s
    cfg.launch.max_restarts = 2 if name in RESTARTED else 0
    try:
        return start.launch(cfg, globals()[name])
    except (ConfigError, StorageError) as error:
        print(error, file=sys.stderr)
        return 75 if isinstance(error, StorageError) else 2
