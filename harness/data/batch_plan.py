"""Which samples are in each batch: arithmetic on the batch index, the mixture, the sample orders and the ledger.

How: the mixture gives source and turn of each row of the global batch, and the sample order of that source gives the
sample. Nothing here reads a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import ConfigError
from harness.data.corpus.corpus import Corpus
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, Mixture, MixtureRecipe
from harness.data.order.order import Stretch, num_unrepeated, samples_in
from harness.data.order.stratify import OrderStage, StratifiedOrder, StratifyReport

Ints = NDArray[np.int64]

NUM_PLANNED = 32
"""Batches whose samples are looked up at once: in numpy a few hundred lookups cost little more than a few."""


class Source(NamedTuple):
    name: str
    corpus: Corpus
    samples: range
    """Samples of the corpus that are read."""
    seed: int
    """Seed of their order."""
    later: tuple[Stretch, ...] = ()
    """Further stretches, for files added during the run."""

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        return (Stretch(0, 0, (self.samples,)), *self.later)


class PlannedBatches(NamedTuple):
    """Sources and samples of consecutive batches, one row each; immutable, so that threads may share it."""

    mixture: Mixture
    first: int
    sources: Ints
    samples: Ints


@final
class BatchPlan:
    """The samples of every batch, by the ledger as it was when `apply_ledger` was last called."""

    def __init__(
        self, sources: Sequence[Source], *, recipe: MixtureRecipe, ledger: Ledger, stratified: StratifiedOrder | None
    ) -> None:
        self._sources = tuple(sources)
        self._recipe = recipe
        self._ledger = ledger
        self._stratified = stratified
        self._redirected: dict[int, dict[tuple[int, int], int]] = {}
        self.apply_ledger()

    @property
    def is_current(self) -> bool:
        """Whether the ledger is as it was when it was last applied."""
        return self._ledger.revision == self._applied_revision

    def apply_ledger(self) -> None:
        """Rebuild the mixture from the ledger."""
        amendments = self._amendments()
        self.mixture = self._recipe.mixture(amendments)
        if self._stratified is not None and self._stratified.num_stages != 1 + len(amendments):
            stages = [
                OrderStage(self._recipe.mixture(amendments[: number + 1]), amendment.from_batch)
                for number, amendment in enumerate(amendments)
            ]
            self._stratified = self._stratified.amended([OrderStage(self._recipe.mixture()), *stages])
        self._planned = self.plan_from(0, 1, self.mixture)
        self._applied_revision = self._ledger.revision

    def redirect(self, index: int, samples: Mapping[tuple[int, int], int]) -> None:
        """Read other samples in one batch: `samples` maps a source and its sample to the sample that is read instead.
        Other batches that contain the sample, in this epoch or another, do not change."""
        self._redirected[index] = {**self._redirected.get(index, {}), **samples}

    def can_reweight(self, from_batch: int, weights: Mapping[str, float]) -> bool:
        """Whether every batch still has a source if the ledger sets these weights from a batch on."""
        try:
            self._recipe.mixture([*self._amendments(), Change(from_batch, weights)])
        except ConfigError:
            return False
        return True

    def first_repeat(self) -> tuple[int, int]:
        """The first batch that contains a repeated sample, and the number of the source of that sample."""
        ends = [
            self.mixture.find(number, num_unrepeated(source.stretches)) for number, source in enumerate(self._sources)
        ]
        index, _, number = min((*end, number) for number, end in enumerate(ends) if end is not None)
        return index, number

    def later_stretches(self) -> list[tuple[int, str]]:
        """The first batch with a sample of each later stretch of a source, and what begins there."""
        found = [
            (self.mixture.find(number, stretch.from_turn), source.name, stretch.is_of_added)
            for number, source in enumerate(self._sources)
            for stretch in source.later
        ]
        whats = {True: "begins with its added files", False: "begins a pass over old and added files"}
        return [(place[0], f"source {name} {whats[is_of_added]}") for place, name, is_of_added in found if place]

    def stratify_report(self) -> StratifyReport | None:
        """What the limit on rare tokens applies to; None: there is no limit."""
        return None if self._stratified is None else self._stratified.report()

    def samples(self, index: int, mixture: Mixture) -> tuple[Ints, Ints]:
        """Source number and sample of its corpus, for each row of the global batch.

        Consecutive batches are planned many at once. A prefetch thread passes the mixture of its request, which the
        ledger may have replaced meanwhile.
        """
        planned = self._planned
        goes_on = planned.mixture is mixture and index == planned.first + len(planned.samples)
        if planned.mixture is not mixture or not 0 <= index - planned.first < len(planned.samples):
            self._planned = planned = self.plan_from(index, NUM_PLANNED if goes_on else 1, mixture)
        sources, samples = planned.sources[index - planned.first], planned.samples[index - planned.first]
        if redirected := self._redirected.get(index):
            pairs = zip(sources.tolist(), samples.tolist(), strict=True)
            samples = np.array([redirected.get(pair, pair[1]) for pair in pairs])
        return sources, samples

    def plan_from(self, first: int, count: int, mixture: Mixture) -> PlannedBatches:
        """Look up `count` batches, or fewer if the batch size changes before."""
        num_alike = mixture.sizes.num_alike(first)
        sources, turns = mixture.batches(first, count if num_alike is None else min(count, num_alike))
        if len(self._sources) == 1:
            samples = self._samples_at_turns(0, turns.ravel()).reshape(turns.shape)
            return PlannedBatches(mixture, first, sources, samples)
        samples = np.empty_like(turns)
        for number in range(len(self._sources)):
            here = sources == number
            samples[here] = self._samples_at_turns(number, turns[here])
        return PlannedBatches(mixture, first, sources, samples)

    def _amendments(self) -> list[Change]:
        return [Change(entry.from_batch, entry.weights) for entry in self._ledger.reweightings]

    def _samples_at_turns(self, number: int, turns: Ints) -> Ints:
        """The samples of a source at these turns."""
        if self._stratified is not None:
            turns = self._stratified.turns(number, turns)
        return samples_in(turns, self._sources[number].stretches, seed=self._sources[number].seed)
