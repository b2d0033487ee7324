"""The event log survives torn lines and full disks, and is read from its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.events import CheckpointSaved, StepRecord, read, to_json
from harness.telemetry.sinks import EventLog, last_iteration, read_chunk, tail

MakeStep = Callable[..., StepRecord]


def test_written_events_can_be_read_before_the_log_is_closed(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    written = [make_step(0), make_step(1, loss=2.0, group_grad_norms={"layers.0": 0.5})]
    for event in written:
        log.write(event)
    assert list(read(path)) == written
    log.close()


@pytest.mark.parametrize("kept_bytes", [1, 40, -2, -1])
def test_a_torn_last_line_costs_nothing_after_it(tmp_path: Path, make_step: MakeStep, kept_bytes: int) -> None:
    path = tmp_path / "events.jsonl"
    torn = (to_json(make_step(1)) + "\n")[:kept_bytes]
    path.write_text(to_json(make_step(0)) + "\n" + torn)
    log = EventLog(path)
    log.write(make_step(2))
    log.write(make_step(3))
    log.close()
    whole = kept_bytes == -1
    assert [event.iteration for event in read(path)] == ([0, 1, 2, 3] if whole else [0, 2, 3])


def test_a_full_disk_costs_events_and_one_warning(make_step: MakeStep, capfd: pytest.CaptureFixture[str]) -> None:
    log = EventLog(Path("/dev/full"))
    for iteration in range(3):
        log.write(make_step(iteration))
    assert log.num_lost == 3
    assert capfd.readouterr().err.splitlines() == [
        "warning: cannot write /dev/full: No space left on device; training goes on, this event is lost"
    ]
    log.close()
    assert "3 events could not be written to /dev/full" in capfd.readouterr().err


def test_a_line_the_disk_cut_short_is_ended_by_the_next(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(make_step(0))
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole_write(descriptor, data[:30]))
    log.write(make_step(1))
    monkeypatch.undo()
    log.write(make_step(2))
    log.close()
    assert log.num_lost == 1
    assert [event.iteration for event in read(path)] == [0, 2]


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


def test_last_iteration_sees_past_late_records_torn_lines_and_noise(tmp_path: Path, make_step: MakeStep) -> None:
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
