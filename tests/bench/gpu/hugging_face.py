"""Hugging Face's Llama: with plain FSDP2, with Lightning Fabric, and with accelerate.

Blocks are compiled in place one by one and then sharded. `start_whole` compiles all layers as one graph instead, which
takes minutes and leaves FSDP2 one group of all parameters: suitable for one GPU only.
Fabric's NaN check while clipping is off, because it would wait for the device. accelerate gets FSDP2's own policy
instead of `mixed_precision`, which would convert all logits to fp32; it supports FSDP2 on GPUs only. Both join the
existing process group and set environment variables, accelerate also its global state; these are restored. Their own
device mesh, with groups of one rank, stays until the process group is destroyed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from harness.core.rundir import RunDir
from harness.distributed.world import World
from tests.bench.gpu.peer import (
    POLICY,
    Job,
    Peer,
    Step,
    build_adamw,
    build_loss,
    check_size,
    compile_and_shard,
    peer_entry,
    plain_loop,
)
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting

BLOCK = "LlamaDecoderLayer"


def build_llama(job: Job) -> Any:
    """A Llama of the same shape, initialised on the device."""
    transformers = import_module("transformers")
    model, sequence_length = job.cfg.model, job.cfg.train.sequence_length
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=sequence_length,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with job.world.device:
        llama = transformers.LlamaForCausalLM(config).train()
    check_size(llama, job.cfg)
    return llama


def build_logits(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def logits(inputs: Tensor) -> Tensor:
        output: Tensor = model(input_ids=inputs, use_cache=False).logits
        return output

    return logits


@contextmanager
def start_blocks(job: Job) -> Iterator[Step]:
    model = build_llama(job)
    compile_and_shard(model, model.model.layers, job.world.mesh, is_compiled=job.is_compiled)
    with plain_loop(model, build_logits(model), build_loss(job), job) as step:
        yield step


@contextmanager
def start_whole(job: Job) -> Iterator[Step]:
    model = build_llama(job)
    with without_mask(import_module(type(model).__module__)):
        if job.is_compiled:
            model.model.forward = torch.compile(model.model.forward)
        fully_shard(model, mesh=job.world.mesh, mp_policy=POLICY, reshard_after_forward=False)
        with plain_loop(model, build_logits(model), build_loss(job), job) as step:
            yield step


@contextmanager
def without_mask(modeling: Any) -> Iterator[None]:
    """Disable the explicit causal mask: in one graph it is materialized, and SDPA is causal without it."""
    original = modeling.create_causal_mask
    modeling.create_causal_mask = lambda *_, **__: None
    try:
        yield
    finally:
        modeling.create_causal_mask = original


@contextmanager
def start_lightning(job: Job) -> Iterator[Step]:
    fabric_module = import_module("lightning.fabric")
    strategies = import_module("lightning.fabric.strategies")

    def parallelize(model: Any, mesh: Any) -> nn.Module:
        return compile_and_shard(model, model.model.layers, mesh["data_parallel"], is_compiled=job.is_compiled)

    with restore_environment():
        strategy = strategies.ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size=1)
        fabric = fabric_module.Fabric(accelerator=job.world.device.type, devices=1, strategy=strategy)
        fabric.launch()
        model = fabric.setup(build_llama(job))
        optimizer = fabric.setup_optimizers(build_adamw(model.parameters(), job.cfg))
        logits, loss_of = build_logits(model), build_loss(job)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = loss_of(logits(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=job.cfg.optim.clip_norm, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        yield step


@contextmanager
def start_accelerate(job: Job) -> Iterator[Step]:
    package, state = import_module("accelerate"), import_module("accelerate.state")
    with restore_environment():
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        plugin = package.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[BLOCK],
            mixed_precision_policy=POLICY,
            cpu_ram_efficient_loading=False,
        )
        try:
            accelerator = package.Accelerator(fsdp_plugin=plugin, cpu=job.world.device.type == "cpu")
            if not accelerator.is_fsdp2:
                raise NotImplementedError(f"no FSDP2 on this device: {accelerator.distributed_type}")
            model = build_llama(job)
            if job.is_compiled:
                for block in model.model.layers:
                    block.compile()
            model, optimizer = accelerator.prepare(model, build_adamw(model.parameters(), job.cfg))
            logits, loss_of = build_logits(model), build_loss(job)

            def step(inputs: Tensor, targets: Tensor) -> Tensor:
                loss = loss_of(logits(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), job.cfg.optim.clip_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss.detach()

            yield step
        finally:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


@contextmanager
def restore_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


PEERS = {
    "huggingface": Peer("Hugging Face Llama, FSDP2, block by block", start_blocks),
    "huggingface-whole": Peer("Hugging Face Llama, FSDP2, all in one", start_whole),
    "lightning": Peer("Lightning Fabric, FSDP2, Hugging Face Llama", start_lightning),
    "accelerate": Peer("accelerate, FSDP2, Hugging Face Llama", start_accelerate),
}


@contextmanager
def start(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    with peer_entry(PEERS[name], world, setting, run) as entry:
        yield entry
