"""Hugging Face's Llama: with plain FSDP2, by Lightning Fabric, and by accelerate.

Blocks are compiled in place, each by itself, and then sharded. `whole` compiles all layers as one graph instead, which
takes minutes and leaves FSDP2 one group of all parameters: right for one GPU only.
Fabric is told not to look for NaN while clipping, which would wait for the device. accelerate gets FSDP2's own policy
instead of `mixed_precision`, which would turn all logits into fp32; it knows FSDP2 on GPUs only. Both join the process
group that is there and leave settings in the environment, accelerate also in its own state, which are taken back; a
mesh of their own stays, with its groups of one rank, until the process leaves the group.
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
from tests.bench.gpu.peer import POLICY, Job, Peer, Step, adamw, check_size, entry_of, loss_function, plain_loop, shard
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting

BLOCK = "LlamaDecoderLayer"


def llama(job: Job) -> Any:
    """The same shape, initialised on the device."""
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
        built = transformers.LlamaForCausalLM(config).train()
    check_size(built, job.cfg)
    return built


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def logits(inputs: Tensor) -> Tensor:
        computed: Tensor = model(input_ids=inputs, use_cache=False).logits
        return computed

    return logits


@contextmanager
def blocks(job: Job) -> Iterator[Step]:
    model = llama(job)
    shard(model, model.model.layers, job.world.mesh, is_compiled=job.is_compiled)
    with plain_loop(model, logits_of(model), loss_function(job), job) as step:
        yield step


@contextmanager
def whole(job: Job) -> Iterator[Step]:
    model = llama(job)
    with without_mask(import_module(type(model).__module__)):
        if job.is_compiled:
            model.model.forward = torch.compile(model.model.forward)
        fully_shard(model, mesh=job.world.mesh, mp_policy=POLICY, reshard_after_forward=False)
        with plain_loop(model, logits_of(model), loss_function(job), job) as step:
            yield step


@contextmanager
def without_mask(modeling: Any) -> Iterator[None]:
    """While it is compiled as a whole it makes a mask as large as the scores, and attention is causal without one."""
    made = modeling.create_causal_mask
    modeling.create_causal_mask = lambda *_, **__: None
    try:
        yield
    finally:
        modeling.create_causal_mask = made


@contextmanager
def lightning(job: Job) -> Iterator[Step]:
    fabric_module = import_module("lightning.fabric")
    strategies = import_module("lightning.fabric.strategies")

    def parallelize(model: Any, mesh: Any) -> nn.Module:
        return shard(model, model.model.layers, mesh["data_parallel"], is_compiled=job.is_compiled)

    with environment_restored():
        strategy = strategies.ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size=1)
        fabric = fabric_module.Fabric(accelerator=job.world.device.type, devices=1, strategy=strategy)
        fabric.launch()
        model = fabric.setup(llama(job))
        optimizer = fabric.setup_optimizers(adamw(model.parameters(), job.cfg))
        logits, loss_of = logits_of(model), loss_function(job)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = loss_of(logits(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=job.cfg.optim.clip_norm, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        yield step


@contextmanager
def accelerate(job: Job) -> Iterator[Step]:
    package, state = import_module("accelerate"), import_module("accelerate.state")
    with environment_restored():
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
            model = llama(job)
            if job.is_compiled:
                for block in model.model.layers:
                    block.compile()
            model, optimizer = accelerator.prepare(model, adamw(model.parameters(), job.cfg))
            logits, loss_of = logits_of(model), loss_function(job)

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
def environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


PEERS = {
    "huggingface": Peer("Hugging Face Llama, FSDP2, block by block", blocks),
    "huggingface-whole": Peer("Hugging Face Llama, FSDP2, all in one", whole),
    "lightning": Peer("Lightning Fabric, FSDP2, Hugging Face Llama", lightning),
    "accelerate": Peer("accelerate, FSDP2, Hugging Face Llama", accelerate),
}


@contextmanager
def start(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    with entry_of(PEERS[name], world, setting, run) as entry:
        yield entry
