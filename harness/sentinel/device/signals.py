"""The signals of a step: one fixed-size float32 vector, summed over all ranks in one all-reduce.

Why: every rank needs the same numbers at the same step to take the same decision, at the cost of one small collective.
How: `SignalLayout` maps each number to its place. Sums over data (loss, tokens, activations) add up over all ranks.
Sums over sharded state (gradients, weights, moments) are first divided by the number of replicas of each shard. Numbers
of a single rank go into its own column of a table that is zero elsewhere: the sum is then a gather, and a NaN stays in
its column. What is not measured in a step is sent as zero, so the shape of the collective never changes. Per-group sums
are row sums of a table, not index additions: on a GPU, index additions have no fixed order, and the clip norm would
differ between runs.
Left out: the ratio of each single gradient to its second moment. Rows of rare tokens have moments near zero and would
dominate a mean; so second moments are summed per layer group and compared with the gradient of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from harness.core.events import TOKEN_LOSS_EDGES
from harness.distributed.bit_digests import stage_names
from harness.distributed.collectives import all_reduce_max, all_reduce_sum
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.world import World
from harness.precision.fp8.quantize_meters import SCALE_EXPONENTS, TensorRole
from harness.sentinel.device.local_sums import (
    square_sums,
    square_sums_in_one_launch,
    state_sums,
    state_sums_in_one_pass,
)
from harness.sentinel.device.slots import DIGEST_BITS, LIMBS, SLOTS, split_fingerprint

SCALARS = (
    *("loss", "z_loss", "tokens", "stop", "save", "command", "v", "update", "weights"),
    *("entropy", "entropy_tokens"),
)
PARTS = (
    "scalars",
    "group_squares",
    "group_params",
    "group_moments",
    "group_updates",
    "attention_logits",
    "layer_squares",
    "source_losses",
    "source_tokens",
    "token_losses",
    "fp8_zeros",
    "fp8_nonzeros",
    "fp8_saturated",
    "fp8_tensors",
    "fp8_scales",
    "slots",
)
"""The parts of the vector, in order."""


@dataclass(frozen=True)
class SignalLayout:
    """The place of each number in the signal vector."""

    groups: tuple[str, ...]
    """Layer groups with separate gradient and weight norms."""
    layers: tuple[str, ...]
    """Layers whose activations are sampled."""
    sources: tuple[str, ...]
    """Data sources with separate losses."""
    num_ranks: int = 1
    context: int = 1
    """Number of neighbouring ranks that share their sequences."""
    has_fp8: bool = False
    """Whether the run uses fp8; adds the parts that measure underflow and saturation."""

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The layer groups that are transformer blocks."""
        return tuple(group for group in self.groups if group.startswith("blocks."))

    @cached_property
    def parts(self) -> dict[str, slice]:
        """Part name -> its slice of the vector."""
        groups, sources, roles = len(self.groups), len(self.sources), len(TensorRole) if self.has_fp8 else 0
        lengths = (
            *(len(SCALARS), groups, groups, groups, groups, len(self.blocks), len(self.layers)),
            *(sources, sources, len(TOKEN_LOSS_EDGES) + 1),
            *(roles * groups, roles * groups, roles, roles, roles * len(SCALE_EXPONENTS)),
            len(SLOTS) * self.num_ranks,
        )
        ends = list(accumulate(lengths))
        return {name: slice(end - length, end) for name, length, end in zip(PARTS, lengths, ends, strict=True)}

    @property
    def size(self) -> int:
        return int(self.parts[PARTS[-1]].stop)

    def scalar(self, vector: Tensor, name: str) -> Tensor:
        return vector[SCALARS.index(name)]

    def part(self, vector: Tensor, name: str) -> Tensor:
        return vector[self.parts[name]]

    def group_squares(self, vector: Tensor) -> Tensor:
        return self.part(vector, "group_squares")

    def slots(self, vector: Tensor) -> Tensor:
        """`SLOTS` x ranks."""
        return self.part(vector, "slots").view(len(SLOTS), self.num_ranks)

    def slot(self, vector: Tensor, name: str) -> Tensor:
        """One slot of all ranks [ranks]."""
        return self.slots(vector)[SLOTS.index(name)]

    def describe_stage(self, stage: int) -> tuple[str, list[str]]:
        """What a stage of a computation is, and its layer groups (`harness.distributed.bit_digests`)."""
        name, group = stage_names(len(self.blocks))[stage]
        others = [own for own in self.groups if own not in self.blocks]
        return name, [group] if group in self.groups else others


def group_of(parameter_name: str) -> str:
    """The layer group of a parameter: its block, or its top-level module outside the blocks."""
    first, _, rest = parameter_name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


class Signals:
    """Accumulates the signals of one step on this rank, then sums them over all ranks."""

    def __init__(
        self,
        layout: SignalLayout,
        *,
        parameters: Mapping[str, Tensor],
        world: World,
        comm_stats: CommStats,
        own_kernels: bool = False,
    ) -> None:
        """`own_kernels`: use the Triton kernels of the harness for sums over gradients and state; CUDA only."""
        self.layout = layout
        self._sum_squares = square_sums_in_one_launch if own_kernels else square_sums
        self._sum_state = state_sums_in_one_pass if own_kernels else state_sums
        self._world = world
        self._comm_stats = comm_stats
        self._parameters = dict(parameters)
        groups = [layout.groups.index(group_of(name)) for name in parameters]
        table = torch.full((len(layout.groups), max(Counter(groups).values())), -1)
        for number, group in enumerate(groups):
            table[group, groups[:number].count(group)] = number
        self._is_filled = (table >= 0).to(world.device)
        """[groups, width]: a table with one row per layer group; cells at the end of a row may have no parameter."""
        self._parameter_numbers = table.clamp(min=0).view(-1).to(world.device)
        """The parameter of each cell; any number in an empty cell."""
        self._source_numbers = torch.arange(len(layout.sources), device=world.device)[:, None]
        self.clear()

    def clear(self) -> None:
        self.vector = torch.zeros(self.layout.size, dtype=torch.float32, device=self._world.device)

    def add_forward(
        self,
        *,
        row_losses: Tensor,
        row_tokens: Tensor,
        sources: Tensor,
        z_loss: Tensor,
        layers: Tensor | None,
        token_losses: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> None:
        """Add one micro-batch whose rows come from `sources`; `layers`, `token_losses` and `entropy` only on a probed
        step."""
        self._add("loss", row_losses.sum())
        self._add("z_loss", z_loss)
        self._add("tokens", row_tokens.sum())
        is_from = self._source_numbers == sources
        self._part("source_losses").add_(torch.where(is_from, row_losses, 0.0).sum(dim=1))
        self._part("source_tokens").add_(torch.where(is_from, row_tokens, 0.0).sum(dim=1))
        if layers is not None:
            self._part("layer_squares").add_(layers)
        if token_losses is not None:
            self._part("token_losses").add_(token_losses)
        if entropy is not None:
            self._add("entropy", entropy[0])
            self._add("entropy_tokens", entropy[1])

    def add_attention_logits(self, logits: Tensor) -> None:
        """Add this rank's largest sampled attention logit of each layer, from [layers, heads]; negative ones as 0.

        The queries of a sequence are spread over its context group, so the largest one is that of the group.
        """
        largest = logits.amax(dim=1).clamp(min=0)
        if self._world.context_group is not None:
            with self._comm_stats.timed():
                all_reduce_max(largest, self._world.context_group)
        self._part("attention_logits").copy_(largest)

    def add_gradients(self) -> None:
        """Add the squared gradient norm of each layer group, and of this rank before the reduce-scatter.

        With world_size 1 both are the same gradient.
        """
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        assert len(gradients) == len(self._parameters), "every parameter takes part in every step"
        self._part("group_squares").add_(self._by_group(self._sum_squares(gradients)))
        if self._comm_stats.measures_gradients:
            self._set_slot("grad_square", self._comm_stats.take_square_sum())
        elif self._world.size == 1:
            self._set_slot("grad_square", self._part("group_squares").sum())

    @torch.no_grad()
    def add_state(
        self,
        *,
        moments: Mapping[str, Mapping[str, Tensor]],
        rates: Mapping[str, Tensor],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Add norms of weights, second moments and the Adam update.

        `moments`: parameter name -> step, exp_avg, exp_avg_sq. `rates`: parameter name -> lr of the next update.
        Parameters without exp_avg_sq are updated by Muon. Their layer groups have no second moment to compare the
        gradient with, and `add_updates` adds their update.
        """
        names = [name for name in self._parameters if "exp_avg_sq" in moments[name]]
        parameters = [self._parameters[name] for name in names]
        firsts, seconds = ([moments[name][key] for name in names] for key in ("exp_avg", "exp_avg_sq"))
        step = moments[names[0]]["step"].clamp(min=1)
        first_correction, second_correction = (1 - torch.pow(beta, step) for beta in betas)
        sums = self._sum_state(parameters, firsts, seconds, second_correction, eps=eps)
        squares, second_sums = sums.weight_squares, sums.seconds
        if len(names) < len(self._parameters):
            squares = self._sum_squares(list(self._parameters.values()))
            second_sums = self._spread(names, second_sums)
        self._part("group_params").add_(self._by_group(squares))
        self._part("group_moments").add_(self._by_group(second_sums / second_correction))
        self._add("v", sums.second_squares.sum() / self._world.replicate)
        steps = torch.stack([rates[name] for name in names]) / first_correction
        squares = sums.directions * steps.square()
        self._add("update", squares.sum() / self._world.replicate)
        if len(names) < len(self._parameters):
            squares = self._fill(dict(zip(names, squares.unbind(), strict=True)))
        self._part("group_updates").add_(self._by_group(squares))

    def _spread(self, names: list[str], values: Tensor) -> Tensor:
        """One number per parameter, from those of the parameters in `names`; zero in layer groups that have others."""
        missing = {group_of(name) for name in self._parameters.keys() - set(names)}
        by_name = dict(zip(names, values.unbind(), strict=True))
        return self._fill({name: value for name, value in by_name.items() if group_of(name) not in missing})

    def _fill(self, by_name: Mapping[str, Tensor]) -> Tensor:
        """One number per parameter; zero where none is given."""
        zero = self.vector.new_zeros(())
        return torch.stack([by_name.get(name, zero) for name in self._parameters])

    def add_updates(self, squares: Mapping[str, Tensor]) -> None:
        """Add squared norms of updates by another optimizer than Adam: name of each parameter that this rank updates ->
        value."""
        by_parameter = self._fill(squares)
        self._add("update", by_parameter.sum() / self._world.replicate)
        self._part("group_updates").add_(self._by_group(by_parameter))

    def add_weights(self, *, bits: Tensor, square: Tensor, changed: Tensor) -> None:
        """Add the sums over this rank's weights of their bit patterns (modulo 2**32) and of their squares, and 1 if the
        last update found them changed."""
        self._set_slot("weights_low", bits & 0xFFFF)
        self._set_slot("weights_high", bits >> 16)
        self._set_slot("weights_changed", changed)
        self._add("weights", square / self._world.replicate)

    def add_exchange(self, first: Tensor | None) -> None:
        """Add the number of the first exchange in which this rank sent NaN or Inf to its context group; 0: in none;
        None: there was no exchange."""
        if first is not None:
            self._set_slot("exchange", first)

    def add_corruption(self, stage: Tensor, exchange: Tensor | None = None) -> None:
        """Add 1 + the first stage at which a micro-batch that was computed twice differs; 0: the bits are equal.
        `exchange`: the number of the first exchange with its context group that differs."""
        self._set_slot("corruption", stage)
        if exchange is not None:
            self._set_slot("corrupted_exchange", exchange)

    def add_fp8(self, sums: Mapping[str, Tensor]) -> None:
        """Add the fp8 underflow and saturation counts of a probed step: part name -> values."""
        for name, values in sums.items():
            self._part(name).add_(values)

    def add_requests(self, *, stop: bool, save: bool, command: bool) -> None:
        """Add external requests to this rank; all ranks see them at the same iteration."""
        for name, is_requested in (("stop", stop), ("save", save), ("command", command)):
            if is_requested:
                self.layout.scalar(self.vector, name).fill_(1.0)

    def add_host_facts(self, *, decision: int, busy_s: float, device_s: float = 0.0, step_s: float = 0.0) -> None:
        """Add this rank's digest of decisions and branches, its host seconds outside comm_stats, the device seconds of
        the loss head of an earlier step, and the duration of the last timed step."""
        assert 0 <= decision < 2**DIGEST_BITS, "float32 cannot hold this digest exactly"
        self._own("decision").fill_(decision)
        self._own("busy_s").fill_(busy_s)
        self._own("device_s").fill_(device_s)
        self._own("step_s").fill_(step_s)

    def add_data(self, *, fingerprint: int, plan: int, own_row: int = 0, other_row: int = 0) -> None:
        """Add what this rank read: the 64-bit fingerprint of its rows, and 24-bit digests of its data plan, of one of
        its rows and of one row of another rank (0: no rows compared in this step)."""
        numbers = (plan, *split_fingerprint(fingerprint), own_row, other_row)
        assert all(0 <= number < 2**DIGEST_BITS for number in numbers), "float32 cannot hold this number exactly"
        assert fingerprint < 2**64
        first = SLOTS.index("plan")
        assert SLOTS[first:] == ("plan", *LIMBS, "own_row", "other_row")
        values = torch.tensor(numbers, dtype=torch.float32, pin_memory=self._world.device.type == "cuda")
        self.layout.slots(self.vector)[first:, self._world.rank].copy_(values, non_blocking=True)

    def reduce(self) -> Tensor:
        """All-reduce the vector (the only collective of the sentinel per step), return it, and start a new one."""
        tokens = self.layout.scalar(self.vector, "tokens")
        self._set_slot("loss", self.layout.scalar(self.vector, "loss") / tokens.clamp(min=1))
        with self._comm_stats.timed():
            reduced = all_reduce_sum(self.vector)
        self.clear()
        return reduced

    def _part(self, name: str) -> Tensor:
        return self.layout.part(self.vector, name)

    def _own(self, slot: str) -> Tensor:
        return self.layout.slots(self.vector)[SLOTS.index(slot), self._world.rank]

    def _add(self, scalar: str, value: Tensor) -> None:
        self.layout.scalar(self.vector, scalar).add_(value)

    def _set_slot(self, slot: str, value: Tensor) -> None:
        self._own(slot).copy_(value)

    def _by_group(self, sums: Tensor) -> Tensor:
        """This rank's share of the sum of each layer group, from one number per parameter."""
        cells = sums.index_select(0, self._parameter_numbers).view_as(self._is_filled)
        return torch.where(self._is_filled, cells, 0.0).sum(dim=1) / self._world.replicate
