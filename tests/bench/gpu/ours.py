"""This harness, with the sentinel and without, in turns in one run on the same weights (`tests.bench.sentinel`), and in
the same turns with the reference where there is one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from harness.build import build
from harness.config import Config
from harness.model.size import num_parameters
from harness.parallel import World
from harness.rundir import RunDir
from tests.bench import sentinel
from tests.bench.clock import Side, held_bytes
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Row


class Way(NamedTuple):
    """Of computing."""

    precision: str
    """As the row calls it."""
    overrides: Sequence[str]
    """That choose it."""


class Pair(NamedTuple):
    on: Row
    off: Row
    remark: str


def measure(way: Way, world: World, setting: Setting, run: RunDir, beside: tuple[Side, ...]) -> Pair:
    """Both sides of one precision."""
    cfg = setting.config(*way.overrides)
    held = held_bytes(world.device)
    with closing(build(cfg, world, run)) as parts:
        count = sum(parameter.numel() for parameter in parts.model.parameters())
        assert count == num_parameters(cfg.model), f"{count:,} parameters"
        watched, plain = sentinel.sides(cfg, parts, run)
        measured = sentinel.measure(watched, plain, rounds=setting.rounds, num_steps=setting.steps, beside=beside)
    others = tuple(other for each in measured for other in each.beside)
    return Pair(
        on=Row(
            name=f"ours, {way.precision}, sentinel on",
            rounds=tuple(each.on.without(held) for each in measured),
            beside=others,
            losses=(watched.losses[0], watched.losses[-1]),
        ),
        off=Row(
            name=f"ours, {way.precision}, sentinel off",
            rounds=tuple(each.off.without(held) for each in measured),
            beside=others,
        ),
        remark=told(cfg, way.precision, measured, watched.judging_s),
    )


def told(cfg: Config, precision: str, measured: list[sentinel.Round], judging_s: list[float]) -> str:
    costs = sorted(each.cost for each in measured)
    return (
        f"The sentinel costs {statistics.median(costs):+.2%} of a step in {precision} ({costs[0]:+.2%} to "
        f"{costs[-1]:+.2%} over {len(costs)} rounds in turns, a probe every {cfg.sentinel.probe_every} steps), and "
        f"{statistics.median(judging_s) * 1e6:.0f} us of the host beside it."
    )
