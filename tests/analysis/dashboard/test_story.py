"""Reading the event log: incremental reads equal one read, and invalid lines do not raise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.analysis.dashboard.page import render
from harness.analysis.dashboard.page_data import page_data, state_of
from harness.analysis.dashboard.series import thin
from harness.analysis.dashboard.story import FP8_COLUMNS, MOST_MARKS, MarkKind, Story
from harness.analysis.dashboard.terminal_view import frame
from harness.core.event_json import to_json
from harness.core.events import Action, ActionKind, Finding, FindingKind, Outcome, RunRestarted, RunStarted
from harness.core.rundir import RunDir
from tests.analysis.dashboard.logs import BEGUN, long_run, record, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir(long_run(tmp_path_factory.mktemp("runs") / "long", 400))


def read(run: RunDir) -> Story:
    story = Story()
    assert story.read_more(run)
    return story


def test_story_of_a_run(run: RunDir) -> None:
    story = read(run)
    assert (len(story.steps), len(story.probes), len(story.evals)) == (400, 40, 20)
    assert story.num_starts == 2
    assert story.ended is not None
    assert story.num_lines_lost == 0
    assert {kind: len(marks) for kind, marks in story.marks.items()} == {
        MarkKind.start: 2,
        MarkKind.checkpoint: 20,
        MarkKind.finding: 3,
        MarkKind.action: 3,
        MarkKind.restored: 2,
        MarkKind.refused: 1,
        MarkKind.intervention: 1,
        MarkKind.end: 1,
        MarkKind.fault: 1,
    }
    spike, norm, nonfinite = story.incidents.by_number.values()
    assert [each.kinds for each in (spike, norm, nonfinite)] == [["loss_spike"], ["grad_spike"], ["nonfinite"]]
    assert (spike.onset, spike.last) == (99, 140)
    assert [(taken.steps_lost, taken.seconds) for taken in spike.actions] == [(10, 0.2)]
    assert [(taken.kind, taken.target) for taken in spike.actions] == [("rewind", "snapshot of iteration 90")]
    assert [each.iteration for each in spike.findings] == [100]
    assert (spike.ranks, spike.groups, spike.cursors, spike.verdict) == ({3}, {"blocks.3"}, {99}, "cured")
    assert [(batch.cursor, batch.why) for batch in story.guilty.values()] == [
        (99, "loss_spike, excluded by incident 1"),
        (199, "grad_spike, excluded by incident 2"),
        (299, "update rejected, nonfinite, excluded by incident 3"),
    ]
    assert story.guilty[99].rarest == [[147, 1, 12], [156, 2, 105], [157, 2, 107]]


@pytest.mark.parametrize(("succeeded", "is_torn"), [(True, False), (False, False), (False, True)])
def test_only_batches_that_an_action_did_exclude_are_blamed(tmp_path: Path, succeeded: bool, is_torn: bool) -> None:
    facts: Any = {"time": BEGUN, "iteration": 2, "step": 2, "incident": 1, "kind": ActionKind.rollback}
    action = Action(**facts, reason="the loss rises", onset=1, exclude=[1, 1])
    outcome = Outcome(**facts, succeeded=succeeded, is_torn=is_torn)
    write(tmp_path / "events.jsonl", [record(1, time=BEGUN), record(2, time=BEGUN), action, outcome])
    excluded = [batch.cursor for batch in read(RunDir(tmp_path)).guilty.values()]
    assert excluded == ([1] if succeeded or is_torn else [])


def test_incremental_reads_equal_one_read(run: RunDir, tmp_path: Path) -> None:
    whole, text = read(run), run.events.read_bytes()
    growing, story = RunDir(tmp_path), Story()
    growing.faults.write_bytes(run.faults.read_bytes())
    for end in (10, 700, 701, len(text) // 2, len(text) - 1, len(text)):
        growing.events.write_bytes(text[:end])
        story.read_more(growing)
    assert not story.read_more(growing)
    assert np.array_equal(story.steps.column("loss"), whole.steps.column("loss"))
    assert story.all_marks() == whole.all_marks()
    assert story.incidents == whole.incidents
    assert story.accounts.total() == whole.accounts.total()
    assert story.guilty == whole.guilty


@pytest.mark.parametrize("num_steps", [0, 3, 5, 9])
def test_a_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path, num_steps: int) -> None:
    """The file keeps its inode, as a new one may have that of the old one."""
    run, story = RunDir(tmp_path), Story()
    write(run.events, [record(iteration, time=BEGUN) for iteration in range(1, 6)])
    assert story.read_more(run)
    write(run.events, [record(iteration, time=BEGUN + 1, loss=2.0) for iteration in range(1, num_steps + 1)])
    assert story.read_more(run)
    assert story.steps.column("loss").tolist() == [2.0] * num_steps
    assert (story.num_lines, story.num_lines_lost) == (num_steps, 0)
    assert not story.read_more(run)


def test_the_story_of_a_run_that_was_removed_is_empty(tmp_path: Path) -> None:
    run, story = RunDir(long_run(tmp_path / "first", 20)), Story()
    story.read_more(run)
    shutil.rmtree(run.path)
    assert story.read_more(run)
    assert (len(story.steps), story.started, story.all_marks()) == (0, None, [])
    assert not story.read_more(run)


def test_a_line_that_is_completed_while_the_others_are_read_is_read_next_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second, third = (f"{record(iteration, time=BEGUN)}\n" for iteration in (1, 2, 3))
    run.events.write_text(first + second[:90])
    story = Story()
    new_lines = story._new_lines(run.events)
    assert next(new_lines) == first.encode()
    with run.events.open("a") as log:
        log.write(second[90:] + third)
    assert list(new_lines) == []
    assert list(story._new_lines(run.events)) == [second.encode(), third.encode()]


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    lines = [
        to_json(RunStarted(time=BEGUN, iteration=0, world_size=1, num_steps=5, step=0)),
        '{"event":"step","time":1',
        '{"event":"step","time":1,"iteration":1}',
        '{"event":"step","time":"noon","iteration":[],"loss":{}}',
        '{"event":"never heard of","time":1,"iteration":1}',
        "\x00\ufffd not JSON",
        "[]",
        record(1, time=BEGUN + 1),
    ]
    write(tmp_path / "events.jsonl", lines)
    story = read(RunDir(tmp_path))
    assert len(story.steps) == 1
    assert story.num_lines_lost == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1e9, 1e9) | st.sampled_from(["", "nan", "inf", "<b>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["median", "worst", "a"]), inner),
    max_leaves=5,
)
KEYS = (
    "iteration",
    "step",
    "cursor",
    "tokens",
    "loss",
    "grad_norm",
    "refused",
    "step_time_s",
    "ranks",
    "bounds",
    "batch",
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.dictionaries(st.sampled_from([*KEYS, "param_norm", "token_loss_counts"]), JSON, max_size=3), max_size=5)
)
def test_no_invalid_value_raises(tmp_path: Path, spoiled: list[dict[str, object]]) -> None:
    good = json.loads(record(1, time=BEGUN))
    lines = [json.dumps(good | changes, separators=(",", ":")) for changes in spoiled]
    write(tmp_path / "events.jsonl", [*lines, record(7, time=BEGUN + 1, loss=1.5)])
    story = read(RunDir(tmp_path))
    assert story.steps.column("loss")[-1] == 1.5
    assert len(render(page_data(RunDir(tmp_path), story, now_s=BEGUN))) > 1000
    assert frame("first", story, [], now_s=BEGUN, width=80)


def test_missing_log_gives_an_empty_story(tmp_path: Path) -> None:
    story = Story()
    assert not story.read_more(RunDir(tmp_path / "nowhere"))
    assert len(story.steps) == 0


def test_non_finite_loss_is_marked_and_a_gap(tmp_path: Path) -> None:
    lines = [
        record(1, time=1.0),
        record(2, time=2.0, loss="nan", grad_norm="inf", refused=True),  # type: ignore[arg-type]
        record(3, time=3.0, loss="inf"),  # type: ignore[arg-type]
    ]
    write(tmp_path / "events.jsonl", lines)
    story = read(RunDir(tmp_path))
    assert np.isnan(story.steps.column("loss")).tolist() == [False, True, True]
    assert [mark.text for mark in story.marks[MarkKind.refused]] == [
        "update rejected: loss nan, gradient norm inf",
        "not finite: loss inf, gradient norm 1",
    ]


def test_a_batch_without_a_token_to_predict_is_a_gap_and_blamed_for_nothing(tmp_path: Path) -> None:
    lines = [record(1, time=1.0), record(2, time=2.0, loss=0.0, grad_norm=0.0, refused=True)]
    write(tmp_path / "events.jsonl", lines)
    story = read(RunDir(tmp_path))
    assert np.isnan(story.steps.column("loss")).tolist() == [False, True]
    assert np.isnan(story.steps.column("grad_norm")).tolist() == [False, True]
    assert story.steps.column("refused")[1] == 1, "no update"
    assert [mark.text for mark in story.marks[MarkKind.refused]] == ["no update: batch 1 has no token to predict"]
    assert story.guilty == {}


def test_fp8_probes_become_columns(tmp_path: Path) -> None:
    health = {
        "activations": {"underflow": 0.2, "saturated": 0.0, "scale_log2": [-14, 12]},
        "gradients": {"underflow": 0.0, "saturated": 0.5, "scale_log2": [22, 36]},
    }
    rows = [
        record(1, time=1.0, in_fp8=True, param_norm=1.0, fp8=health, fp8_underflow={"blocks.0": 0.1, "blocks.1": 0.4}),
        record(2, time=2.0, in_fp8=False, param_norm=1.0, fp8={}, fp8_underflow={}),
    ]
    write(tmp_path / "events.jsonl", rows)
    story = read(RunDir(tmp_path))
    assert story.steps.column("in_bf16").tolist() == [0.0, 1.0]
    values = [story.probes.column(name)[0] for name in FP8_COLUMNS]
    assert values == pytest.approx([0.4, 0.5, -14, 36])
    assert np.isnan([story.probes.column(name)[1] for name in FP8_COLUMNS]).all()
    write(tmp_path / "other" / "events.jsonl", [record(1, time=1.0, in_fp8=None)])
    assert "in_bf16" not in thin(read(RunDir(tmp_path / "other")).steps).lows, "a panel without data is not drawn"


def test_only_the_newest_marks_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", (record(n, time=float(n), refused=True) for n in range(1, MOST_MARKS + 11)))
    marks = read(RunDir(tmp_path)).marks[MarkKind.refused]
    assert (len(marks), marks[0].iteration) == (MOST_MARKS, 11)


def test_finding_without_action_is_no_incident() -> None:
    story = Story()
    story.add(
        Finding(time=1, iteration=5, kind=FindingKind.slow, step=5, onset=4, value=1, bound=2, message="rank 1 lags")
    )
    assert len(story.incidents) == 0
    assert [mark.text for mark in story.marks[MarkKind.finding]] == ["slow, rank 1 lags"]


def test_a_run_that_is_restarted_inside_the_job_is_running() -> None:
    story = Story()
    story.add(RunStarted(time=1, iteration=0, world_size=2, num_steps=9, step=0))
    story.add(RunRestarted(time=2, iteration=5, step=5, number=1, reason="rank 1 on a was killed by SIGKILL"))
    assert state_of(story, now_s=3.0) == ("running", "")
    assert [mark.text for mark in story.marks[MarkKind.restart]] == [
        "restart 1 after step 5: rank 1 on a was killed by SIGKILL"
    ]
