"""Watches one step from inside: which module first made something not finite out of what was finite.

How: hooks on every module that has no children, so that the first to report is the one that did it. What enters and
leaves is looked at on the host; a replay has the time. Backward, the first module whose incoming gradient was finite
and whose outgoing one was not; and the parameters whose gradients ended up not finite, in the order of the layers.
Left out: what happens inside a compiled block, whose modules run as one; a replay is not compiled.
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
class Seen:
    """What a step showed, on one rank; empty where all was finite."""

    forward: str = ""
    """The first module whose output was not finite although its inputs were."""
    broken_weights: str = ""
    """The first module that computed with weights that are not finite."""
    backward: str = ""
    """The first module, from the loss down, whose gradient was finite on the way in and not on the way out."""
    gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient is not finite after the backward pass."""

    @property
    def is_clean(self) -> bool:
        return not (self.forward or self.broken_weights or self.backward or self.gradients)


@contextmanager
def watching(model: nn.Module) -> Iterator[Seen]:
    """Look at everything that happens in the model meanwhile."""
    seen, handles = Seen(), []
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
        if not isinstance(module, nn.Embedding):  # what enters it has no gradient
            handles.append(module.register_full_backward_hook(backward))
    try:
        yield seen
        seen.gradients = [name for name, parameter in model.named_parameters() if not is_finite(parameter.grad)]
    finally:
        for handle in handles:
            handle.remove()


def is_finite(value: Any) -> bool:
    """Whether every number in a tensor, or in a nest of them, is finite; what is no number is."""
    match value:
        case Tensor():
            return not value.is_floating_point() or bool(torch.isfinite(local(value)).all())
        case tuple() | list():
            return all(is_finite(each) for each in value)
        case _:
            return True
