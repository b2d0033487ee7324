"""Tests of what a process beside training does about itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

IMPORTS = "import os, signal, subprocess, sys, time; from harness.core.child_process import *"
CHILD = f"{IMPORTS}; {{what}}; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = f"""\
{IMPORTS}
child = subprocess.Popen([sys.executable, "-c", {{child!r}}, str(os.getpid())], stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def has_died(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def start_orphan(what: str) -> int:
    """The process id of a child whose parent was killed after the child had executed `what`."""
    program = PARENT.format(child=CHILD.format(what=what))
    parent = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=False)
    assert parent.returncode == -signal.SIGKILL
    return int(parent.stdout)


def test_a_child_dies_with_its_parent_only_if_it_asks_for_that() -> None:
    orphan = start_orphan("pass")
    try:
        dead = start_orphan("die_with(int(sys.argv[1]))")
        wait_until(lambda: has_died(dead))
        assert not has_died(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_child_whose_parent_died_before_it_asked_exits() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD.format(what="die_with(1 << 22)")], timeout=60, check=False)
    assert child.returncode == 1


SEE_END = f"""\
{IMPORTS}
print(is_run_over(os.getppid()), is_run_over(1 << 22), wait_for_trainer(0), flush=True)
print(wait_for_trainer(60), is_run_over(os.getppid()), flush=True)
"""


def test_a_child_sees_that_the_run_is_over() -> None:
    """Another parent than the trainer, or the end of the pipe."""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", SEE_END], stdin=pipe, stdout=pipe)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"False True False\n"
    child.stdin.close()
    assert child.stdout.read() == b"True True\n"
    assert child.wait(timeout=60) == 0
    child.stdout.close()


def test_the_signals_of_the_trainer_do_not_end_a_child_of_low_priority() -> None:
    what = (
        f"{IMPORTS}; ignore_trainer_signals(); lower_priority(); print(os.nice(0), flush=True); input(); print('end')"
    )
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", what], stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    assert int(child.stdout.readline()) == min(os.nice(0) + 10, 19)
    for number in (signal.SIGINT, signal.SIGUSR1):
        child.send_signal(number)
    assert child.communicate(b"\n", timeout=60)[0] == b"end\n"
    assert child.returncode == 0
