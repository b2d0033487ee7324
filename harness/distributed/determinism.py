"""Settings of a rank that make GPU results bit-identical (`run.deterministic`).

How: every way to start a rank (launcher, Slurm, torchrun, replay) enters `deterministic_algorithms` before it touches
CUDA, NCCL or Transformer Engine, which read these variables when they start. A variable that the user has set is kept
and reported. torch then refuses operators without a deterministic kernel; Inductor does not choose kernels by measured
time (`torch_private.inductor_options`). torch would also fill uninitialized memory, which costs a pass over every
buffer; that is off, because no result depends on uninitialized memory (`tests/distributed/test_determinism.py`).
NCCL: a ring adds the ranks in the order of the ring, and both values exist for every collective of NCCL 2.28, on one
machine and on several. NVLS adds inside the switch, in an order that no setting fixes.
Left out: another number of ranks, or other hardware, sums in another order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.utils.deterministic

from harness.config.errors import ConfigError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Variable -> its value in a deterministic run."""
ALLOWED = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",)}
"""Values that the user may choose; any for the others."""


@final
@dataclass(frozen=True, slots=True)
class DeterministicSettings:
    """What was set in this rank; empty if `run.deterministic` is false."""

    is_on: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    """Variable -> value in effect."""
    kept: tuple[str, ...] = ()
    """Variables that the user had set."""

    def describe_kept(self) -> str:
        """The variables that the user had set, as the end of a line; empty if there are none."""
        kept = ", ".join(f"{name}={self.environment[name]}" for name in self.kept)
        return f"; kept from the environment: {kept}" if kept else ""

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {"enabled": self.is_on, "environment": self.environment, "set_by_user": list(self.kept)}


@contextmanager
def deterministic_algorithms(*, enabled: bool) -> Iterator[DeterministicSettings]:
    """Make results bit-identical while the block runs; does nothing unless `enabled`. Enter before CUDA is used."""
    if not enabled:
        yield DeterministicSettings()
        return
    check_environment()
    kept = tuple(name for name in ENVIRONMENT if name in os.environ)
    was_on, fills = torch.are_deterministic_algorithms_enabled(), fills_memory()
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in kept})
    torch.use_deterministic_algorithms(True)
    fill_memory(False)
    try:
        yield DeterministicSettings(True, {name: os.environ[name] for name in ENVIRONMENT}, kept)
    finally:
        fill_memory(fills)
        torch.use_deterministic_algorithms(was_on)
        for name in ENVIRONMENT.keys() - set(kept):
            os.environ.pop(name, None)


def check_environment() -> None:
    """Reject a value of the user that cannot give bit-identical results."""
    for name, values in ALLOWED.items():
        found = os.environ.get(name)
        if found is not None and found not in values:
            message = f"needs {name}={' or '.join(values)}, but the environment has {found!r}"
            raise ConfigError("run.deterministic", message)


def fills_memory() -> bool:
    """Whether torch fills uninitialized memory while deterministic algorithms are enabled."""
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


def fill_memory(is_on: bool) -> None:
    """Set whether torch fills uninitialized memory while deterministic algorithms are enabled."""
    torch.utils.deterministic.fill_uninitialized_memory = is_on  # type: ignore[attr-defined]
