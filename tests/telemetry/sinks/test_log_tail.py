"""Tests of the shared tail: the log is parsed once for sinks that keep up, and nothing is skipped or read twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.event_json import to_json
from harness.core.events import Event, StepRecord, SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry import event_log, system_sampler
from harness.telemetry.sinks import log_tail
from harness.telemetry.sinks.log_tail import LogTail

MakeStep = Callable[..., StepRecord]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def append(path: Path, *events: Event) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{to_json(event)}\n" for event in events)


def sample(time: float, rank: int = 0) -> SystemSampled:
    return SystemSampled(time=time, iteration=1, rank=rank, host="h", every_s=10.0, cpu_load=0.5)


def test_sinks_that_keep_up_share_one_parsed_chunk(run: RunDir, make_step: MakeStep) -> None:
    tail = LogTail(run)
    assert tail.read(0) is None
    append(run.events, make_step(0), make_step(1))
    first = tail.read(0)
    append(run.events, make_step(2))
    assert first is not None
    assert tail.read(0) is first, "another sink gets the same chunk, although the log has grown"
    second = tail.read(first.end)
    assert second is not None
    assert [event.iteration for event in second.events] == [2]
    assert tail.read(first.end) is second
    assert tail.read(second.end) is None


def test_a_sink_that_is_behind_reaches_the_shared_chunks(
    run: RunDir, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "CHUNK_BYTES", 2000)
    append(run.events, *(make_step(iteration) for iteration in range(40)))
    lines = run.events.read_bytes().splitlines(keepends=True)
    tail = LogTail(run)
    place = sum(map(len, lines[:21]))
    ahead = tail.read(place)
    assert ahead is not None
    inside = tail.read(ahead.start + len(lines[21]))
    assert inside is not None
    assert inside.end == ahead.end
    assert [event.iteration for event in inside.events] == [event.iteration for event in ahead.events][1:]
    seen, offset = [], len(lines[0])
    while chunk := tail.read(offset):
        assert chunk.start == offset
        assert chunk.line_ends[-1] == chunk.end
        seen += [event.iteration for event in chunk.events]
        offset = chunk.end
        assert chunk is ahead or not chunk.start < ahead.start < chunk.end
    assert seen == list(range(1, 40))


def test_every_system_sample_is_read_once(run: RunDir) -> None:
    tail = LogTail(run)
    assert tail.samples_after({}) == []
    path = system_sampler.system_file(run, 0)
    append(path, *(sample(float(time)) for time in range(200)))
    append(system_sampler.system_file(run, 8), sample(7.0, rank=8))
    found = tail.samples_after({})
    assert [each.time for each in found] == [*map(float, range(200)), 7.0]
    sampled = {"0": 199.0, "8": 7.0}
    assert tail.samples_after(sampled) == []
    append(path, sample(200.0))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::2]))  # as a full file is thinned out
    assert [each.time for each in tail.samples_after(sampled)] == [200.0]
    assert [each.time for each in tail.samples_after({"0": 100.0, "8": 7.0})] == [
        float(time) for time in range(102, 201, 2)
    ]


@pytest.mark.parametrize("num_before", [5, 200])
def test_samples_are_read_after_the_clock_was_set_back(run: RunDir, num_before: int) -> None:
    path = system_sampler.system_file(run, 0)
    append(path, *(sample(4000.0 + time) for time in range(num_before)))
    tail = LogTail(run)
    (*_, last) = tail.samples_after({})
    append(path, *(sample(400.0 + time) for time in range(3)))
    for reader in (tail, LogTail(run)):
        assert [each.time for each in reader.samples_after({"0": last.time})] == [400.0, 401.0, 402.0]
        assert reader.samples_after({"0": 402.0}) == []
    append(path, sample(403.0))
    assert [each.time for each in tail.samples_after({"0": 402.0})] == [403.0]
    path.write_text(
        "".join(line for line in path.read_text().splitlines(keepends=True) if f":{last.time}," not in line)
    )
    assert [each.time for each in tail.samples_after({"0": last.time})] == [400.0, 401.0, 402.0, 403.0]


def test_a_file_that_has_lost_its_end_is_not_read_again(run: RunDir) -> None:
    path = system_sampler.system_file(run, 0)
    append(path, *(sample(float(time)) for time in range(3)))
    tail = LogTail(run)
    assert tail.samples_after({"0": 7.0}) == []
    append(path, sample(9.0))
    assert [each.time for each in tail.samples_after({"0": 7.0})] == [9.0]


def test_samples_of_a_limited_number_of_machines_are_sent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MOST_MACHINES", 2)
    for rank in (16, 0, 8):
        append(system_sampler.system_file(run, rank), sample(1.0, rank=rank))
    append(run.system / "rank-00000.old.jsonl", sample(1.0))
    assert [each.rank for each in LogTail(run).samples_after({})] == [0, 8]
