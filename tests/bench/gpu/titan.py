"""torchtitan's Llama: its model, its compilation, its sharding, its loss and its clipping, from an installed package or
from a directory that holds one.

What torchtitan imports besides, for its command line and its corpora, need not be installed: where it is missing, an
empty module stands in for it while torchtitan is imported, and is taken away afterwards. Nothing that computes is
replaced. On one GPU torchtitan would leave FSDP2 out and cast by autocast; here it does what it does on many, without
the division of gradients by 1 that this brings along.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.bench.gpu.peer import Job, Peer, Step, adamw, check_size

IDLE = {
    "tyro": ("tyro",),
    "datasets": ("datasets", "datasets.distributed"),
    "torchdata": ("torchdata", "torchdata.stateful_dataloader"),
    "tensorboard": ("torch.utils.tensorboard",),
}
"""Package -> its modules that torchtitan imports and the model does without: command line, corpora, loaders, logs."""


class Nothing:
    """Good enough for an annotation or a base class."""


class _Empty(ModuleType):
    """Has every name: those with a capital are classes, others are as empty as itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing if name[0].isupper() else _Empty(f"{self.__name__}.{name}")


@contextmanager
def standing_in() -> Iterator[None]:
    missing = [package for package in IDLE if importlib.util.find_spec(package) is None]
    names = [name for package in missing for name in IDLE[package] if name not in sys.modules]
    sys.modules.update({name: _Empty(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def imported(directory: Path | None) -> ModuleType:
    """torchtitan.models.llama3, from a directory if one is given."""
    before = list(sys.path)
    if directory is not None:
        sys.path.insert(0, str(directory))
    try:
        if importlib.util.find_spec("torchtitan") is None:
            raise ModuleNotFoundError("torchtitan is not installed; --torchtitan DIR takes a directory that holds it")
        with standing_in():
            return import_module("torchtitan.models.llama3")
    finally:
        sys.path[:] = before


def peer(directory: Path | None, *, as_shipped: bool = False) -> Peer:
    """The row; `directory` holds the package where it is not installed."""

    @contextmanager
    def start(job: Job) -> Iterator[Step]:
        llama3 = imported(directory)
        logging.getLogger().setLevel(logging.WARNING)
        yield step_of(parallelized(llama3, job, as_shipped=as_shipped), job)

    return Peer("torchtitan, sharded as shipped" if as_shipped else "torchtitan", start)


def parallelized(llama3: ModuleType, job: Job, *, as_shipped: bool) -> Any:
    """Compiled, then sharded, then made on the device, in its own order.

    `as_shipped`: with its own defaults, which reshard after forward and have gradients divided by 1.
    """
    own = import_module("torchtitan.models.llama3.infra.parallelize")
    model = job.cfg.model
    narrow = int(8 * model.dim / 3)
    arguments = llama3.TransformerModelArgs(
        dim=model.dim,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        multiple_of=model.ffn_dim,
        ffn_dim_multiplier=model.ffn_dim / narrow,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        max_seq_len=job.cfg.train.sequence_length,
    )
    with torch.device("meta"):
        built = llama3.Transformer(arguments)
    check_size(built, job.cfg)
    if job.is_compiled:
        own.apply_compile(built, import_module("torchtitan.config.job_config").Compile(enable=True))
    own.apply_fsdp(
        built,
        job.world.mesh,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy="default" if as_shipped else "never",
    )
    for module in built.modules():
        if (
            isinstance(module, FSDPModule) and not as_shipped
        ):  # torchtitan says 1; alone, FSDP2 divides by that in a pass of its own
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    built.to_empty(device=job.world.device)
    with torch.no_grad():
        built.init_weights(buffer_device=job.world.device)
    return built.train()


def step_of(model: Any, job: Job) -> Step:
    """As its trainer makes it: the loss summed, then divided by the tokens of the batch."""
    clip = import_module("torchtitan.distributed.utils").clip_grad_norm_
    sum_of: Callable[[Tensor, Tensor], Tensor] = import_module("torchtitan.components.loss").cross_entropy_loss
    if job.is_compiled:
        sum_of = torch.compile(sum_of)
    optimizer = adamw(model.parameters(), job.cfg)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = sum_of(model(inputs), targets) / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), job.cfg.optim.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
