"""The plan of a run: its numbers by hand, its text to the letter, its complaints in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness import compose
from harness.checkpoint.cadence import num_buffers
from harness.model.size import num_parameters
from launch import plan

ONE_BILLION = """\
model 1b
  parameters        1,263,634,432
  a token           9.604 GFLOP
  a step            32,768 tokens, 314.7 TFLOP, 0.0994 s at 40 % MFU
memory of a rank (8 ranks, 1 copy of the model)
  weights           631.8 MB
  gradients         631.8 MB
  moments           1.264 GB
  together          2.527 GB, and activations
checkpoints
  on disk           15.16 GB each
  in memory         60.65 GB a machine: 3 snapshots and the one being saved
  allowed           50 GB (checkpoint.ring.memory_gb); TOO LITTLE, the run will be refused
going back loses at most
  rewind            12 steps (on average 7.5), 393,216 tokens, 1.19 s
  rollback          1,021 steps (on average 521.5), 33,456,128 tokens, 102 s
"""

CLOCKS = """\
going back loses at most
  rewind            no snapshots are kept
  rollback          121 steps (on average 71.5), 247,808 tokens; or 10 minutes and 22 steps, whichever is less
"""


def printed(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert plan.main(words) == 0
    return capsys.readouterr().out


def numbers(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    read = json.loads(printed("--json", *words, capsys=capsys))
    assert isinstance(read, dict)
    return read


def test_the_text_of_a_large_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=1b_bf16", "launch.nproc=8", "checkpoint.ring.memory_gb=50", "checkpoint.every_steps=1000"]
    words += ["train.num_steps=100000", "checkpoint.ring.slots=3"]
    assert printed(*words, capsys=capsys) == ONE_BILLION


def test_the_text_where_clock_and_steps_decide(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint.every_minutes=10", "checkpoint.ring.slots=0", "checkpoint.ring.memory_gb=1"]
    text = printed(*words, capsys=capsys)
    assert text.endswith(CLOCKS)
    assert "  allowed           1 GB (checkpoint.ring.memory_gb)\n" in text
    by_clock = printed(*words, "checkpoint.every_steps=0", capsys=capsys)
    assert by_clock.endswith("  rollback          10 minutes and 22 steps\n")


def test_each_byte_has_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    count = num_parameters(compose.load().model)
    assert count % 2 == 0
    read = numbers("launch.nproc=4", "parallel.replicate=2", capsys=capsys)
    assert (read["num_ranks"], read["replicate"], read["num_parameters"]) == (4, 2, count)
    share = 4 * count // 2
    assert [read[f"{part}_bytes"] for part in ("weights", "gradients", "moments")] == [share, share, 2 * share]
    assert read["checkpoint_bytes"] == 12 * count, "copies are saved once"
    assert read["ring_bytes"] == 4 * (3 + 1) * 3 * share, "every rank keeps its part"
    assert read["ring_allowed_bytes"] is None


@pytest.mark.parametrize("slots", [0, 2, 5])
def test_the_ring_is_as_large_as_it_will_be(slots: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"checkpoint.ring.slots={slots}"
    read = numbers(words, capsys=capsys)
    assert read["ring_bytes"] == num_buffers(compose.load([words]).checkpoint.ring) * 12 * read["num_parameters"]


def test_seconds_need_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(capsys=capsys)["step_time_s"] is None
    read = numbers("cluster.peak_tflops=2", "--mfu", "0.5", "launch.nproc=2", capsys=capsys)
    assert read["step_time_s"] == pytest.approx(read["flops_per_step"] / 2e12)
    assert read["flops_per_step"] == read["flops_per_token"] * 2048
    assert read["rollback"]["steps_at_most"] == 121
    assert read["rewind"] == {
        "steps_at_most": 12,
        "steps_on_average": 7.5,
        "tokens_at_most": 12 * 2048,
        "minutes_at_most": None,
        "steps_besides": 0,
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["optim.lrr=1"], "optim.lrr: no such key; optim has "),
        (["train.num_steps=0"], "train.num_steps: must be at least 1, got 0"),
        (["launch.nproc=3"], "train.batch_size: must be a multiple of the number of ranks (3), got 8"),
        (["--mfu", "0"], "--mfu: must be above 0 and at most 1, got 0.0"),
        (["--mfu", "nan"], "--mfu: must be above 0 and at most 1, got nan"),
        (["--fast"], "plan: unrecognized arguments: --fast; --help says more"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harness: {complaint}")
