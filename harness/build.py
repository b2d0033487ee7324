"""The composition root: constructs every part of a run from the config.

Parts are plain objects. An enum and a `match` decide which class is used; there is no registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.io_retry import StopCheck
from harness.checkpoint.manager import CheckpointManager
from harness.checkpoint.ring import Ring
from harness.checkpoint.ring_cost import rollback_cost
from harness.checkpoint.shared_snapshots import open_shared
from harness.config.errors import ConfigError
from harness.config.parallel import ParallelConfig
from harness.config.precision import PrecisionKind
from harness.config.schema import Config, sharing
from harness.config.sentinel import AllowedActions
from harness.core.rundir import RunDir, config_digest
from harness.data.batches import Batches
from harness.data.corpus.corpus_record import DataRecord
from harness.data.corpus.remote_cache import stopping_by
from harness.data.order.ledger import Ledger
from harness.data.sources import RecordedData, describe_eod_token, make_rare_index, open_data
from harness.distributed.activation_offload import ActivationOffload
from harness.distributed.collectives import all_reduce_min, gather_results, run_on_all_ranks, run_on_rank_zero
from harness.distributed.compute_clock import ComputeClock
from harness.distributed.context import join_context, split_of
from harness.distributed.determinism import DeterministicSettings
from harness.distributed.fsdp import gather_before_forward, shard
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.world import World, device_memory_bytes, may_wait_for_this_rank
from harness.held_out import HeldOut, open_held_out
from harness.model.attention_layer import attention_backend, check_chunks, find_te_obstacle
from harness.model.init import initialize
from harness.model.mup import parameter_table, role_of
from harness.model.size import flops_per_token, needs_resharding, num_parameters
from harness.model.transformer import Transformer, sampled_layers
from harness.optim.qk_clip import QkClip
from harness.optim.update import Group, Update, build_update
from harness.planned_changes import PlannedChanges
from harness.precision.fp8.engine import require_engine
from harness.precision.fp8.layers import Fp8Layers, convert_to_fp8
from harness.precision.loss_scale import LossScale, build_loss_scale
from harness.precision.mixed_precision import DTYPES, fp32_matmul_mode, fsdp_policy, linear
from harness.run_corpus import recorded_data
from harness.sentinel.device.gate import Gate
from harness.sentinel.device.mailbox import Mailbox
from harness.sentinel.device.signals import SignalLayout, Signals, group_of
from harness.sentinel.device.step_report import DECIDED, HostFacts
from harness.sentinel.sentinel import Sentinel
from harness.telemetry.manifest import build_manifest
from harness.telemetry.meters import Meter, peak_flops


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything that a step uses."""

    world: World
    model: Transformer
    update: Update
    qk_clip: QkClip
    loss_scale: LossScale
    fp8_layers: Fp8Layers
    emulation: AbstractContextManager[Any]
    """Around each forward pass: computes half-precision matmuls in fp32 on a CPU that lacks them."""
    comm_stats: CommStats
    compute_clock: ComputeClock
    signals: Signals
    mailbox: Mailbox[HostFacts]
    batches: Batches
    held_out: Batches
    check: HeldOut
    """Fixed held-out rows; their loss tells a damaged state from different data."""
    planned: PlannedChanges
    ledger: Ledger
    ring: Ring
    checkpoints: CheckpointManager
    gate: Gate
    sentinel: Sentinel

    def close(self) -> None:
        self.checkpoints.close()
        self.ring.close()
        self.batches.close()
        self.held_out.close()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a snapshot or checkpoint. They are restored in place."""
        return state_tensors(self.update, self.loss_scale, self.gate)


def state_tensors(update: Update, loss_scale: LossScale, gate: Gate) -> dict[str, Tensor]:
    """Every tensor that a step changes, under its name on disk."""
    moments = {f"optimizer.{name}.{key}": t for name, state in update.state().items() for key, t in state.items()}
    counters = {
        "device.step": update.step,
        "device.lr_scale": update.lr_scale,
        "device.scale": loss_scale.value,
        "device.clean_steps": loss_scale.clean_steps,
        "device.gate": gate.history,
    }
    return {f"model.{name}": parameter for name, parameter in update.parameters.items()} | moments | counters


def build(
    cfg: Config,
    world: World,
    run: RunDir,
    *,
    record: DataRecord | None = None,
    shares_snapshots: bool = False,
    is_stopping: StopCheck = lambda: False,
) -> Parts:
    """Construct every part. Initial weights depend on the seed and the parameter name only, not on the world size.

    record: the data that this start reads, the same on all ranks; None: the data that the run has recorded.
    shares_snapshots: keep snapshots where a later start finds them. Only a training run does.
    is_stopping: whether this rank was asked to stop; a wait for storage then ends on all ranks.
    """
    run_on_all_ranks(lambda: require_engine(cfg.precision, world.device))
    model, fp8_layers = build_model(cfg, world)
    parallel = resolve_resharding(cfg)
    comm_stats = shard(model, model.blocks, world=world, cfg=parallel, precision=fsdp_policy(cfg.precision.kind))
    if comm_stats.is_sharded and world.device.type == "cpu" and not parallel.reshard_after_forward:
        gather_before_forward(model)
    join_context(world, comm_stats)
    if parallel.activation_offload:
        model.offload = ActivationOffload(len(model.blocks), world.device)
    model.to_empty(device=world.device)
    initialize(model, cfg.model, seed=cfg.run.seed)

    entries = run_on_rank_zero(lambda: Ledger.load(run.ledger, writer=False).entries)
    ledger = Ledger.of(entries, path=run.ledger if world.is_first else None)
    with stopping_by(is_stopping):
        batches, held_out = open_data_on_all_ranks(cfg, world, run, ledger, record)
    parameters = dict(model.named_parameters())
    layout = signal_layout(cfg, world, parameters, sources=batches.source_names)
    fp8_layers.materialize(world.device, layout.groups)
    compiles_on_cuda = cfg.parallel.compile and world.device.type == "cuda"
    update = build_update(
        parameter_groups(model, cfg),
        cfg=cfg.optim,
        num_steps=cfg.train.num_steps,
        device=world.device,
        replicate=world.replicate,
        own_kernel=compiles_on_cuda,
        world=world,
        comm_stats=comm_stats,
    )
    update.seed_noise(cfg.run.seed)
    loss_scale = build_loss_scale(cfg.precision, world.device)
    gate = Gate(
        cfg.sentinel.detect,
        device=world.device,
        compiled=compiles_on_cuda,
        rejects_corruption=cfg.sentinel.policy.actions is AllowedActions.all,
    )
    ring_cfg = cfg.checkpoint.ring
    shared = open_shared(ring_cfg, run.path, world=world, config=config_digest(cfg)) if shares_snapshots else None
    ring = Ring(state_tensors(update, loss_scale, gate), cfg=ring_cfg, world=world, shared=shared)
    return Parts(
        world=world,
        model=model,
        update=update,
        qk_clip=build_qk_clip(cfg, update, device=world.device, comm_stats=comm_stats),
        loss_scale=loss_scale,
        fp8_layers=fp8_layers,
        emulation=fp32_matmul_mode(DTYPES[cfg.precision.kind], world.device) or nullcontext(),
        comm_stats=comm_stats,
        compute_clock=ComputeClock(model.norm, device=world.device),
        signals=Signals(
            layout, parameters=parameters, world=world, comm_stats=comm_stats, own_kernels=compiles_on_cuda
        ),
        mailbox=Mailbox(size=layout.size + DECIDED, lag=cfg.sentinel.lag, device=world.device),
        batches=batches,
        held_out=held_out,
        check=open_held_out(cfg, held_out, world=world),
        planned=PlannedChanges(cfg, ledger, batches.later_stretches),
        ledger=ledger,
        ring=ring,
        checkpoints=CheckpointManager(cfg, run.checkpoints, ring=ring, world=world, is_stopping=is_stopping),
        gate=gate,
        sentinel=Sentinel.start(cfg.sentinel),
    )


def signal_layout(
    cfg: Config, world: World, parameters: Mapping[str, Tensor], *, sources: tuple[str, ...]
) -> SignalLayout:
    """What the all-reduce of a step contains."""
    return SignalLayout(
        groups=tuple(dict.fromkeys(map(group_of, parameters))),
        layers=tuple(f"blocks.{layer}" for layer in sampled_layers(cfg.model.num_layers)),
        sources=sources,
        num_ranks=world.size,
        context=world.context,
        has_fp8=cfg.precision.kind is PrecisionKind.fp8,
    )


def build_model(cfg: Config, world: World) -> tuple[Transformer, Fp8Layers]:
    """The model and its fp8 layers, without memory for their tensors."""
    check_chunks(cfg, world.device)
    te_obstacle = find_te_obstacle(cfg.model) if world.context > 1 else ""
    with torch.device("meta"):
        model = Transformer(
            cfg.model,
            sequence_length=cfg.train.sequence_length,
            linear=linear,
            own_kernels=cfg.parallel.compile,
            deterministic=cfg.run.deterministic,
            context=split_of(world, te_obstacle=te_obstacle),
        )
        fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    return model, fp8_layers


def build_qk_clip(cfg: Config, update: Update, *, device: torch.device, comm_stats: CommStats) -> QkClip:
    """Compiled blocks measure attention logits in every step, so that they have one graph."""
    return QkClip(
        update.parameters,
        cfg=cfg.model,
        threshold=cfg.optim.qk_clip,
        digest=update.digest,
        device=device,
        comm_stats=comm_stats,
        measure_always=cfg.parallel.compile,
    )


def open_data_on_all_ranks(
    cfg: Config, world: World, run: RunDir, ledger: Ledger, record: DataRecord | None
) -> tuple[Batches, Batches]:
    """Open this rank's training and held-out data. All ranks read the files that rank 0 lists; if one fails, all do."""
    record = record or run_on_rank_zero(lambda: recorded_data(cfg, run))
    recorded = RecordedData(record, run.rare_tokens)
    gather_results(lambda: make_rare_index(cfg, recorded) if world.is_first else None, world.background_group)
    opened = run_on_all_ranks(lambda: open_rank_data(cfg, world, ledger, recorded))
    if world.is_first and (report := opened[0].stratify_report()) is not None:
        print(f"data.stratify: {report.in_words()}", flush=True)
    if world.is_first and (line := describe_eod_token(cfg, opened[0].sources)):
        print(f"data.eod_token: {line}", flush=True)
    return opened


def open_rank_data(cfg: Config, world: World, ledger: Ledger, recorded: RecordedData) -> tuple[Batches, Batches]:
    """Open this rank's data. The plan digest reads the corpus once, so an I/O error appears here."""
    opened = open_data(
        cfg,
        rank=world.data_rank,
        world_size=world.num_data_ranks,
        device=world.device,
        ledger=ledger,
        recorded=recorded,
    )
    opened[0].plan_digest()
    return opened


@contextmanager
def closing_parts(parts: Parts) -> Iterator[Parts]:
    """Close the parts after a run, but not after a crash or an error of one rank: a thread may wait for ranks that
    never answer, and the error would not be reported."""
    try:
        yield parts
    except ConfigError as error:
        if not may_wait_for_this_rank(error, parts.world):
            parts.close()
        raise
    parts.close()


def resolve_resharding(cfg: Config) -> ParallelConfig:
    """Choose `reshard_after_forward` by the device memory if the config leaves it open; the same on all ranks."""
    if cfg.parallel.reshard_after_forward is not None:
        return cfg.parallel
    size = DTYPES[cfg.precision.kind].itemsize
    own_bytes = device_memory_bytes(ranks_per_gpu=cfg.launch.ranks_per_gpu)
    reshard = needs_resharding(cfg.model, weight_bytes=size, memory_bytes=all_reduce_min(own_bytes))
    return replace(cfg.parallel, reshard_after_forward=reshard)


def parameter_groups(model: Transformer, cfg: Config) -> list[Group]:
    """Group the parameters by optimizer, learning rate and weight decay, from the model's parameter table."""
    treatments = parameter_table(
        cfg.model, decay_embeddings=cfg.optim.decay_embeddings, matrix_optimizer=cfg.optim.kind
    )
    groups = [
        Group(
            parameters={name: p for name, p in model.named_parameters() if role_of(name) is role},
            lr_multiplier=treatment.lr_multiplier,
            weight_decay=cfg.optim.weight_decay * treatment.decay_multiplier if treatment.decay else 0.0,
            optimizer=treatment.optimizer,
        )
        for role, treatment in treatments.items()
    ]
    return [group for group in groups if group.parameters]


def build_meter(cfg: Config, world: World) -> Meter:
    """Build the meter of tokens/s, FLOP/s and MFU of all ranks gather_results."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    peak = peak_flops(device, cfg.cluster.peak_tflops)
    batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
    return Meter(
        tokens_per_step=batch_tokens,
        flops_per_step=batch_tokens * flops_per_token(cfg.model, cfg.train.sequence_length),
        peak_flops=None if peak is None else peak * world.size,
        started_s=time.perf_counter(),
    )


def run_manifest(cfg: Config, parts: Parts, settings: DeterministicSettings) -> dict[str, Any]:
    """Build the manifest of this start, with the attention kernel and the cost of a rollback."""
    num_rows = sharing(cfg, parts.world.size).micro_batch_slots
    attention = attention_backend(cfg, parts.world.device, num_rows=num_rows, deterministic=parts.model.deterministic)
    return build_manifest(
        cfg,
        world_size=parts.world.size,
        device=parts.world.device,
        corpus_fingerprint=parts.batches.fingerprint(),
        num_parameters=num_parameters(cfg.model),
    ) | {"attention": attention, "deterministic": settings.as_dict(), "rollback": rollback_cost(cfg).as_dict()}
