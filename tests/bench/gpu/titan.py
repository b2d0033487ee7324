"""torchtitan's Llama: its model, its compilation, its sharding, its loss and its clipping, from an installed package or
from a directory that holds one.

What torchtitan imports besides, for its command line and its corpora, need not be installed: where it is missing, an
empty module stands in for it while torchtitan is imported, and is taken away afterwards. Nothing that computes is
replaced. Two ways: "as shipped" is what torchtitan's own configuration gives on one GPU (`shipped_step`); "at its best"
has the settings that make it fastest here (`best_step`), sharded as on many GPUs.
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
from tests.bench.gpu.peer import Job, Peer, Step, adamw, check_size, entry_of
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting

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


class Way(NamedTuple):
    title: str
    float8: str | None = None
    """Recipe of torchao's float8."""
    is_as_shipped: bool = False


WAYS = {
    "torchtitan-shipped": Way("torchtitan, as shipped", is_as_shipped=True),
    "torchtitan": Way("torchtitan, at its best"),
    "torchtitan-float8-tensorwise": Way("torchtitan + torchao float8 tensorwise", float8="tensorwise"),
    "torchtitan-float8-rowwise": Way("torchtitan + torchao float8 rowwise", float8="rowwise"),
}


@contextmanager
def start(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    with entry_of(peer(None, WAYS[name]), world, setting, run) as entry:
        yield entry


def peer(directory: Path | None, way: Way = WAYS["torchtitan"]) -> Peer:
    """The row; `directory` holds the package where it is not installed."""

    @contextmanager
    def begun(job: Job) -> Iterator[Step]:
        llama3 = imported(directory)
        logging.getLogger().setLevel(logging.WARNING)
        yield shipped_step(llama3, job) if way.is_as_shipped else best_step(llama3, job, way.float8)

    return Peer(way.title, begun)


def built(llama3: ModuleType, job: Job) -> Any:
    """Its model of the given shape, without memory."""
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
        made = llama3.Transformer(arguments)
    check_size(made, job.cfg)
    return made


def materialized(model: Any, job: Job) -> Any:
    model.to_empty(device=job.world.device)
    with torch.no_grad():
        model.init_weights(buffer_device=job.world.device)
    return model.train()


def best_step(llama3: ModuleType, job: Job, float8: str | None) -> Step:
    """Its own functions in its own order: float8, compilation by block, FSDP2; the loss compiled, nothing recomputed.

    It keeps gathered weights between forward and backward, and gradients are not divided by 1: alone, FSDP2 does that
    in a pass of its own.
    """
    own = import_module("torchtitan.models.llama3.infra.parallelize")
    model = built(llama3, job)
    config = default_config(job)
    config.compile.enable = job.is_compiled
    if float8 is not None:
        convert_to_float8(model, config, float8)
    if job.is_compiled:
        own.apply_compile(model, config.compile)
    own.apply_fsdp(
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
    return step_of(materialized(model, job), job, nullcontext(), is_compiled=job.is_compiled)


def shipped_step(llama3: ModuleType, job: Job) -> Step:
    """With the settings of its `llama3_8b.toml`, the smallest training configuration it ships; the shape and the batch
    are those of the table.

    In 0.2.2: not compiled, selective activation checkpointing by operator, fused AdamW. On one GPU it does not shard,
    and computes in bf16 by autocast.
    """
    own = import_module("torchtitan.models.llama3.infra.parallelize")
    config = default_config(job)
    read_settings(config, Path(llama3.__file__ or "").parent / "train_configs/llama3_8b.toml")
    dims = one_rank()
    model = materialized(own.parallelize_llama(built(llama3, job), dims, config), job)
    cast = import_module("torchtitan.distributed.utils").maybe_enable_amp(
        dims, config.training.mixed_precision_param, job.world.device.type
    )
    return step_of(model, job, cast, is_compiled=config.compile.enable)


def default_config(job: Job) -> Any:
    config = import_module("torchtitan.config.job_config").JobConfig()
    config.training.seq_len = job.cfg.train.sequence_length
    return config


def read_settings(config: Any, path: Path) -> None:
    """What decides how a step is computed."""
    with path.open("rb") as file:
        shipped = tomllib.load(file)
    for section in ("compile", "activation_checkpoint", "parallelism"):
        for key, value in shipped.get(section, {}).items():
            setattr(getattr(config, section), key, value)


def one_rank() -> Any:
    dims = import_module("torchtitan.distributed").ParallelDims
    return dims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def convert_to_float8(model: Any, config: Any, recipe: str) -> None:
    """By torchtitan's own converter, for all but the output layer, as its configurations have it.

    Without a GPU torchao can only emulate one scale a tensor, which is enough to try the row out.
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
    converter(config, one_rank()).convert(model)


def step_of(model: Any, job: Job, cast: AbstractContextManager[Any], *, is_compiled: bool) -> Step:
    """As its trainer makes it: the loss summed, then divided by the tokens of the batch."""
    clip = import_module("torchtitan.distributed.utils").clip_grad_norm_
    sum_of: Callable[[Tensor, Tensor], Tensor] = import_module("torchtitan.components.loss").cross_entropy_loss
    if is_compiled:
        sum_of = torch.compile(sum_of)
    optimizer = adamw(model.parameters(), job.cfg)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with cast:
            loss = sum_of(model(inputs), targets) / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), job.cfg.optim.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
