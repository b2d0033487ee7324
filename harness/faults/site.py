"""The interface of fault injectors, and the view of a run that each injector gets.

Why: the trainer has no hooks for faults, and a drill must break the same run that a user would have.
How: `intercept` wraps the run's batches and mailbox. The loop reads the batch first and posts to the mailbox last,
which marks the start and the end of an iteration. An injector that needs another place (a layer, the reduction of
gradients, the corpus, a file) installs itself there when it is created. Every strike is written to `faults.jsonl` by
the rank that injects it, before the injection, because the process may not survive it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast, final

from torch import Tensor, nn

from harness.config.errors import ConfigError
from harness.core import event_json
from harness.core.event_json import to_json
from harness.core.events import FaultInjected
from harness.core.rundir import append_line
from harness.distributed.shards import local
from harness.faults.fault_plan import DATA_FAULTS, Fault
from harness.run import Run

T = TypeVar("T")


class FaultInjector(Protocol):
    """An installed fault, on one rank."""

    def before(self, iteration: int) -> None:
        """Called at the start of an iteration, before its batch is read."""

    def after(self, iteration: int) -> None:
        """Called after its update was applied or rejected and its report was posted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One fault of one run, on one rank."""

    run: Run
    fault: Fault
    number: int
    """Index in the plan."""
    seed: int
    struck: frozenset[int]
    """Iterations that this fault has struck on this rank in earlier starts; it does not strike them again."""
    begun: float = 0.0
    """Time of the first event of the log."""
    strike_times: list[float] = field(default_factory=list)
    """When it has struck in this start."""

    @property
    def is_here(self) -> bool:
        """Whether the fault strikes this rank."""
        world = self.run.parts.world
        return self.fault.strikes_rank(world.rank, world.size)

    @property
    def iteration(self) -> int:
        """The current iteration."""
        return self.run.state.iteration + 1

    def strikes(self, iteration: int) -> bool:
        """Whether the fault strikes this rank in this iteration."""
        if not self.is_here:
            return False
        if self.fault.at_s is not None:
            now = time.time()
            lasted_s = now - self.strike_times[0] if self.strike_times else None
            return not self.struck and self.fault.strikes_after(now - self.begun, lasted_s=lasted_s)
        return self.fault.strikes_at(iteration) and iteration not in self.struck

    @property
    def layer(self) -> nn.Module:
        """The module that the fault names."""
        name = self.fault.layer
        modules: dict[str, nn.Module] = dict(self.run.parts.model.named_modules())
        if not name or name not in modules:
            raise ConfigError("drill.fault.layer", f"must name a module of the model, got '{name}'")
        return modules[name]

    def weight(self, name: str) -> Tensor:
        """This rank's shard of the weight of a module."""
        parameters = self.run.parts.update.parameters
        if f"{name}.weight" not in parameters:
            raise ConfigError("drill.fault.layer", f"must name a module with a weight, '{name}' has none")
        return local(parameters[f"{name}.weight"]).detach()

    def log_strike(self, message: str, iteration: int | None = None) -> None:
        """Append an imminent injection to `faults.jsonl`, at the current iteration unless another is given."""
        self.strike_times.append(time.time())
        event = FaultInjected(
            time=self.strike_times[-1],
            iteration=self.iteration if iteration is None else iteration,
            number=self.number,
            kind=self.fault.kind,
            rank=self.run.parts.world.rank,
            message=message,
        )
        append_line(self.run.directory.faults, to_json(event))


def begin_time(run: Run) -> float:
    """Time of the first event of the log; that of this call if nothing is logged yet."""
    log = run.directory.events
    first = next(event_json.read(log), None) if log.exists() else None
    return time.time() if first is None else first.time


def earlier_strikes(run: Run, number: int, fault: Fault) -> frozenset[int]:
    """Iterations that a fault struck on this rank in earlier starts; empty for data faults, which strike again."""
    if fault.kind in DATA_FAULTS or not run.directory.faults.exists():
        return frozenset()
    return frozenset(
        event.iteration
        for event in event_json.read(run.directory.faults)
        if isinstance(event, FaultInjected) and event.number == number and event.rank == run.parts.world.rank
    )


def intercept(part: T, method: str, act: Callable[[], None], *, first: bool) -> T:
    """Wrap an object: `act` runs before (`first`) or after each call of one method; all else is passed through."""
    return cast(T, _Interceptor(part, method, act, first))


@final
class _Interceptor:
    def __init__(self, part: Any, method: str, act: Callable[[], None], first: bool) -> None:
        self._part, self._method, self._act, self._first = part, method, act, first

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return self._wrap(value) if name == self._method else value

    def __getitem__(self, index: Any) -> Any:
        if self._method != "__getitem__":
            return self._part[index]
        return self._wrap(self._part.__getitem__)(index)

    def __len__(self) -> int:
        return len(self._part)

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if self._first:
                self._act()
            result = call(*arguments, **options)
            if not self._first:
                self._act()
            return result

        return wrapper
