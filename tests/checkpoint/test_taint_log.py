"""The taint log: which checkpoints it covers, and a line that a crash cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint.integrity import Manifest
from harness.checkpoint.taint_log import TAINT_LOG, Taint, read_taints, record_taint
from harness.config.errors import StorageError


@pytest.mark.parametrize(
    ("iteration", "generation", "time", "expected"),
    [
        (11, 0, 99.0, True),
        (11, 1, 100.0, True),
        (10, 1, 99.0, False),
        (11, 2, 99.0, False),
        (11, 1, 101.0, False),
    ],
    ids=["older generation", "same generation", "restored state", "later generation", "saved since"],
)
def test_it_covers_what_was_taken_after_the_restored_state_and_saved_before(
    iteration: int, generation: int, time: float, expected: bool
) -> None:
    manifest = Manifest(step=1, generation=generation, iteration=iteration, tokens=1, time=time, world_size=1, files={})
    assert Taint(iteration=10, generation=1, reason="a test", time=100.0).covers(manifest) is expected


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    assert read_taints(tmp_path) == []
    found = [Taint(iteration=5, generation=0, reason="a", time=1.0), Taint(7, 1, "b", 2.0)]
    record_taint(tmp_path, found[0])
    with (tmp_path / TAINT_LOG).open("a") as file:
        file.write(json.dumps(found[1]._asdict())[:20])
    record_taint(tmp_path, found[1])
    assert read_taints(tmp_path) == found
    (tmp_path / TAINT_LOG).unlink()
    (tmp_path / TAINT_LOG).mkdir()
    with pytest.raises(StorageError):
        read_taints(tmp_path)
