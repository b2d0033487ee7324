"""The terminal view, line by line."""

from __future__ import annotations

import json
from pathlib import Path

from harness.analysis.dashboard.page_data import eta_s
from harness.analysis.dashboard.story import MOST_MARKS, Story
from harness.analysis.dashboard.terminal_view import frame, sparkline
from harness.core.event_json import to_json
from harness.core.events import CheckpointSaved, Intervention, RunStarted
from harness.core.rundir import RunDir
from harness.telemetry.heartbeat import Beat, Phase
from tests.analysis.dashboard.logs import BATCH_TOKENS, BEGUN, STEP_S, long_run, record, write


def beat(rank: int, *, iteration: int, time: float, exit_code: int | None = None) -> Beat:
    return Beat(
        rank=rank,
        world_size=3,
        host=f"node{rank // 2}",
        pid=1,
        phase=Phase.train,
        iteration=iteration,
        step=iteration,
        beats=1,
        writes=1,
        every_s=1.0,
        beat_time=time,
        time=time,
        exit_code=exit_code,
    )


def test_the_time_to_the_end_counts_the_larger_batches_that_are_to_come(tmp_path: Path) -> None:
    lines = [RunStarted(time=BEGUN, iteration=0, world_size=3, num_steps=80, step=0)]
    write(tmp_path / "events.jsonl", [*lines, *(record(n, time=BEGUN + n) for n in range(1, 41))])
    warmup = "[{until_batch: 50, batch_size: 1}, {until_batch: 60, batch_size: 3}]"
    (tmp_path / "config.yaml").write_text(
        f"train: {{batch_size: 4, sequence_length: {BATCH_TOKENS}, batch_size_warmup: {warmup}}}\n"
    )
    story = Story()
    story.read_more(RunDir(tmp_path))
    assert eta_s(story) == STEP_S * (10 * 1 + 10 * 3 + 20 * 4)
    again = json.dumps({"batch_sizes": [[0, 1], [45, 2]]})
    (tmp_path / "corpus.json").write_text(again)
    with (tmp_path / "events.jsonl").open("a") as file:
        started = RunStarted(time=BEGUN + 41, iteration=40, world_size=3, num_steps=80, step=40)
        file.write(f"{to_json(started)}\n{record(41, time=BEGUN + 42)}\n")
    story.read_more(RunDir(tmp_path))
    assert eta_s(story) == STEP_S * (4 * 1 + 35 * 2), "a later start has other sizes"


def test_frame_of_a_live_run(tmp_path: Path) -> None:
    lines = [RunStarted(time=BEGUN, iteration=0, world_size=3, num_steps=80, step=0)]
    records = [record(n, time=BEGUN + n, loss=4.0 - n / 20, mfu=0.5) for n in range(1, 41)]
    order = Intervention(
        time=BEGUN + 40, iteration=40, who="ada", reason="too\tloud\x1b[31m", changes={"command": "lr 0.5"}
    )
    write(tmp_path / "events.jsonl", [*lines, *records, order])
    story = Story()
    story.read_more(RunDir(tmp_path))
    now_s = BEGUN + 41
    beats = [
        beat(0, iteration=40, time=now_s),
        beat(1, iteration=37, time=now_s),
        beat(2, iteration=30, time=now_s - 90),
    ]
    view = frame("first", story, beats, now_s=now_s, width=64)
    assert [line.text for line in view] == [
        "first: running · 3 ranks",
        "step 40/80 ━━━━━━━━━━━━━━━━━━─────────────────── 50.0%  ETA 0:20",
        "loss 2.0000  grad 1  lr 3.0e-04  2.05 ktok/s  50.0% MFU",
        "loss ████▇▇▆▆▆▅▅▄▄▃▃▃▂▂▁▁ 2.05 to 3.75",
        "goodput 97.5%  lost to recovery 0.00%  0 incidents",
        "0 updates rejected  0 steps undone",
        "lost to first start 2.5%",
        "checkpoints: none yet",
        "ranks 2 alive, 1 silent, on 2 hosts",
        "  rank 2 on node1: train, iteration 30, 1 min ago",
        "  rank 1 on node0: train, iteration 37, 0 s ago",
        "",
        "last events",
        "40 operator: command of ada: lr 0.5 (too loud [31m)",
    ]


def test_frame_of_an_ended_run_lists_its_last_events(tmp_path: Path) -> None:
    story = Story()
    story.read_more(RunDir(long_run(tmp_path / "first", 400)))
    ended = [beat(rank, iteration=400, time=BEGUN, exit_code=0) for rank in range(3)]
    texts = [line.text for line in frame("first", story, ended, now_s=BEGUN, width=200)]
    assert texts[0] == "first: done · exit code 0 · all steps done · 8 ranks"
    assert "3 incidents  1 update rejected  20 steps undone" in texts[4]
    assert texts[5] == "lost to rewind or rollback 5.1%  evaluation 0.8%  checkpoints 0.4%  first start 0.2%"
    assert texts[6] == "saved 20 checkpoints  latest: step 400: saved step-00000400-gen-0 in 2.0 s"
    assert texts[7] == "ranks 0 alive, 3 ended, on 2 hosts"
    assert len(texts) == 8 + 2 + 8


def test_all_checkpoints_of_a_long_run_are_counted() -> None:
    story = Story()
    story.add(RunStarted(time=BEGUN, iteration=0, world_size=1, num_steps=9999, step=0))
    for step in range(MOST_MARKS + 2):
        story.add(CheckpointSaved(time=BEGUN, iteration=step, step=step, directory=f"step-{step}", seconds=2.0))
    texts = [line.text for line in frame("first", story, [], now_s=BEGUN, width=200)]
    assert "saved 1,002 checkpoints  latest: step 1001: saved step-1001 in 2.0 s" in texts


def test_frame_of_an_empty_log_and_of_a_nan_loss(tmp_path: Path) -> None:
    story = Story()
    assert [line.text for line in frame("new", story, [], now_s=0.0, width=40)] == ["new: silent · its log is empty"]
    story.add(RunStarted(time=BEGUN, iteration=0, world_size=1, num_steps=2, step=0))
    assert "step 0/2" in frame("new", story, [], now_s=BEGUN, width=40)[1].text
    write(tmp_path / "events.jsonl", [record(1, time=BEGUN, loss="nan")])  # type: ignore[arg-type]
    story.read_more(RunDir(tmp_path))
    texts = [line.text for line in frame("new", story, [], now_s=BEGUN, width=60)]
    assert texts[2].startswith("loss nan")
    assert texts[3] == "loss: no finite value"


def test_sparklines() -> None:
    assert sparkline([0.0, 1.0, float("nan"), 9.0], 0.0, 1.0) == "▁█ █"
    assert sparkline([2.0, 2.0], 2.0, 2.0) == "▁▁"


def test_no_text_is_lost_on_a_narrow_terminal(tmp_path: Path) -> None:
    """Lines are wrapped: every part of the wide view is also in the narrow one."""
    story = Story()
    story.read_more(RunDir(long_run(tmp_path / "first", 400)))
    wide, narrow = ([line.text for line in frame("first", story, [], now_s=BEGUN, width=w)] for w in (130, 60))
    assert max(map(len, wide)) <= 130
    assert max(map(len, narrow)) <= 60
    assert not any("…" in text for text in [*wide, *narrow])
    for part in ("1 update rejected", "20 steps undone", "latest: step 400: saved step-00000400-gen-0 in 2.0 s"):
        assert any(part in text for text in wide)
        assert any(part in text for text in narrow)
    assert "      100  recovery      restored snapshot of iteration 90, step 90: 10 steps lost, took 0.20 s" in wide
    assert "100 recovery: restored snapshot of iteration 90, step 90: 10" in narrow
    assert "  steps lost, took 0.20 s" in narrow
