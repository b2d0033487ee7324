"""What a check or a probe adds to a step: blocks of steps with it alternate with blocks without, in one run."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.build import build, build_meter
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.world import connect, disconnect
from harness.model.size import num_parameters
from harness.precision.attention import fast_attention
from tests.bench.clock import SETTLING_STEPS, WARMUP_STEPS, Block, alternate
from tests.bench.sentinel import SentinelSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedBlocks:
    cfg: Config
    device: torch.device
    num_steps: int
    """Steps of a block."""
    rounds: Sequence[tuple[Block, Block]]
    """A block with the addition and one without, per round."""

    @property
    def ratios(self) -> list[float]:
        """Step time with the addition to that without, in ascending order."""
        return sorted(added.step_s / plain.step_s for added, plain in self.rounds)

    def render_cost(self, noun: str, adjective: str, *, every: int) -> str:
        """The cost in words, if one step in `every` has the addition."""
        cfg, ratios = self.cfg, self.ratios
        ratio, plain_s = statistics.median(ratios), statistics.median(plain.step_s for _, plain in self.rounds)
        size = f"{num_parameters(cfg.model) / 1e6:.1f}M, {cfg.train.batch_size} x {cfg.train.sequence_length} tokens"
        return "\n".join(
            (
                f"cost: {cfg.model.name}, {size}, {cfg.precision.kind}, {self.device.type}",
                f"  {len(self.rounds)} rounds of {self.num_steps} steps; a step takes {plain_s * 1e3:.2f} ms",
                f"  a {adjective} step takes {ratio:.3f} times as long ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                f"  one {noun} in {every} steps: {(ratio - 1) / every:+.2%}",
            )
        )


def measure_paired(
    cfg: Config, make_side: Callable[[SentinelSteps, bool], SentinelSteps], *, rounds: int, num_steps: int
) -> PairedBlocks:
    """Time the steps of one run with one rank. `make_side` gets the steps of the loop and whether to add to them."""
    with fast_attention(), tempfile.TemporaryDirectory() as directory:
        world, root = connect(cfg.parallel), RunDir(Path(directory))
        with closing(build(cfg, world, root)) as parts:
            steps = SentinelSteps(cfg, parts, RunState(), root.checkpoints, build_meter(cfg, world))
            sides = [make_side(steps, is_added) for is_added in (True, False)]
            for side in sides:
                side.run(WARMUP_STEPS - SETTLING_STEPS)
            blocks = alternate([side.run for side in sides], rounds=rounds, num_steps=num_steps, device=world.device)
        disconnect()
    return PairedBlocks(cfg=cfg, device=world.device, num_steps=num_steps, rounds=[(one, two) for one, two in blocks])
