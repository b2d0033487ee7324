"""torchtitan's Llama: its model, compilation, sharding, loss and clipping, installed or from a directory.

Packages that torchtitan imports for its command line and its datasets need not be installed: a missing one is replaced
by placeholder modules while torchtitan is imported. Nothing that computes is replaced. Two variants: "as shipped" uses
torchtitan's own configuration on one GPU (`shipped_step`); "at its best" has the settings that make it fastest here
(`best_step`), sharded as on many GPUs.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from harness.core.rundir import RunDir
from harness.distributed.world import World
from tests.bench.gpu.peer import Job, Peer, Step, build_adamw, check_size, peer_entry
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting

UNUSED_PACKAGES = {
    "tyro": ("tyro",),
    "datasets": ("datasets", "datasets.distributed"),
    "torchdata": ("torchdata", "torchdata.stateful_dataloader"),
    "tensorboard": ("torch.utils.tensorboard",),
}
"""Package -> its modules that torchtitan imports and the model does not use: command line, datasets, loaders, logs."""


class Placeholder:
    """Serves as an annotation or a base class."""


class _PlaceholderModule(ModuleType):
    """A module with every attribute: `Placeholder` for capitalized names, a placeholder module for others."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder if name[0].isupper() else _PlaceholderModule(f"{self.__name__}.{name}")


@contextmanager
def placeholder_modules() -> Iterator[None]:
    missing = [package for package in UNUSED_PACKAGES if importlib.util.find_spec(package) is None]
    names = [name for package in missing for name in UNUSED_PACKAGES[package] if name not in sys.modules]
    sys.modules.update({name: _PlaceholderModule(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def import_torchtitan(directory: Path | None) -> ModuleType:
    """Import torchtitan.models.llama3, from a directory if one is given."""
    previous = list(sys.path)
    if directory is not None:
        sys.path.insert(0, str(directory))
    try:
        if importlib.util.find_spec("torchtitan") is None:
            raise ModuleNotFoundError("torchtitan is not installed; --torchtitan DIR takes a directory that holds it")
        with placeholder_modules():
            return import_module("torchtitan.models.llama3")
    finally:
        sys.path[:] = previous


class Variant(NamedTuple):
    title: str
    float8: str | None = None
    """Recipe of torchao's float8; None: bf16."""
    is_as_shipped: bool = False


VARIANTS = {
    "torchtitan-shipped": Variant("torchtitan, as shipped", is_as_shipped=True),
    "torchtitan": Variant("torchtitan, at its best"),
    "torchtitan-float8-tensorwise": Variant("torchtitan + torchao float8 tensorwise", float8="tensorwise"),
    "torchtitan-float8-rowwise": Variant("torchtitan + torchao float8 rowwise", float8="rowwise"),
}


@contextmanager
def start(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    with peer_entry(build_peer(None, VARIANTS[name]), world, setting, run) as entry:
        yield entry


def build_peer(directory: Path | None, variant: Variant = VARIANTS["torchtitan"]) -> Peer:
    """Build the row; `directory` holds the package if it is not installed."""

    @contextmanager
    def start_peer(job: Job) -> Iterator[Step]:
        llama3 = import_torchtitan(directory)
        logging.getLogger().setLevel(logging.WARNING)
        yield shipped_step(llama3, job) if variant.is_as_shipped else best_step(llama3, job, variant.float8)

    return Peer(variant.title, start_peer)


def build_model(llama3: ModuleType, job: Job) -> Any:
    """Build its model of the given shape, on the meta device."""
    model = job.cfg.model
    default_ffn_dim = int(8 * model.dim / 3)
    arguments = llama3.TransformerModelArgs(
        dim=model.dim,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        multiple_of=model.ffn_dim,
        ffn_dim_multiplier=model.ffn_dim / default_ffn_dim,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        max_seq_len=job.cfg.train.sequence_length,
    )
    with torch.device("meta"):
        transformer = llama3.Transformer(arguments)
    check_size(transformer, job.cfg)
    return transformer


def materialize(model: Any, job: Job) -> Any:
    model.to_empty(device=job.world.device)
    with torch.no_grad():
        model.init_weights(buffer_device=job.world.device)
    return model.train()


def best_step(llama3: ModuleType, job: Job, float8: str | None) -> Step:
    """Its own functions in its own order: float8, compilation by block, FSDP2; compiled loss, no recomputation.

    Weights stay gathered between forward and backward. Gradients are not divided by a world size of 1, for which FSDP2
    would need an extra pass.
    """
    parallelize = import_module("torchtitan.models.llama3.infra.parallelize")
    model = build_model(llama3, job)
    config = default_config(job)
    config.compile.enable = job.is_compiled
    if float8 is not None:
        convert_to_float8(model, config, float8)
    if job.is_compiled:
        parallelize.apply_compile(model, config.compile)
    parallelize.apply_fsdp(
        model,
        job.world.mesh,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy="never",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    return build_step(materialize(model, job), job, nullcontext(), is_compiled=job.is_compiled)


def shipped_step(llama3: ModuleType, job: Job) -> Step:
    """With the settings of its `llama3_8b.toml`, the smallest training configuration it ships; the shape and the batch
    are those of the table.

    In 0.2.2: not compiled, selective activation checkpointing by operator, fused AdamW. On one GPU it does not shard,
    and computes in bf16 by autocast.
    """
    parallelize = import_module("torchtitan.models.llama3.infra.parallelize")
    config = default_config(job)
    read_settings(config, Path(llama3.__file__ or "").parent / "train_configs/llama3_8b.toml")
    dims = single_rank_dims()
    model = materialize(parallelize.parallelize_llama(build_model(llama3, job), dims, config), job)
    cast = import_module("torchtitan.distributed.utils").maybe_enable_amp(
        dims, config.training.mixed_precision_param, job.world.device.type
    )
    return build_step(model, job, cast, is_compiled=config.compile.enable)


def default_config(job: Job) -> Any:
    config = import_module("torchtitan.config.job_config").JobConfig()
    config.training.seq_len = job.cfg.train.sequence_length
    return config


def read_settings(config: Any, path: Path) -> None:
    """Copy the settings that affect how a step is computed."""
    with path.open("rb") as file:
        shipped = tomllib.load(file)
    for section in ("compile", "activation_checkpoint", "parallelism"):
        for key, value in shipped.get(section, {}).items():
            setattr(getattr(config, section), key, value)


def single_rank_dims() -> Any:
    dims = import_module("torchtitan.distributed").ParallelDims
    return dims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def convert_to_float8(model: Any, config: Any, recipe: str) -> None:
    """Convert all layers except the output layer with torchtitan's own converter, as in its configurations.

    Without a GPU torchao can only emulate tensorwise scaling, which is enough to test the row.
    """
    float8 = config.quantize.linear.float8
    float8.filter_fqns = ["output"]
    if torch.cuda.is_available():
        float8.recipe_name = recipe
    elif recipe == "tensorwise":
        float8.emulate = True
    else:
        raise NotImplementedError(f"float8 {recipe} needs a GPU")
    converter = import_module("torchtitan.components.quantization.float8").Float8LinearConverter
    converter(config, single_rank_dims()).convert(model)


def build_step(model: Any, job: Job, cast: AbstractContextManager[Any], *, is_compiled: bool) -> Step:
    """A step like that of its trainer: the loss is summed, then divided by the tokens of the batch."""
    clip = import_module("torchtitan.distributed.utils").clip_grad_norm_
    loss_sum: Callable[[Tensor, Tensor], Tensor] = import_module("torchtitan.components.loss").cross_entropy_loss
    if is_compiled:
        loss_sum = torch.compile(loss_sum)
    optimizer = build_adamw(model.parameters(), job.cfg)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with cast:
            loss = loss_sum(model(inputs), targets) / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), job.cfg.optim.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
