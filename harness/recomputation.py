"""Computes a micro-batch twice on some steps and compares the bits, to find ranks that compute wrong numbers silently.

Why: NaN is a small share of what faulty hardware produces. A wrong low bit raises no curve, and an update spreads it to
all ranks.
How: on a step in `sentinel.sdc.every`, all ranks compute the first micro-batch of the step once more, before the step
itself, and drop the result. They must do so together, because the passes contain FSDP2's collectives; while one rank
recomputes, the others would wait anyway. Every second time a rank repeats its own rows: a difference is an error of
this rank. In between it computes the rows of another rank, at a distance that rotates: a rank that makes the same error
every time agrees with itself, but not with others. Digests of all outputs and gradients before the reduction
(`harness.distributed.bit_digests`) are compared on the device. The first stage that differs travels in this rank's slot
of the step's all-reduce, so the gate rejects the update before it is applied. After a difference the next steps repeat
the check: transient, or lasting (`harness.sentinel.detect.corruption`).
The schedule is a function of the iteration and of the detectors, which are equal on all ranks.
Left out: the reduction and the update themselves. Digests of the weights in every step cover part of them.
With full activation checkpointing the recomputed forward pass is not compared: in a compiled block it is part of the
compiled backward graph, and elsewhere torch stops it before the block's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.build import Parts
from harness.config.schema import Config
from harness.data.batch import Batch
from harness.distributed.bit_digests import BitDigests, Computation
from harness.distributed.collectives import receive_from_distance
from harness.distributed.shards import local
from harness.distributed.world import World


def check_interval(cfg: Config, world: World) -> int:
    """Steps between two checks; 0: never. A GPU gives the same bits twice only with `run.deterministic`."""
    return cfg.sentinel.sdc.every if cfg.run.deterministic or world.device.type == "cpu" else 0


def explain_check_off(cfg: Config, world: World) -> str:
    """One line if the config asks for checks that this run cannot make; empty otherwise."""
    if cfg.sentinel.sdc.every and not check_interval(cfg, world):
        return "sentinel.sdc: off, because on a GPU two computations may differ without run.deterministic=true"
    return ""


def choose_recomputation(parts: Parts, *, iteration: int, cfg: Config) -> int | None:
    """Choose whose rows the coming step computes again; None: no recomputation. Equal on all ranks.

    With delayed fp8 scaling every rank has scales of its own, so ranks cannot be compared with each other. A context
    group computes the rows of another group, so distances are multiples of its size.
    """
    across_ranks = cfg.sentinel.sdc.across_ranks and not (parts.fp8_layers.is_delayed and parts.fp8_layers.layers)
    distance = choose_distance(
        iteration,
        every=check_interval(cfg, parts.world),
        is_repeating=parts.sentinel.repeats_check,
        num_ranks=parts.world.num_data_ranks if across_ranks else 1,
    )
    return None if distance is None else distance * parts.world.context


def choose_distance(iteration: int, *, every: int, is_repeating: bool, num_ranks: int) -> int | None:
    """Whose rows a rank computes again: 0 its own, k those of the rank k places on; None: no check in this step.

    Scheduled checks alternate between own and other rows, and so do the checks of consecutive steps after a difference.
    """
    if not every or not (is_repeating or iteration % every == every - 1):
        return None
    number = iteration if is_repeating else iteration // every
    if num_ranks == 1 or number % 2 == 0:
        return 0
    return 1 + number // 2 % (num_ranks - 1)


def fetch_rows(rows: Batch, distance: int) -> Batch:
    """The first micro-batch of the rank `distance` places on. Collective unless it is this rank's own."""
    if not distance:
        return rows
    inputs, targets = (receive_from_distance(each, distance) for each in (rows.inputs, rows.targets))
    documents = rows.documents
    if documents is not None:
        documents = receive_from_distance(documents, distance)
    return rows._replace(inputs=inputs, targets=targets, documents=documents, is_own=None)


@contextmanager
def discarding(parts: Parts) -> Iterator[None]:
    """Undo what a forward and backward pass changes: gradients, their norms, the meters of fp8 and the clock."""
    meters = parts.fp8_layers.table.clone()
    yield
    parts.update.clear_gradients()
    parts.comm_stats.take_square_sum()
    parts.compute_clock.discard_step()
    parts.fp8_layers.table.copy_(meters)


def add_stored_gradients(parts: Parts, digests: BitDigests) -> None:
    """Digest the gradients where nothing is reduced: with world_size 1 the stored gradients are this rank's own."""
    if parts.comm_stats.measures_gradients:
        return
    blocks = [list(block.parameters()) for block in parts.model.blocks]
    inside = {parameter for block in blocks for parameter in block}
    others = [parameter for parameter in parts.model.parameters() if parameter not in inside]
    for number, parameters in enumerate([*blocks, others]):
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        digests.add_gradient(number, *gradients)


@torch.no_grad()
def compare_computations(digests: BitDigests, distance: int) -> Tensor:
    """1 + the first stage at which the two computations of the same rows differ; 0 if they are equal. Collective unless
    both are this rank's."""
    of_step = digests.tables[Computation.step]
    if distance:
        of_step = receive_from_distance(of_step, distance)
    return digests.first_difference(of_step)
