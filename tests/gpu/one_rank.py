"""The set-up of tests with one rank on a GPU: a small model, single steps, losses of a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from harness.build import Parts, build
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.world import connect, disconnect
from harness.precision.attention import fast_attention
from harness.step import finish_step, forward_backward

SMALL = (
    "model.dim=256",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=512",
    "train.batch_size=8",
    "train.sequence_length=256",
    "parallel.device=cuda",
)


def one_rank() -> Iterator[None]:
    """As a fixture: the attention of training, and no process group after the test."""
    with fast_attention():
        yield
    disconnect()


def start(*overrides: str) -> tuple[Parts, Config]:
    """The parts of a run of the small model; the process group is that of this process alone."""
    cfg = load([*SMALL, *overrides])
    return build(cfg, connect(cfg.parallel), RunDir(Path("/nonexistent"))), cfg


def step(parts: Parts, cfg: Config, index: int, *, probe: bool = False) -> Tensor:
    """One training step on a batch; returns its report."""
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=probe)
    return finish_step(parts, cfg=cfg, probe=probe)


def train_losses(parts: Parts, cfg: Config, num_steps: int) -> list[float]:
    """The losses of the first steps."""
    layout = parts.signals.layout
    reports = [step(parts, cfg, index).clone() for index in range(num_steps)]
    return [float(layout.scalar(report, "loss") / layout.scalar(report, "tokens")) for report in reports]
