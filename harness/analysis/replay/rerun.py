"""The replay itself, on all ranks: restore, take the way to the guilty step, and make that step again.

How: the parts are those of a run, built from its configuration and not compiled, so that every module can be watched.
The steps on the way are compared with the log one by one; what the log says of the guilty step is compared with two
replays of it from the same state, and a third is watched from inside. Then the guilty batch is set among its
neighbours, on this state and on an older one. Nothing of the run is changed: no event, no ledger entry, no checkpoint.
Left out: the fault of a drill that struck once; data that a drill spoiled is spoiled again, as bad data would be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from harness.analysis.replay.module_watch import Seen, watching
from harness.analysis.replay.samples import Sample, weigh
from harness.analysis.replay.verdict import Cause, Nature, Numbers, Standing, cause, is_same, nature
from harness.build import Parts, build, closing_parts
from harness.checkpoint import store
from harness.checkpoint.io_retry import IoRetry
from harness.config.errors import EXIT_DONE, ConfigError
from harness.config.schema import Config
from harness.core.events import StepRecord, encode
from harness.core.rundir import RunDir, write_atomically
from harness.core.state import RunState
from harness.distributed.collectives import all_reduce_sum, gather_results
from harness.distributed.shards import local
from harness.distributed.world import World, connected
from harness.precision.attention import fast_attention
from harness.precision.mixed_precision import emulate_half_matmul
from harness.recovery import set_rate
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.step import finish_step, forward_backward, loss_sums

NUM_NEIGHBOURS = 4
"""Batches before the guilty one that it is set among."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be replayed."""

    run: Path
    report: Path
    """Where the result goes."""
    checkpoint: str | None
    way: list[StepRecord]
    """From the checkpoint to the guilty step, that one included."""
    older: str | None
    """None: the weights the run began with."""
    exactly: bool
    """Whether the same bits can be expected."""
    with_samples: bool
    tamper: Callable[[Parts], None] | None = None
    """A drill's bad data."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of it; `harness.analysis.replay.wording` puts it into words."""

    iteration: int
    cursor: int
    checkpoint: str
    num_on_the_way: int
    left_the_log_at: int | None
    """The first iteration on the way whose numbers are not the log's; None: all are."""
    exactly: bool
    logged: Numbers
    first: Numbers
    second: Numbers
    seen: dict[int, Seen]
    """By rank, where something was not finite."""
    here: Standing
    before: Standing | None
    nature: Nature
    cause: Cause
    samples: list[Sample] = field(default_factory=list)


def run_worker(order: Order, cfg: Config) -> int:
    """One rank's part of a replay; rank 0 writes the result."""
    with (
        fast_attention(),
        connected(cfg.parallel) as world,
        closing_parts(build(cfg, world, RunDir(order.run))) as parts,
        emulate_half_matmul(cfg.precision.kind, world.device),
    ):
        if order.tamper is not None:
            order.tamper(parts)
        replayed = replay(order, parts, cfg, world)
        if world.is_first:
            write_atomically(order.report, json.dumps(encode(as_dict(replayed)), indent=1) + "\n")
    return EXIT_DONE


def as_dict(replayed: Replayed) -> dict[str, Any]:
    """Plain data; the ranks as texts, as JSON has them."""
    return asdict(replayed) | {"seen": {str(rank): asdict(seen) for rank, seen in replayed.seen.items()}}


def replay(order: Order, parts: Parts, cfg: Config, world: World) -> Replayed:
    root, tensors = order.run / "checkpoints", parts.tensors()
    begun = clone(tensors)
    restore(order.checkpoint, root, parts, world)
    *way, guilty = order.way
    left_at = None
    for record in way:
        again = Numbers.of(take(parts, cfg, record))
        if left_at is None and not is_same(again, Numbers.of(record), exactly=order.exactly):
            left_at = record.iteration
    reached = clone(tensors)
    first = Numbers.of(take(parts, cfg, guilty))
    put_back(tensors, reached)
    second = Numbers.of(take(parts, cfg, guilty))
    put_back(tensors, reached)
    seen = watch(parts, cfg, guilty)
    put_back(tensors, reached)
    samples = weigh(parts, guilty.cursor) if order.with_samples else []
    here = standing(parts, cfg, guilty.cursor, order.checkpoint)
    logged = Numbers.of(guilty)
    found = nature(logged, first, second, is_faithful=left_at is None, exactly=order.exactly)
    before = None
    if order.checkpoint is not None:
        put_back(tensors, begun)
        restore(order.older, root, parts, world)
        before = standing(parts, cfg, guilty.cursor, order.older)
    all_seen = dict(enumerate(gather_results(lambda: seen)))
    return Replayed(
        iteration=guilty.iteration,
        cursor=guilty.cursor,
        checkpoint=order.checkpoint or "the beginning",
        num_on_the_way=len(way),
        left_the_log_at=left_at,
        exactly=order.exactly,
        logged=logged,
        first=first,
        second=second,
        seen={rank: each for rank, each in all_seen.items() if not each.is_clean},
        here=here,
        before=before,
        nature=found,
        cause=cause(found, here, before),
        samples=samples,
    )


def restore(name: str | None, root: Path, parts: Parts, world: World) -> None:
    """The state of a checkpoint, with the learning rate that was scaled then; nothing to do for the beginning."""
    if name is None:
        return
    retry = IoRetry(parts.checkpoints.retry_s)
    found = store.load_first(root, [name], parts.tensors(), world=world, retry=retry, quarantines=False)
    if found.loaded is None:
        raise ConfigError("", f"{root / name} is damaged: {found.damage[0]}")
    state: RunState = found.loaded.state
    parts.sentinel.resume(state.sentinel, [])
    set_rate(parts, state)


def take(parts: Parts, cfg: Config, record: StepRecord) -> StepRecord:
    """A logged step once more, in the precision that it had; returns what it came to now."""
    parts.fp8_layers.use_fp8(record.in_fp8 is not False)
    forward_backward(parts, parts.batches[record.cursor], cfg=cfg, probe=False)
    report = finish_step(parts, cfg=cfg, probe=False)
    facts = HostFacts(
        iteration=record.iteration,
        cursor=record.cursor,
        tokens=record.tokens,
        probed=False,
        posted_s=0.0,
        memory_bytes=0,
        batch={},
        in_fp8=parts.fp8_layers.in_fp8,
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


def watch(parts: Parts, cfg: Config, record: StepRecord) -> Seen:
    """The same step with every module watched, which costs the last bits of its gradients."""
    with watching(parts.model) as seen:
        forward_backward(parts, parts.batches[record.cursor], cfg=cfg, probe=False)
    finish_step(parts, cfg=cfg, probe=False)
    return seen


def standing(parts: Parts, cfg: Config, cursor: int, checkpoint: str | None) -> Standing:
    """The loss of a batch on the present state, and of those before it."""
    others = [parts.batches[index] for index in range(max(0, cursor - NUM_NEIGHBOURS), cursor)]
    sums = [all_reduce_sum(loss_sums(parts, batch, cfg=cfg)).tolist() for batch in [parts.batches[cursor], *others]]
    losses = [loss_sum / tokens for loss_sum, tokens in sums]
    return Standing(checkpoint=checkpoint or "the beginning", loss=losses[0], neighbours=losses[1:])


def clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of every tensor, in host memory."""
    return {name: local(tensor).detach().cpu().clone() for name, tensor in tensors.items()}


def put_back(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            local(tensor).copy_(saved[name])


def uncompiled(cfg: Config) -> Config:
    """The configuration of a replay: every module runs by itself, and no memory is taken for snapshots."""
    ring = replace(cfg.checkpoint.ring, slots=0)
    return replace(
        cfg, parallel=replace(cfg.parallel, compile=False), checkpoint=replace(cfg.checkpoint, ring=ring, every_steps=0)
    )
