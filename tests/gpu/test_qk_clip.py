"""Sampled attention logits and QK-clip on a GPU: compiled and eager, one graph, no host sync, refused updates, NCCL."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from harness.build import Parts
from harness.distributed.shards import local
from harness.distributed.world import disconnect
from harness.step import finish_step, forward_backward
from tests.gpu import one_rank
from tests.gpu.one_rank import step
from tests.no_sync import host_syncs_fail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile
]

single_rank = pytest.fixture(autouse=True)(one_rank.one_rank)
start = partial(one_rank.start, "precision=bf16")
QUERY = "blocks.1.attention.query.weight"


def grow(parts: Parts, factor: float) -> None:
    local(parts.update.parameters[QUERY]).detach().mul_(factor)
    parts.update.measure_digest()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.activation_checkpointing=full",),
        ("parallel.activation_checkpointing=selective",),
        ("model.qk_norm=true",),
    ],
    ids=["plain", "full", "selective", "qk_norm"],
)
def test_compiled_blocks_measure_the_logits_that_eager_blocks_measure(overrides: tuple[str, ...]) -> None:
    measured = []
    for compile_ in ("true", "false"):
        parts, cfg = start(f"parallel.compile={compile_}", *overrides)
        grow(parts, 50.0)
        step(parts, cfg, 0, probe=True)
        measured.append(parts.qk_clip.logits.clone())
        parts.close()
        disconnect()
    compiled, eager = measured
    print("compiled", compiled.tolist(), "eager", eager.tolist())
    assert bool(torch.isfinite(compiled).all())
    torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.02)


def test_probed_and_other_steps_share_a_compiled_graph() -> None:
    parts, cfg = start("parallel.compile=true")
    for index, probe in enumerate((True, False)):
        step(parts, cfg, index, probe=probe)
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    for index, probe in enumerate((True, False, True), start=2):
        step(parts, cfg, index, probe=probe)
    print("compiled frames", frames, torch._dynamo.utils.counters["frames"])
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames


@pytest.mark.parametrize("compile_", ["true", "false"])
def test_clipping_waits_for_nothing_and_bounds_the_logits(compile_: str) -> None:
    parts, cfg = start("optim.qk_clip=2", "optim.lr=1e-6", f"parallel.compile={compile_}")
    step(parts, cfg, 0)
    grow(parts, 2000.0)
    step(parts, cfg, 0)
    before = float(parts.qk_clip.logits.max())  # already clipped: `clip` scales what it holds
    with host_syncs_fail():
        report = step(parts, cfg, 0)
    after = float(parts.qk_clip.logits.max())
    layout = parts.signals.layout
    changed = layout.slot(report[: layout.size], "weights_changed")
    print("largest logit", before, after, "weights changed", changed.tolist())
    assert after <= 2 * 1.05
    assert not changed.any()


def test_a_rejected_update_clips_nothing() -> None:
    parts, cfg = start("optim.qk_clip=2", "parallel.compile=true")
    step(parts, cfg, 0)
    grow(parts, 2000.0)
    kept = {name: local(each).detach().clone() for name, each in parts.update.parameters.items()}
    forward_backward(parts, parts.batches[1], cfg=cfg, probe=False)
    gradient = next(iter(parts.update.parameters.values())).grad
    assert gradient is not None
    local(gradient).fill_(math.nan)
    finish_step(parts, cfg=cfg, probe=False)
    assert all(torch.equal(kept[name], local(each)) for name, each in parts.update.parameters.items())
    step(parts, cfg, 2)
    print("scaled by", float(local(parts.update.parameters[QUERY]).norm() / kept[QUERY].norm()))
    assert not torch.equal(kept[QUERY], local(parts.update.parameters[QUERY]))
