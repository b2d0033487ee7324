"""Config sections `run`, `train` and `eval`: name, seed, resume policy, batch size, length, evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require, require_duration

MOST_STEPS = 100_000_000
"""Most updates of a run: the learning rates of all of them are in a table, 4 bytes each on the device."""
LONGEST_NAME_BYTES = 255
"""Limit of a file name on Linux."""


class ResumePolicy(StrEnum):
    """What happens if an existing run is started with another configuration."""

    same = "same"
    """The start is rejected."""
    changed = "changed"
    """The change is recorded as an intervention."""


class PreflightPolicy(StrEnum):
    """What happens if a setting is known to make training unstable."""

    warn = "warn"
    """Each problem is one line; the run starts."""
    strict = "strict"
    """The start is rejected."""


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """Name, place and seed of a run."""

    name: str | None
    """Name of the run and of its directory; null: model name and start time."""
    dir: str
    """Parent directory of all run directories."""
    seed: int
    """Seed of the weights, the data order and synthetic data."""
    resume: ResumePolicy
    """If an existing run is started with another configuration: reject it (same) or record the change (changed)."""
    preflight: PreflightPolicy = PreflightPolicy.warn
    """If a setting is known to make training unstable: print a warning (warn) or reject the start (strict)."""
    deterministic: bool = False
    """Give bit-identical results on GPUs: two starts, a resume, and a run after a skip, a rewind or a rollback, on the
    same number of ranks. Every start computes its first batch twice and compares the bits. Costs speed
    (docs/operations.md). Drills use it by default. CPU ranks are bit-identical with and without it."""
    lease_s: float = 60.0
    """Seconds without a lease renewal after which a start on another machine takes over a run; on the same machine it
    takes over as soon as the process is gone."""

    def __post_init__(self) -> None:
        require(self.lease_s >= 1, "run.lease_s", f"must be at least 1, got {self.lease_s}")
        require_duration(self.lease_s, "run.lease_s")
        require(0 <= self.seed < 2**63, "run.seed", f"must be from 0 to 2**63 - 1, got {self.seed}")
        if self.name is not None:
            valid = bool(self.name) and "/" not in self.name and not self.name.startswith(".")
            require(
                valid,
                "run.name",
                f"must be a directory name without / that does not start with a dot, got {self.name!r}",
            )
            num_bytes = len(self.name.encode(errors="replace"))
            message = f"must have at most {LONGEST_NAME_BYTES} bytes, got {num_bytes}"
            require(num_bytes <= LONGEST_NAME_BYTES, "run.name", message)


@dataclass(slots=True, kw_only=True)
class BatchSizeStage:
    """A part of the batch-size warm-up."""

    until_batch: int
    """The first batch index after this stage."""
    batch_size: int
    """Sequences in one global batch of this stage."""


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of its batches."""

    num_steps: int
    """Updates to apply; a rejected update does not count."""
    batch_size: int
    """Sequences in one global batch, over all ranks and micro-batches."""
    sequence_length: int
    """Tokens the model predicts in one sequence."""
    batch_tokens: int | None
    """Tokens in one global batch; if set, it replaces batch_size."""
    micro_batch_size: int | None
    """Maximum sequences in one forward pass of one rank; null: the rank's whole share of the batch. All passes have the
    same size: if this does not divide the share, they are smaller, and padded with rows that do not count."""
    batch_size_warmup: list[BatchSizeStage] = field(default_factory=list)
    """Smaller global batches at the start of the run, in order: {until_batch: first batch index after the stage,
    batch_size: sequences}. Afterwards train.batch_size holds. Learning rate and train.num_steps still count updates."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "sequence_length"):
            require(getattr(self, name) >= 1, f"train.{name}", f"must be at least 1, got {getattr(self, name)}")
        message = f"must be at most {MOST_STEPS:,}, got {self.num_steps:,}; a start computes the learning rate of each"
        require(self.num_steps <= MOST_STEPS, "train.num_steps", message)
        if self.micro_batch_size is not None:
            require(
                self.micro_batch_size >= 1, "train.micro_batch_size", f"must be at least 1, got {self.micro_batch_size}"
            )
        if self.batch_tokens is not None:
            fits = self.batch_tokens >= self.sequence_length and self.batch_tokens % self.sequence_length == 0
            message = f"must be a multiple of train.sequence_length={self.sequence_length}, got {self.batch_tokens}"
            require(fits, "train.batch_tokens", message)
            self.batch_size = self.batch_tokens // self.sequence_length
        check_warmup(self)

    def size_stages(self) -> list[tuple[int, int]]:
        """(first batch index, global batch size) of each part of the run, the last one without an end."""
        starts = [0, *(stage.until_batch for stage in self.batch_size_warmup)]
        return list(
            zip(starts, [*(stage.batch_size for stage in self.batch_size_warmup), self.batch_size], strict=True)
        )

    def num_tokens(self) -> int:
        """Tokens of the run if no batch is skipped and no update is rejected."""
        starts = [min(start, self.num_steps) for start, _ in self.size_stages()]
        ends = [*starts[1:], self.num_steps]
        sizes = [size for _, size in self.size_stages()]
        rows = sum((end - start) * size for start, end, size in zip(starts, ends, sizes, strict=True))
        return rows * self.sequence_length


def check_warmup(train: TrainConfig) -> None:
    """Check that the stages of the batch-size warm-up are in order, grow, and consist of whole micro-batches."""
    until, size, micro = 0, 0, train.micro_batch_size or 1
    for number, stage in enumerate(train.batch_size_warmup):
        key = f"train.batch_size_warmup[{number}]"
        message = f"must be above {until}, the first batch of the stage, got {stage.until_batch}"
        require(stage.until_batch > until, f"{key}.until_batch", message)
        message = f"must be above {size} and below train.batch_size={train.batch_size}, got {stage.batch_size}"
        require(size < stage.batch_size < train.batch_size, f"{key}.batch_size", message)
        message = f"must be a multiple of train.micro_batch_size={micro}, got {stage.batch_size}"
        require(stage.batch_size % micro == 0, f"{key}.batch_size", message)
        until, size = stage.until_batch, stage.batch_size
    if train.batch_size_warmup:
        message = f"must be a multiple of train.micro_batch_size={micro} with a batch-size warm-up, got"
        require(train.batch_size % micro == 0, "train.batch_size", f"{message} {train.batch_size}")


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out data."""

    every_steps: int
    """Steps between evaluations on held-out data; 0: never. The last step is always evaluated unless 0."""
    num_batches: int
    """Held-out batches per evaluation; fewer if the held-out data has fewer."""
    harness: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness, such as [hellaswag,arc_easy], computed on checkpoints by a process beside
    training; empty: none."""
    harness_every_steps: int = 0
    """Steps between evaluated checkpoints; 0: the newest checkpoint whenever the process is free. The last one of the
    run is always evaluated."""
    harness_device: str = "cpu"
    """Device of that process: cpu, or one GPU such as cuda:7, which needs room beside what trains there."""
    harness_batch_size: int = 8
    """Sequences per forward pass."""
    harness_limit: int | None = None
    """Examples of each task; null: all."""
    harness_fewshot: int | None = None
    """Examples in the context; null: as the task says."""
    harness_tasks_dir: str | None = None
    """Directory with YAML files of further tasks; null: only those that come with lm-evaluation-harness."""
    harness_exit_wait_s: float = 600.0
    """Seconds for which the end of a run waits for the last evaluation. An interruption or a stop request ends the
    wait."""

    def __post_init__(self) -> None:
        for name in ("harness_batch_size", "harness_limit"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"eval.{name}", f"must be at least 1, got {value}")
        for name in ("harness_every_steps", "harness_fewshot", "harness_exit_wait_s"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"eval.{name}", f"must be 0 or more, got {value}")
        require_duration(self.harness_exit_wait_s, "eval.harness_exit_wait_s")
        valid = re.fullmatch(r"cpu|cuda(:\d+)?", self.harness_device) is not None
        require(valid, "eval.harness_device", f"must be cpu, cuda or cuda:N, got {self.harness_device!r}")
        require(self.every_steps >= 0, "eval.every_steps", f"must be 0 (never) or more, got {self.every_steps}")
        require(self.num_batches >= 1, "eval.num_batches", f"must be at least 1, got {self.num_batches}")
