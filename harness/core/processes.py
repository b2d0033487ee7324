"""Python subprocesses that must import this very code, from any working directory: command, start and end.

Why: `python -m` searches the working directory first. A folder `harness` or a file `json.py` there would be imported
instead.
How: `-P` removes the working directory from the search path, and PYTHONPATH starts with the directory of this code (a
checkout or the copy of a job), followed by the user's entries. An installed package needs no entry; adding
site-packages would put its other packages before the standard library. A process beside training has a session of its
own, so that it does not receive the trainer's signals, and a log in the run directory, whose last line says what went
wrong. `child_process` is the other side: what such a process does about itself.
Left out: entries that the user put into PYTHONPATH, even the working directory; and `multiprocessing`, which sets the
search path only after its first imports.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SEARCH_PATH = "PYTHONPATH"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which torchrun tells a process that it is a rank."""
GRACE_S = 5.0
"""Seconds that a process that is told to end may take."""
KILLED_WITHIN_S = 5.0
"""Seconds that the kernel may take to end a killed process."""
POLL_S = 0.05


def command(module: str, *args: str) -> list[str]:
    """`python -m MODULE ARGS`, without the working directory in the search path."""
    return [sys.executable, "-P", "-m", module, *args]


def child_environment() -> dict[str, str]:
    """The environment of this process, with the directory of this code first in PYTHONPATH."""
    here = str(Path(__file__).absolute().parents[2])
    if here in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    search_path = os.environ.get(SEARCH_PATH)  # an empty entry would mean the working directory
    others = [entry for entry in search_path.split(os.pathsep) if entry != here] if search_path else []
    return os.environ | {SEARCH_PATH: os.pathsep.join([here, *others])}


def environment_outside_ranks() -> dict[str, str]:
    """The environment for a child of a rank that is no rank itself, although it may import torch.distributed."""
    return {key: value for key, value in child_environment().items() if key not in RANK_VARIABLES}


def start_logged(
    module: str,
    *args: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGS` in a session of its own and append its output to `log`; raises OSError.

    `stdin` and `stdout` may be `subprocess.PIPE`; without `stdout` standard output goes to the log too. `inherited`:
    further file descriptors that the process keeps.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command(module, *args),
            env=child_environment() if environment is None else environment,
            stdin=stdin,
            stdout=output if stdout is None else stdout,
            stderr=output,
            start_new_session=True,
            pass_fds=inherited,
        )


def never() -> bool:
    """The condition of a wait that only its time limit ends."""
    return False


def wait_or_end(
    process: subprocess.Popen[bytes], *, wait_s: float, grace_s: float = 0, until: Callable[[], bool] = never
) -> bool:
    """Wait for a process, and end it after `wait_s` seconds, or as soon as `until()` holds.

    True if it ended by itself with exit code 0.
    """
    deadline_s = time.monotonic() + wait_s
    while process.poll() is None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or until():
            end_process(process, grace_s=grace_s)
            return False
        time.sleep(min(POLL_S, left_s))
    return process.returncode == 0


def end_process(process: subprocess.Popen[bytes], *, grace_s: float = 0) -> None:
    """Kill a process and reap it; with `grace_s` it gets SIGTERM first and may take that many seconds.

    A process in an uninterruptible call, such as one on a dead mount, ends only when that call does. It is left behind.
    """
    if grace_s > 0:
        process.terminate()
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            pass
        else:
            return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=KILLED_WITHIN_S)


def last_line(path: Path) -> str:
    """The last nonempty line of a file; empty if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
