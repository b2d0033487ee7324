"""The config tree of a run: `Config` and the checks that involve several sections; no torch.

Types, units and limits are in `harness/config/`, values in `conf/`; `harness.config.compose` merges the two with Hydra
into these dataclasses. An invalid value raises `ConfigError`: one line with the key and what is allowed. Checks that
depend on the number of ranks are in `check_world`, which runs once that number is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from harness.config.checkpoint import CheckpointConfig
from harness.config.data import DataConfig, DataKind
from harness.config.errors import ConfigError, require
from harness.config.launch import LaunchConfig
from harness.config.model import ModelConfig
from harness.config.optim import OptimConfig, ScheduleKind
from harness.config.parallel import ClusterConfig, ParallelConfig
from harness.config.precision import FP8_SIDE, Fp8Recipe, PrecisionConfig, PrecisionKind
from harness.config.profile import ProfileConfig, require_ranks
from harness.config.run import EvalConfig, RunConfig, TrainConfig
from harness.config.sentinel import SentinelConfig
from harness.config.telemetry import TelemetryConfig
from harness.core.batch_shares import Sharing


@dataclass(slots=True, kw_only=True)
class Config:
    """All options of a run; one field per config section."""

    run: RunConfig
    train: TrainConfig
    eval: EvalConfig
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    sentinel: SentinelConfig
    checkpoint: CheckpointConfig
    telemetry: TelemetryConfig
    launch: LaunchConfig
    cluster: ClusterConfig
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        optim, train, model = self.optim, self.train, self.model
        message = f"must not exceed train.num_steps={train.num_steps}, got {optim.warmup_steps}"
        require(optim.warmup_steps <= train.num_steps, "optim.warmup_steps", message)
        if optim.schedule is ScheduleKind.wsd:
            limit = train.num_steps - optim.warmup_steps
            message = f"must not exceed train.num_steps - optim.warmup_steps ({limit}), got {optim.decay_steps}"
            require(optim.decay_steps <= limit, "optim.decay_steps", message)
        check_context(self)
        if self.precision.kind is PrecisionKind.fp8:
            check_fp8(self)
            self.precision.resolve_phases(train.num_steps)
        if self.precision.kind is PrecisionKind.fp16:
            check_fp16(self)
        if self.run.deterministic and (reason := find_nondeterminism(self)):
            raise ConfigError("run.deterministic", f"must be false with {reason}")
        message = "must be empty with data.stratify.rare_below, whose limits hold for batches of one size"
        is_possible = not (train.batch_size_warmup and self.data.stratify.rare_below)
        require(is_possible, "train.batch_size_warmup", message)
        eod = self.data.eod_token
        message = f"must be an id in 0 .. {model.vocab_size - 1} (model.vocab_size), or null, got {eod}"
        require(eod is None or 0 <= eod < model.vocab_size, "data.eod_token", message)
        kinds = {source.kind for source in self.data.sources.values()}
        if DataKind.embedded in kinds:
            message = f"must be at least 256 for byte-level data (kind=embedded), got {model.vocab_size}"
            require(model.vocab_size >= 256, "model.vocab_size", message)
        if DataKind.synthetic in kinds:
            message = f"must be at least 2 for synthetic data (kind=synthetic), got {model.vocab_size}"
            require(model.vocab_size >= 2, "model.vocab_size", message)
            rare = self.data.synthetic.rare_tokens
            message = f"must be at most model.vocab_size - 2 ({model.vocab_size - 2}), got {rare}"
            require(rare <= model.vocab_size - 2, "data.synthetic.rare_tokens", message)


def find_nondeterminism(cfg: Config) -> str:
    """The setting that cannot give bit-identical results, and why; empty: none."""
    if cfg.precision.kind is PrecisionKind.fp8 and cfg.precision.fp8.recipe is Fp8Recipe.delayed:
        return "precision.fp8.recipe=delayed: its amax history is in no checkpoint and no snapshot; use current"
    return ""


def check_fp16(cfg: Config) -> None:
    """Check that a healthy run may halve its first loss scale down to 1 without a halt."""
    scale, most = cfg.precision.initial_loss_scale, cfg.sentinel.halt_after_refused
    halvings = int(math.log2(scale))
    message = f"must be above {halvings} with precision=fp16 and precision.initial_loss_scale={scale:g}, got {most}"
    require(most > halvings, "sentinel.halt_after_refused", f"{message}: each halving rejects an update")


def check_fp8(cfg: Config) -> None:
    """Check that all dimensions of fp8 GEMMs are multiples of 16."""
    model, fp8 = cfg.model, cfg.precision.fp8
    first, last, layers = fp8.keep_first_blocks, fp8.keep_last_blocks, model.num_layers
    key = "precision.fp8.keep_first_blocks" if first >= layers else "precision.fp8.keep_last_blocks"
    kept = f"the first {first} and the last {last} stay bf16"
    require(first + last < layers, key, f"must leave a block of model.num_layers={layers} to fp8; {kept}")
    sides = {
        "model.dim": model.dim,
        "model.ffn_dim": model.ffn_dim,
        "model.num_kv_heads": model.num_kv_heads * model.head_dim,
    }
    for key, side in sides.items():
        message = f"must give GEMM dimensions that are multiples of {FP8_SIDE} for precision=fp8, gives {side}"
        require(side % FP8_SIDE == 0, key, message)
    rows = (cfg.train.micro_batch_size or 1) * cfg.train.sequence_length // cfg.parallel.context
    message = f"must give micro-batches of a multiple of {FP8_SIDE} tokens for precision=fp8, gives {rows}"
    require(rows % FP8_SIDE == 0, "train.sequence_length", message)


def check_context(cfg: Config) -> None:
    """Check that the ranks of a context group can share a sequence evenly: each takes two chunks of it."""
    context, length = cfg.parallel.context, cfg.train.sequence_length
    message = f"must be a multiple of 2 x parallel.context ({2 * context}), got {length}"
    require(context == 1 or length % (2 * context) == 0, "train.sequence_length", message)


def check_world(cfg: Config, world_size: int) -> None:
    """Check the values that depend on the number of ranks."""
    replicate, context, batch = cfg.parallel.replicate, cfg.parallel.context, cfg.train.batch_size
    require(
        world_size % replicate == 0,
        "parallel.replicate",
        f"must divide the number of ranks ({world_size}), got {replicate}",
    )
    of_replica = f"the number of ranks ({world_size})"
    if replicate > 1:
        of_replica = f"the number of ranks of a replica ({world_size // replicate})"
    require(world_size // replicate % context == 0, "parallel.context", f"must divide {of_replica}, got {context}")
    num_data_ranks = world_size // context
    least = f"the number of ranks ({world_size})"
    if context > 1:
        least = f"the number of ranks / parallel.context ({num_data_ranks})"
    message = f"must be at least {least}, one sequence per {'rank' if context == 1 else 'group'}, got {batch}"
    require(batch >= num_data_ranks, "train.batch_size", message)
    for number, stage in enumerate(cfg.train.batch_size_warmup):
        message = f"must be at least {least}, got {stage.batch_size}"
        require(stage.batch_size >= num_data_ranks, f"train.batch_size_warmup[{number}].batch_size", message)
    require_ranks("profile.ranks", cfg.profile.ranks, world_size)
    if cfg.precision.kind is PrecisionKind.fp8:
        for _, size in cfg.train.size_stages():
            rows = sharing(cfg, world_size, batch_size=size).micro_batch_slots
            tokens = rows * cfg.train.sequence_length // context
            message = f"must give micro-batches of a multiple of {FP8_SIDE} tokens for precision=fp8, "
            message += f"gives {rows} sequences ({tokens} tokens) on {world_size} ranks"
            require(tokens % FP8_SIDE == 0, "train.micro_batch_size", message)


def sharing(cfg: Config, world_size: int, *, batch_size: int | None = None) -> Sharing:
    """The split of the global batch over `world_size` ranks; `batch_size` is that of a stage of the warm-up. The ranks
    of a context group share their rows, so the shares are those of the groups."""
    train = cfg.train
    size = train.batch_size if batch_size is None else batch_size
    num_data_ranks = world_size // cfg.parallel.context
    return Sharing(batch_size=size, world_size=num_data_ranks, micro_batch_size=train.micro_batch_size)
