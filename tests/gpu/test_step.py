"""The training step on a GPU: no host sync, refused updates, torch.compile, mixed precision."""

from __future__ import annotations

import math

import pytest
import torch

from harness.distributed.shards import local
from harness.distributed.world import disconnect
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.step import evaluate, finish_step, forward_backward
from tests.gpu import one_rank
from tests.gpu.one_rank import start, step, train_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
]

single_rank = pytest.fixture(autouse=True)(one_rank.one_rank)


def build_facts(index: int) -> HostFacts:
    return HostFacts(
        iteration=index, cursor=index, tokens=0, probed=index % 2 == 0, posted_s=0.0, memory_bytes=0, batch={}
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_step_has_no_host_sync(precision: str) -> None:
    parts, cfg = start(f"precision={precision}", "train.micro_batch_size=4", "sentinel.lag=2")
    for index in range(2):
        step(parts, cfg, index, probe=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(2, 5):
            report = step(parts, cfg, index, probe=index % 2 == 0)
            parts.mailbox.post(build_facts(index), report)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    records = [
        unpack_report(
            parts.signals.layout, facts, values, dim=cfg.model.dim, dynamic_scale=False, clip_norm=None, replicate=1
        )
        for facts, values in parts.mailbox.read(everything=True)
    ]
    assert [record.cursor for record in records] == [2, 3, 4]
    assert all(math.isfinite(record.loss) and not record.refused for record in records)
    assert records[0].param_norm is not None


def test_micro_batch_gradients_accumulate() -> None:
    gradients_of_runs = []
    for size in (8, 1):
        parts, cfg = start("precision=fp32", "model.dim=1024", "model.ffn_dim=4096", f"train.micro_batch_size={size}")
        for _ in range(3):  # memory that is freed too early would be overwritten by a later step
            forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
            gradients_of_runs.append(
                {name: local(p.grad).clone() for name, p in parts.update.parameters.items() if p.grad is not None}
            )
            parts.update.clear_gradients()
        disconnect()
    for gradients in gradients_of_runs[1:]:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, gradients_of_runs[0][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_refused_update_changes_no_tensor(value: float) -> None:
    parts, cfg = start("precision=bf16")
    step(parts, cfg, 0)
    before = {name: local(p).detach().clone() for name, p in parts.update.parameters.items()}
    moments = {name: {k: local(v).clone() for k, v in s.items()} for name, s in parts.update.state().items()}
    forward_backward(parts, parts.batches[1], cfg=cfg, probe=False)
    gradient = parts.update.parameters["blocks.1.mlp.up.weight"].grad
    assert gradient is not None
    local(gradient).view(-1)[7] = value
    finish_step(parts, cfg=cfg, probe=False)
    for name, parameter in parts.update.parameters.items():
        assert torch.equal(local(parameter), before[name]), name
        for key, moment in parts.update.state()[name].items():
            assert torch.equal(local(moment), moments[name][key]), (name, key)
    assert int(parts.update.step) == 1
    step(parts, cfg, 2)
    assert not torch.equal(local(parts.update.parameters["norm.weight"]), before["norm.weight"])


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_blocks_train_like_eager_ones(checkpointing: str) -> None:
    variant = f"parallel.activation_checkpointing={checkpointing}"
    parts, cfg = start("precision=bf16", "optim.warmup_steps=2")
    plain = train_losses(parts, cfg, 8)
    disconnect()
    parts, cfg = start("precision=bf16", "optim.warmup_steps=2", "parallel.compile=true", variant)
    compiled = train_losses(parts, cfg, 8)
    assert compiled == pytest.approx(plain, rel=5e-3)
    assert compiled[-1] < compiled[0] - 0.5


@pytest.mark.parametrize(("checkpointing", "num_forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_compiled_blocks_fuse_qkv(checkpointing: str, num_forwards: int) -> None:
    variant = f"parallel.activation_checkpointing={checkpointing}"
    parts, cfg = start("precision=bf16", "parallel.compile=true", variant)
    step(parts, cfg, 0)
    # after compilation, which also calls the operators
    with torch.profiler.profile(acc_events=True) as profiler:
        step(parts, cfg, 1)
    called = [event.name for event in profiler.events() if event.device_type.name == "CPU"]
    kernels = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    assert called.count("harness::qkv_rope") == num_forwards * cfg.model.num_layers
    assert called.count("harness::qkv_rope_backward") == cfg.model.num_layers
    assert kernels.count("_move_heads") == (num_forwards + 1) * cfg.model.num_layers


def test_the_same_seed_gives_the_same_bits() -> None:
    parts, cfg = start("precision=bf16")
    first = train_losses(parts, cfg, 20)
    disconnect()
    parts, cfg = start("precision=bf16")
    assert train_losses(parts, cfg, 20) == first


def test_evaluation_uses_the_trained_weights() -> None:
    from harness.core.state import RunState

    parts, cfg = start("precision=bf16")
    before = evaluate(parts, RunState(), cfg=cfg)
    train_losses(parts, cfg, 10)
    after = evaluate(parts, RunState(), cfg=cfg)
    assert before.tokens == after.tokens == 4 * 8 * 256
    assert after.loss < before.loss
