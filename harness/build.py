"""The composition root: every part of a run, constructed by name from the configuration.

Why: there is one place to see what a run is made of, and nothing reaches for its parts from afar.
How: parts are plain objects; which one is taken is decided by an enum and a `match`, never by a registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.manager import Keeper
from harness.checkpoint.ring import Ring
from harness.checkpoint.ring_cost import rollback_cost
from harness.config.errors import ConfigError
from harness.config.parallel import ParallelConfig
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.data.batches import Batches
from harness.data.order.ledger import Ledger
from harness.data.sources import Known, make_rare_index, open_data
from harness.distributed.collectives import from_first, jointly, minimum, together
from harness.distributed.compute_clock import ComputeClock
from harness.distributed.fsdp import Collectives, shard
from harness.distributed.world import World, device_memory_bytes
from harness.held_out import HeldOut, open_held_out
from harness.model.init import initialize
from harness.model.mup import parameter_table, role_of
from harness.model.size import flops_per_token, num_parameters, reshards
from harness.model.transformer import Transformer, sampled_layers
from harness.optim.update import Group, Update, build_update
from harness.planned_changes import Planned
from harness.precision.fp8.engine import require_engine
from harness.precision.fp8.layers import Products, lower
from harness.precision.loss_scale import LossScale, loss_scale
from harness.precision.mixed_precision import DTYPES, linear, policy
from harness.run_corpus import recorded_data
from harness.sentinel.device.gate import Gate
from harness.sentinel.device.mailbox import Mailbox
from harness.sentinel.device.signals import Layout, Signals, group_of
from harness.sentinel.device.step_report import DECIDED, HostFacts
from harness.sentinel.sentinel import Sentinel
from harness.telemetry.manifest import build_manifest
from harness.telemetry.meters import Meter, peak_flops


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything a step touches."""

    world: World
    model: Transformer
    update: Update
    scale: LossScale
    products: Products
    collectives: Collectives
    compute_clock: ComputeClock
    signals: Signals
    mailbox: Mailbox[HostFacts]
    batches: Batches
    held_out: Batches
    check: HeldOut
    """The fixed held-out rows that tell a damaged state from different data."""
    planned: Planned
    ledger: Ledger
    ring: Ring
    keeper: Keeper
    gate: Gate
    sentinel: Sentinel

    def close(self) -> None:
        self.keeper.close()
        self.ring.close()
        self.batches.close()
        self.held_out.close()

    def tensors(self) -> dict[str, Tensor]:
        """What a snapshot and a checkpoint hold, restored in place."""
        return state_tensors(self.update, self.scale, self.gate)


def state_tensors(update: Update, scale: LossScale, gate: Gate) -> dict[str, Tensor]:
    """Every tensor that a step changes, by the name it has on disk."""
    moments = {f"optimizer.{name}.{key}": t for name, state in update.state().items() for key, t in state.items()}
    counters = {
        "device.step": update.step,
        "device.lr_scale": update.lr_scale,
        "device.scale": scale.scale,
        "device.clean_steps": scale.clean_steps,
        "device.gate": gate.history,
    }
    return {f"model.{name}": parameter for name, parameter in update.parameters.items()} | moments | counters


def build(cfg: Config, world: World, run: RunDir) -> Parts:
    """Construct every part; weights depend on the seed and their names alone, whatever the number of ranks."""
    jointly(lambda: require_engine(cfg.precision, world.device))
    with torch.device("meta"):
        model = Transformer(
            cfg.model, sequence_length=cfg.train.sequence_length, linear=linear, own_kernels=cfg.parallel.compile
        )
        products = lower(model.blocks, cfg.precision)
    collectives = shard(model, model.blocks, world=world, cfg=settled(cfg), precision=policy(cfg.precision.kind))
    model.to_empty(device=world.device)
    initialize(model, cfg.model, seed=cfg.run.seed)

    entries = from_first(lambda: Ledger.load(run.ledger, writer=False).entries)
    ledger = Ledger.of(entries, path=run.ledger if world.is_first else None)
    batches, held_out = open_together(cfg, world, run, ledger)
    parameters = dict(model.named_parameters())
    layout = Layout(
        groups=tuple(dict.fromkeys(group_of(name) for name in parameters)),
        layers=tuple(f"blocks.{layer}" for layer in sampled_layers(cfg.model.num_layers)),
        sources=batches.source_names,
        num_ranks=world.size,
        has_fp8=cfg.precision.kind is PrecisionKind.fp8,
    )
    products.materialize(world.device, layout.groups)
    compiles_on_cuda = cfg.parallel.compile and world.device.type == "cuda"
    update = build_update(
        parameter_groups(model, cfg),
        cfg=cfg.optim,
        num_steps=cfg.train.num_steps,
        device=world.device,
        own_kernel=compiles_on_cuda,
    )
    scale = loss_scale(cfg.precision, world.device)
    gate = Gate(cfg.sentinel.detect, device=world.device, compiled=compiles_on_cuda)
    ring = Ring(state_tensors(update, scale, gate), cfg=cfg.checkpoint.ring, world=world)
    return Parts(
        world=world,
        model=model,
        update=update,
        scale=scale,
        products=products,
        collectives=collectives,
        compute_clock=ComputeClock(model.norm, device=world.device),
        signals=Signals(
            layout, parameters=parameters, world=world, collectives=collectives, own_kernels=compiles_on_cuda
        ),
        mailbox=Mailbox(size=layout.size + DECIDED, lag=cfg.sentinel.lag, device=world.device),
        batches=batches,
        held_out=held_out,
        check=open_held_out(cfg, held_out, world=world),
        planned=Planned(cfg, ledger),
        ledger=ledger,
        ring=ring,
        keeper=Keeper(cfg, run.checkpoints, ring=ring, world=world),
        gate=gate,
        sentinel=Sentinel.start(cfg.sentinel),
    )


def open_together(cfg: Config, world: World, run: RunDir, ledger: Ledger) -> tuple[Batches, Batches]:
    """This rank's data. All ranks read the files that rank 0 names; if one rank fails, all of them do."""
    known = Known(from_first(lambda: recorded_data(cfg, run)), run.rare_tokens)
    together(lambda: make_rare_index(cfg, known) if world.is_first else None, world.aside)
    return jointly(lambda: open_for(cfg, world, ledger, known))


def open_for(cfg: Config, world: World, ledger: Ledger, known: Known) -> tuple[Batches, Batches]:
    """This rank's data. The corpus is read once for its digest, so that a disk that fails does so here."""
    opened = open_data(cfg, rank=world.rank, world_size=world.size, device=world.device, ledger=ledger, known=known)
    opened[0].plan_digest()
    return opened


@contextmanager
def held(parts: Parts) -> Iterator[Parts]:
    """Close the parts after a run. After a crash the process ends at once: what a thread of theirs waits for may never
    come, and the death would not be told."""
    try:
        yield parts
    except ConfigError:
        parts.close()
        raise
    parts.close()


def settled(cfg: Config) -> ParallelConfig:
    """How the model is spread over this machine's devices, where that was left to their memory: alike on all ranks."""
    if cfg.parallel.reshard_after_forward is not None:
        return cfg.parallel
    size = DTYPES[cfg.precision.kind].itemsize
    reshard = reshards(cfg.model, weight_bytes=size, memory_bytes=minimum(device_memory_bytes()))
    return replace(cfg.parallel, reshard_after_forward=reshard)


def parameter_groups(model: Transformer, cfg: Config) -> list[Group]:
    """What the optimizer does with each parameter, read from the model's parameter table."""
    treatments = parameter_table(cfg.model, decay_embeddings=cfg.optim.decay_embeddings)
    groups = [
        Group(
            parameters={name: p for name, p in model.named_parameters() if role_of(name) is role},
            lr_multiplier=treatment.lr_multiplier,
            weight_decay=cfg.optim.weight_decay * treatment.decay_multiplier if treatment.decay else 0.0,
        )
        for role, treatment in treatments.items()
    ]
    return [group for group in groups if group.parameters]


def meter(cfg: Config, world: World) -> Meter:
    """Turns seconds into tokens/s, FLOP/s and MFU of all ranks together."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    peak = peak_flops(device, cfg.cluster.peak_tflops)
    batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
    return Meter(
        tokens_per_step=batch_tokens,
        flops_per_step=batch_tokens * flops_per_token(cfg.model, cfg.train.sequence_length),
        peak_flops=None if peak is None else peak * world.size,
        started_s=time.perf_counter(),
    )


def describe(cfg: Config, parts: Parts) -> dict[str, Any]:
    """The manifest of this start, with what going back would cost at its cadence of checkpoints."""
    return build_manifest(
        cfg,
        world_size=parts.world.size,
        device=parts.world.device,
        corpus_fingerprint=parts.batches.fingerprint(),
        num_parameters=num_parameters(cfg.model),
    ) | {"rollback": rollback_cost(cfg).as_dict()}
