"""This harness, with and without the sentinel, alternating on the same weights (`tests.bench.sentinel`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from harness.build import build
from harness.core.rundir import RunDir
from harness.distributed import fsdp
from harness.distributed.determinism import deterministic_algorithms
from harness.distributed.reduce_scatter import CommStats, MeasuredReduceScatter
from harness.distributed.world import World
from harness.model.size import num_parameters
from tests.bench import sentinel
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting


class Variant(NamedTuple):
    title: str
    overrides: tuple[str, ...]
    has_shortcuts: bool = True
    """Whether FSDP's copies are skipped, as with world_size 1."""


VARIANTS = {
    "ours-bf16": Variant("bf16", ("precision=bf16",)),
    "ours-bf16-cluster": Variant("bf16, single-rank shortcuts off", ("precision=bf16",), has_shortcuts=False),
    "ours-bf16-deterministic": Variant("bf16, deterministic", ("precision=bf16", "run.deterministic=true")),
    "ours-fp8": Variant("fp8", ("precision=fp8",)),
    "ours-fp8-delayed": Variant("fp8 delayed", ("precision=fp8", "precision.fp8.recipe=delayed")),
}


@contextmanager
def start(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    variant = VARIANTS[name]
    cfg = setting.config(*variant.overrides)
    with (
        deterministic_algorithms(enabled=cfg.run.deterministic),
        nullcontext() if variant.has_shortcuts else without_shortcuts(world.device),
        closing(build(cfg, world, run)) as parts,
    ):
        count = sum(parameter.numel() for parameter in parts.model.parameters())
        assert count == num_parameters(cfg.model), f"{count:,} parameters"
        with_sentinel, without_sentinel = sentinel.build_sides(cfg, parts, run)
        titles = (f"ours, {variant.title}, sentinel on", f"ours, {variant.title}, sentinel off")
        yield Entry(
            sides=dict(zip(titles, (with_sentinel.run, without_sentinel.run), strict=True)),
            losses=lambda: (with_sentinel.losses[0], with_sentinel.losses[-1]) if with_sentinel.losses else None,
            report_s=with_sentinel.report_s,
        )


@contextmanager
def without_shortcuts(device: torch.device) -> Iterator[None]:
    """Build as for a cluster: FSDP casts and copies each weight before the all-gather, copies gradients before the
    reduce-scatter, and the norm of the local gradients is measured in between. The collectives themselves move nothing.

    FSDP's division of gradients is still skipped: with several ranks it is part of the reduction.
    """

    def build_reduce_scatter() -> MeasuredReduceScatter:
        square_sum = torch.zeros((), device=device)
        return MeasuredReduceScatter(CommStats(square_sum, measures_gradients=True, is_sharded=False))

    replacements: dict[str, Any] = {"cast_on_copy": lambda _: None, "NoCopyReduceScatter": build_reduce_scatter}
    originals = {name: getattr(fsdp, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(fsdp, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(fsdp, name, original)
