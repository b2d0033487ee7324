"""Measures activations and token losses of one step with forward hooks, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from harness.analysis.replay.measured_step import EMBEDDING, ActivationRange, TokenLoss
from harness.distributed.collectives import gather_results
from harness.distributed.context import ContextSplit
from harness.model.loss import IGNORED
from harness.model.transformer import Output, Transformer

NUM_WORST_TOKENS = 16


@final
@dataclass(slots=True)
class StepMeasurements:
    """Sums of one rank."""

    context: ContextSplit | None = None
    """This rank's part of each sequence; None: all of it."""
    squares: dict[str, float] = field(default_factory=dict)
    """Point -> sum of squares."""
    counts: dict[str, int] = field(default_factory=dict)
    amaxes: dict[str, float] = field(default_factory=dict)
    tokens: list[TokenLoss] = field(default_factory=list)
    num_rows: int = 0
    """Rows that are not padding."""
    _is_own: Tensor | None = None
    _targets: Tensor | None = None

    def begin(self, targets: Tensor) -> None:
        """A micro-batch enters the model; rows without any target are padding."""
        self._is_own = (targets != IGNORED).any(dim=1)
        self._targets = targets if self.context is None else self.context.take(targets, 1)

    def add_activations(self, point: str, values: Tensor) -> None:
        assert self._is_own is not None
        own = values.detach()[self._is_own].double()
        if own.numel():
            self.squares[point] = self.squares.get(point, 0.0) + float(own.square().sum())
            self.counts[point] = self.counts.get(point, 0) + own.numel()
            self.amaxes[point] = _larger(self.amaxes.get(point, 0.0), float(own.abs().max()))

    def add_token_losses(self, losses: Tensor) -> None:
        """Keep the tokens with the highest losses; a NaN is ranked as Inf."""
        assert self._targets is not None
        assert self._is_own is not None
        own, targets = losses.detach()[self._is_own], self._targets[self._is_own]
        length = targets.shape[1] * (1 if self.context is None else self.context.size)
        places = list(range(length))
        if self.context is not None:
            places = self.context.positions(length, torch.device("cpu")).tolist()
        ranked = own.nan_to_num(nan=torch.inf).flatten()
        for place in ranked.topk(min(NUM_WORST_TOKENS, ranked.numel())).indices.tolist():
            row, column = divmod(place, own.shape[1])
            token, loss = int(targets[row, column]), float(own[row, column])
            self.tokens.append(TokenLoss(row=self.num_rows + row, position=places[column], token=token, loss=loss))
        self.num_rows += len(own)


@contextmanager
def measure_activations(model: nn.Module) -> Iterator[StepMeasurements]:
    """Measure every forward pass of the model while the context is open."""
    assert isinstance(model, Transformer)
    sums = StepMeasurements(context=model.context)

    def at(point: str) -> Any:
        return lambda _module, _inputs, output: sums.add_activations(
            point, output[0] if isinstance(output, tuple) else output
        )

    def after_block(point: str) -> Any:
        return lambda _module, _inputs, output: sums.add_activations(point, output[0] + output[1])

    def on_output(_module: nn.Module, _inputs: Any, output: Output) -> None:
        sums.add_token_losses(output.token_losses)

    first = model.embedding if isinstance(model.embedding_norm, nn.Identity) else model.embedding_norm
    handles = [
        model.register_forward_pre_hook(lambda _model, inputs: sums.begin(inputs[1])),
        first.register_forward_hook(at(EMBEDDING)),
        model.norm.register_forward_hook(at("norm")),
        model.register_forward_hook(on_output),
    ]
    for number, block in enumerate(model.blocks):
        handles.append(block.get_submodule("attention").register_forward_hook(at(f"blocks.{number}.attention")))
        handles.append(block.get_submodule("mlp").register_forward_hook(at(f"blocks.{number}.mlp")))
        handles.append(block.register_forward_hook(after_block(f"blocks.{number}")))
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def reduce_measurements(own: StepMeasurements) -> tuple[list[ActivationRange], list[TokenLoss]]:
    """The measurements of all ranks together, equal on every rank."""
    own._is_own = own._targets = None
    ranks = gather_results(lambda: own)
    activations = []
    for point in dict.fromkeys(point for rank in ranks for point in rank.squares):
        count = sum(rank.counts.get(point, 0) for rank in ranks)
        squares = sum(rank.squares.get(point, 0.0) for rank in ranks)
        amax = 0.0
        for rank in ranks:
            amax = _larger(amax, rank.amaxes.get(point, 0.0))
        activations.append(ActivationRange(point=point, rms=(squares / count) ** 0.5, amax=amax))
    tokens, offset = [], 0
    for rank in ranks:
        tokens += [
            TokenLoss(row=offset + found.row, position=found.position, token=found.token, loss=found.loss)
            for found in rank.tokens
        ]
        if rank.context is None or rank.context.rank == rank.context.size - 1:  # the ranks before have the same rows
            offset += rank.num_rows
    tokens.sort(key=lambda found: -found.loss if found.loss == found.loss else -torch.inf)
    return activations, tokens[:NUM_WORST_TOKENS]


def _larger(one: float, other: float) -> float:
    """The larger number; NaN is larger than any."""
    return one if not other > one and other == other else other
