"""Muon on sharded matrices that a mask on the device can skip.

What: the momentum of a matrix (the exponential average of its gradients) is orthogonalized and added to the weight, as
in `torch.optim.Muon`. Update and weight decay are scaled as Moonshot does (arXiv 2502.16982), so that learning rate and
weight decay of AdamW can be kept: every update has the root mean square lr * update_rms.
How: orthogonalization needs whole matrices, and FSDP2 leaves each rank some rows. Each matrix has an owner
(`harness.optim.matrix_owners`). An all-to-all per batch brings all rows to the owners, which orthogonalize
(`harness.optim.orthogonalize`), and a second one returns the result; the exchange of the next batch overlaps with the
GEMMs of this one. With replicas, each replica does so for every n-th batch, among its own ranks, and sends the result
to the others: all of them apply the same bits, even if their devices round differently.
The skip mask is applied where momentum and weights are written, by selection, not by multiplication. All ranks always
enter the same collectives, whatever the mask says, and nothing waits for the device on the host.
Queries, keys, values, gate and up projections are separate parameters, also where their GEMMs are fused, and each is
orthogonalized by itself. Left out: orthogonalization of each head by itself; overlap with the backward pass.
The momentum is called exp_avg, like AdamW's first moment, which is the same average: a checkpoint of AdamW can be
continued with Muon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from harness.config.optim import MuonConfig
from harness.distributed.collectives import start_all_to_all, start_broadcast
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.shards import local
from harness.distributed.world import World
from harness.optim.matrix_owners import MatrixBatch, assign_matrices
from harness.optim.orthogonalize import orthogonalize
from harness.optim.weight_digest import UpdateSums, sum_bits, sum_weights


class MatrixOptions(NamedTuple):
    """How a matrix is updated."""

    lr_multiplier: float
    weight_decay: float


class MatrixShard(NamedTuple):
    """This rank's rows of a matrix, with the tensors that its update reads and writes."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor


class _Exchange(NamedTuple):
    """A collective under way. The tensors are kept until it is done."""

    work: Any
    sent: Tensor
    received: Tensor


@final
class Muon:
    """Muon over a set of matrices, with its momenta allocated."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: Sequence[MatrixOptions],
        *,
        cfg: MuonConfig,
        device: torch.device,
        world: World | None = None,
        comm_stats: CommStats | None = None,
        own_kernel: bool = False,
    ) -> None:
        """`options`: one for each parameter. `world`: needed if the parameters are sharded. `own_kernel`: use the
        Triton kernels of the harness; CUDA only."""
        assert all(parameter.ndim == 2 for parameter in parameters.values()), "Muon is for matrices"
        self.parameters = dict(parameters)
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        """Learning rate of the next update at multiplier 1."""
        self._cfg = cfg
        self._world = world
        self._comm_stats = comm_stats
        self._own_kernel = own_kernel
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in parameters.values()]
        num_ranks, self._rank = (1, 0) if world is None else (world.num_shards, world.shard)
        self._num_replicas, replica = (1, 0) if world is None else (world.replicate, world.replica)
        self._batches = assign_matrices(shapes, num_ranks)
        self._own_batches = self._batches[replica :: self._num_replicas]
        """The batches that this replica orthogonalizes."""
        places = {number: place for batch in self._batches for number, place in batch.places.items()}
        self._places = [places[number] for number in range(len(shapes))]
        factors = [
            each.lr_multiplier * cfg.update_rms * math.sqrt(max(shape))
            for each, shape in zip(options, shapes, strict=True)
        ]
        owned = [number for batch in self._own_batches for number in batch.owned[self._rank]]
        names = list(parameters)
        self._owned_names = [names[number] for number in owned]
        self._factors = torch.tensor(factors, dtype=torch.float32, device=device)
        """Factor on the learning rate of each orthogonalized matrix."""
        self._decays = torch.tensor([each.lr_multiplier * each.weight_decay for each in options], device=device)
        """Factor on the learning rate by which each weight shrinks."""
        self._owned_factors = torch.tensor([factors[number] for number in owned], dtype=torch.float32, device=device)
        self._full_rank = torch.tensor([min(shapes[number]) for number in owned], dtype=torch.float32, device=device)
        self._direction_squares = self._full_rank.clone()
        """Squared norm of each matrix that this rank orthogonalized for the last applied update."""

    @torch.no_grad()
    def step(self, *, skip_mask: Tensor, divisor: Tensor) -> UpdateSums:
        """Update each matrix by its gradient / `divisor`; if `skip_mask` is 1, nothing changes by a bit.

        Collective: all ranks must call.
        """
        shards = [self._shard(name, parameter) for name, parameter in self.parameters.items()]
        directions = torch.empty(self._batches[-1].end, dtype=self._dtype, device=self.lr.device)
        blend = self._blend_triton if self._own_kernel else self._blend
        apply = self._apply_triton if self._own_kernel else self._apply
        blend(shards, directions, skip_mask, divisor)
        squares = self._orthogonalize(directions)
        self._direction_squares.copy_(torch.where(skip_mask != 0, self._direction_squares, squares))
        return apply(shards, directions, skip_mask)

    def update_squares(self, lr: Tensor) -> dict[str, Tensor]:
        """Squared norm of the last update of each matrix that this rank owns, at this learning rate, by name; weight
        decay not counted. With replicas the sum over ranks is that many times too large, as with what every replica
        holds.

        After a restore and before the first update it is that of matrices whose singular values are all 1.
        """
        squares = self._direction_squares * (self._owned_factors * lr).square() * self._num_replicas
        return dict(zip(self._owned_names, squares.unbind(), strict=True))

    def on_restore(self) -> None:
        """Weights and momenta were initialized, loaded or restored."""
        self._direction_squares.copy_(self._full_rank)

    def _shard(self, name: str, parameter: nn.Parameter) -> MatrixShard:
        assert parameter.grad is not None
        return MatrixShard(local(parameter), local(parameter.grad), local(self.momenta[name]))

    def _blend(self, shards: Sequence[MatrixShard], directions: Tensor, skip_mask: Tensor, divisor: Tensor) -> None:
        """Add the gradients to the momenta, and write what is to be orthogonalized into the flat buffer."""
        is_skipped, momentum = skip_mask != 0, self._cfg.momentum
        for shard, place in zip(shards, self._places, strict=True):
            gradient = shard.gradient / divisor
            blended = torch.lerp(shard.momentum, gradient, 1 - momentum)
            direction = torch.lerp(gradient, blended, momentum) if self._cfg.nesterov else blended
            directions[place : place + gradient.numel()].view_as(gradient).copy_(direction)
            shard.momentum.copy_(torch.where(is_skipped, shard.momentum, blended))

    def _blend_triton(
        self, shards: Sequence[MatrixShard], directions: Tensor, skip_mask: Tensor, divisor: Tensor
    ) -> None:
        from harness.kernels.muon import blend_momentum

        momentum = self._cfg.momentum
        terms = self.lr.new_empty(4)
        terms[0], terms[1] = skip_mask, divisor
        terms[2].fill_(1 - momentum)
        terms[3].fill_(momentum if self._cfg.nesterov else 1.0)
        _, gradients, momenta = (list(column) for column in zip(*shards, strict=True))
        blend_momentum(gradients, momenta, directions, self._places, terms)

    def _apply(self, shards: Sequence[MatrixShard], directions: Tensor, skip_mask: Tensor) -> UpdateSums:
        """Add the orthogonalized matrices in the flat buffer to the weights."""
        weights = [shard.parameter for shard in shards]
        before, is_skipped = sum_bits(weights), skip_mask != 0
        kept, steps = (1 - self.lr * self._decays).unbind(), (self.lr * self._factors).unbind()
        for weight, place, keep, step in zip(weights, self._places, kept, steps, strict=True):
            direction = directions[place : place + weight.numel()].view_as(weight)
            updated = weight * keep - direction * step
            weight.copy_(torch.where(is_skipped, weight, updated))
        return sum_weights(weights)._replace(before=before)

    def _apply_triton(self, shards: Sequence[MatrixShard], directions: Tensor, skip_mask: Tensor) -> UpdateSums:
        from harness.kernels.muon import apply_directions

        terms = directions.new_empty(len(shards), 3, dtype=torch.float32)
        terms[:, 0] = skip_mask
        terms[:, 1] = 1 - self.lr * self._decays
        terms[:, 2] = self.lr * self._factors
        weights = [shard.parameter for shard in shards]
        return UpdateSums(*apply_directions(weights, directions, self._places, terms))

    def _orthogonalize(self, directions: Tensor) -> Tensor:
        """Replace all rows in the flat buffer by those of the orthogonalized matrices; returns the squared norms of the
        matrices that this rank owns."""
        squares: list[Tensor] = [self._full_rank.new_empty(0)]
        scatters: list[_Exchange] = []
        gathers = [self._start_gather(directions, batch) for batch in self._own_batches[:1]]
        for batch, following in zip_longest(self._own_batches, self._own_batches[1:]):
            gathered = self._finish(gathers.pop())
            if following is not None:
                gathers.append(self._start_gather(directions, following))
            count, num_ranks = len(batch.owned[self._rank]), batch.num_ranks
            parts = gathered.view(num_ranks, count, batch.part_rows, batch.columns)
            padded = parts.transpose(0, 1).reshape(count, num_ranks * batch.part_rows, batch.columns)
            if count:  # the same on every step
                whole = padded[:, : batch.rows]
                found = orthogonalize(whole, num_iterations=self._cfg.iterations)
                squares.append(torch.linalg.vector_norm(found, dim=(-2, -1), dtype=torch.float32).square())
                whole.copy_(found)
            returned = padded.view(count, num_ranks, batch.part_rows, batch.columns).transpose(0, 1).reshape(-1)
            scatters.append(self._start_scatter(directions, batch, returned))
        for scatter in scatters:
            self._finish(scatter)
        for exchange in self._start_broadcasts(directions):
            self._finish(exchange)
        return torch.cat(squares)

    def _start_gather(self, directions: Tensor, batch: MatrixBatch) -> _Exchange:
        """Send this rank's rows to the owners of a batch, and receive all rows of the matrices that it owns."""
        sent = directions[batch.start : batch.end]
        if batch.num_ranks == 1:
            return _Exchange(None, sent, sent)
        own_size = len(batch.owned[self._rank]) * batch.part_size
        received = directions.new_empty(batch.num_ranks * own_size)
        return self._start(sent, received, batch.sizes, [own_size] * batch.num_ranks)

    def _start_scatter(self, directions: Tensor, batch: MatrixBatch, returned: Tensor) -> _Exchange:
        """The way back: into the places from which the rows were sent."""
        received = directions[batch.start : batch.end]
        if batch.num_ranks == 1:  # `returned` shares its memory
            return _Exchange(None, returned, received)
        own_size = len(batch.owned[self._rank]) * batch.part_size
        return self._start(returned, received, [own_size] * batch.num_ranks, batch.sizes)

    def _start_broadcasts(self, directions: Tensor) -> list[_Exchange]:
        """Send the rows of each batch from the replica that orthogonalized it to the others."""
        if self._num_replicas == 1:
            return []
        assert self._world is not None
        with self._timed():
            parts = [directions[batch.start : batch.end] for batch in self._batches]
            works = [
                start_broadcast(part, number % self._num_replicas, self._world.replica_group)
                for number, part in enumerate(parts)
            ]
        return [_Exchange(work, part, part) for work, part in zip(works, parts, strict=True)]

    def _start(self, sent: Tensor, received: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> _Exchange:
        assert self._world is not None
        with self._timed():
            work = start_all_to_all(
                sent, received, sent_sizes=sent_sizes, received_sizes=received_sizes, group=self._world.shard_group
            )
        return _Exchange(work, sent, received)

    def _finish(self, exchange: _Exchange) -> Tensor:
        if exchange.work is not None:
            with self._timed():
                exchange.work.wait()
        return exchange.received

    def _timed(self) -> Any:
        return nullcontext() if self._comm_stats is None else self._comm_stats.timed()
