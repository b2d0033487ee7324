"""Where a fault is put: the run it is part of, and the two moments of an iteration at which it may act.

Why: the product has no hook for faults, and a drill must break the run that a user would have, not a copy of it.
How: `watched` stands in the place of the run's batches and of its mailbox and passes everything on; what the loop takes
first and gives last mark the beginning and the end of an iteration. A fault that needs another place (a layer, the
reduction of gradients, the corpus, a file) goes there itself when it is made. Every strike is written to `faults.jsonl`
by the rank that does it, before it does it, because it may not live to tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, final

from torch import Tensor, nn

from harness.config.errors import ConfigError
from harness.core import events
from harness.core.events import FaultInjected, to_json
from harness.core.rundir import append_line
from harness.distributed.shards import local
from harness.faults.plan import OF_THE_DATA, Fault
from harness.run import Run

T = TypeVar("T")


class FaultInjector(Protocol):
    """A fault that is in place, on one rank."""

    def before(self, iteration: int) -> None:
        """The iteration is about to begin: its batch has not been taken."""

    def after(self, iteration: int) -> None:
        """Its update was applied or refused, and its report is posted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One fault of one run, as one rank sees it."""

    run: Run
    fault: Fault
    number: int
    """Place in the plan."""
    seed: int
    struck: frozenset[int]
    """Iterations at which this fault has struck this rank in earlier starts: it does not strike twice."""

    @property
    def is_here(self) -> bool:
        """Whether this rank is among those that are struck."""
        world = self.run.parts.world
        return self.fault.strikes_rank(world.rank, world.size)

    @property
    def iteration(self) -> int:
        """The one that goes on now."""
        return self.run.state.iteration + 1

    def strikes(self, iteration: int) -> bool:
        """Whether this rank is struck in this iteration."""
        return self.is_here and self.fault.strikes_at(iteration) and iteration not in self.struck

    @property
    def layer(self) -> nn.Module:
        """The module that the fault names."""
        name = self.fault.layer
        modules: dict[str, nn.Module] = dict(self.run.parts.model.named_modules())
        if not name or name not in modules:
            raise ConfigError("drill.fault.layer", f"must name a module of the model, got '{name}'")
        return modules[name]

    def weight(self, name: str) -> Tensor:
        """This rank's part of the weight of a module."""
        parameters = self.run.parts.update.parameters
        if f"{name}.weight" not in parameters:
            raise ConfigError("drill.fault.layer", f"must lead to a module with a weight, {name or 'nothing'} has none")
        return local(parameters[f"{name}.weight"]).detach()

    def tell(self, message: str, iteration: int | None = None) -> None:
        """Write down what is about to be done, for the score card and for the person who reads the run later; in the
        iteration that goes on, unless another is named."""
        event = FaultInjected(
            time=time.time(),
            iteration=self.iteration if iteration is None else iteration,
            number=self.number,
            kind=self.fault.kind,
            rank=self.run.parts.world.rank,
            message=message,
        )
        append_line(self.run.directory.faults, to_json(event))


def earlier_strikes(run: Run, number: int, fault: Fault) -> frozenset[int]:
    """Iterations at which a fault has struck this rank before this start; a fault of the data strikes again."""
    if fault.kind in OF_THE_DATA or not run.directory.faults.exists():
        return frozenset()
    return frozenset(
        event.iteration
        for event in events.read(run.directory.faults)
        if isinstance(event, FaultInjected) and event.number == number and event.rank == run.parts.world.rank
    )


def watched(part: T, method: str, act: Callable[[], None], *, first: bool) -> T:
    """A stand-in for a part that acts before (`first`) or after each call of one method, and else is the part."""
    return cast(T, _Watched(part, method, act, first))


@final
class _Watched:
    def __init__(self, part: Any, method: str, act: Callable[[], None], first: bool) -> None:
        self._part, self._method, self._act, self._first = part, method, act, first

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return self._around(value) if name == self._method else value

    def __getitem__(self, index: Any) -> Any:
        if self._method != "__getitem__":
            return self._part[index]
        return self._around(self._part.__getitem__)(index)

    def __len__(self) -> int:
        return len(self._part)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*arguments: Any, **options: Any) -> Any:
            if self._first:
                self._act()
            result = call(*arguments, **options)
            if not self._first:
                self._act()
            return result

        return around
