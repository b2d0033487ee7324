"""All rows of the table, and how each contender is started.

The module of a contender is imported when it starts, in its own process, so that a peer runs without code of this
harness that it does not import.
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
    """A contender after it was built."""

    sides: dict[str, Side]
    """Row name in the table -> function that runs steps; the sides of an entry alternate."""
    losses: Callable[[], tuple[float, float] | None]
    """Mean loss of its first and of its latest step."""
    note: Callable[[], str] = str
    report_s: list[float] = field(default_factory=list)
    """Host seconds for each report of the sentinel; empty for peers."""


class Row(NamedTuple):
    what: str
    module: str
    """Has `start(name, world, setting, run)`, a context manager that yields an `Entry`."""
    is_ours: bool = False
    is_default: bool = True
    is_as_shipped: bool = False
    """Neither the order of attention kernels nor the precision of fp32 matmuls is set for it."""
    packages: tuple[str, ...] = ()
    """Packages that an option of the command line may locate."""


OURS, TITAN, HUGGING_FACE = "tests.bench.gpu.ours", "tests.bench.gpu.titan", "tests.bench.gpu.hugging_face"
TORCHTITAN, TORCHAO = "torchtitan", "torchao"

ROWS = {
    "ours-bf16": Row("this harness, bf16, sentinel on and off", OURS, is_ours=True),
    "ours-bf16-cluster": Row("the same with FSDP's copies, which a single rank could skip", OURS, is_ours=True),
    "ours-bf16-deterministic": Row("this harness, bf16, run.deterministic=true", OURS, is_ours=True),
    "ours-fp8": Row("this harness, fp8, current scaling", OURS, is_ours=True),
    "ours-fp8-delayed": Row("this harness, fp8, delayed scaling", OURS, is_ours=True),
    "torchtitan-shipped": Row(
        "torchtitan with its own llama3_8b.toml", TITAN, is_as_shipped=True, packages=(TORCHTITAN,)
    ),
    "torchtitan": Row("torchtitan with its best settings", TITAN, packages=(TORCHTITAN,)),
    "torchtitan-float8-tensorwise": Row(
        "the same with torchao's float8, one scale per tensor", TITAN, packages=(TORCHTITAN, TORCHAO)
    ),
    "torchtitan-float8-rowwise": Row(
        "the same with torchao's float8, one scale per row", TITAN, packages=(TORCHTITAN, TORCHAO)
    ),
    "huggingface": Row("Hugging Face's Llama, FSDP2, compiled block by block", HUGGING_FACE),
    "huggingface-whole": Row("the same, all layers in one graph", HUGGING_FACE),
    "lightning": Row("Hugging Face's Llama by Lightning Fabric", HUGGING_FACE, is_default=False),
    "accelerate": Row("Hugging Face's Llama by accelerate", HUGGING_FACE, is_default=False),
}


@contextmanager
def start_row(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    with import_module(ROWS[name].module).start(name, world, setting, run) as entry:
        yield entry
