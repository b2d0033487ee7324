"""What every step tells: one fixed-size float32 vector, summed over all ranks in one all-reduce.

Why: every rank must hold the same numbers at the same step to take the same decision, and one small collective is what
that may cost.
How: `Layout` gives each number its place. Sums over data (loss, tokens, activations) add up over all ranks; sums over
sharded state (gradients, weights, moments) are first divided by the number of replicas that hold the same shard. What
is not measured in a step travels as zero, so the vector and the collective never change shape. Sums are taken over rows
of a table, not by adding at indices: a GPU would add in another order each time, and clip by another norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.parallel import World, all_reduce_sum, local

SCALARS = ("loss", "z_loss", "tokens", "stop", "save", "param", "v")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each number lies in the vector."""

    groups: tuple[str, ...]
    """Layer groups whose gradient norms are told apart."""
    layers: tuple[str, ...]
    """Layers whose activations are sampled."""
    sources: tuple[str, ...]
    """Sources of data whose losses are told apart."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the vector's parts: scalars, groups, layers, losses of the sources, tokens of the sources."""
        return len(SCALARS), len(self.groups), len(self.layers), len(self.sources), len(self.sources)

    @property
    def size(self) -> int:
        return sum(self.parts)

    def scalar(self, vector: Tensor, name: str) -> Tensor:
        return vector[SCALARS.index(name)]

    def group_squares(self, vector: Tensor) -> Tensor:
        return self._part(vector, 1)

    def layer_squares(self, vector: Tensor) -> Tensor:
        return self._part(vector, 2)

    def source_losses(self, vector: Tensor) -> Tensor:
        return self._part(vector, 3)

    def source_tokens(self, vector: Tensor) -> Tensor:
        return self._part(vector, 4)

    def _part(self, vector: Tensor, number: int) -> Tensor:
        first = sum(self.parts[:number])
        return vector[first : first + self.parts[number]]


def group_of(parameter_name: str) -> str:
    """The layer group a parameter belongs to: its block, or its own module outside the blocks."""
    first, _, rest = parameter_name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of this rank's part of each tensor, as a vector."""
    norms = torch._foreach_norm([local(tensor) for tensor in tensors], 2, dtype=torch.float32)
    return torch.stack(norms).square()


class Signals:
    """Gathers one step's numbers on this rank, then sums them over all."""

    def __init__(self, layout: Layout, *, parameters: Mapping[str, Tensor], world: World) -> None:
        self.layout = layout
        self._world = world
        self._parameters = list(parameters.values())
        groups = [layout.groups.index(group_of(name)) for name in parameters]
        self._width = max(Counter(groups).values())
        places = [group * self._width + groups[:number].count(group) for number, group in enumerate(groups)]
        self._places = torch.tensor(places, device=world.device)
        """Where each parameter's square goes in a table of one row a group."""
        self._source_numbers = torch.arange(len(layout.sources), device=world.device)[:, None]
        self.clear()

    def clear(self) -> None:
        self.vector = torch.zeros(self.layout.size, dtype=torch.float32, device=self._world.device)

    def add_forward(
        self, *, row_losses: Tensor, row_tokens: Tensor, sources: Tensor, z_loss: Tensor, layers: Tensor | None
    ) -> None:
        """Sums of one micro-batch, whose rows come from `sources`."""
        self.layout.scalar(self.vector, "loss").add_(row_losses.sum())
        self.layout.scalar(self.vector, "z_loss").add_(z_loss)
        self.layout.scalar(self.vector, "tokens").add_(row_tokens.sum())
        is_from = self._source_numbers == sources
        self.layout.source_losses(self.vector).add_(torch.where(is_from, row_losses, 0.0).sum(dim=1))
        self.layout.source_tokens(self.vector).add_(torch.where(is_from, row_tokens, 0.0).sum(dim=1))
        if layers is not None:
            self.layout.layer_squares(self.vector).add_(layers)

    def add_gradients(self) -> None:
        """Squared norm of each layer group's gradient."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        assert len(gradients) == len(self._parameters), "every parameter takes part in every step"
        squares = square_sums(gradients) / self._world.replicate
        table = squares.new_zeros(len(self.layout.groups) * self._width).scatter_(0, self._places, squares)
        self.layout.group_squares(self.vector).add_(table.view(-1, self._width).sum(dim=1))

    def add_state(self, second_moments: Sequence[Tensor]) -> None:
        """Squared norms of weights and second moments."""
        share = 1 / self._world.replicate
        self.layout.scalar(self.vector, "param").add_(square_sums(self._parameters).sum(), alpha=share)
        self.layout.scalar(self.vector, "v").add_(square_sums(second_moments).sum(), alpha=share)

    def add_requests(self, *, stop: bool, save: bool) -> None:
        """What this rank was asked from outside; all ranks will hear of it at the same iteration."""
        if stop:
            self.layout.scalar(self.vector, "stop").add_(1.0)
        if save:
            self.layout.scalar(self.vector, "save").add_(1.0)

    def reduce(self) -> Tensor:
        """The one collective of the step; returns the vector every rank now shares and starts a new one."""
        reduced = all_reduce_sum(self.vector)
        self.clear()
        return reduced
