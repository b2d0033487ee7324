"""Tests of the event log: torn lines, full disks, stalls, and reading from the end."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import PIPE_BUF

import pytest

from harness.core.event_json import parse, read, to_json
from harness.core.events import CheckpointSaved, Event, StepRecord
from harness.telemetry import event_log
from harness.telemetry.event_log import EventLog, last_iteration, read_chunk, tail

MakeStep = Callable[..., StepRecord]


def test_written_events_can_be_read_before_the_log_is_closed(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    written = [make_step(0), make_step(1, loss=2.0, group_grad_norms={"layers.0": 0.5})]
    for event in written:
        log.write(event)
    assert log.flush()
    assert list(read(path)) == written
    log.close()


@pytest.mark.parametrize("kept_bytes", [1, 40, -2, -1])
def test_events_after_a_torn_last_line_are_read(tmp_path: Path, make_step: MakeStep, kept_bytes: int) -> None:
    path = tmp_path / "events.jsonl"
    torn = (to_json(make_step(1)) + "\n")[:kept_bytes]
    path.write_text(to_json(make_step(0)) + "\n" + torn)
    log = EventLog(path)
    log.write(make_step(2))
    log.write(make_step(3))
    log.close()
    whole = kept_bytes == -1
    assert [event.iteration for event in read(path)] == ([0, 1, 2, 3] if whole else [0, 2, 3])


def test_a_full_disk_loses_events_with_one_warning(make_step: MakeStep, capfd: pytest.CaptureFixture[str]) -> None:
    log = EventLog(Path("/dev/full"))
    for iteration in range(3):
        log.write(make_step(iteration))
    assert log.flush(), "lost events count as finished"
    assert log.num_lost == 3
    assert capfd.readouterr().err.splitlines() == [
        "warning: cannot write /dev/full: No space left on device; training continues, this event is lost"
    ]
    log.close()
    assert "3 events could not be written to /dev/full" in capfd.readouterr().err


def test_the_log_continues_if_its_warning_cannot_be_written(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk that is full holds the run and the file of standard error."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    full = Path("/dev/full").open("w")  # noqa: SIM115 -- closing it fails
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", full)
        patched.setattr(os, "write", write_without_space)
        log.write(make_step(0))
        assert log.flush()
    with suppress(OSError):  # the stream still holds the warning
        full.close()
    log.write(make_step(1))
    assert log.close()
    assert log.num_lost == 1
    assert [event.iteration for event in read(path)] == [1]


def write_without_space(_descriptor: int, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_line_cut_short_by_the_disk_is_terminated_before_the_next(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(make_step(0))
    assert log.flush()
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole_write(descriptor, data[:30]))
    log.write(make_step(1))
    assert log.flush()
    monkeypatch.undo()
    log.write(make_step(2))
    log.close()
    assert log.num_lost == 1
    assert [event.iteration for event in read(path)] == [0, 2]


@dataclass
class Pipe:
    """A log that accepts no data: a full pipe, which `drain` empties."""

    path: Path
    descriptor: int = -1
    content: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        os.mkfifo(self.path)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self.fill()

    def fill(self) -> None:
        with suppress(BlockingIOError):
            while True:
                os.write(self.descriptor, b"\n" * PIPE_BUF)

    def drain(self, log: EventLog) -> list[Event]:
        while not log.flush(0.02):
            self._read()
        self._read()
        return [event for line in self.content.decode().splitlines() for event in parse(line)]

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.content.extend(os.read(self.descriptor, 65536))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "events.jsonl")
    yield pipe
    os.close(pipe.descriptor)


def test_a_stalled_log_does_not_block_the_writer(
    pipe: Pipe, make_step: MakeStep, capfd: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(pipe.path)
    written = [make_step(iteration) for iteration in range(1000)]
    for event in written:
        log.write(event)
    assert not log.flush(0.2)
    begin_s = time.monotonic()
    assert not any(log.flush(3600) for _ in range(100)), "only the first flush of a stall waits"
    assert time.monotonic() - begin_s < 60
    assert capfd.readouterr().err.count("accepted no data for 0.2 s; training continues") == 1
    assert pipe.drain(log) == written, "all of them, in order"
    log.close()
    assert log.num_lost == 0


def test_a_full_queue_drops_step_records_first(
    pipe: Pipe, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_log, "QUEUE_BYTES", 20_000)
    log = EventLog(pipe.path)
    for iteration in range(1000):
        log.write(make_step(iteration))
    num_steps = 1000 - log.num_lost
    assert 0 < num_steps < 100
    saved = [CheckpointSaved(time=0.0, iteration=8, step=8, directory=f"step-{n}", seconds=0.1) for n in range(20)]
    for event in saved:
        log.write(event)
    assert log.num_lost == 1000 - num_steps
    for _ in range(1000):
        log.write(saved[0])
    assert log.num_lost > 1000 - num_steps, "the queue is bounded"
    assert capfd.readouterr().err.count("the queue in memory is full") == 1
    events = pipe.drain(log)
    assert events[:num_steps] == [make_step(iteration) for iteration in range(num_steps)]
    assert events[num_steps : num_steps + 20] == saved
    log.close()
    assert f"{log.num_lost} events could not be written" in capfd.readouterr().err


def test_closing_a_stalled_log_takes_bounded_time(
    pipe: Pipe, make_step: MakeStep, capfd: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(pipe.path)
    for iteration in range(5):
        log.write(make_step(iteration))
    assert not log.close(0.1)
    assert "5 events could not be written" in capfd.readouterr().err
    pipe.drain(log)


def test_the_callback_gets_events_that_are_in_the_file(tmp_path: Path, make_step: MakeStep) -> None:
    path, calls = tmp_path / "events.jsonl", list[tuple[int, int]]()
    log = EventLog(path, on_written=lambda event: calls.append((event.iteration, len(list(read(path))))))
    for iteration in range(3):
        log.write(make_step(iteration))
    log.close()
    assert [iteration for iteration, _ in calls] == [0, 1, 2]
    assert all(num_written > iteration for iteration, num_written in calls)


def test_last_iteration_reads_the_end_only(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "events.jsonl"
    assert last_iteration(path) == -1
    path.touch()
    assert last_iteration(path) == -1
    far_back = to_json(make_step(10**9)) + "\n"
    near = "".join(to_json(make_step(iteration)) + "\n" for iteration in range(300))
    path.write_text(far_back + near)
    assert len(near) > 64 * 1024
    assert last_iteration(path) == 299


def test_last_iteration_ignores_late_records_torn_lines_and_noise(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "events.jsonl"
    saved = CheckpointSaved(time=0.0, iteration=8, step=8, directory="step-8", seconds=0.1)
    path.write_text(f"{to_json(saved)}\n{to_json(make_step(7))}\n" + "x" * 200_000 + "\n" + to_json(make_step(9))[:50])
    assert last_iteration(path) == 8
    assert [event.iteration for event in tail(path)] == [8, 7]


def test_chunks_cover_whole_lines_and_nothing_twice(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "events.jsonl"
    assert read_chunk(path, 0) is None
    first, second = to_json(make_step(0)) + "\n", to_json(make_step(1)) + "\n"
    path.write_text(first + second[:20])
    chunk = read_chunk(path, 0)
    assert chunk is not None
    assert ([event.iteration for event in chunk.events], chunk.end) == ([0], len(first))
    assert read_chunk(path, chunk.end) is None
    path.write_text(first + second)
    chunk = read_chunk(path, chunk.end)
    assert chunk is not None
    assert ([event.iteration for event in chunk.events], chunk.end) == ([1], len(first + second))
