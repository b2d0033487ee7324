"""The rows that can be asked for, and how each contender is started.

Modules of a contender are imported where it starts, in its own process: a peer never runs beside code of this harness
that it did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple, final

from harness.core.rundir import RunDir
from harness.distributed.world import World
from tests.bench.clock import Side
from tests.bench.gpu.setting import Setting


@final
@dataclass(slots=True)
class Entry:
    """A contender that is built and warm."""

    sides: dict[str, Side]
    """Its ways to make steps, by the name that the table gives them; they take turns."""
    losses: Callable[[], tuple[float, float] | None]
    """Mean loss of its first step and of its newest."""
    note: Callable[[], str] = str
    judging_s: list[float] = field(default_factory=list)
    """Of this harness: the host's time for each report."""


class Row(NamedTuple):
    what: str
    module: str
    """Has `start(name, world, setting, run)`, a context manager that yields an `Entry`."""
    is_ours: bool = False
    is_default: bool = True
    is_as_shipped: bool = False
    """Nothing is set for it: neither the order of attention kernels nor the precision of fp32 products."""
    packages: tuple[str, ...] = ()
    """That a directory of the command line may hold."""


OURS, TITAN, HUGGING_FACE = "tests.bench.gpu.ours", "tests.bench.gpu.titan", "tests.bench.gpu.hugging_face"
TORCHTITAN, TORCHAO = "torchtitan", "torchao"

ROWS = {
    "ours-bf16": Row("this harness, bf16, sentinel on and off", OURS, is_ours=True),
    "ours-bf16-cluster": Row("the same with FSDP's copies, which a single rank could skip", OURS, is_ours=True),
    "ours-fp8": Row("this harness, fp8, scales of the tensor itself", OURS, is_ours=True),
    "ours-fp8-delayed": Row("this harness, fp8, scales of the last steps", OURS, is_ours=True),
    "torchtitan-shipped": Row(
        "torchtitan with its own llama3_8b.toml", TITAN, is_as_shipped=True, packages=(TORCHTITAN,)
    ),
    "torchtitan": Row("torchtitan at its best", TITAN, packages=(TORCHTITAN,)),
    "torchtitan-float8-tensorwise": Row(
        "the same with torchao's float8, one scale a tensor", TITAN, packages=(TORCHTITAN, TORCHAO)
    ),
    "torchtitan-float8-rowwise": Row(
        "the same with torchao's float8, one scale a row", TITAN, packages=(TORCHTITAN, TORCHAO)
    ),
    "huggingface": Row("Hugging Face's Llama, FSDP2, compiled block by block", HUGGING_FACE),
    "huggingface-whole": Row("the same, all layers in one graph", HUGGING_FACE),
    "lightning": Row("Hugging Face's Llama by Lightning Fabric", HUGGING_FACE, is_default=False),
    "accelerate": Row("Hugging Face's Llama by accelerate", HUGGING_FACE, is_default=False),
}


@contextmanager
def started(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    with import_module(ROWS[name].module).start(name, world, setting, run) as entry:
        yield entry
