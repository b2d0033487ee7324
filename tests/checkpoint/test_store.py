"""A checkpoint is there whole or not at all, and only the newest stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint import store
from harness.compose import load
from harness.config import ConfigError
from harness.parallel import World, connect, disconnect
from harness.state import RunState
from tests.distributed.pool import Pool


def tensors(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4, 3), value)}, "device": {"step": torch.tensor(int(value))}}


def world() -> World:
    return connect(load(["parallel.device=cpu"]).parallel)


def save_many(root: str, steps: list[int], keep: int) -> list[str]:
    here = world()
    saved = [
        store.save(Path(root), tensors(step), RunState(step=step, cursor=step + 1), world=here, keep=keep).directory
        for step in steps
    ]
    disconnect()
    return saved


def load_newest(root: str) -> tuple[RunState, str, float, int] | None:
    here = world()
    into = tensors(-1.0)
    try:
        found = store.load_newest(Path(root), into, world=here)
    finally:
        disconnect()
    if found is None:
        return None
    return *found, float(into["model"]["weight"][2, 1]), int(into["device"]["step"])


def complaint_of_loading(root: str) -> str:
    try:
        load_newest(root)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2])
def test_what_was_saved_last_comes_back_whole(ranks: Pool, tmp_path: Path, size: int) -> None:
    for saved in ranks.run(size, save_many, str(tmp_path), [5, 10, 10000000], 2):
        assert saved == ["step-00000005-gen-0", "step-00000010-gen-0", "step-10000000-gen-0"]
    assert [path.name for path in store.saved(tmp_path)] == ["step-00000010-gen-0", "step-10000000-gen-0"]
    for state, directory, weight, step in ranks.run(size, load_newest, str(tmp_path)):
        assert state == RunState(step=10000000, cursor=10000001)
        assert directory == "step-10000000-gen-0"
        assert (weight, step) == (10000000.0, 10000000)


def test_where_nothing_was_saved_nothing_is_found(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, load_newest, str(tmp_path / "nowhere")) == [None, None]


def test_a_checkpoint_that_was_never_finished_does_not_exist(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, save_many, str(tmp_path), [5], 2)
    (tmp_path / ".step-00000009-gen-0.part").mkdir()
    (tmp_path / "step-x-gen-0").mkdir()
    assert [path.name for path in store.saved(tmp_path)] == ["step-00000005-gen-0"]
    ranks.run(1, save_many, str(tmp_path), [9], 2)
    assert [path.name for path in store.saved(tmp_path)] == ["step-00000005-gen-0", "step-00000009-gen-0"]


def test_saving_the_same_step_again_keeps_what_is_there(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, save_many, str(tmp_path), [5], 2)
    before = (tmp_path / "step-00000005-gen-0" / store.STATE_FILE).stat().st_ino
    ranks.run(2, save_many, str(tmp_path), [5], 2)
    assert (tmp_path / "step-00000005-gen-0" / store.STATE_FILE).stat().st_ino == before


@pytest.mark.parametrize("text", ["", "{", '{"unheard_of": 1}'])
def test_a_spoiled_state_is_one_line_that_names_the_file(ranks: Pool, tmp_path: Path, text: str) -> None:
    ranks.run(2, save_many, str(tmp_path), [5], 2)
    (tmp_path / "step-00000005-gen-0" / store.STATE_FILE).write_text(text)
    for complaint in ranks.run(2, complaint_of_loading, str(tmp_path)):
        assert "step-00000005-gen-0/state.json cannot be read" in complaint
        assert "\n" not in complaint
