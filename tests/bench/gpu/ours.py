"""This harness, with the sentinel and without, in turns in one run on the same weights (`tests.bench.sentinel`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from harness.build import build
from harness.config import Config
from harness.model.size import num_parameters
from harness.parallel import connect, disconnect
from harness.rundir import RunDir
from tests.bench import sentinel
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Row


class Pair(NamedTuple):
    on: Row
    off: Row
    remark: str


def measure(setting: Setting, precision: str, overrides: Sequence[str], run: RunDir) -> Pair:
    """Both sides of one precision, which the overrides choose."""
    cfg = setting.config(*overrides)
    world = connect(cfg.parallel)
    try:
        with closing(build(cfg, world, run)) as parts:
            count = sum(parameter.numel() for parameter in parts.model.parameters())
            assert count == num_parameters(cfg.model), f"{count:,} parameters"
            watched, plain = sentinel.sides(cfg, parts, run)
            measured = sentinel.measure(watched, plain, rounds=setting.rounds, num_steps=setting.steps)
    finally:
        disconnect()
    losses = (watched.losses[0], watched.losses[-1])
    return Pair(
        on=Row(name=f"ours, {precision}, sentinel on", rounds=tuple(each.on for each in measured), losses=losses),
        off=Row(name=f"ours, {precision}, sentinel off", rounds=tuple(each.off for each in measured)),
        remark=told(cfg, precision, measured, watched.judging_s),
    )


def told(cfg: Config, precision: str, measured: list[sentinel.Round], judging_s: list[float]) -> str:
    costs = sorted(each.cost for each in measured)
    return (
        f"The sentinel costs {statistics.median(costs):+.2%} of a step in {precision} ({costs[0]:+.2%} to "
        f"{costs[-1]:+.2%} over {len(costs)} rounds in turns, a probe every {cfg.sentinel.probe_every} steps), and "
        f"{statistics.median(judging_s) * 1e6:.0f} us of the host beside it."
    )
