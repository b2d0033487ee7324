"""Runs a replay on all ranks: restore a checkpoint, repeat the steps up to the guilty one, and repeat that one.

How: model, optimizer and data are built from the run's configuration, not compiled, so that modules can be hooked. A
deterministic run (`run.deterministic`) is replayed compiled if it was, for the same bits, up to the first hook. Each
step before the guilty one is compared with the log. The guilty step is computed twice from the same state and compared
with the log, the second time as a probed step, and a third time with every operation watched. Then the loss of the
guilty batch is compared with that of the batches before it, on this state and on an older one. On request the step is
computed once more in fp32. The run is not changed: no event, ledger entry or checkpoint is written.
Left out: faults of a drill that struck once. Data that a drill corrupted is corrupted again, as bad data would be.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from harness.analysis.replay.activation_probe import measure_activations, reduce_measurements
from harness.analysis.replay.history import AcceptedLevel
from harness.analysis.replay.measured_step import MeasuredStep, probed_fields
from harness.analysis.replay.module_watch import NonFiniteModules, watch_modules
from harness.analysis.replay.request import ReplayRequest
from harness.analysis.replay.samples import SampleGradient, measure_samples
from harness.analysis.replay.verdict import (
    BatchComparison,
    Origin,
    Reproducibility,
    StepNumbers,
    classify,
    describe_precision,
    find_origin,
    is_same,
    stands_out,
)
from harness.build import Parts, build, closing_parts
from harness.checkpoint import store
from harness.checkpoint.io_retry import IoRetry
from harness.config.errors import EXIT_DONE, ConfigError
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.event_json import encode
from harness.core.events import StepRecord
from harness.core.rundir import RunDir, write_atomically
from harness.distributed.collectives import all_reduce_sum, gather_results
from harness.distributed.compile_cache import compile_cache, compiles
from harness.distributed.determinism import deterministic_algorithms
from harness.distributed.fsdp import run_eagerly
from harness.distributed.shards import local
from harness.distributed.world import World, connected
from harness.precision.attention import fast_attention
from harness.precision.mixed_precision import emulate_half_matmul
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.step import finish_step, forward_backward, loss_sums

NUM_NEIGHBOURS = 4
"""Batches before the guilty one that its loss is compared with."""
FORMAT_STATE = ("device.scale", "device.clean_steps")
"""State of the loss scale, which fp32 does not have."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of a replay, written to `replay.json`; `harness.analysis.replay.replay_text` renders it as text."""

    iteration: int
    cursor: int
    checkpoint: str
    num_on_the_way: int
    left_the_log_at: int | None
    """The first iteration before the guilty step that differs from the log; None: none does."""
    exactly: bool
    logged: StepNumbers
    first: StepNumbers
    second: StepNumbers
    seen: dict[int, NonFiniteModules]
    """Rank -> its modules with non-finite values; only ranks that have any."""
    here: BatchComparison
    before: BatchComparison | None
    nature: Reproducibility
    cause: Origin
    samples: list[SampleGradient] = field(default_factory=list)
    measured: MeasuredStep = field(default_factory=MeasuredStep)
    in_fp32: StepNumbers | None = None
    """The guilty step computed in fp32; None: not requested."""
    precision_verdict: str = ""
    """Whether the number format caused it; empty: the step was not computed in fp32."""


def run_replay_worker(request: ReplayRequest, cfg: Config) -> int:
    """One rank's part of a replay; rank 0 writes the result."""
    with (
        deterministic_algorithms(enabled=cfg.run.deterministic),
        fast_attention(),
        connected(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu) as world,
        compile_cache(request.run.parent, enabled=compiles(cfg.parallel, world.device)),
        closing_parts(build(cfg, world, RunDir(request.run))) as parts,
        emulate_half_matmul(cfg.precision.kind, world.device),
    ):
        if request.tamper is not None:
            request.tamper(parts)
        result = replay_steps(request, parts, cfg, world)
        if world.is_first:
            write_atomically(request.report, json.dumps(encode(result_as_dict(result)), indent=1) + "\n")
    return EXIT_DONE


def result_as_dict(result: ReplayResult) -> dict[str, Any]:
    """The result as JSON-ready data; ranks are strings."""
    return asdict(result) | {"seen": {str(rank): asdict(seen) for rank, seen in result.seen.items()}}


def replay_steps(request: ReplayRequest, parts: Parts, cfg: Config, world: World) -> ReplayResult:
    """Replay the steps of a request on this rank."""
    root, tensors = request.run / "checkpoints", parts.tensors()
    initial = clone(tensors)
    restore(request.checkpoint, root, parts, world)
    *earlier, guilty = request.steps
    accepted = deque(request.accepted)
    left_at = None
    for record in earlier:
        follow_policy(request, parts, cfg, accepted, before=record.iteration)
        again = StepNumbers.of(replay_step(parts, cfg, record))
        if left_at is None and not is_same(again, StepNumbers.of(record), exactly=request.exactly):
            left_at = record.iteration
    follow_policy(request, parts, cfg, accepted, before=guilty.iteration)
    reached = clone(tensors)
    first = StepNumbers.of(replay_step(parts, cfg, guilty))
    copy_back(tensors, reached)
    if cfg.parallel.compile:
        second = StepNumbers.of(replay_step(parts, cfg, guilty, probe=True))
        copy_back(tensors, reached)
        run_eagerly(parts.model.blocks, cfg.parallel)
        _, measured = measure_guilty_step(parts, cfg, guilty)
    else:
        probed, measured = measure_guilty_step(parts, cfg, guilty)
        second = StepNumbers.of(probed)
    copy_back(tensors, reached)
    seen = watch_guilty_step(parts, cfg, guilty, first, reached)
    copy_back(tensors, reached)
    samples = measure_samples(parts, guilty.cursor) if request.with_samples else []
    here = compare_batch(parts, cfg, guilty.cursor, request.checkpoint)
    in_fp32 = replay_in_fp32(request, cfg, world, guilty, reached) if request.in_fp32 else None
    logged = StepNumbers.of(guilty)
    found = classify(logged, first, second, is_faithful=left_at is None, exactly=request.exactly)
    before = None
    if request.checkpoint is not None and request.has_older:
        copy_back(tensors, initial)
        restore(request.older, root, parts, world)
        before = compare_batch(parts, cfg, guilty.cursor, request.older)
    return ReplayResult(
        iteration=guilty.iteration,
        cursor=guilty.cursor,
        checkpoint=request.checkpoint or "the beginning",
        num_on_the_way=len(earlier),
        left_the_log_at=left_at,
        exactly=request.exactly,
        logged=logged,
        first=first,
        second=second,
        seen=seen,
        here=here,
        before=before,
        nature=found,
        cause=find_origin(found, here, before, is_ordinary=not stands_out(guilty, request.earlier)),
        samples=samples,
        measured=measured,
        in_fp32=in_fp32,
        precision_verdict=describe_precision(cfg.precision.kind, logged, first, in_fp32),
    )


def restore(name: str | None, root: Path, parts: Parts, world: World) -> None:
    """Restore the tensors of a checkpoint; does nothing for the initial state."""
    if name is None:
        return
    retry = IoRetry(parts.checkpoints.retry_s)
    found = store.load_first(root, [name], parts.tensors(), world=world, retry=retry, quarantines=False)
    if found.loaded is None:
        raise ConfigError("", f"{root / name} is damaged: {found.damage[0]}")
    parts.loss_scale.adapt()


def follow_policy(
    request: ReplayRequest, parts: Parts, cfg: Config, accepted: deque[AcceptedLevel], *, before: int
) -> None:
    """What the policy did before an iteration and the log of the steps does not say: re-anchor the gate at the levels
    that were accepted, which are taken off the list, and clip attention logits."""
    while accepted and accepted[0].after < before:
        level = accepted.popleft()
        parts.gate.reopen(loss=level.loss, grad_norm=level.grad_norm)
    if request.logits_clipped_after is not None and request.logits_clipped_after < before:
        parts.qk_clip.limit_logits(cfg.sentinel.detect.logit_bound)


def replay_step(parts: Parts, cfg: Config, record: StepRecord, *, probe: bool = False) -> StepRecord:
    """Compute a logged step again, in the precision, with the bounds of the gate and with the learning rate that it
    had; returns its new record."""
    parts.update.fixed_lr = torch.tensor(record.lr, dtype=torch.float32, device=parts.world.device)
    parts.fp8_layers.use_fp8(record.in_fp8 is not False)
    forward_backward(parts, parts.batches[record.cursor], cfg=cfg, probe=probe)
    report = finish_step(parts, cfg=cfg, probe=probe, planned=record.in_planned_change)
    facts = HostFacts(
        iteration=record.iteration,
        cursor=record.cursor,
        tokens=record.tokens,
        probed=probe,
        posted_s=0.0,
        memory_bytes=0,
        batch={},
        in_fp8=parts.fp8_layers.in_fp8,
        in_planned_change=record.in_planned_change,
    )
    return unpack_report(
        parts.signals.layout,
        facts,
        report.cpu(),
        dim=cfg.model.dim,
        dynamic_scale=parts.loss_scale.growth_interval is not None,
        clip_norm=cfg.optim.clip_norm,
        replicate=parts.world.replicate,
    )


def measure_guilty_step(parts: Parts, cfg: Config, record: StepRecord) -> tuple[StepRecord, MeasuredStep]:
    """Compute a logged step again as a probed one; returns its new record and what a run does not measure."""
    with measure_activations(parts.model) as sums:
        probed = replay_step(parts, cfg, record, probe=True)
    activations, worst_tokens = reduce_measurements(sums)
    fields = probed_fields(probed, activations)
    return probed, MeasuredStep(activations=activations, worst_tokens=worst_tokens, probed=fields)


def watch_guilty_step(
    parts: Parts, cfg: Config, record: StepRecord, replayed: StepNumbers, reached: dict[str, Tensor]
) -> dict[int, NonFiniteModules]:
    """Non-finite operations of the guilty step, by rank; ranks without any are left out.

    A fused kernel may overflow where the reference path does not. If the replayed step was not finite and no rank found
    anything, the step is watched again with the fused kernels. All ranks decide that from the same numbers.
    """
    seen = watch_step(parts, cfg, record, on_reference_path=True)
    if not seen and not replayed.is_finite:
        copy_back(parts.tensors(), reached)
        seen = watch_step(parts, cfg, record, on_reference_path=False)
    return seen


def watch_step(
    parts: Parts, cfg: Config, record: StepRecord, *, on_reference_path: bool
) -> dict[int, NonFiniteModules]:
    """Compute a logged step with every operation watched; the last bits of its values may differ."""
    parts.fp8_layers.use_fp8(record.in_fp8 is not False)
    with watch_modules(parts.model, on_reference_path=on_reference_path) as own:
        forward_backward(parts, parts.batches[record.cursor], cfg=cfg, probe=False)
    finish_step(parts, cfg=cfg, probe=False, planned=record.in_planned_change)
    by_rank = enumerate(gather_results(lambda: own))
    return {rank: of_rank for rank, of_rank in by_rank if not of_rank.is_clean}


def replay_in_fp32(
    request: ReplayRequest, cfg: Config, world: World, record: StepRecord, reached: dict[str, Tensor]
) -> StepNumbers:
    """Compute the guilty step in fp32, from the same state and on the same batch.

    The weights and moments of the state are fp32 in every precision. Loss scale and fp8 scales belong to the format and
    are left out.
    """
    in_fp32 = config_in_fp32(cfg)
    with closing_parts(build(in_fp32, world, RunDir(request.run))) as parts:
        if request.tamper is not None:
            request.tamper(parts)
        tensors = parts.tensors()
        names = [name for name in tensors if name in reached and name not in FORMAT_STATE]
        copy_back({name: tensors[name] for name in names}, reached)
        return StepNumbers.of(replay_step(parts, in_fp32, record))


def config_in_fp32(cfg: Config) -> Config:
    """The same run in fp32 throughout, not compiled."""
    precision = replace(cfg.precision, kind=PrecisionKind.fp32, phases=[])
    return replace(cfg, precision=precision, parallel=replace(cfg.parallel, compile=False))


def compare_batch(parts: Parts, cfg: Config, cursor: int, checkpoint: str | None) -> BatchComparison:
    """Loss of a batch, and of the batches before it, on the current state."""
    others = [parts.batches[index] for index in range(max(0, cursor - NUM_NEIGHBOURS), cursor)]
    sums = [all_reduce_sum(loss_sums(parts, batch, cfg=cfg)).tolist() for batch in [parts.batches[cursor], *others]]
    losses = [loss_sum / tokens for loss_sum, tokens in sums]
    return BatchComparison(checkpoint=checkpoint or "the beginning", loss=losses[0], neighbours=losses[1:])


def clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shard of every tensor, copied to host memory."""
    return {name: local(tensor).detach().cpu().clone() for name, tensor in tensors.items()}


def copy_back(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy shards saved by `clone` back into the tensors."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            local(tensor).copy_(saved[name])


def replay_config(cfg: Config) -> Config:
    """The run's configuration for a replay: without snapshots and checkpoints, compiled only if the same bits are
    promised."""
    ring = replace(cfg.checkpoint.ring, slots=0)
    is_compiled = cfg.parallel.compile and cfg.run.deterministic
    return replace(
        cfg,
        parallel=replace(cfg.parallel, compile=is_compiled),
        checkpoint=replace(cfg.checkpoint, ring=ring, every_steps=0),
    )
