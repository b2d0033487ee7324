"""A slot of the snapshot ring: memory for one snapshot of this rank's shards, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from harness.core.state import RunState
from harness.distributed.host_memory import PinnedBlock


@final
@dataclass(slots=True)
class Slot:
    """Memory for one snapshot, empty or filled."""

    name: str
    """Name of its block among the files in shared memory."""
    block: PinnedBlock
    tensors: dict[str, Tensor]
    """This rank's part of every tensor."""
    as_sharded: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """Makes DTensors of such parts."""
    copied: torch.cuda.Event | None
    state: RunState = field(default_factory=RunState)
    is_taken: bool = False
    is_complete: bool = False
    """The reports of all steps up to it have arrived."""
    is_trusted: bool = False
    """Every step up to it and one step computed from it were clean; implies is_taken and is_complete."""
    is_saving: bool = False
    """It is being written to disk and must not be overwritten."""
    is_held: bool = False
    """A trial returns to it; it must not be overwritten."""
    is_sending: bool = False
    """It is being sent to a partner; it is overwritten only if no other slot is free."""
    _is_finite: bool | None = None
    _sharded: dict[str, Tensor] | None = None

    @property
    def sharded(self) -> dict[str, Tensor]:
        """The same memory as DTensors; checkpoints are written from these. Made at the first use: most slots of a ring
        are never written to disk, and making them takes a tenth of the start of a rank."""
        if self._sharded is None:
            self._sharded = self.as_sharded(self.tensors)
        return self._sharded

    def complete(self, *, step: int, refused_in_row: int, sentinel: dict[str, Any] | None = None) -> None:
        """Fill in the parts of the run state that come from the reports up to this iteration."""
        self.state = replace(self.state, step=step, refused_in_row=refused_in_row, sentinel=sentinel or {})
        self.is_complete = True

    def wait(self) -> None:
        """Block the host until the device-to-host copy has finished."""
        if self.copied is not None:
            self.copied.synchronize()  # sync: only readers of a snapshot wait for its copy; a step never does

    @property
    def is_finite(self) -> bool:
        """Whether all values of this rank's shards are finite; computed once, on the host, on first use."""
        if self._is_finite is None:
            self.wait()
            self._is_finite = are_finite(self.tensors.values())
        return self._is_finite

    def begin(self, state: RunState) -> None:
        """Reset the slot for a new snapshot."""
        self.state = replace(state)
        self.is_taken, self.is_complete, self.is_trusted, self._is_finite = True, False, False, None

    def adopt(self, state: RunState) -> None:
        """Mark the slot as the trusted snapshot of this state; its memory already holds it."""
        self.begin(state)
        self.is_complete = self.is_trusted = True


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of tensors in host memory are finite."""
    floats = [part for part in tensors if part.is_floating_point() and part.numel()]
    extremes = [extreme for part in floats for extreme in torch.aminmax(part)]
    return not extremes or bool(torch.stack(extremes).isfinite().all())  # sync: none, in host memory
