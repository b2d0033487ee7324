"""A stalled file system does not stall training; when it answers again, nothing is missing from the log."""

from __future__ import annotations

import os
from collections.abc import Callable
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest

from harness import train
from harness.core.event_json import parse
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir, locate
from tests.distributed.cases import tiny
from tests.distributed.pool import Pool
from tests.stalled import Stalled, can_stall

pytestmark = pytest.mark.full

STALL_STEP = 3
PIPE_BYTES = 16384
"""Capacity of the pipe; the kernel's default is four times as much."""


def stalled_run(directory: str, num_steps: int, everything: bool) -> tuple[int, list[str]]:
    """A run whose event log is a pipe that is not read until the last step starts; with `everything`, STOP, commands
    and heartbeats stall as well until then. Returns the exit code and the lines of the log, on rank 0."""
    cfg = tiny("run.name=a", f"train.num_steps={num_steps}", directory=directory)
    run, is_first = locate(cfg), os.environ["RANK"] == "0"
    compute: Callable[..., None] = getattr(train, "forward_backward")  # noqa: B009  (which train only imports)
    num_steps_started, pipe, lines, num_held = 0, -1, bytearray(), 0
    mount = Stalled(Path(directory) / "mount")

    def drain() -> None:
        while chunk := os.read(pipe, PIPE_BYTES):
            lines.extend(chunk)

    reader = Thread(target=drain)

    def forward_backward(*arguments: Any, **options: Any) -> None:
        nonlocal num_steps_started, pipe, num_held
        num_steps_started += 1
        if is_first and num_steps_started == STALL_STEP and everything:
            mount.__enter__()
            run.stop.symlink_to(mount.path / "STOP")
            for path in (run.control, run.heartbeat):
                path.rename(path.with_name(f"{path.name}-before"))
                path.symlink_to(mount.path)
        if is_first and num_steps_started == num_steps:
            num_held = mount.num_held
            run.stop.unlink(missing_ok=True)
            mount.release()
            reader.start()
        compute(*arguments, **options)

    if is_first:
        run.path.mkdir(parents=True)
        os.mkfifo(run.events)
        pipe = os.open(run.events, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
    try:
        with patch.object(train, "forward_backward", forward_backward):
            code = train.run_worker(cfg)
        if is_first:
            reader.join(timeout=200)
            os.close(pipe)
        assert num_held > 0 or not (everything and is_first), "nothing has stalled"
    finally:
        if is_first and everything:
            mount.__exit__()
    return code, lines.decode().splitlines()


@pytest.mark.parametrize(
    ("num_steps", "everything"),
    [
        (50, False),
        pytest.param(120, True, marks=pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")),
    ],
    ids=["log", "everything"],
)
def test_training_continues_and_no_event_is_lost(num_steps: int, everything: bool, ranks: Pool, tmp_path: Path) -> None:
    (code, lines), (other, _) = ranks.run(2, stalled_run, str(tmp_path), num_steps, everything)
    assert code == other == 0
    assert sum(map(len, lines)) > 2 * PIPE_BYTES, "the pipe was full"
    log = [event for line in lines for event in parse(line)]
    assert len(log) == len(lines)
    assert isinstance(log[0], RunStarted)
    assert isinstance(log[-1], RunEnded)
    records = [event.iteration for event in log if isinstance(event, StepRecord)]
    assert records == list(range(1, num_steps + 1))
    assert not RunDir(tmp_path / "a").stop.exists()
