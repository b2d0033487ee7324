"""The faults of a drill as plain data: kinds, time and place; without torch.

A fault is a pure function of (seed, iteration, rank): random choices, such as the affected value, are drawn from these
three. The drill is therefore reproducible on every cluster. The plan is stored in the run directory as `drill.json`, so
a run that is killed and resumes, here or on another node, continues with the same plan. Iterations never repeat, so a
fault strikes an iteration once. A batch is read again after a rewind that did not exclude it, and is then bad again.
A fault of the infrastructure may be planned by the clock instead (`at_s`): it changes no number of the run, so its
iteration does not matter.
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
    """The kinds of fault; `harness.faults.injectors` maps each to its injector."""

    nan_loss = "nan_loss"
    """One value of the head's input on this rank is NaN, and so is its loss."""
    nan_activation = "nan_activation"
    """One value of the output of a layer is NaN on this rank."""
    nan_grad = "nan_grad"
    """One value of this rank's own gradient, before the reduction, is NaN."""
    inf_grad = "inf_grad"
    """One value of this rank's own gradient, before the reduction, is infinite."""
    big_grad = "big_grad"
    """This rank's own gradient of one layer, before the reduction, times `factor`."""
    bit_flip_grad = "bit_flip_grad"
    """Bit `bit` of one value of this rank's own gradient is flipped."""
    bit_flip_weight = "bit_flip_weight"
    """Bit `bit` of one value of this rank's weights is flipped, after an update."""
    bit_flip_activation = "bit_flip_activation"
    """Bit `bit` of one value of the output of a layer is flipped on this rank."""
    bit_flip_read = "bit_flip_read"
    """Bit `bit` of one value of a layer's gathered weight is flipped on this rank, as if it was read wrong."""
    bit_flip_backward = "bit_flip_backward"
    """Bit `bit` of one value of this rank's own gradient, drawn at random, is flipped before the reduction."""
    poisoned_batch = "poisoned_batch"
    """Rows of the batch consist of the rarest tokens."""
    scrambled_batch = "scrambled_batch"
    """Rows of the batch are tokens drawn at random."""
    duplicate_batch = "duplicate_batch"
    """The batch has the tokens of the batch before it."""
    repeated_batch = "repeated_batch"
    """`duration` batches have the tokens of the batch before the first of them."""
    data_shift = "data_shift"
    """A share `factor` of the rows of `duration` batches is other data: the same text with its frequent tokens
    permuted, which the model has never seen and can learn."""
    lr_spike = "lr_spike"
    """The learning rate is `factor` times the scheduled one for `duration` iterations."""
    warmup_cut = "warmup_cut"
    """The rest of the warm-up is skipped: the learning rate jumps to its peak."""
    optimizer_reset = "optimizer_reset"
    """Both moments are set to zero."""
    fp16_overflow = "fp16_overflow"
    """The output of one layer is multiplied by `factor`, beyond the range of fp16."""
    fp8_outlier = "fp8_outlier"
    """The linear layers of one module read the first token of every sequence `factor` times as large, and their output
    is divided by `factor`."""
    logit_growth = "logit_growth"
    """Query and key weights of one layer grow by `factor` each iteration, for `duration` iterations."""
    slow_rank = "slow_rank"
    """This rank sleeps `factor` seconds in each of `duration` iterations."""
    slow_device = "slow_device"
    """The device of this rank computes `factor` seconds of extra GEMMs in the forward pass of each of `duration`
    iterations."""
    hung_rank = "hung_rank"
    """SIGSTOP of this rank."""
    mismatched_collective = "mismatched_collective"
    """This rank calls a collective that the others do not call."""
    raised_error = "raised_error"
    """This rank raises an exception."""
    kill_rank = "kill_rank"
    """SIGKILL of this rank."""
    kill_node = "kill_node"
    """SIGKILL of all ranks of this machine and of their launcher."""
    unhealthy_node = "unhealthy_node"
    """The machine of this rank cannot write to the run directory when it tries to join."""
    preemption = "preemption"
    """SIGUSR1, which a scheduler sends before it ends a job."""
    full_disk = "full_disk"
    """The file system of the checkpoints is full for `duration` iterations."""
    corrupted_checkpoint = "corrupted_checkpoint"
    """One bit of the newest checkpoint is flipped on disk, then SIGKILL."""
    truncated_checkpoint = "truncated_checkpoint"
    """The largest file of the newest checkpoint is truncated, then SIGKILL."""
    network_down = "network_down"
    """The network between the ranks is down for `factor` seconds."""
    tracking_down = "tracking_down"
    """SIGKILL of the tracking server."""
    clock_jump = "clock_jump"
    """The wall clock of this rank is `factor` seconds off for `duration` iterations."""


DATA_FAULTS = (
    FaultKind.poisoned_batch,
    FaultKind.scrambled_batch,
    FaultKind.duplicate_batch,
    FaultKind.repeated_batch,
    FaultKind.data_shift,
)
"""These strike a batch index, whenever it is read; all others strike an iteration."""

CLOCK_FAULTS = (
    FaultKind.hung_rank,
    FaultKind.raised_error,
    FaultKind.kill_rank,
    FaultKind.kill_node,
    FaultKind.preemption,
    FaultKind.full_disk,
    FaultKind.corrupted_checkpoint,
    FaultKind.truncated_checkpoint,
    FaultKind.network_down,
    FaultKind.tracking_down,
)
"""Faults of processes, disks and networks; only these can be planned by the clock."""

LINK_VARIABLE = "HARNESS_DRILL_LINK"
"""Environment variable of a drill on virtual hosts: the network device of the host, for `network_down`."""


@final
@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault: what, when and where."""

    kind: FaultKind
    at: int
    """The first iteration that it strikes, counted from 1; for data faults, the first batch index."""
    duration: int = 1
    """Number of iterations, or batches, that it strikes."""
    rank: int | None = None
    """The affected rank; negative: counted from the last; null: all ranks. For data faults, the rank whose rows are
    bad."""
    layer: str = ""
    """Name of a module, such as blocks.1.mlp.up; required by faults of a layer."""
    factor: float = 1.0
    """Strength; its meaning and unit depend on the kind."""
    growth: float = 1.0
    """lr_spike, big_grad, fp8_outlier: `factor` is multiplied by this with each further iteration."""
    bit: int = 30
    """Bit of a float32, 0 to 31; 30 is the highest bit of the exponent. Of a 16-bit value, bit - 16, at least 0."""
    is_stuck: bool = False
    """bit_flip_activation, bit_flip_read, bit_flip_backward: the same value is hit whenever it is computed; otherwise
    every forward and backward pass draws another one."""
    at_s: float | None = None
    """Seconds after the first event of the log; it strikes the first iteration after that, once. Replaces `at`."""
    duration_s: float = 0.0
    """With `at_s`: it strikes all iterations for this many seconds, instead of one; a restart ends it."""

    def __post_init__(self) -> None:
        require(self.at >= 0, "drill.fault.at", f"must be 0 or more, got {self.at}")
        require(self.duration >= 1, "drill.fault.duration", f"must be at least 1, got {self.duration}")
        is_share = self.kind is not FaultKind.data_shift or 0 < self.factor <= 1
        message = f"must be a share of the rows, above 0 and at most 1, got {self.factor}"
        require(is_share, "drill.fault.factor", message)
        require(self.growth > 0, "drill.fault.growth", f"must be positive, got {self.growth}")
        require(0 <= self.bit < 32, "drill.fault.bit", f"must be from 0 to 31, got {self.bit}")
        allowed = self.at_s is None or (self.kind in CLOCK_FAULTS and self.at_s >= 0)
        require(allowed, "drill.fault.at_s", f"must be null, or 0 or more with a fault of {', '.join(CLOCK_FAULTS)}")
        require(self.duration_s >= 0, "drill.fault.duration_s", f"must be 0 or more, got {self.duration_s}")

    def strikes_at(self, moment: int) -> bool:
        """Whether it strikes this iteration or batch index."""
        return self.at <= moment < self.at + self.duration

    def strength_at(self, iteration: int) -> float:
        """`factor` in an iteration that it strikes, with its growth."""
        return self.factor * self.growth ** (iteration - self.at)

    def strikes_after(self, elapsed_s: float, *, lasted_s: float | None) -> bool:
        """Whether a fault planned by the clock strikes this many seconds after the first event of the log.

        `lasted_s` are the seconds since its first strike; None: it has not struck.
        """
        assert self.at_s is not None, "planned by the clock"
        return elapsed_s >= self.at_s if lasted_s is None else lasted_s < self.duration_s

    def strikes_rank(self, rank: int, world_size: int) -> bool:
        """Whether it strikes this rank."""
        return self.rank is None or rank == self.rank_of(world_size)

    def rank_of(self, world_size: int) -> int:
        """The rank that it strikes; 0 if it strikes all ranks."""
        rank = self.rank or 0
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        message = f"must be from {-world_size} to {world_size - 1}, because the run has {ranks}, got {rank}"
        require(-world_size <= rank < world_size, "drill.fault.rank", message)
        return rank % world_size

    def rng(self, seed: int, moment: int, rank: int) -> random.Random:
        """The random generator for everything that the fault draws."""
        return random.Random(f"{seed}/{self.kind}/{moment}/{rank}")


@final
@dataclass(slots=True, kw_only=True)
class FaultPlan:
    """All faults of one run."""

    seed: int
    faults: list[Fault]

    def __iter__(self) -> Iterator[tuple[int, Fault]]:
        return enumerate(self.faults)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_plan(run: RunDir) -> FaultPlan | None:
    """The fault plan of a run; None if the run is not a drill."""
    try:
        tree = json.loads(run.drill.read_text(encoding="utf-8"))["plan"]
        faults = [Fault(**fault | {"kind": FaultKind(fault["kind"])}) for fault in tree["faults"]]
        return FaultPlan(seed=tree["seed"], faults=faults)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(run.drill), f"holds no valid fault plan: {error}") from None
