"""Stop signals that the launcher receives: its main thread records them, and other threads block them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from harness.control.stop_requests import STOP_SIGNALS

DUPLICATE_S = 0.25


@contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """The stop signals received so far; the handler only records them.

    A signal within DUPLICATE_S of another is ignored: Slurm sends SIGTERM twice at the time limit of a job.
    """
    stop_signals: list[int] = []
    last_s = -math.inf

    def on_signal(signal_number: int, _frame: FrameType | None) -> None:
        nonlocal last_s
        is_duplicate, last_s = time.monotonic() - last_s < DUPLICATE_S, time.monotonic()
        if not is_duplicate:
            stop_signals.append(signal_number)

    before = {signal_number: signal.signal(signal_number, on_signal) for signal_number in STOP_SIGNALS}
    try:
        yield stop_signals
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def block_stop_signals() -> None:
    """Run in the agent's thread, so that the main thread receives the stop signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
