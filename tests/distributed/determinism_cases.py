"""Functions that the tests of `run.deterministic` run on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from harness import train
from harness.build import Parts
from harness.config.errors import ConfigError
from harness.distributed.determinism import ENVIRONMENT, fill_memory, fills_memory
from harness.distributed.shards import local
from harness.run import Run
from harness.start_check import check_determinism
from tests.distributed import faulty_runs
from tests.distributed.cases import tiny
from tests.distributed.faulty_runs import RankResult

NOISY_LAYER = "blocks.1.mlp.up"


def environment_of_rank(run: Run) -> dict[str, Any]:
    """What a run that is about to start has set on this rank."""
    return {
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "fills": fills_memory(),
        "deterministic_model": run.parts.model.deterministic,
    }


def settings_after_run() -> list[Any]:
    """The same settings once a run has ended in this process."""
    return [torch.are_deterministic_algorithms_enabled(), *(os.environ.get(name) for name in ENVIRONMENT)]


def state_around_check(run: Run) -> dict[str, bool]:
    """Which parts of a run are unchanged after another check."""
    before, seconds = state_of(run.parts), run.parts.comm_stats.waited_s
    check_determinism(run.parts, run.state, cfg=run.cfg)
    after = state_of(run.parts)
    equal = {name: torch.equal(before[name].view(-1), after[name].view(-1)) for name in before}
    no_gradients = all(parameter.grad is None for parameter in run.parts.model.parameters())
    return equal | {"no gradients": no_gradients, "waited": run.parts.comm_stats.waited_s == seconds}


def state_of(parts: Parts) -> dict[str, Tensor]:
    """Copies of all tensors that a step may change, and of the random state."""
    tensors = {name: local(tensor) for name, tensor in parts.tensors().items()}
    tensors |= {"signals": parts.signals.vector, "squares": parts.comm_stats.square_sum}
    tensors |= {"meters": parts.fp8_layers.table, "history": parts.fp8_layers.history, "rng": torch.get_rng_state()}
    tensors |= {"weight digest": parts.update.digest.total, "fp8": torch.tensor([parts.fp8_layers.switch.is_on])}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def run_filled(directory: str, *overrides: str) -> RankResult:
    """A run in which torch fills all uninitialized memory with NaN, from before its parts are built."""
    build: Callable[..., Parts] = getattr(train, "build")  # noqa: B009  (which train only imports)

    def build_filled(*arguments: Any, **options: Any) -> Parts:
        fill_memory(True)
        assert torch.empty(3).isnan().all(), "torch fills memory"
        return build(*arguments, **options)

    with patch.object(train, "build", build_filled):
        return faulty_runs.run(directory, None, *overrides)


def error_of_noisy_run(directory: str, kind: str, rank: int, *overrides: str) -> str:
    """The error of a run in which one layer of one rank is not deterministic."""
    build: Callable[..., Parts] = getattr(train, "build")  # noqa: B009  (which train only imports)

    def build_noisy(*arguments: Any, **options: Any) -> Parts:
        parts: Parts = build(*arguments, **options)
        if parts.world.rank == rank:
            make_noisy(parts.model.get_submodule(NOISY_LAYER), kind)
        return parts

    cfg = tiny("run.deterministic=true", "run.name=noisy", *overrides, directory=directory)
    with patch.object(train, "build", build_noisy):
        try:
            train.run_worker(cfg)
        except ConfigError as error:
            return str(error)
    return ""


def make_noisy(layer: nn.Module, kind: str) -> None:
    """Add noise to the output of a layer, or change the last bit of one value of its weight's gradient every second
    time."""
    if kind == "forward":
        layer.register_forward_hook(lambda _layer, _inputs, output: output + 1e-3 * torch.randn_like(output))
        return
    flip = alternating_flip()
    layer.register_forward_pre_hook(lambda each, _inputs: each.weight.register_hook(flip) and None)


def alternating_flip() -> Callable[[Tensor], Tensor]:
    num_calls = 0

    def flip(gradient: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            return gradient
        changed = gradient.clone()
        changed.view(torch.int32).view(-1)[0] ^= 1
        return changed

    return flip
