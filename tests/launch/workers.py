"""What ranks do in the launcher's tests instead of training; `python -m tests.launch.workers NAME RUNS` starts one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from harness import compose
from harness.config import Config, ConfigError
from harness.requests import StopRequest, signals_to
from harness.rundir import locate

PATIENCE_S = 60.0


def rank() -> int:
    return int(os.environ["RANK"])


def halt_on_one(_cfg: Config) -> int:
    print(f"rank {rank()} of {os.environ['WORLD_SIZE']} with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    return 3 if rank() == 1 else 0


def crash(cfg: Config) -> int:
    if rank() == 1:
        raise ZeroDivisionError("the first to fall")
    while not list(locate(cfg).path.glob("logs/*/rank-1.fall.json")):
        time.sleep(0.01)
    raise ConnectionError("a victim of the first")


def killed(cfg: Config) -> int:
    last_words = locate(cfg).path / "last-words-1"
    if rank() == 1:
        last_words.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not last_words.exists():
        time.sleep(0.01)
    raise ConnectionError("a victim of the kill")


def refuse(_cfg: Config) -> int:
    raise ConfigError("data.path", "no such file")


def exit_late(_cfg: Config) -> int:
    sys.exit(75)


def patient(cfg: Config) -> int:
    """Works until asked to stop, then takes its time, as a run that saves a checkpoint does."""
    stop = StopRequest()
    with signals_to(stop):
        (locate(cfg).path / f"ready-{rank()}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not stop:
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.05)
        time.sleep(0.5)
        (locate(cfg).path / f"saved-{rank()}").write_text(stop.reason)
    return 75


def stubborn(cfg: Config) -> int:
    """Does not listen."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    (locate(cfg).path / f"ready-{rank()}").touch()
    time.sleep(PATIENCE_S)
    return 0


def config(runs: Path, name: str) -> Config:
    return compose.load([f"run.dir={runs}", f"run.name={name}", "launch.nproc=2", "parallel.device=cpu"])


if __name__ == "__main__":
    from launch import local
    from tests.launch import workers

    sys.exit(local.launch(config(Path(sys.argv[2]), sys.argv[1]), getattr(workers, sys.argv[1])))
