"""Finds the first module that produces a non-finite value from finite inputs, with hooks during one step.

How: every leaf module gets a forward and a backward hook that check inputs and outputs. Each check is a host sync; a
replay can afford it. After the step, parameters with a non-finite gradient are listed in the order of the layers.
Left out: modules inside a compiled block, which run as one. A replay is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from harness.distributed.shards import local


@final
@dataclass(slots=True)
class NonFiniteModules:
    """Modules with non-finite values in a step, on one rank; empty if everything was finite."""

    forward: str = ""
    """The first module with a non-finite output from finite inputs."""
    broken_weights: str = ""
    """The first module with non-finite weights."""
    backward: str = ""
    """The first module, from the loss down, with a non-finite input gradient from a finite output gradient."""
    gradients: list[str] = field(default_factory=list)
    """Parameters with a non-finite gradient after the backward pass."""

    @property
    def is_clean(self) -> bool:
        return not (self.forward or self.broken_weights or self.backward or self.gradients)


@contextmanager
def watch_modules(model: nn.Module) -> Iterator[NonFiniteModules]:
    """Check every leaf module of the model while the context is open."""
    seen, handles = NonFiniteModules(), []
    for name, module in model.named_modules():
        if any(module.children()) or isinstance(module, nn.Identity):
            continue

        def forward(layer: nn.Module, inputs: Any, output: Any, *, name: str = name) -> None:
            if not seen.broken_weights and not is_finite(list(layer.parameters(recurse=False))):
                seen.broken_weights = name
            if not seen.forward and not is_finite(output) and is_finite(inputs):
                seen.forward = name

        def backward(_layer: nn.Module, outgoing: Any, incoming: Any, *, name: str = name) -> None:
            if not seen.backward and not is_finite(outgoing) and is_finite(incoming):
                seen.backward = name

        handles.append(module.register_forward_hook(forward))
        if not isinstance(module, nn.Embedding):  # its input has no gradient
            handles.append(module.register_full_backward_hook(backward))
    try:
        yield seen
        seen.gradients = [name for name, parameter in model.named_parameters() if not is_finite(parameter.grad)]
    finally:
        for handle in handles:
            handle.remove()


def is_finite(value: Any) -> bool:
    """Whether all values of a tensor, or of nested tensors, are finite; other objects count as finite."""
    match value:
        case Tensor():
            return not value.is_floating_point() or bool(torch.isfinite(local(value)).all())
        case tuple() | list():
            return all(is_finite(item) for item in value)
        case _:
            return True
