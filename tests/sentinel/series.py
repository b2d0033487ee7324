"""Generated training curves, and records made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, StepRecord
from launch.cli.judge import detect_config

NOISE = 0.01


def config(**changes: Any) -> DetectConfig:
    """The defaults of `conf/`, changed by name."""
    return detect_config([f"{name}={value}" for name, value in changes.items()])


def losses(num: int, *, seed: int = 0, noise: float = NOISE) -> list[float]:
    """A healthy run: steep at first, then flat, with normal noise."""
    random = Random(seed)
    return [(3 + 8 * math.exp(-step / 80)) * math.exp(random.gauss(0, noise)) for step in range(num)]


def norms(num: int, *, seed: int = 1) -> list[float]:
    random = Random(seed)
    return [(0.3 + math.exp(-step / 80)) * math.exp(random.gauss(0, 0.05)) for step in range(num)]


def record(step: int, loss: float, grad_norm: float = 0.0, **facts: Any) -> StepRecord:
    given: dict[str, Any] = {
        "time": 0.0,
        "iteration": step,
        "step": step,
        "cursor": step,
        "tokens": 0,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": math.nan,
        "tokens_per_s": 0.0,
        "refused": False,
        "stop_requested": False,
        "step_time_s": 0.0,
        "flops_per_s": 0.0,
    }
    return StepRecord(**(given | facts))


def records(losses: Sequence[float], norms: Sequence[float] = (), *, every: int = 1) -> list[StepRecord]:
    """One record a loss, `every` steps apart."""
    return [
        record(place * every, loss, norms[place] if norms else 0.0)
        for place, loss in enumerate(losses)
        if not norms or place < len(norms)
    ]


def kinds(findings: Sequence[Finding]) -> list[str]:
    return [str(finding.kind) for finding in findings]
