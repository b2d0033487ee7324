"""What a drill breaks: which fault, where and when, as plain data that needs no torch.

Why: a fault must strike the same place at the same moment however often the drill is run, and on every cluster.
How: a fault is a pure function of (seed, iteration, rank): it says itself when it strikes, and what it leaves to chance
(which number, which bit) is drawn from those three. The plan lies in the run directory as `drill.json`, so that a run
that is killed and begins again, here or on another node, goes on with the same plan. An iteration never comes back, so
a fault strikes once; a batch does come back, after a rewind that did not exclude it, and spoils what it spoiled before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, final

from harness.config.errors import ConfigError, require
from harness.core.rundir import RunDir


class FaultKind(StrEnum):
    """Each touches the real thing; `harness.faults` has one small class or function for each."""

    nan_loss = "nan_loss"
    """One number of what this rank's loss is computed from is NaN."""
    nan_grad = "nan_grad"
    """One number of this rank's own gradient, before the reduction, is NaN."""
    inf_grad = "inf_grad"
    big_grad = "big_grad"
    """This rank's own gradient of one layer, before the reduction, times `factor`."""
    bit_flip_grad = "bit_flip_grad"
    """Bit `bit` of one number of this rank's own gradient is turned over."""
    bit_flip_weight = "bit_flip_weight"
    """Bit `bit` of one number of this rank's weights is turned over, after an update."""
    poisoned_batch = "poisoned_batch"
    """Rows of the batch consist of the rarest tokens."""
    scrambled_batch = "scrambled_batch"
    """Rows of the batch are tokens drawn at random."""
    duplicate_batch = "duplicate_batch"
    """The batch is the one before it again."""
    repeated_batch = "repeated_batch"
    """So are the `duration` ones that follow."""
    data_shift = "data_shift"
    """A share `factor` of the rows of `duration` batches is other data: the same text with its frequent tokens
    exchanged for each other, which the model has never seen and can learn."""
    lr_spike = "lr_spike"
    """The learning rate is `factor` times what the schedule says, for `duration` iterations."""
    warmup_cut = "warmup_cut"
    """The rest of the warm-up is left out: the rate jumps to its peak."""
    optimizer_reset = "optimizer_reset"
    """Both moments are zero."""
    fp16_overflow = "fp16_overflow"
    """What one layer gives on is multiplied with `factor`, beyond what fp16 can hold."""
    fp8_outlier = "fp8_outlier"
    """The first token of every sequence is `factor` times as large as the others where the maps of one layer read it,
    and what they make of it is as much smaller again."""
    logit_growth = "logit_growth"
    """Query and key weights of one layer grow by `factor` each iteration, for `duration` iterations."""
    slow_rank = "slow_rank"
    """This rank sleeps `factor` seconds in each of `duration` iterations."""
    slow_device = "slow_device"
    """The device of this rank does `factor` seconds of other work in the forward pass of each of `duration`
    iterations."""
    hung_rank = "hung_rank"
    """SIGSTOP."""
    kill_rank = "kill_rank"
    """SIGKILL."""
    kill_node = "kill_node"
    """SIGKILL of all ranks of this machine and of what started them."""
    preemption = "preemption"
    """The signal a scheduler sends before it takes the machine away."""
    full_disk = "full_disk"
    """The file system of the checkpoints is full for `duration` iterations."""
    corrupted_checkpoint = "corrupted_checkpoint"
    """One bit of the newest checkpoint is turned over on disk, then SIGKILL."""
    truncated_checkpoint = "truncated_checkpoint"
    """The largest file of the newest checkpoint loses its end, then SIGKILL."""
    tracking_down = "tracking_down"
    """SIGKILL of the tracking server."""
    clock_jump = "clock_jump"
    """The wall clock of this rank is `factor` seconds off for `duration` iterations."""


OF_THE_DATA = (
    FaultKind.poisoned_batch,
    FaultKind.scrambled_batch,
    FaultKind.duplicate_batch,
    FaultKind.repeated_batch,
    FaultKind.data_shift,
)
"""These belong to a batch index, whenever it is seen; all others to an iteration."""


@final
@dataclass(slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    at: int
    """The iteration that it strikes, counted from 1; for faults of the data, the batch index."""
    duration: int = 1
    """Iterations, or batches, that it lasts."""
    rank: int | None = None
    """Who is struck; negative: counted from the last one; null: all. Faults of the data: whose rows."""
    layer: str = ""
    """Name of a module, such as blocks.1.mlp.up; faults of one layer need it."""
    factor: float = 1.0
    bit: int = 30
    """Of the 32 of a float; 30 is the highest of the exponent."""

    def __post_init__(self) -> None:
        require(self.at >= 0, "drill.fault.at", f"must be 0 or more, got {self.at}")
        require(self.duration >= 1, "drill.fault.duration", f"must be at least 1, got {self.duration}")
        is_share = self.kind is not FaultKind.data_shift or 0 < self.factor <= 1
        require(
            is_share, "drill.fault.factor", f"must be a share of the rows, above 0 and at most 1, got {self.factor}"
        )
        require(0 <= self.bit < 32, "drill.fault.bit", f"must be in 0 .. 31, got {self.bit}")

    def strikes_at(self, moment: int) -> bool:
        """Whether it lasts at this iteration, or spoils this batch."""
        return self.at <= moment < self.at + self.duration

    def strikes_rank(self, rank: int, world_size: int) -> bool:
        return self.rank is None or rank == self.rank_of(world_size)

    def rank_of(self, world_size: int) -> int:
        """The rank it strikes; the first, where it strikes all."""
        rank = self.rank or 0
        require(-world_size <= rank < world_size, "drill.fault.rank", f"there are {world_size} ranks, got {rank}")
        return rank % world_size

    def dice(self, seed: int, moment: int, rank: int) -> random.Random:
        """Whatever is left to chance comes from here."""
        return random.Random(f"{seed}/{self.kind}/{moment}/{rank}")


@final
@dataclass(slots=True, kw_only=True)
class FaultPlan:
    """All that is broken in one run."""

    seed: int
    faults: list[Fault]

    def __iter__(self) -> Iterator[tuple[int, Fault]]:
        return enumerate(self.faults)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_plan(run: RunDir) -> FaultPlan | None:
    """What is to be broken in a run; None where it is no drill."""
    try:
        words = json.loads(run.drill.read_text(encoding="utf-8"))["plan"]
        faults = [Fault(**each | {"kind": FaultKind(each["kind"])}) for each in words["faults"]]
        return FaultPlan(seed=words["seed"], faults=faults)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(run.drill), f"is not the plan of a drill: {error}") from None
