"""Which of a model's maps compute in fp8, and what is known of them between steps.

How: chosen maps are replaced by their twins with the same parameter before the model is sharded. All of them share one
table of meters and one switch. In a step that is probed the table becomes sums that add up over ranks: how many numbers
became zero, by layer group; how many tensors went beyond the range; and how many have which scale.
The recipe `delayed` remembers the largest numbers of the last steps that were applied. That memory is in no checkpoint
and no snapshot: after a restore, and after a while in bf16, the first steps take the scales of the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from harness.config.precision import Fp8Config, Fp8Recipe, PrecisionConfig, PrecisionKind
from harness.precision.fp8.formats import LIMITS
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch
from harness.precision.fp8.meters import METER, SCALE_EXPONENTS, Column, Role, dtype_of, probing, scale_of

ATTENTION, MLP = ("query", "key", "value", "output"), ("gate", "up", "down")

FIRST_READER = {"key": "query", "value": "query", "up": "gate"}
"""Maps whose input another one reads too, which is the one that takes notes of it."""
PRIMED_STEPS = 4
"""Steps that take the scales of the tensors themselves where none is remembered; the first may be refused."""
SATURATED = 2.0
"""How far beyond the range the largest number must be. The one that a scale is made for lies on its edge, and where a
batch has gradients a little larger than any that is remembered, all of its tensors lie beyond: their tops are cut, and
nothing is amiss."""


@final
@dataclass(slots=True)
class Products:
    maps: list[Fp8Linear]
    groups: list[str]
    """The layer group of each."""
    readers: list[int]
    """Of each the number of the map that takes notes of its input."""
    switch: Switch
    recipe: Fp8Recipe
    history_steps: int = 1
    members: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Layer groups x maps: 1 where a map is of the group."""
    first_readers: Tensor = field(default_factory=lambda: torch.zeros(0))
    limits: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The largest number of each role."""
    table: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The meters of all maps."""
    history: Tensor = field(default_factory=lambda: torch.zeros(0))
    """delayed only: the largest numbers of the last steps."""
    remembered: Tensor = field(default_factory=lambda: torch.zeros(0))
    """delayed only: the scales that follow from them."""
    primed_steps: int = PRIMED_STEPS
    """delayed only: steps to come whose scales are not remembered."""

    @property
    def is_delayed(self) -> bool:
        return self.recipe is Fp8Recipe.delayed

    @property
    def can_fall_back(self) -> bool:
        return bool(self.maps)

    @property
    def in_fp8(self) -> bool | None:
        """Whether the passes compute in fp8 now; None where they never do."""
        return self.switch.is_on if self.maps else None

    def materialize(self, device: torch.device, groups: Sequence[str]) -> None:
        """Meters and memory, after the model got its own; `groups`: all layer groups of the model."""
        count = len(self.maps)
        is_member = [[float(own == group) for own in self.groups] for group in groups]
        self.members = torch.tensor(is_member, dtype=torch.float32, device=device)
        self.first_readers = torch.tensor(self.readers, dtype=torch.int64, device=device)
        limits = [LIMITS[dtype_of(role, self.recipe)] for role in Role]
        self.limits = torch.tensor(limits, dtype=torch.float32, device=device)
        self.table = torch.zeros(count, *METER, device=device)
        self.remembered = torch.ones(count, len(Role) + 1, device=device)[:, :-1]  # aligned like meters
        self.history = torch.zeros(self.history_steps, count, len(Role), device=device)
        for number, each in enumerate(self.maps):
            each.meter, each.remembered = self.table[number], self.remembered[number]
        self.forget()

    def use_fp8(self, wanted: bool) -> None:
        """From the next forward pass on."""
        if wanted and not self.switch.is_on:
            self.forget()
        self.switch.is_on = wanted

    def forget(self) -> None:
        """What was remembered belongs to other weights."""
        self.history.zero_()
        self.primed_steps = PRIMED_STEPS

    def probing(self, probe: bool) -> AbstractContextManager[None]:
        """While passes run, of a step or of an evaluation."""
        return probing(counts=probe, primes=self.primed_steps > 0) if self.in_fp8 else nullcontext()

    @torch.no_grad()
    def learn(self, refused: Tensor) -> None:
        """After a step: what its largest numbers say about the scales of the next one; nothing where it was refused."""
        if not (self.is_delayed and self.in_fp8):
            return
        largest = self.table[..., Column.largest]
        largest[:, Role.activations] = largest[self.first_readers, Role.activations]
        newest = torch.where(largest.isfinite(), largest, 0.0)[None]
        self.history.copy_(torch.where(refused > 0, self.history, torch.cat([newest, self.history[:-1]])))
        self.remembered.copy_(scale_of(self.history.amax(dim=0), self.limits))
        self.table.zero_()
        self.primed_steps = max(0, self.primed_steps - 1)

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """The sums of a probed step, each flat: numbers by layer group and role, tensors by role, and by role and bin
        of their scales. The meters begin anew, but for what is remembered."""
        largest, scale, zeros, nonzeros, *_ = self.table.unbind(dim=-1)
        is_seen = (nonzeros > 0).to(torch.float32)
        is_beyond = (largest * scale > SATURATED * self.limits).to(torch.float32)
        bins = (scale.log2() - SCALE_EXPONENTS.start) / SCALE_EXPONENTS.step
        numbers = bins.nan_to_num(0.0).clamp(0, len(SCALE_EXPONENTS) - 1).to(torch.int64)
        scales = one_hot(numbers, len(SCALE_EXPONENTS)) * is_seen[..., None]
        sums = {
            "fp8_zeros": (self.members @ zeros).flatten(),
            "fp8_nonzeros": (self.members @ nonzeros).flatten(),
            "fp8_saturated": (is_beyond * is_seen).sum(dim=0),
            "fp8_tensors": is_seen.sum(dim=0),
            "fp8_scales": scales.sum(dim=0).flatten(),
        }
        self.table[..., Column.scale if self.is_delayed else Column.largest : Column.guess] = 0.0
        return sums


def lower(blocks: Iterable[nn.Module], cfg: PrecisionConfig) -> Products:
    """Replace the maps that are to compute in fp8 by their twins; none where the run is not in fp8."""
    products = Products(
        maps=[],
        groups=[],
        readers=[],
        switch=Switch(),
        recipe=cfg.fp8.recipe,
        history_steps=cfg.fp8.history_steps,
    )
    if cfg.kind is not PrecisionKind.fp8:
        return products
    recipe = Recipe(str(cfg.fp8.recipe), str(cfg.fp8.engine))
    layers = list(enumerate(blocks))
    for index, block in layers[cfg.fp8.keep_first_blocks : len(layers) - cfg.fp8.keep_last_blocks]:
        for parent, name in _chosen(block, cfg.fp8):
            plain: nn.Linear = getattr(parent, name)
            twin = Fp8Linear(plain.in_features, plain.out_features, recipe=recipe, switch=products.switch)
            twin.weight = plain.weight
            setattr(parent, name, twin)
            products.maps.append(twin)
            products.groups.append(f"blocks.{index}")
            number = len(products.readers)
            siblings = ATTENTION if name in ATTENTION else MLP
            reader = siblings.index(FIRST_READER.get(name, name)) - siblings.index(name)
            products.readers.append(number + reader)
    return products


def _chosen(block: nn.Module, cfg: Fp8Config) -> Iterator[tuple[nn.Module, str]]:
    """The maps of a block that are to compute in fp8: each with the module it is part of."""
    for is_wanted, part, names in ((cfg.attention, "attention", ATTENTION), (cfg.mlp, "mlp", MLP)):
        if is_wanted:
            yield from ((block.get_submodule(part), name) for name in names)
