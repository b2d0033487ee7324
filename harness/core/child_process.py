"""What a process beside training does about itself: signals, priority, and the end of its parent.

How: an orphan gets another parent at once. A trainer that lives but wants its child to finish closes the pipe that is
the child's standard input.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from harness.config.errors import EXIT_CRASHED

NICENESS = 10
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def ignore_trainer_signals() -> None:
    """Ignore the signals that are meant for the trainer, but sent to all processes of a job."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def lower_priority() -> None:
    os.nice(NICENESS)


def is_run_over(trainer: int) -> bool:
    """Whether the trainer, the parent of this process, is gone or has closed the pipe to it."""
    return os.getppid() != trainer or wait_for_trainer(0)


def wait_for_trainer(within_s: float) -> bool:
    """Wait until the trainer closes the pipe to this process, at most `within_s` seconds; whether it is closed."""
    return bool(select.select([sys.stdin], [], [], within_s)[0])


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies."""
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_CRASHED)  # the parent died before prctl took effect


def control_process(option: int, value: Any) -> None:
    """Call prctl for this process; does nothing on other systems than Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
