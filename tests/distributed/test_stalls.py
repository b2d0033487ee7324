"""A stalled file system does not stall training; when it answers again, nothing is missing from the log."""

from __future__ import annotations

import os
import time
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
PIPE_BYTES = 4096
"""Capacity of the pipe: a page, the least that the kernel gives."""
NUM_STEPS = 16


def stalled_run(directory: str, everything: bool) -> tuple[int, list[str]]:
    """A run whose event log is a pipe that is not read until the last step starts; with `everything`, STOP, commands
    and heartbeats stall as well until then: the second half of the steps starts when something has. Returns the exit
    code and the lines of the log, on rank 0."""
    cfg = tiny("run.name=a", "model.num_layers=1", f"train.num_steps={NUM_STEPS}", directory=directory)
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
        if is_first and num_steps_started == NUM_STEPS // 2 and everything:
            until_s = time.monotonic() + 60
            while not mount.num_held and time.monotonic() < until_s:
                time.sleep(0.02)
            num_held = mount.num_held
        if is_first and num_steps_started == NUM_STEPS:
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
    "everything",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")),
    ],
    ids=["log", "everything"],
)
def test_training_continues_and_no_event_is_lost(everything: bool, ranks: Pool, tmp_path: Path) -> None:
    (code, lines), (other, _) = ranks.run(2, stalled_run, str(tmp_path), everything)
    assert code == other == 0
    assert sum(map(len, lines)) > 2 * PIPE_BYTES, "the pipe was full"
    log = [event for line in lines for event in parse(line)]
    assert len(log) == len(lines)
    assert isinstance(log[0], RunStarted)
    assert isinstance(log[-1], RunEnded)
    records = [event.iteration for event in log if isinstance(event, StepRecord)]
    assert records == list(range(1, NUM_STEPS + 1))
    assert not RunDir(tmp_path / "a").stop.exists()
