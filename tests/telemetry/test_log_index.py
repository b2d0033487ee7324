"""Tests of the log index: indexed readers agree with a full read, and read little of a long log."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.analysis.dashboard.story import Story
from harness.analysis.replay import history
from harness.config.errors import EXIT_DONE, EXIT_INTERRUPTED
from harness.core import event_json, events
from harness.core.event_json import read, to_json
from harness.core.events import Event, FindingKind, RunEnded, StepRecord
from harness.core.rundir import RunDir, append_line
from harness.telemetry import event_log, log_index
from harness.telemetry.event_log import EventLog, events_since
from harness.telemetry.event_reporter import EventReporter
from harness.telemetry.log_index import PLAIN, TOKENS_PER_S, blocks_of, index_path, read_blocks, sample_lines
from harness.telemetry.run_picture import collect
from tests.analysis.dashboard.logs import long_run
from tests.analysis.postmortem import stories
from tests.telemetry.conftest import MakeRun

MakeStep = Callable[..., StepRecord]
NUM_STEPS = 1200
FIRST, LAST = 1_000_000, 1_500_000
MIB = 1 << 20


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_index, "BLOCK_BYTES", 16 * 1024)
    monkeypatch.setattr(log_index, "LARGEST_BLOCK_BYTES", 128 * 1024)


@pytest.fixture
def run(tmp_path: Path, _small_blocks: None) -> RunDir:
    """A run with three incidents, written by a real event log with its index."""
    source = long_run(tmp_path / "source", NUM_STEPS) / "events.jsonl"
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    log = EventLog(run.events)
    for event in read(source):
        log.write(event)
    log.close()
    return run


def parse_lines(lines: Iterator[bytes]) -> list[Event]:
    return [event for line in lines for event in event_json.parse(line.decode())]


@cache
def all_events(content: bytes) -> list[Event]:
    return parse_lines(iter(line for line in content.splitlines(keepends=True) if line.endswith(b"\n")))


def rare_events(run: RunDir) -> list[Event]:
    return [event for event in all_events(run.events.read_bytes()) if not isinstance(event, StepRecord)]


def steps(run: RunDir, first: int, last: int) -> list[StepRecord]:
    records = [event for event in all_events(run.events.read_bytes()) if isinstance(event, StepRecord)]
    return [record for record in records if first <= record.iteration <= last]


def check(run: RunDir) -> None:
    """Assert that every exact reader agrees with a full read, and that no file changes."""
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir()}
    assert event_log.read_non_step_events(run.events) == rare_events(run)
    for first, last in ((0, 3), (299, 302), (590, 610), (NUM_STEPS - 1, 2 * NUM_STEPS)):
        assert event_log.read_steps(run.events, first, last) == steps(run, first, last)
        nearby = parse_lines(log_index.between(run.events, first, last))
        assert [event for event in nearby if isinstance(event, StepRecord)] == steps(run, first, last)
    blocks = read_blocks(run.events)
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == run.events.stat().st_size
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir()} == before


def test_the_written_index_equals_that_of_a_scan(run: RunDir) -> None:
    written = read_blocks(run.events)
    assert index_path(run.events).read_text().count("\n") > 20
    with run.events.open("rb") as file:
        scanned = list(blocks_of(file, 0))
    for block in scanned:
        block.previous = None
    for block in written:
        block.previous = None
    assert written == scanned
    check(run)


def test_a_missing_torn_or_wrong_index_changes_no_result(run: RunDir) -> None:
    index = index_path(run.events)
    lines = index.read_text().splitlines(keepends=True)
    for content in ("", "".join(lines[:9])[:-20], "".join([*lines[:4], "{}\n", "7\n", "\n", *lines[6:]])):
        index.write_text(content)
        check(run)
    index.unlink()
    check(run)
    index.write_text("".join(lines))
    short = run.events.read_bytes()[:200_000]
    run.events.write_bytes(short[: short.rindex(b"\n") + 1])
    assert event_log.read_non_step_events(run.events) == rare_events(run)
    run.events.write_bytes(b"x" * 5 + b"\n" + run.events.read_bytes())
    assert event_log.read_non_step_events(run.events) == rare_events(run)


def test_the_index_continues_after_a_torn_line_and_a_line_of_another_process(run: RunDir, make_step: MakeStep) -> None:
    num_indexed = index_path(run.events).read_text().count("\n")
    with run.events.open("ab") as file:
        file.write(to_json(make_step(1)).encode()[:100])
    log = EventLog(run.events)
    for iteration in range(NUM_STEPS, NUM_STEPS + 400):
        log.write(make_step(iteration))
        if iteration == NUM_STEPS + 200:
            assert log.flush()
            append_line(run.events, to_json(RunEnded(time=0.0, iteration=9, step=9, exit_code=0, reason="other")))
    log.close()
    assert index_path(run.events).read_text().count("\n") > num_indexed
    check(run)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("is_torn", [False, True])
def test_a_block_of_a_lost_part_of_the_log_is_not_trusted(is_torn: bool, tmp_path: Path, make_step: MakeStep) -> None:
    """All lines have the same length, so the block of the lost part ends where a line ends once the log has grown."""
    run = RunDir(tmp_path)
    steps_from = [make_step(iteration, loss=5.5) for iteration in range(1000, 1700)]
    line_bytes = len(to_json(steps_from[0])) + 1
    short = stories.finding(FindingKind.loss_spike, 1310, "")
    finding = replace(short, message="x" * (line_bytes - 1 - len(to_json(short))))

    def write(*written: Event) -> None:
        log = EventLog(run.events)
        for event in written:
            log.write(event)
        log.close()
        assert event_log.read_non_step_events(run.events) == rare_events(run)

    write(*steps_from[:300])
    end = read_blocks(run.events)[-2].end
    assert f'"end":{end},' in index_path(run.events).read_text().splitlines()[-1], "the last block of the index"
    os.truncate(run.events, end - 20 * line_bytes - (100 if is_torn else 0))
    write(*steps_from[300:310], finding, *steps_from[310:330])
    assert finding in rare_events(run)
    write(*steps_from[330:])
    blocks = read_blocks(run.events)
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks[:-1])]


def test_a_sample_keeps_all_rare_lines_and_the_extremes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = run.events.stat().st_size
    sample = sample_lines(run.events, budget_bytes=size_bytes // 20)
    lines = list(sample.lines)
    assert not sample.is_whole
    assert sample.end == size_bytes
    assert sum(map(len, lines)) < size_bytes // 3
    shown = parse_lines(iter(lines))
    assert [event for event in shown if not isinstance(event, StepRecord)] == rare_events(run)
    whole = steps(run, 0, NUM_STEPS)
    records = [event for event in shown if isinstance(event, StepRecord)]
    assert [event.iteration for event in records] == sorted({event.iteration for event in records})
    assert [event for event in records if event.refused] == [event for event in whole if event.refused]
    for value in (lambda event: event.loss, lambda event: -event.loss, lambda event: event.grad_norm):
        assert max(map(value, records)) == max(map(value, whole))
    monkeypatch.setattr(log_index, "MOST_BLOCKS", 8)
    fewer = list(sample_lines(run.events, budget_bytes=size_bytes // 20).lines)
    assert len(fewer) < len(lines)
    assert [event for event in parse_lines(iter(fewer)) if not isinstance(event, StepRecord)] == rare_events(run)


def test_a_dashboard_of_a_sample_has_the_totals_of_the_whole_log(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Story()
    whole.read_more(run)
    monkeypatch.setattr(
        "harness.analysis.dashboard.story.sample_lines", lambda path: sample_lines(path, budget_bytes=100_000)
    )
    story = Story()
    assert story.read_more(run)
    assert not story.read_more(run)
    assert story.num_left_out > NUM_STEPS // 2
    assert len(story.steps) + story.num_left_out == len(whole.steps)
    assert story.all_marks() == whole.all_marks()
    assert story.incidents == whole.incidents
    assert (story.last, story.ended, story.num_starts) == (whole.last, whole.ended, whole.num_starts)
    assert story.steps.column("loss").max() == whole.steps.column("loss").max()
    part, total = story.accounts.total(), whole.accounts.total()
    assert (part.num_kept, part.num_refused, part.num_undone) == (total.num_kept, total.num_refused, total.num_undone)
    assert (part.tokens_kept, part.tokens_consumed) == (total.tokens_kept, total.tokens_consumed)
    assert part.seconds == pytest.approx(total.seconds)


def test_a_resume_from_an_old_checkpoint_reads_every_decision(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {iteration: events_since(run.events, iteration) for iteration in (0, 280, 599, NUM_STEPS - 5)}
    monkeypatch.setattr(event_log, "RECALL_BYTES", event_log.TAIL_BYTES)
    for iteration, expected in whole.items():
        since = events_since(run.events, iteration)
        assert [event for event in since if not isinstance(event, StepRecord)] == [
            event for event in expected if not isinstance(event, StepRecord)
        ]
        for place, event in enumerate(since):
            if isinstance(event, events.Finding):
                assert since[place - 1].iteration == event.iteration, "the step that it is about is there"
        assert since[-5:] == expected[-5:]
    assert len(events_since(run.events, 0)) < len(whole[0])


@pytest.mark.parametrize("is_old", [False, True])
def test_ordinary_steps_of_old_and_new_logs_match(is_old: bool) -> None:
    other = {"stop_requested": False, "step_time_s": 0.5, "flops_per_s": 1e12, "time": 0.0}
    record = StepRecord(
        iteration=7, step=6, cursor=5, tokens=4, loss=3.5, grad_norm=0.25, lr=1e-5, tokens_per_s=1.5e6, refused=False,
        **cast(Any, other),
    )  # fmt: skip
    fields = json.loads(to_json(record))
    if is_old:
        names = list(fields)
        names.insert(names.index("refused"), names.pop(names.index("tokens_per_s")))
        fields = {name: fields[name] for name in names}
    line = json.dumps(fields, separators=(",", ":")).encode()
    plain, rate = PLAIN.match(line), TOKENS_PER_S.search(line)
    assert plain
    assert [float(text) for text in plain.groups()] == [7, 6, 3.5, 0.25, 1e-5]
    assert rate
    assert float(rate[1]) == 1.5e6
    fields["refused"] = True
    assert not PLAIN.match(json.dumps(fields, separators=(",", ":")).encode())


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a million steps after the first million, with some rejected updates and evaluations, and their index.

    Ten thousand lines are formatted once; the others differ in the leading digits of their numbers.
    """
    path = tmp_path_factory.mktemp("long") / "events.jsonl"
    other = {"stop_requested": False, "step_time_s": 0.5, "flops_per_s": 1e12, "time": 0.0, "iteration": 0, "step": 0}
    zero = StepRecord(
        cursor=0, tokens=0, loss=0.0, grad_norm=0.0, lr=0.0, tokens_per_s=1.0, refused=False, **cast(Any, other)
    )
    assert PLAIN.match(to_json(zero).encode())
    rest = to_json(zero)[to_json(zero).index('"refused"') :] + "\n"
    refused = rest.replace('"refused":false', '"refused":true')
    template = "".join(
        f'{{"event":"step","time":@{n:04}.5,"iteration":@{n:04},"step":@{n:04},"cursor":@{n:04},"tokens":@{n:04}00,'
        f'"loss":2.@{n % 97},"grad_norm":0.5,"lr":0.001,{rest}'
        for n in range(10_000)
    )
    with path.open("w") as file:
        for digits in range(FIRST // 10_000, LAST // 10_000):
            chunk = template.replace("@", str(digits))
            file.write(chunk if digits % 9 else chunk.replace(rest, refused, 1))
            evaluation = events.EvalRecord(time=0.0, iteration=digits * 10_000, step=1, loss=3.0, tokens=1)
            file.write(to_json(evaluation) + "\n")
    with path.open("rb") as lines:
        index_path(path).write_text("".join(block.to_json() + "\n" for block in list(blocks_of(lines, 0))[:-1]))
    return path


def bytes_read(act: Callable[[], object]) -> int:
    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    act()
    return count() - before


@pytest.mark.full
def test_readers_of_a_long_log_read_little(long_log: Path) -> None:
    run = RunDir(long_log.parent)
    assert long_log.stat().st_size > 200 * MIB
    assert bytes_read(lambda: event_log.read_non_step_events(long_log)) < 8 * MIB
    assert bytes_read(lambda: event_log.read_steps(long_log, FIRST + 250_000, FIRST + 250_250)) < 8 * MIB
    assert bytes_read(lambda: history.read(long_log)) < 8 * MIB
    stretches = [range(LAST - 100_250, LAST - 100_000), range(LAST - 9, LAST)]
    path = history.ReplayPath(LAST - 1, None, None, has_older=False, stretches=stretches)
    assert bytes_read(lambda: history.read_path(history.History(long_log), path)) < 8 * MIB
    assert bytes_read(lambda: events_since(long_log, LAST - 1000)) < 8 * MIB
    assert bytes_read(lambda: collect(long_log)) < 64 * MIB
    assert bytes_read(lambda: Story().read_more(run)) < 128 * MIB


@pytest.mark.full
@pytest.mark.parametrize(("code", "most_bytes"), [(EXIT_INTERRUPTED, 16 * MIB), (EXIT_DONE, 80 * MIB)])
def test_the_end_of_a_run_does_not_depend_on_the_length_of_the_log(
    code: int, most_bytes: int, long_log: Path, make_run: MakeRun
) -> None:
    """Measured in bytes read, with a generous limit in seconds: a full read takes minutes."""
    run, cfg = make_run(mlflow="false", picture="true", postmortem="false")
    os.link(long_log, run.events)
    shutil.copy(index_path(long_log), index_path(run.events))
    world = cast(Any, SimpleNamespace(is_first=True))
    ended = RunEnded(time=time.time(), iteration=LAST, step=LAST, exit_code=code, reason="stopped")

    def leave() -> None:
        with EventReporter(cfg, run, world=world, meter=cast(Any, None)) as reporter:
            reporter.end(ended)

    size_bytes = long_log.stat().st_size
    begin_s = time.monotonic()
    try:
        assert bytes_read(leave) < most_bytes
    finally:
        os.truncate(long_log, size_bytes)
    assert time.monotonic() - begin_s < 60
    assert run.picture.exists() == (code == EXIT_DONE)
