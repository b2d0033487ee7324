"""Writes the last collectives of a rank to a file when the launcher asks for them, also while the rank hangs.

How: the launcher sends STACKS_SIGNAL. The signal handler of the interpreter, in C, writes the number of the signal to a
pipe at once, even if the main thread waits in a collective and runs no Python. A thread reads the pipe and dumps the
flight recorder of torch. `faulthandler`, which writes the stacks at the same signal, calls this handler after its own.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from harness.distributed.torch_private.flight_recorder import recorded_collectives
from launch.local.hang_report import shorten_dump


@contextmanager
def dump_collectives_on_signal(path: Path, number: signal.Signals) -> Iterator[None]:
    """Write `path` each time this process gets the signal. Only for the main thread."""
    with suppress(OSError):
        path.unlink()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(number, lambda *_: None)
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = Thread(target=_dump_at_signals, args=(reader, number, path), name="collective dump", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        signal.signal(number, before)
        os.close(writer)  # ends the thread
        thread.join()
        os.close(reader)


def _dump_at_signals(reader: int, number: signal.Signals, path: Path) -> None:
    while received := os.read(reader, 64):
        if number in received:
            with suppress(OSError, RuntimeError, ValueError, KeyError):
                write_dump(path)


def write_dump(path: Path) -> None:
    """Write the recorded collectives that explain a hang, atomically."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(shorten_dump(recorded_collectives())) + "\n", encoding="utf-8")
    scratch.replace(path)
