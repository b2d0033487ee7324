"""Checks at the start of a deterministic run that forward and backward give the same bits twice.

Why: `run.deterministic` promises bit-identical results. A kernel, a library or a GPU that breaks the promise must be
found before the first step, not in a control run weeks later.
How: the first batch is computed twice on the same weights, as a probed step without its update. All ranks do so,
because the passes contain collectives. Losses, norms and meters are compared bit by bit, gradients by integer digests,
which need no second copy of them. The differences of all ranks are summed, so every rank decides alike. The second
pass starts from the fp8 scales of the first, as a step of a running model does and the first step after a resume does
not: results must not depend on them. Afterwards gradients, signals, meters, clocks and random state are as before.
Left out: the update, which the digests of the weights in the log cover; differences that occur rarely.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.build import Parts
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.state import RunState
from harness.data.batch import Batch
from harness.distributed.bit_digests import digest_bits
from harness.distributed.collectives import all_reduce_sum, gather_results
from harness.distributed.shards import local
from harness.sentinel.device.signals import SCALARS, SignalLayout
from harness.step import forward_backward, use_planned_precision

FORWARD_PARTS = ("layer_squares", "scalars", "source_losses", "token_losses")
"""Parts of the signals that the forward pass gives, the earliest first."""
MAX_RANKS = 8
"""Ranks that an error names, at most."""


def check_determinism(parts: Parts, state: RunState, *, cfg: Config) -> str:
    """Compute the next batch twice and compare the bits; returns a line about it. Collective: all ranks must call.

    Raises the same ConfigError on all ranks if anything differs on any rank.
    """
    place = parts.ledger.next_batch(state.cursor, state.given_back)
    batch = parts.batches[place.batch]
    with unchanged_state(parts):
        use_planned_precision(parts, place.position, cfg=cfg)
        first, second = (compute_digests(parts, batch, cfg=cfg) for _ in range(2))
    differs = first != second
    num_ranks = all_reduce_sum(differs.to(torch.float32)).tolist()  # sync: before the first step
    names = name_digests(parts.signals.layout, [name for name, _ in parts.model.named_parameters()])
    found = [number for number, count in enumerate(num_ranks) if count]
    if not found:
        return "the first batch, computed twice, gave the same bits"
    earliest = min(found, key=lambda number: names[number])
    own = bool(differs[earliest])  # sync: before the first step
    ranks = [rank for rank, is_different in enumerate(gather_results(lambda: own)) if is_different]
    where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_RANKS]))}"
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    message = "the first batch, computed twice on the same weights, gives different bits, first in "
    message += f"{names[earliest][1]} on {where}{more}; a kernel or a device is not deterministic"
    raise ConfigError("run.deterministic", message)


@contextmanager
def unchanged_state(parts: Parts) -> Iterator[None]:
    """Restore everything that a forward and backward pass changes; weights and moments it only reads."""
    fp8_layers, device = parts.fp8_layers, parts.world.device
    meters, in_fp8, waited_s = fp8_layers.table.clone(), fp8_layers.switch.is_on, parts.comm_stats.waited_s
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    fp8_layers.table.copy_(meters)
    fp8_layers.switch.is_on = in_fp8
    parts.comm_stats.waited_s = waited_s


def compute_digests(parts: Parts, batch: Batch, *, cfg: Config) -> Tensor:
    """Forward and backward of one batch: the bits of its signals, and a digest of each gradient; int64."""
    forward_backward(parts, batch, cfg=cfg, probe=True)
    with torch.no_grad():
        parts.signals.add_gradients()
        if parts.fp8_layers.in_fp8:
            parts.signals.add_fp8(parts.fp8_layers.take_sums())
        gradients = [digest_bits(local(p.grad)) for p in parts.model.parameters() if p.grad is not None]
        digests = torch.cat([parts.signals.vector.view(torch.int32).to(torch.int64), torch.stack(gradients)])
    parts.signals.clear()
    parts.update.clear_gradients()
    parts.compute_clock.discard_step()
    return digests


def name_digests(layout: SignalLayout, parameters: list[str]) -> list[tuple[int, str]]:
    """For each number that `compute_digests` returns: its place in the order of computation, and its name."""
    names: list[tuple[int, str]] = []
    for part, place in layout.parts.items():
        for number in range(place.stop - place.start):
            match part:
                case "layer_squares":
                    name = f"the output of {layout.layers[number]}"
                case "scalars":
                    name = f"the {SCALARS[number]}"
                case "source_losses" | "source_tokens":
                    name = f"the {part.replace('_', ' ')} of {layout.sources[number]}"
                case "group_squares":
                    name = f"the gradient norm of {layout.groups[number]}"
                case "slots":
                    name = "the gradient norm before the reduction"
                case _:
                    name = f"the {part.replace('_', ' ')}"
            order = FORWARD_PARTS.index(part) if part in FORWARD_PARTS else len(FORWARD_PARTS) + len(parameters)
            names.append((order * layout.size + number, name))
    backward = reversed(range(len(parameters)))
    start = len(FORWARD_PARTS)
    return names + [
        ((start + order) * layout.size, f"the gradient of {name}")
        for order, name in zip(backward, parameters, strict=True)
    ]
