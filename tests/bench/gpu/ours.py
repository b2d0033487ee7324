"""This harness, with the sentinel and without, in turns on the same weights (`tests.bench.sentinel`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from harness.build import build
from harness.core.rundir import RunDir
from harness.distributed import fsdp
from harness.distributed.reduce_scatter import CommStats, MeasuredReduceScatter
from harness.distributed.world import World
from harness.model.size import num_parameters
from tests.bench import sentinel
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting


class Way(NamedTuple):
    title: str
    overrides: tuple[str, ...]
    has_shortcuts: bool = True
    """Whether FSDP's copies are skipped, as they are where there is one rank."""


WAYS = {
    "ours-bf16": Way("bf16", ("precision=bf16",)),
    "ours-bf16-cluster": Way("bf16, single-rank shortcuts off", ("precision=bf16",), has_shortcuts=False),
    "ours-fp8": Way("fp8", ("precision=fp8",)),
    "ours-fp8-delayed": Way("fp8 delayed", ("precision=fp8", "precision.fp8.recipe=delayed")),
}


@contextmanager
def start(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    way = WAYS[name]
    cfg = setting.config(*way.overrides)
    with nullcontext() if way.has_shortcuts else without_shortcuts(world.device):
        parts = build(cfg, world, run)
    with closing(parts):
        count = sum(parameter.numel() for parameter in parts.model.parameters())
        assert count == num_parameters(cfg.model), f"{count:,} parameters"
        watched, plain = sentinel.sides(cfg, parts, run)
        titles = (f"ours, {way.title}, sentinel on", f"ours, {way.title}, sentinel off")
        yield Entry(
            sides=dict(zip(titles, (watched.run, plain.run), strict=True)),
            losses=lambda: (watched.losses[0], watched.losses[-1]) if watched.losses else None,
            judging_s=watched.judging_s,
        )


@contextmanager
def without_shortcuts(device: torch.device) -> Iterator[None]:
    """Build as for a cluster: FSDP casts and copies each weight before it is gathered, copies gradients before they are
    scattered, and the norm of a rank's own gradients is taken in between. The collectives themselves move nothing.

    Only FSDP's division of gradients stays left out: with several ranks it is part of the reduction.
    """

    def measured_reduce_scatter() -> MeasuredReduceScatter:
        square_sum = torch.zeros((), device=device)
        return MeasuredReduceScatter(CommStats(square_sum, measures_gradients=True, is_sharded=False))

    replacements: dict[str, Any] = {"cast_on_copy": lambda _: None, "NoCopyReduceScatter": measured_reduce_scatter}
    kept = {name: getattr(fsdp, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(fsdp, name, replacement)
        yield
    finally:
        for name, original in kept.items():
            setattr(fsdp, name, original)
