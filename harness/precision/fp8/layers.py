"""Converts the projections of a model to fp8, and holds their meters, scales and amax history.

How: chosen `nn.Linear` are replaced by `Fp8Linear` with the same parameter before the model is sharded. All of them
share one table of meters and one switch. In a probed step the table gives sums that add up over ranks: underflows by
layer group, the number of saturated tensors, and a histogram of scales.
The recipe `delayed` derives scales from the amax history of the last applied steps. The history is in no checkpoint and
no snapshot: after a restore, and after a time in bf16, the first steps compute scales from the tensors themselves. The
host counts these steps before it knows whether they were refused. If all of them were, the next scales follow from the
last finite amax of those steps. A tensor that had none is quantized by scale 1 until a step has measured it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from harness.config.precision import Fp8Config, Fp8Recipe, PrecisionConfig, PrecisionKind
from harness.precision.fp8.formats import LIMITS
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch
from harness.precision.fp8.quantize_meters import (
    METER,
    SCALE_EXPONENTS,
    Column,
    TensorRole,
    compute_scale,
    fp8_dtype,
    probing,
)

ATTENTION, MLP = ("query", "key", "value", "output"), ("gate", "up", "down")

SHARED_INPUT_OWNER = {"key": "query", "value": "query", "up": "gate"}
"""Projection -> the projection with the same input that records the input's statistics for both."""
PRIMED_STEPS = 4
"""Steps that compute scales from the tensors themselves while there is no history; the first may be refused."""
SATURATION_MARGIN = 2.0
"""A tensor counts as saturated if its scaled amax exceeds the range by this factor. A scale puts the amax on the edge
of the range, and if a batch has gradients slightly above the history, all of its tensors exceed it: they are clipped a
little, which is harmless."""


@final
@dataclass(slots=True)
class Fp8Layers:
    """All fp8 layers of a model."""

    layers: list[Fp8Linear]
    groups: list[str]
    """The layer group of each layer."""
    input_owners: list[int]
    """For each layer, the index of the layer that records the statistics of its input."""
    switch: Switch
    recipe: Fp8Recipe
    history_steps: int = 1
    members: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[groups, layers]: 1 if a layer belongs to the group."""
    input_owner_index: Tensor = field(default_factory=lambda: torch.zeros(0))
    """`input_owners` on the device."""
    limits: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The largest finite value of each role's format."""
    table: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The meters of all layers."""
    history: Tensor = field(default_factory=lambda: torch.zeros(0))
    """delayed only: amax of the last applied steps [history_steps, layers, roles]."""
    last_amax: Tensor = field(default_factory=lambda: torch.zeros(0))
    """delayed only: the last finite amax [layers, roles], also of refused steps; used where the history is 0."""
    delayed_scales: Tensor = field(default_factory=lambda: torch.zeros(0))
    """delayed only: the scales that follow from the history."""
    primed_steps: int = PRIMED_STEPS
    """delayed only: how many of the next steps compute scales from the tensors themselves."""

    @property
    def is_delayed(self) -> bool:
        return self.recipe is Fp8Recipe.delayed

    @property
    def can_fall_back(self) -> bool:
        return bool(self.layers)

    @property
    def in_fp8(self) -> bool | None:
        """Whether the layers compute in fp8 now; None if the model has no fp8 layers."""
        return self.switch.is_on if self.layers else None

    def materialize(self, device: torch.device, groups: Sequence[str]) -> None:
        """Allocate meters and history after the model was allocated; `groups`: all layer groups of the model."""
        count = len(self.layers)
        is_member = [[float(own == group) for own in self.groups] for group in groups]
        self.members = torch.tensor(is_member, dtype=torch.float32, device=device)
        self.input_owner_index = torch.tensor(self.input_owners, dtype=torch.int64, device=device)
        limits = [LIMITS[fp8_dtype(role, self.recipe)] for role in TensorRole]
        self.limits = torch.tensor(limits, dtype=torch.float32, device=device)
        self.table = torch.zeros(count, *METER, device=device)
        self.delayed_scales = torch.ones(count, len(TensorRole) + 1, device=device)[:, :-1]  # aligned like meters
        self.history = torch.zeros(self.history_steps, count, len(TensorRole), device=device)
        self.last_amax = torch.zeros(count, len(TensorRole), device=device)
        for number, layer in enumerate(self.layers):
            layer.meter, layer.delayed_scales = self.table[number], self.delayed_scales[number]
        self.reset_scale_history()

    def use_fp8(self, wanted: bool) -> None:
        """Switch between fp8 and bf16 from the next forward pass on."""
        if wanted and not self.switch.is_on:
            self.reset_scale_history()
        self.switch.is_on = wanted

    def reset_scale_history(self) -> None:
        """Drop the amax history, which belongs to other weights, and prime the next steps."""
        self.history.zero_()
        self.last_amax.zero_()
        self.primed_steps = PRIMED_STEPS

    def probing(self, probe: bool) -> AbstractContextManager[None]:
        """The context for the forward and backward passes of a step, or for an evaluation."""
        return probing(count_underflow=probe, prime_scales=self.primed_steps > 0) if self.in_fp8 else nullcontext()

    @torch.no_grad()
    def update_scale_history(self, refused: Tensor) -> None:
        """After a step: push its amax into the history and compute the next scales. A refused step does not enter the
        history, and changes a scale only where the history is 0."""
        if not (self.is_delayed and self.in_fp8):
            return
        amax = self.table[..., Column.amax]
        amax[:, TensorRole.activations] = amax[self.input_owner_index, TensorRole.activations]
        newest = torch.where(amax.isfinite(), amax, 0.0)
        self.history.copy_(torch.where(refused > 0, self.history, torch.cat([newest[None], self.history[:-1]])))
        self.last_amax.copy_(torch.where(newest > 0, newest, self.last_amax))
        known = self.history.amax(dim=0)
        self.delayed_scales.copy_(compute_scale(torch.where(known > 0, known, self.last_amax), self.limits))
        self.table.zero_()
        self.primed_steps = max(0, self.primed_steps - 1)

    @torch.no_grad()
    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums of a probed step, each flat, and reset the meters, except the amax of the recipe `delayed`.

        Values are counted by layer group and role, tensors by role, scales by role and histogram bin.
        """
        amax, scale, underflows, nonzeros, *_ = self.table.unbind(dim=-1)
        is_seen = (nonzeros > 0).to(torch.float32)
        is_saturated = (amax * scale > SATURATION_MARGIN * self.limits).to(torch.float32)
        bins = (scale.log2() - SCALE_EXPONENTS.start) / SCALE_EXPONENTS.step
        bin_index = bins.nan_to_num(0.0).clamp(0, len(SCALE_EXPONENTS) - 1).to(torch.int64)
        bin_numbers = torch.arange(len(SCALE_EXPONENTS), device=bin_index.device)
        scales = (bin_index[..., None] == bin_numbers) * is_seen[..., None]
        sums = {
            "fp8_zeros": (self.members @ underflows).flatten(),
            "fp8_nonzeros": (self.members @ nonzeros).flatten(),
            "fp8_saturated": (is_saturated * is_seen).sum(dim=0),
            "fp8_tensors": is_seen.sum(dim=0),
            "fp8_scales": scales.sum(dim=0).flatten(),
        }
        self.table[..., Column.scale if self.is_delayed else Column.amax : Column.last_scale] = 0.0
        return sums


def convert_to_fp8(blocks: Iterable[nn.Module], cfg: PrecisionConfig) -> Fp8Layers:
    """Replace the configured projections by `Fp8Linear`; none if the precision is not fp8."""
    converted = Fp8Layers(
        layers=[],
        groups=[],
        input_owners=[],
        switch=Switch(),
        recipe=cfg.fp8.recipe,
        history_steps=cfg.fp8.history_steps,
    )
    if cfg.kind is not PrecisionKind.fp8:
        return converted
    recipe = Recipe(str(cfg.fp8.recipe), str(cfg.fp8.engine))
    numbered = list(enumerate(blocks))
    for index, block in numbered[cfg.fp8.keep_first_blocks : len(numbered) - cfg.fp8.keep_last_blocks]:
        for parent, name in _configured_projections(block, cfg.fp8):
            plain: nn.Linear = getattr(parent, name)
            fp8_linear = Fp8Linear(plain.in_features, plain.out_features, recipe=recipe, switch=converted.switch)
            fp8_linear.weight = plain.weight
            setattr(parent, name, fp8_linear)
            converted.layers.append(fp8_linear)
            converted.groups.append(f"blocks.{index}")
            number = len(converted.input_owners)
            siblings = ATTENTION if name in ATTENTION else MLP
            offset = siblings.index(SHARED_INPUT_OWNER.get(name, name)) - siblings.index(name)
            converted.input_owners.append(number + offset)
    return converted


def _configured_projections(block: nn.Module, cfg: Fp8Config) -> Iterator[tuple[nn.Module, str]]:
    """The projections of a block that are to run in fp8: (parent module, attribute name)."""
    for is_wanted, part, names in ((cfg.attention, "attention", ATTENTION), (cfg.mlp, "mlp", MLP)):
        if is_wanted:
            yield from ((block.get_submodule(part), name) for name in names)
