"""The data mixture as arithmetic: the source and the turn (n-th sample of that source) of each row of each batch.

Why: weights must hold exactly, change at a given batch, and need no state: a run that resumes, rewinds or turns a
source off computes the same rows as one that had the same weights from the start.
How: positions (batch index x batch size + row) are assigned by a balanced tree of two-way splits. The first n positions
of a node contain round(n x share) of its left side. So one multiplication gives the side of a position and how many
came before it, and one division inverts that. Every prefix of a phase contains each source's share to within half a
sample per level of the tree, every batch is close to it, and a source's turns come in order, without a gap, also across
phases. Rows are shuffled within their batch; otherwise some ranks would always get the same sources.
Shares are multiples of 2 ** -30 in a node; a weight above 0 gets at least one of them.
Left out: randomness. The composition of a batch does not vary as independent draws would.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import ConfigError
from harness.core.batch_sizes import BatchSize, BatchSizes
from harness.data.order.order import shuffled

Ints = NDArray[np.int64]

SHARES = 2**30

Count = TypeVar("Count", int, Ints)


class Change(NamedTuple):
    """New weights from a batch on; a source that is not named keeps its weight."""

    from_batch: int
    weights: Mapping[str, float]


class MixturePhase(NamedTuple):
    """A run of batches with the same weights, up to the next phase."""

    from_batch: int
    weights: tuple[float, ...]
    """In the order of the sources."""


def phases_of(
    base: Mapping[str, float], changes: Sequence[Change], amendments: Sequence[Change] = ()
) -> list[MixturePhase]:
    """The phases of a run, from the base weights, the configured changes and the ledger's amendments.

    An amendment wins over every configured change of the sources it names, also over one at a later batch. Of two
    amendments the later entry wins.
    """
    for name in {name for amendment in amendments for name in amendment.weights} - base.keys():
        raise ConfigError("data.sources", f"the ledger sets the weight of {name!r}; there are only {', '.join(base)}")
    planned = sorted(changes, key=lambda change: change.from_batch)
    phases: list[MixturePhase] = []
    for batch in sorted({0, *(change.from_batch for change in (*planned, *amendments))}):
        weights = dict(base)
        for change in (*planned, *amendments):
            if change.from_batch <= batch:
                weights |= change.weights
        if not any(weights.values()):
            raise ConfigError("data.sources", f"no source has a weight above 0 from batch {batch} on")
        if sum(weights.values()) == math.inf:
            raise ConfigError("data.sources", f"the weights from batch {batch} on have no finite sum")
        phases.append(MixturePhase(batch, tuple(weights[name] for name in base)))
    return phases


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRecipe:
    """The configured mixture, before the ledger's amendments."""

    weights: Mapping[str, float]
    changes: Sequence[Change]
    batch_size: int
    seed: int
    sizes: Sequence[BatchSize] = ()
    """The batch sizes of the run so far, the current one last; empty: `batch_size` from the start."""

    def mixture(self, amendments: Sequence[Change] = ()) -> Mixture:
        phases = phases_of(self.weights, self.changes, amendments)
        return Mixture(phases, batch_size=self.batch_size, seed=self.seed, sizes=self.sizes)


@final
class Mixture:
    """Source and turn of every row; pure and immutable, so safe to use from several threads."""

    def __init__(
        self, phases: Sequence[MixturePhase], *, batch_size: int, seed: int, sizes: Sequence[BatchSize] = ()
    ) -> None:
        assert phases[0].from_batch == 0
        self.phases = tuple(phases)
        self.sizes = BatchSizes(sizes or [BatchSize(0, batch_size)])
        self.num_sources = len(phases[0].weights)
        self._seed = seed
        self._starts = [phase.from_batch for phase in phases]
        self._trees = [_tree(phase.weights) for phase in phases]
        self._taken = [[0] * self.num_sources]
        """For each phase, the number of turns of each source before it."""
        for tree, (start, end) in zip(self._trees, zip(self._starts, self._starts[1:], strict=False), strict=False):
            given = _counts(tree, self.sizes.position(end) - self.sizes.position(start))
            self._taken.append([before + given.get(source, 0) for source, before in enumerate(self._taken[-1])])

    def batch(self, index: int) -> tuple[Ints, Ints]:
        """Source and turn of each row of the global batch."""
        phase, size = bisect_right(self._starts, index) - 1, self.sizes.at(index)
        first = self.sizes.position(index) - self.sizes.position(self._starts[phase])
        sources, turns = _deal(self._trees[phase], np.arange(first, first + size, dtype=np.int64))
        turns = turns + np.array(self._taken[phase], dtype=np.int64)[sources]
        if self.num_sources > 1:
            rows = shuffled(size, (self._seed, index))
            sources, turns = sources[rows], turns[rows]
        return sources, turns

    def batches(self, first: int, count: int) -> tuple[Ints, Ints]:
        """`batch` for `count` indices of the same size, one row each. With one source, turns equal positions."""
        if self.num_sources == 1:
            turns = np.arange(self.sizes.position(first), self.sizes.position(first + count)).reshape(count, -1)
            return np.zeros_like(turns), turns
        dealt = [self.batch(index) for index in range(first, first + count)]
        return np.stack([sources for sources, _ in dealt]), np.stack([turns for _, turns in dealt])

    def find(self, source: int, turn: int) -> tuple[int, int] | None:
        """Batch index and row of a source's turn, the inverse of `batch`; None: the turn never comes."""
        phase = bisect_right([taken[source] for taken in self._taken], turn) - 1
        if self.phases[phase].weights[source] == 0:
            return None
        place = _find(self._trees[phase], source, turn - self._taken[phase][source])
        index, place = self.sizes.find(self.sizes.position(self._starts[phase]) + place)
        if self.num_sources > 1:
            place = int(np.flatnonzero(shuffled(self.sizes.at(index), (self._seed, index)) == place)[0])
        return index, place

    def batches_of(self, source: int, turns: Ints) -> Ints:
        """The batch index of each turn of a source; all of them must come (`num_turns`)."""
        if self.num_sources == 1 and self.sizes.is_constant:
            return turns // self.sizes.largest
        taken = [taken[source] for taken in self._taken]
        phases = np.searchsorted(taken, turns, side="right") - 1
        found = np.empty_like(turns)
        for place, (phase, turn) in enumerate(zip(phases.tolist(), turns.tolist(), strict=True)):
            position = _find(self._trees[phase], source, turn - taken[phase])
            found[place] = self.sizes.find(self.sizes.position(self._starts[phase]) + position)[0]
        return found

    def num_turns(self, source: int) -> int | None:
        """How many turns a source has in the whole run; None: there is no end."""
        return None if self.phases[-1].weights[source] else self._taken[-1][source]

    def turns_in(self, source: int, index: int) -> range:
        """The turns of a source in one batch."""
        return range(self.turns_before(index)[source], self.turns_before(index + 1)[source])

    def turns_before(self, index: int) -> list[int]:
        """How many turns each source has in the batches before `index`."""
        phase = bisect_right(self._starts, index) - 1
        num_places = self.sizes.position(index) - self.sizes.position(self._starts[phase])
        given = _counts(self._trees[phase], num_places)
        return [before + given.get(source, 0) for source, before in enumerate(self._taken[phase])]


@final
@dataclass(frozen=True, slots=True)
class _Split:
    left: _Split | int
    right: _Split | int
    share: int
    """Share of the left side, as a multiple of 1 / SHARES."""
    sources: frozenset[int]

    def num_left(self, places: Count) -> Count:
        """How many of the first `places` positions belong to the left side; rounded, and free of overflow."""
        return places // SHARES * self.share + (places % SHARES * self.share + SHARES // 2) // SHARES


def _tree(weights: Sequence[float]) -> _Split | int:
    return _node([source for source, weight in enumerate(weights) if weight > 0], weights)


def _node(sources: list[int], weights: Sequence[float]) -> _Split | int:
    if len(sources) == 1:
        return sources[0]
    middle = len(sources) // 2
    left, right = sources[:middle], sources[middle:]
    fraction = sum(weights[source] for source in left) / sum(weights[source] for source in sources)
    share = min(max(round(fraction * SHARES), 1), SHARES - 1)
    return _Split(_node(left, weights), _node(right, weights), share, frozenset(sources))


def _deal(node: _Split | int, places: Ints) -> tuple[Ints, Ints]:
    """Source and turn of each position of a node."""
    if isinstance(node, int):
        return np.full(len(places), node, dtype=np.int64), places
    before = node.num_left(places)
    is_left = node.num_left(places + 1) > before
    sources, turns = np.empty_like(places), np.empty_like(places)
    for side, here, nth in ((node.left, is_left, before), (node.right, ~is_left, places - before)):
        sources[here], turns[here] = _deal(side, nth[here])
    return sources, turns


def _counts(node: _Split | int, num_places: int) -> dict[int, int]:
    """How often each source occurs in the first `num_places` positions of a node."""
    if isinstance(node, int):
        return {node: num_places}
    num_left = node.num_left(num_places)
    return _counts(node.left, num_left) | _counts(node.right, num_places - num_left)


def _find(node: _Split | int, source: int, turn: int) -> int:
    """The position in a node at which a source has its turn."""
    if isinstance(node, int):
        return turn
    in_left = source == node.left if isinstance(node.left, int) else source in node.left.sources
    nth = _find(node.left if in_left else node.right, source, turn)
    share, offset = (node.share, SHARES // 2) if in_left else (SHARES - node.share, SHARES // 2 - 1)
    return -(-((nth + 1) * SHARES - offset) // share) - 1
