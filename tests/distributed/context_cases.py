"""Functions that the tests of context parallelism run on every rank."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import harness.distributed.context
from harness.analysis.plan.traffic import SEQUENCES, collectives
from harness.analysis.replay.activation_probe import measure_activations, reduce_measurements
from harness.analysis.replay.samples import measure_samples
from harness.build import Parts
from harness.distributed.collectives import all_gather_stack, all_reduce_sum, reduce_scatter_stack
from harness.distributed.context import ContextSplit, gather_keys_and_values, join_chunks, join_context, part_chunks
from harness.distributed.context import split_of as split_of_world
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.world import ContextGroup, connect
from harness.step import differentiate, forward_backward, loss_sums, reduce_signals
from tests.distributed.cases import _build, full, tiny


def _named_sums(parts: Parts, reduced: Tensor) -> dict[str, list[float]]:
    """Sums of the signals; the attention logits as their mean over the ranks, as in a record."""
    names = ("scalars", "group_squares", "layer_squares", "source_losses", "source_tokens", "token_losses")
    sums = {name: parts.signals.layout.part(reduced, name).tolist() for name in names}
    logits = parts.signals.layout.part(reduced, "attention_logits") / parts.world.size
    return sums | {"attention_logits": logits.tolist()}


def one_step(*overrides: str) -> dict[str, Any]:
    """What one probed step computes, before its update: the full gradients, loss and gradient norm, the reduced sums,
    the loss of the first held-out batch, and the fingerprint limbs of each rank."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    batch = parts.batches[0]
    forward_backward(parts, batch, cfg=cfg, probe=True)
    gradients = {name: full(p.grad).cpu().clone() for name, p in parts.update.parameters.items() if p.grad is not None}
    signals = reduce_signals(parts, cfg=cfg, probe=False)
    held_out = all_reduce_sum(loss_sums(parts, parts.held_out[0], cfg=cfg))
    assert batch.facts is not None
    return {
        "gradients": gradients,
        "loss": float(signals.totals.loss),
        "grad_norm": float(signals.totals.grad_norm),
        "sums": _named_sums(parts, signals.reduced),
        "held_out": held_out.tolist(),
        "fingerprint": batch.facts.fingerprint,
    }


def exchanges_of_a_step(*overrides: str) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """Collectives of keys and values in a step, and those of the plan: (kind, bytes of the whole tensor) -> calls."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    found: Counter[tuple[str, int]] = Counter()

    def gather(local: Tensor, num_ranks: int, group: ContextGroup) -> Tensor:
        found["all_gather", local.nbytes * num_ranks] += 1
        return all_gather_stack(local, num_ranks, group)

    def scatter(stacked: Tensor, group: ContextGroup) -> Tensor:
        found["reduce_scatter", stacked.nbytes] += 1
        return reduce_scatter_stack(stacked, group)

    with (
        patch.object(harness.distributed.context, "all_gather_stack", gather),
        patch.object(harness.distributed.context, "reduce_scatter_stack", scatter),
    ):
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
    planned = Counter(
        {
            (each.kind.value, each.num_bytes): each.num_calls
            for each in collectives(cfg, world_size=parts.world.size)
            if each.of == SEQUENCES
        }
    )
    return found, planned


def row_losses(*overrides: str) -> tuple[Tensor, Tensor]:
    """Summed loss and number of targets of each row of this rank's first batch, summed over its context group."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    (rows,) = parts.batches[0].micro_batches(None)
    output = differentiate(parts, rows, seed=torch.ones(()), probe=False)
    sums = torch.stack([output.row_losses, output.row_tokens])
    if parts.world.context_group is not None:
        torch.distributed.all_reduce(sums, group=parts.world.context_group)
    return sums[0].clone(), sums[1].clone()


def gathered_and_differentiated(context: int) -> dict[str, Tensor]:
    """Keys and values that are split, gathered and differentiated; with the gradients of the whole tensors."""
    cfg = tiny(f"parallel.context={context}")
    world = connect(cfg.parallel)
    stats = CommStats(torch.zeros(()), measures_gradients=True)
    join_context(world, stats)
    stats.exchanges.start()
    split = split_of_world(world)
    assert isinstance(split, ContextSplit)
    key, value = torch.randn(2, 3, 16, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    weights = torch.randn(2, 3, 16, 2, 4, generator=torch.Generator().manual_seed(1 + world.rank))
    own_key, own_value = (split.take(each, 1).requires_grad_() for each in (key, value))
    gathered = gather_keys_and_values(own_key, own_value, split)
    torch.stack(gathered).mul(weights).sum().backward()  # type: ignore[no-untyped-call]
    total = weights.clone()
    torch.distributed.all_reduce(total, group=world.context_group)
    assert stats.waited_s > 0, "the collectives are timed"
    nonfinite = stats.exchanges.take_first_nonfinite()
    assert nonfinite is not None
    assert float(nonfinite) == 0
    by_rank = torch.arange(2 * context * 2).view(context, 1, 1, 4)
    assert torch.equal(part_chunks(join_chunks(by_rank), context), by_rank)
    assert own_key.grad is not None
    assert own_value.grad is not None
    return {
        "key": gathered[0].detach() - key,
        "value": gathered[1].detach() - value,
        "key_gradient": own_key.grad - split.take(total[0], 1),
        "value_gradient": own_value.grad - split.take(total[1], 1),
        "positions": split.positions(16, torch.device("cpu")),
    }


def replayed_samples(*overrides: str) -> tuple[list[tuple[int, float, float]], list[tuple[int, int, int, float]]]:
    """What a replay measures: row, loss and gradient norm of each sample; row, position, token and loss of the worst
    tokens."""
    cfg = tiny(*overrides)
    parts = _build(cfg)
    samples = [(sample.row, sample.loss, sample.grad_norm) for sample in measure_samples(parts, 0)]
    with measure_activations(parts.model) as sums:
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
    _, tokens = reduce_measurements(sums)
    return samples, [(found.row, found.position, found.token, found.loss) for found in tokens]
