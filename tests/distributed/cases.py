"""Functions that the distributed tests run on every rank. They are sent to worker processes by name."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import train
from harness.build import Parts, build
from harness.checkpoint import store
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core import event_json, rundir
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.collectives import all_reduce_sum
from harness.distributed.reduce_scatter import MeasuredReduceScatter
from harness.distributed.shards import local
from harness.distributed.torch_private import chunk_cat
from harness.distributed.world import World, connect
from harness.faults.site import intercept
from harness.resume import Opened, open_run
from harness.run import Ending, Run
from harness.run_corpus import RunData
from harness.step import finish_step, forward_backward, loss_sums
from tests.composed import load
from tests.no_sync import host_syncs_fail

TINY = (
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=48",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.num_steps=6",
    "optim.warmup_steps=2",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "telemetry=plain",
    "telemetry.picture=false",
    "telemetry.postmortem=false",
    "parallel.device=cpu",
    "checkpoint.ring.shared_dir=null",
)
"""A model that trains in milliseconds. Its snapshots end with the process, so that a resume reads the disk."""


def tiny(*overrides: str, directory: str = "runs") -> Config:
    """The config of that model with these overrides, for a run in `directory`."""
    cfg = load([*TINY, *overrides])
    cfg.run.dir = directory
    return cfg


def full(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest that is equal only for bit-equal tensors."""
    joined = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        joined.update(name.encode())
        joined.update(full(tensor).detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return joined.hexdigest()


def initial_weights_digest(*overrides: str) -> str:
    """Digest of the initial weights."""
    cfg = tiny(*overrides)
    return digest(dict(_build(cfg).model.named_parameters()))


def _build(cfg: Config, world: World | None = None) -> Parts:
    return build(
        cfg, world or connect(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu), RunDir(Path("/nonexistent"))
    )


def run(directory: str, *overrides: str) -> tuple[int, list[StepRecord]]:
    """A whole run through `run_worker`: exit code and step records."""
    cfg = tiny(*overrides, directory=directory)
    code = train.run_worker(cfg)
    path = rundir.locate(cfg).events if cfg.run.name else None
    records = [] if path is None else [event for event in event_json.read(path) if isinstance(event, StepRecord)]
    return code, records


def run_with_sync_as_error(directory: str, *overrides: str) -> list[StepRecord]:
    """A whole run on CUDA in which a host sync after the fourth step is an error; returns its records."""
    loop = train.train
    cfg = tiny(*overrides, "run.name=guarded", directory=directory)

    def guarded_loop(run: Run) -> Ending:
        loop(replace(run, cfg=replace(cfg, train=replace(cfg.train, num_steps=4))))
        with host_syncs_fail():
            return loop(run)

    with patch.object(train, "train", guarded_loop):
        assert train.run_worker(cfg) == 0
    return [event for event in event_json.read(rundir.locate(cfg).events) if isinstance(event, StepRecord)]


def guarded_losses(directory: str, *overrides: str) -> list[float]:
    """The losses of `run_with_sync_as_error`."""
    return [record.loss for record in run_with_sync_as_error(directory, *overrides)]


def run_in_fp8(directory: str, *overrides: str) -> list[bool | None]:
    """Whether fp8 was switched on on this rank, for each iteration of a whole run."""
    seen: list[bool | None] = []

    def wrap(run: Run) -> Run:
        record_step = lambda: seen.append(run.parts.fp8_layers.in_fp8)  # noqa: E731
        run.parts.mailbox = intercept(run.parts.mailbox, "post", record_step, first=True)
        return run

    cfg = tiny("precision=fp8_emulated", "run.name=victim", *overrides, directory=directory)
    assert train.run_worker(cfg, wrap) == 0
    return seen


def state_on_disk(checkpoint: Path) -> RunState:
    """The host state of a checkpoint."""
    return RunState(**json.loads((checkpoint / store.STATE_FILE).read_text()))


def device_step(checkpoint: Path) -> int:
    """The number of applied updates that the device had counted."""
    return int(store.read_tensors(checkpoint, ["device.step"])["device.step"])


@dataclass
class Snapshot:
    """Everything that an update may change, on this rank."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    step: int

    @staticmethod
    def of(parts: Parts) -> Snapshot:
        weights = {name: local(p).detach().clone() for name, p in parts.update.parameters.items()}
        moments = {
            f"{name}.{key}": local(value).clone()
            for name, state in parts.update.state().items()
            for key, value in state.items()
        }
        return Snapshot(weights, moments, int(parts.update.step))

    def equals(self, other: Snapshot) -> bool:
        def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
            return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

        return self.step == other.step and same(self.weights, other.weights) and same(self.moments, other.moments)


def poison(parts: Parts, corrupt: Callable[[Tensor], Any]) -> None:
    """Corrupt the first block's gradient on this rank, after the backward pass and before the signals are reduced."""
    gradient = parts.update.parameters["blocks.0.attention.query.weight"].grad
    assert gradient is not None
    with torch.no_grad():
        corrupt(local(gradient))


def step(
    parts: Parts, cfg: Config, index: int, *, poisoned_by: float | None = None, faulty_rank: int = 0
) -> list[float]:
    """One iteration of the loop, with the gradient of one rank corrupted if requested."""
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    if poisoned_by is not None and parts.world.rank == faulty_rank:
        poison(parts, lambda gradient: gradient.view(-1)[0].fill_(poisoned_by))
    return finish_step(parts, cfg=cfg, probe=False).tolist()


def run_refused_step(value: float, faulty_rank: int, *overrides: str) -> dict[str, Any]:
    """A poisoned step between two clean ones, and a control run without the poisoned step."""
    cfg = tiny(*overrides)
    world = connect(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu)
    parts = _build(cfg, world)
    step(parts, cfg, 0)
    before = Snapshot.of(parts)
    step(parts, cfg, 1, poisoned_by=value, faulty_rank=faulty_rank)
    after = Snapshot.of(parts)
    step(parts, cfg, 2)
    end = digest(parts.update.parameters)

    control = _build(cfg, world)
    step(control, cfg, 0)
    step(control, cfg, 2)
    return {
        "unchanged": before.equals(after),
        "equals_control": digest(control.update.parameters) == end,
        "moved": not Snapshot.of(control).equals(before),
    }


def muon_refusal(*overrides: str) -> dict[str, Any]:
    """`run_refused_step` with NaN on rank 1."""
    return run_refused_step(float("nan"), 1, *overrides)


def count_collectives(*overrides: str) -> dict[str, int]:
    """Number of calls of each collective in one step."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    step(parts, cfg, 0)
    counting = _Counting()
    with counting:
        step(parts, cfg, 1)
    return counting.calls


def count_gathers_before_blocks(*overrides: str) -> list[int]:
    """Number of all-gathers of a forward pass that are done when each block begins."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    counting, counts = _Counting(), list[int]()

    def count_gathers(_module: Any, _inputs: Any) -> None:
        counts.append(sum(count for name, count in counting.calls.items() if "allgather" in name))

    handles = [block.register_forward_pre_hook(count_gathers) for block in parts.model.blocks]
    with counting:
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
    for handle in handles:
        handle.remove()
    return counts


class _Counting(TorchDispatchMode):
    """Counts collectives by name; torch's own `CommDebugMode` takes one forward pass only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.calls[function.__name__.replace("_", "")] += 1
        return function(*args, **(kwargs or {}))


def dtypes(*overrides: str) -> dict[str, str]:
    """The dtypes of a step: master weights, moments, gradients, and the gathered weights in a block's forward."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    seen: dict[str, str] = {}
    name = "blocks.0.attention.query.weight"

    def record_dtypes(module: Any, _inputs: Any, output: Tensor) -> None:
        seen["activation"] = str(output.dtype)
        seen["gathered"] = str(module.weight.dtype)

    handle = parts.model.get_submodule(name.removesuffix(".weight")).register_forward_hook(record_dtypes)
    forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
    handle.remove()
    parameter = parts.update.parameters[name]
    assert parameter.grad is not None
    moments = parts.update.state()[name]
    return seen | {
        "master": str(parameter.dtype),
        "gradient": str(parameter.grad.dtype),
        "moment": str(moments["exp_avg_sq"].dtype),
    }


def full_gradients(*overrides: str) -> dict[str, Tensor]:
    """Full gradients of the first batch."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
    return {name: full(p.grad).clone() for name, p in parts.update.parameters.items() if p.grad is not None}


Pairs = dict[str, tuple[Tensor, Tensor]]


def replica_gradients(*overrides: str) -> tuple[Pairs, Pairs]:
    """Gradients of the first batch with an all-reduce between replicas in each micro-batch and with one of their sum:
    first of gradients rounded to multiples of 2 ** -20, which fp32 adds exactly in any order, then as they are."""
    cfg = tiny(*overrides)
    world = connect(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu)

    def coarsen(gradient: Tensor) -> None:
        gradient.mul_(2.0**20).round_().mul_(2.0**-20)

    def gradients(*, rounded: bool, once: bool) -> dict[str, Tensor]:
        parts = _build(cfg, world)
        if rounded:
            scatter = MeasuredReduceScatter(parts.comm_stats, before_measuring=[coarsen])
            for module in parts.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(scatter)
        if once:
            forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
        else:
            seed = 1.0 / (cfg.train.batch_size * cfg.train.sequence_length)
            for rows in parts.batches[0].micro_batches(cfg.train.micro_batch_size):
                parts.model(rows.inputs, rows.targets, seed=seed).objective.backward()
        return {name: full(p.grad).clone() for name, p in parts.update.parameters.items() if p.grad is not None}

    def pairs(*, rounded: bool) -> Pairs:
        each, once = gradients(rounded=rounded, once=False), gradients(rounded=rounded, once=True)
        assert each.keys() == once.keys()
        assert any(gradient.any() for gradient in once.values())
        return {name: (each[name], once[name]) for name in once}

    return pairs(rounded=True), pairs(rounded=False)


def square_sums_by_path(*overrides: str) -> dict[str, tuple[float, float]]:
    """Sums of squares of this rank's gradients of one step before the reduction: all, and those measured in a pass of
    their own instead of by the copy into the reduce-scatter input. Needs Triton.

    copied, again: all by the copy; the second time a host sync on CUDA is an error. separate: none, because a function
    may modify them. mixed: one block separately. nan: by the copy, with NaN in a gradient of the last rank.
    """
    cfg = tiny(*overrides)
    world = connect(cfg.parallel)
    chunk_cat.install(world.device.type.upper())
    parts = _build(cfg, world)
    stats = parts.comm_stats
    modules = [module for module in parts.model.modules() if isinstance(module, FSDPModule)]

    def measure(separate: Sequence[FSDPModule] = (), *, guarded: bool = False) -> tuple[float, float]:
        by_copy = MeasuredReduceScatter(stats)
        in_own_pass = MeasuredReduceScatter(stats, before_measuring=[lambda _: None])
        for module in modules:
            module.set_custom_reduce_scatter(in_own_pass if module in separate else by_copy)
        batch = parts.batches[0]
        with host_syncs_fail() if guarded and world.device.type == "cuda" else nullcontext():
            forward_backward(parts, batch, cfg=cfg, probe=False)
            parts.update.clear_gradients()
            own_pass = stats.square_sum.clone()
            everything = stats.take_square_sum()
        return float(everything), float(own_pass)

    found = {
        "copied": measure(),
        "again": measure(guarded=True),
        "separate": measure(modules),
        "mixed": measure(modules[1:2]),
    }
    if world.rank == world.size - 1:
        parts.model.get_submodule("blocks.0.mlp").register_forward_hook(_spoil_gradient)
    return found | {"nan": measure()}


def _spoil_gradient(_module: Any, _inputs: Any, output: Tensor) -> None:
    """A forward hook: the gradient of the output becomes NaN."""
    output.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]


def timeouts_of_groups(*overrides: str) -> dict[str, float]:
    """Mesh axis -> the seconds that a collective of its group waits."""
    cfg = tiny(*overrides)
    world = connect(cfg.parallel)
    groups = {"shard": world.shard_group, "replicate": world.replica_group}
    return {
        axis: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for axis, group in groups.items()
    }


def fails_before_a_late_rank(*overrides: str) -> bool:
    """Whether the first shard gives up in a collective that the second one calls after the timeout."""
    cfg = tiny(*overrides)
    world = connect(cfg.parallel)
    if world.shard:
        time.sleep(1.5 * cfg.parallel.timeout_s)
    try:
        dist.all_reduce(torch.ones(1), group=world.shard_group)
    except RuntimeError:
        return True
    return False


def gather_with_world_size_1(*overrides: str) -> dict[str, bool]:
    """Whether world_size 1 copies the weights of a block only once, with results bit-equal to plain FSDP."""
    cfg = tiny(*overrides)
    world = connect(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu)
    own, plain = _build(cfg, world), _build(cfg, world)
    given = [each.all_gather_inputs[0].data_ptr() for each in _sharded(own)]
    for parameter in _sharded(plain):
        parameter.__class__ = FSDPParam
    seen: dict[str, list[Tensor]] = {"own": [], "plain": []}
    for parts, weights in ((own, seen["own"]), (plain, seen["plain"])):
        query = parts.model.get_submodule("blocks.0.attention.query")
        query.register_forward_hook(lambda module, *_, to=weights: to.append(module.weight.detach().clone()))
        for index in range(3):
            step(parts, cfg, index)
    return {
        "inputs are the shards": sorted(given) == sorted(local(each).data_ptr() for each in own.model.parameters()),
        "equal weights": all(map(torch.equal, seen["own"], seen["plain"])),
        "moved": not torch.equal(seen["own"][0], seen["own"][-1]),
        "equal state": digest(own.tensors()) == digest(plain.tensors()),
    }


def _sharded(parts: Parts) -> list[FSDPParam]:
    modules = [module for module in parts.model.modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


@dataclass
class StartResult:
    """The result of one start of a run, on one rank."""

    code: int
    problem: str
    """The config error; empty if there was none."""
    cursors: list[int]
    """The cursors of all steps in the log."""
    tokens: list[int]
    windows: list[tuple[str, int]]
    """File and first token of each row that was read since this start, in order."""
    held_out: list[tuple[str, int]]


def start_run(directory: str, *overrides: str) -> StartResult:
    """Start or resume a run through `run_worker`."""
    windows: list[tuple[str, int]] = []
    held_out: list[tuple[str, int]] = []

    def wrap(run: Run) -> Run:
        batches = run.parts.batches
        source = run.parts.held_out.sources[0]
        held_out.extend(source.corpus.origin(sample)[:2] for sample in source.samples)
        record_step = lambda: windows.extend(origin[:2] for origin in batches.origins(run.state.cursor - 1))  # noqa: E731
        run.parts.mailbox = intercept(run.parts.mailbox, "post", record_step, first=True)
        return run

    cfg = tiny(*overrides, directory=directory)
    code, problem = 2, ""
    try:
        code = train.run_worker(cfg, wrap)
    except ConfigError as error:
        problem = str(error)
    path = rundir.locate(cfg).events
    records = [event for event in event_json.read(path) if isinstance(event, StepRecord)] if path.exists() else []
    return StartResult(
        code=code,
        problem=problem,
        cursors=[record.cursor for record in records],
        tokens=[record.tokens for record in records],
        windows=windows,
        held_out=held_out,
    )


def start_run_beside(directory: str, name: str, *overrides: str) -> StartResult:
    """As `start_run`, while another process publishes a checkpoint after the data of this start is planned."""
    cfg = tiny(*overrides, directory=directory)
    checkpoints = rundir.locate(cfg).checkpoints

    def publish_and_open(cfg: Config, data: RunData) -> Opened:
        (checkpoints / "later").rename(checkpoints / name)
        return open_run(cfg, data)

    (checkpoints / name).rename(checkpoints / "later")
    with patch("harness.train.open_run", publish_and_open):
        return start_run(directory, *overrides)


def start_run_per_host(directory: str, places: list[tuple[str, str]], *overrides: str) -> StartResult:
    """As `start_run`, with a working directory and a host name per rank, as on machines with separate disks."""
    place, host = places[int(os.environ["RANK"])]
    with chdir(place), patch("socket.gethostname", lambda: host):
        return start_run(directory, *overrides)


def losses_around_restore(*overrides: str) -> list[list[float]]:
    """Summed loss and tokens of one batch: before an update, after it, and after the old shards are restored."""
    cfg = tiny("optim.lr=0.1", "optim.warmup_steps=0", *overrides)
    parts = _build(cfg)

    def total_loss() -> list[float]:
        return all_reduce_sum(loss_sums(parts, parts.batches[1], cfg=cfg)).tolist()

    before = total_loss()
    shards = {name: local(tensor).clone() for name, tensor in parts.tensors().items()}
    step(parts, cfg, 0)
    after = total_loss()
    with torch.no_grad():
        for name, tensor in parts.tensors().items():
            local(tensor).copy_(shards[name])
    return [before, after, total_loss()]
