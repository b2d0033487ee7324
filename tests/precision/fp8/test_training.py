"""fp8 runs on real ranks: checkpoints fit every precision, and reports sum over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from harness.build import Parts, build
from harness.checkpoint import store
from harness.config.schema import Config
from harness.core import event_json
from harness.core.events import Action, ActionKind, RunStarted
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from harness.precision.fp8.layers import PRIMED_STEPS
from harness.precision.fp8.quantize_meters import Column, TensorRole
from harness.recovery import recover
from harness.step import finish_step, forward_backward
from tests.distributed import cases
from tests.distributed.pool import Pool


class Loaded(NamedTuple):
    names: list[str]
    digest: str
    """Of every tensor, on all ranks."""
    has_initial_weights: bool
    """Whether the weights are still the initial ones."""


def loaded(directory: str, *overrides: str) -> Loaded:
    """The tensors of a run with this config after it has loaded the newest checkpoint of a directory."""
    cfg, run = cases.tiny(*overrides), RunDir(Path(directory))
    parts = build(cfg, connect(cfg.parallel), run)
    before = cases.digest(parts.update.parameters)
    found = store.load_newest(run.checkpoints, parts.tensors(), world=parts.world)
    assert found.loaded is not None
    tensors = parts.tensors()
    parts.close()
    return Loaded(sorted(tensors), cases.digest(tensors), cases.digest(parts.update.parameters) == before)


@pytest.mark.full
def test_a_checkpoint_moves_between_precisions_and_numbers_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    common = ("run.name=a", "checkpoint.every_steps=2", "run.resume=changed", "sentinel.probe_every=2")
    starts = ((2, "fp8_emulated", 2), (1, "bf16", 4), (2, "fp8_emulated", 6), (1, "fp32", 8))
    for size, precision, until in starts:
        overrides = (*common, f"precision={precision}", f"train.num_steps={until}", "optim.schedule=constant")
        code, records = ranks.run(size, cases.run, str(tmp_path), *overrides)[0]
        assert (code, len(records)) == (0, until), "each resumes where the other stopped"
        if until in (2, 4):
            found = [ranks.run(1, loaded, str(tmp_path / "a"), f"precision={other}")[0] for other in ("bf16", "fp32")]
            found += ranks.run(2, loaded, str(tmp_path / "a"), "precision=fp8_emulated")
            assert all(each == found[0] for each in found), "the same names with the same bits"
            assert not found[0].has_initial_weights
    resumed = [
        event.resumed_from
        for event in event_json.read(tmp_path / "a" / "events.jsonl")
        if isinstance(event, RunStarted)
    ]
    assert resumed == [None, *(f"step-{step:08d}-gen-0" for step in (2, 4, 6))]
    assert [record.in_fp8 for record in records] == [True, True, None, None, True, True, None, None]
    assert records[-1].loss < records[0].loss
    probed = [record for record in records if record.fp8]
    assert [record.iteration for record in probed] == [1, 5]
    for record in probed:
        assert list(record.fp8) == [role.name for role in TensorRole]
        assert list(record.fp8_underflow) == ["blocks.0", "blocks.1"]
        assert all(health["saturated"] == 0.0 for health in record.fp8.values())
        assert all(0 <= share < 0.2 for share in record.fp8_underflow.values())


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_refused_update_changes_nothing_in_fp8(ranks: Pool, recipe: str) -> None:
    """Except in the recipe `delayed`, whose meters hold the amax of the refused step."""
    overrides = ("precision=fp8_emulated", f"precision.fp8.recipe={recipe}")
    for outcome in ranks.run(2, cases.run_refused_step, math.nan, 1, *overrides):
        assert all(outcome.values()), outcome


@pytest.fixture
def single_rank() -> Iterator[None]:
    yield
    disconnect()


def started(directory: Path, *overrides: str) -> tuple[Config, Parts]:
    cfg = cases.tiny("precision=fp8_emulated", *overrides)
    return cfg, build(cfg, connect(cfg.parallel), RunDir(directory))


@pytest.mark.full
@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recomputed_activations_give_the_same_gradients(recipe: str, tmp_path: Path) -> None:
    """`selective` saves the fp8 outputs and counts them once; `full` computes and counts them twice."""
    expected: list[Tensor] = []
    for kind, times in (("none", 1), ("selective", 1), ("full", 2)):
        overrides = (f"parallel.activation_checkpointing={kind}", f"precision.fp8.recipe={recipe}")
        cfg, parts = started(tmp_path, *overrides)
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=True)
        found = [local(each.grad).clone() for each in parts.update.parameters.values() if each.grad is not None]
        expected = expected or found
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        nonzeros = parts.fp8_layers.table[..., Column.nonzeros]
        sizes = [each.weight.numel() for each in parts.fp8_layers.layers]
        assert nonzeros[:, TensorRole.weights].tolist() == [times * size for size in sizes]
        finish_step(parts, cfg=cfg, probe=True)
        assert not parts.fp8_layers.table[..., : Column.last_scale].any(), "each probed step starts from zero"
        parts.close()
        disconnect()


@pytest.mark.usefixtures("single_rank")
def test_scales_of_weights_that_were_left_behind_are_forgotten(tmp_path: Path) -> None:
    cfg, parts = started(tmp_path, "precision.fp8.recipe=delayed", "checkpoint.ring.every_steps=1")
    state = RunState()
    for index in range(2):
        forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
        finish_step(parts, cfg=cfg, probe=False)
    assert (parts.fp8_layers.primed_steps, bool(parts.fp8_layers.history.any())) == (PRIMED_STEPS - 2, True)
    action = Action(time=0.0, iteration=2, kind=ActionKind.rewind, step=2, incident=1, reason="a test", onset=2)
    assert not recover(action, parts, state, root=tmp_path).succeeded, "there is nothing to go back to yet"
    assert (parts.fp8_layers.primed_steps, bool(parts.fp8_layers.history.any())) == (PRIMED_STEPS - 2, True)
    parts.ring.take_snapshot(state).complete(step=0, refused_in_row=0)
    parts.ring.trust(1)
    assert recover(action, parts, state, root=tmp_path).succeeded
    assert (parts.fp8_layers.primed_steps, bool(parts.fp8_layers.history.any())) == (PRIMED_STEPS, False)
    parts.close()
