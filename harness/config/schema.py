"""Every option of a run, as one typed tree that needs no torch.

Why: an option that exists is written once, here, with its unit and its limits, and nowhere else.
How: types and checks live in this file, values in `conf/`; `harness.config.compose` lets Hydra merge the two into these
plain dataclasses. A value that cannot work is a `ConfigError`: one line, the key first, then what is allowed.
Left out: what only the machine can tell (how many ranks there are) is checked by `check_world`, once it is known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from harness.core.batch_shares import Sharing

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_BAD_CONFIG = 2
EXIT_HALTED = 3
EXIT_INTERRUPTED = 75

FP8_SIDE = 16
"""What every side of a product in fp8 is a multiple of."""


class ConfigError(Exception):
    """The user asked for something that cannot be; the message names the key and what is allowed."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        """A rank sends it to the others."""
        return ConfigError, ("", str(self))


class StorageError(OSError):
    """Storage did not answer, or answered with an error. This says nothing about the data: the same command may succeed
    later, so the exit code of a run is 75. Built like `OSError`: errno, problem, path."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def require(condition: bool, key: str, message: str) -> None:
    """Refuse the configuration unless `condition` holds."""
    if not condition:
        raise ConfigError(key, message)


class ResumePolicy(StrEnum):
    same = "same"
    changed = "changed"


class AttentionKind(StrEnum):
    fused = "fused"
    fp32 = "fp32"


class InitKind(StrEnum):
    fixed = "fixed"
    hidden = "hidden"


class DataKind(StrEnum):
    embedded = "embedded"
    synthetic = "synthetic"
    files = "files"


class TokenDtype(StrEnum):
    auto = "auto"
    uint8 = "uint8"
    uint16 = "uint16"
    uint32 = "uint32"
    int32 = "int32"
    int64 = "int64"


class ScheduleKind(StrEnum):
    cosine = "cosine"
    wsd = "wsd"
    linear = "linear"
    constant = "constant"
    inverse_sqrt = "inverse_sqrt"


class PrecisionKind(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Fp8Recipe(StrEnum):
    current = "current"
    """A scale for each tensor, from the tensor itself: no state, nothing to roll back."""
    delayed = "delayed"
    """A scale for each tensor, from its largest numbers in the last steps: nothing is rounded twice, and a memory."""
    block = "block"
    """A scale for every 128 numbers of an activation or gradient, and for every 128 x 128 of a weight."""


class Fp8Engine(StrEnum):
    transformer_engine = "transformer_engine"
    emulated = "emulated"
    """The same rounding in plain torch, on any device: for rehearsals, not for speed."""


class ActivationCheckpointing(StrEnum):
    none = "none"
    selective = "selective"
    full = "full"


class DeviceKind(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LaunchKind(StrEnum):
    local = "local"
    slurm = "slurm"


@dataclass(slots=True, kw_only=True)
class RunConfig:
    name: str | None
    """Name of the run and of its directory; null: model name and start time."""
    dir: str
    """Where run directories live."""
    seed: int
    """Weights, data order and synthetic data are pure functions of it."""
    resume: ResumePolicy
    """What to do when an existing run is started with another configuration: refuse (same) or record it (changed)."""
    lease_s: float = 60.0
    """Seconds without a heartbeat after which a start on another machine takes a run over; on the same machine it does
    so as soon as the process is gone."""

    def __post_init__(self) -> None:
        require(self.lease_s >= 1, "run.lease_s", f"must be at least 1 second, got {self.lease_s}")
        require(0 <= self.seed < 2**63, "run.seed", f"must be in 0 .. 2**63 - 1, got {self.seed}")
        if self.name is not None:
            valid = bool(self.name) and "/" not in self.name and not self.name.startswith(".")
            require(valid, "run.name", f"must be a plain directory name, got {self.name!r}")


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    num_steps: int
    """Updates to apply; a refused update does not count."""
    batch_size: int
    """Sequences in one global batch, over all ranks and micro-batches."""
    sequence_length: int
    """Tokens the model predicts in one sequence."""
    batch_tokens: int | None
    """Tokens in one global batch; when set, it decides batch_size."""
    micro_batch_size: int | None
    """The most sequences in one forward pass of one rank; null: the rank's whole share of the batch. Passes are of
    equal size: where this does not divide the share, they are smaller, and filled up with rows that count nothing."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "sequence_length"):
            require(getattr(self, name) >= 1, f"train.{name}", f"must be at least 1, got {getattr(self, name)}")
        if self.micro_batch_size is not None:
            require(
                self.micro_batch_size >= 1, "train.micro_batch_size", f"must be at least 1, got {self.micro_batch_size}"
            )
        if self.batch_tokens is not None:
            fits = self.batch_tokens >= self.sequence_length and self.batch_tokens % self.sequence_length == 0
            message = f"must be a multiple of train.sequence_length={self.sequence_length}, got {self.batch_tokens}"
            require(fits, "train.batch_tokens", message)
            self.batch_size = self.batch_tokens // self.sequence_length


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    every_steps: int
    """Steps between evaluations on held-out data; 0: never. The last step is always evaluated unless 0."""
    num_batches: int
    """Held-out batches in one evaluation; fewer where the held-out data has fewer."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "eval.every_steps", f"must be 0 (never) or more, got {self.every_steps}")
        require(self.num_batches >= 1, "eval.num_batches", f"must be at least 1, got {self.num_batches}")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    name: str
    """What the size is called in run names and reports."""
    vocab_size: int
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    """Query heads; each is dim / num_heads wide."""
    num_kv_heads: int
    """Key and value heads (grouped-query attention); divides num_heads."""
    ffn_dim: int
    """Width of the SwiGLU hidden layer."""
    rope_theta: float
    norm_eps: float
    tied_head: bool
    """Use the embedding as output head."""
    qk_norm: bool
    """RMSNorm on queries and keys of each head."""
    embedding_norm: bool
    """RMSNorm right after the embedding (BLOOM)."""
    attention: AttentionKind
    """fused: the fastest kernel, whose softmax is fp32; fp32: queries, keys and values are raised to fp32 too."""
    z_loss: float
    """Coefficient of the squared log-partition; 0: off."""
    loss_chunk_tokens: int
    """Tokens whose logits exist at once in the loss."""
    init: InitKind
    """fixed: std is init_std; hidden: std is sqrt(1 / (3 dim))."""
    init_std: float
    depth_scaled_init: bool
    """Divide the std of matrices that write into the residual stream by sqrt(2 num_layers)."""
    mup_base_width: int | None
    """muP: the width at which lr and init_std were tuned; null: standard parametrization."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "loss_chunk_tokens"):
            require(getattr(self, name) >= 1, f"model.{name}", f"must be at least 1, got {getattr(self, name)}")
        require(
            self.dim % self.num_heads == 0, "model.num_heads", f"must divide model.dim={self.dim}, got {self.num_heads}"
        )
        message = f"must be even for rotary embedding, model.dim / model.num_heads is {self.head_dim}"
        require(self.head_dim % 2 == 0, "model.dim", message)
        message = f"must divide model.num_heads={self.num_heads}, got {self.num_kv_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", message)
        for name in ("rope_theta", "norm_eps", "init_std"):
            require(getattr(self, name) > 0, f"model.{name}", f"must be positive, got {getattr(self, name)}")
        require(self.z_loss >= 0, "model.z_loss", f"must be 0 (off) or more, got {self.z_loss}")
        if self.mup_base_width is not None:
            require(
                self.mup_base_width >= 1,
                "model.mup_base_width",
                f"must be at least 1 or null, got {self.mup_base_width}",
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(slots=True, kw_only=True)
class SyntheticConfig:
    num_samples: int
    """Training and held-out sequences in the corpus."""
    zipf_exponent: float
    """Frequency of the k-th common token falls as k ** -exponent."""
    repeat_probability: float
    """How often the next token is the fixed successor of the last one: what there is to learn beyond frequencies."""
    rare_tokens: int
    """Size of the tail: that many highest token ids never occur in the bulk."""
    rare_probability: float
    """How often a position holds a token of the tail."""

    def __post_init__(self) -> None:
        require(self.num_samples >= 3, "data.synthetic.num_samples", f"must be at least 3, got {self.num_samples}")
        require(self.zipf_exponent >= 0, "data.synthetic.zipf_exponent", f"must be 0 or more, got {self.zipf_exponent}")
        require(self.rare_tokens >= 0, "data.synthetic.rare_tokens", f"must be 0 or more, got {self.rare_tokens}")
        for name in ("repeat_probability", "rare_probability"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"data.synthetic.{name}", f"must be in 0 .. 1, got {value}")
        message = "must be at least 1 where data.synthetic.rare_probability is above 0, got 0"
        require(self.rare_tokens > 0 or self.rare_probability == 0, "data.synthetic.rare_tokens", message)


@dataclass(slots=True, kw_only=True)
class SourceConfig:
    kind: DataKind
    """embedded: English text that every Python installation carries; synthetic: a corpus with a controllable tail;
    files: tokens on disk."""
    weight: float = 1.0
    """How many samples this source gives, relative to the others."""
    seed: int | None = None
    """Order of the samples, and content of synthetic ones; null: from run.seed and the name of the source."""
    paths: list[str] = field(default_factory=list)
    """files only: Megatron prefixes, .bin or .npy files, globs."""
    dtype: TokenDtype = TokenDtype.auto
    """files only: what a flat .bin without a header holds; auto: what the file itself says, or uint16."""


@dataclass(slots=True, kw_only=True)
class PhaseConfig:
    from_batch: int
    """The first batch index with these weights."""
    weights: dict[str, float]
    """Source -> weight; 0: off. A source that is not named keeps the weight it had."""


@dataclass(slots=True, kw_only=True)
class StratifyConfig:
    rare_below: int
    """A token with fewer occurrences in the training data is rare; 0: off. Rank 0 scans the data at the first start."""
    max_per_batch: int
    """Most occurrences of any one rare token in one global batch."""

    def __post_init__(self) -> None:
        require(self.rare_below >= 0, "data.stratify.rare_below", f"must be 0 (off) or more, got {self.rare_below}")
        message = f"must be at least 1, got {self.max_per_batch}"
        require(self.max_per_batch >= 1, "data.stratify.max_per_batch", message)


@dataclass(slots=True, kw_only=True)
class DataConfig:
    eval_fraction: float
    """Share of each source's samples held out; disjoint from training by construction."""
    document_mask: bool
    """No attention and no target across documents; refused for files without document boundaries (flat .bin, .npy)."""
    sources: dict[str, SourceConfig]
    """Name -> where tokens come from."""
    phases: list[PhaseConfig]
    """Changes of the weights, in order; evaluation always mixes by the weights of the sources."""
    stratify: StratifyConfig
    synthetic: SyntheticConfig
    """Shared by all synthetic sources; they differ by their seeds."""

    def __post_init__(self) -> None:
        require(0 < self.eval_fraction < 1, "data.eval_fraction", f"must be between 0 and 1, got {self.eval_fraction}")
        require(bool(self.sources), "data.sources", "must name at least one source")
        for name, source in self.sources.items():
            check_source(name, source)
        check_phases(self.phases, self.sources)
        message = (
            f"must be 0 (off) for a mixture: it orders the batches of one source, and there are {len(self.sources)}"
        )
        require(self.stratify.rare_below == 0 or len(self.sources) == 1, "data.stratify.rare_below", message)


def check_source(name: str, source: SourceConfig) -> None:
    """Refuse what no source can be."""
    key = f"data.sources.{name}"
    message = f"names of sources are letters, digits, _ and -, got {name!r}"
    require(re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None, "data.sources", message)
    require(0 < source.weight < math.inf, f"{key}.weight", f"must be positive, got {source.weight}")
    valid = source.seed is None or 0 <= source.seed < 2**63
    require(valid, f"{key}.seed", f"must be in 0 .. 2**63 - 1 or null, got {source.seed}")
    if source.kind is DataKind.files:
        require(bool(source.paths), f"{key}.paths", "must name at least one file, prefix or glob for kind=files")
    else:
        require(not source.paths, f"{key}.paths", f"must be empty for kind={source.kind}, got {source.paths}")


def check_phases(phases: list[PhaseConfig], sources: dict[str, SourceConfig]) -> None:
    """Refuse phases out of order, of unknown sources, or that leave nothing to read."""
    weights = {name: source.weight for name, source in sources.items()}
    earlier = -1
    for number, phase in enumerate(phases):
        key = f"data.phases[{number}]"
        message = f"must be above {earlier}, where the phase before begins, got {phase.from_batch}"
        require(phase.from_batch >= 0, f"{key}.from_batch", f"must be 0 or more, got {phase.from_batch}")
        require(phase.from_batch > earlier, f"{key}.from_batch", message)
        earlier = phase.from_batch
        for name, weight in phase.weights.items():
            require(name in sources, f"{key}.weights", f"no source {name!r}; there are {', '.join(sources)}")
            require(0 <= weight < math.inf, f"{key}.weights.{name}", f"must be 0 (off) or more, got {weight}")
        weights |= phase.weights
        require(any(weights.values()), f"{key}.weights", "must leave a source with a weight above 0")


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    lr: float
    """Peak learning rate; under muP, the one of the base width."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """Decoupled; on matrices, never on norms."""
    decay_embeddings: bool
    """Also decay the embedding (and the head tied to it)."""
    clip_norm: float | None
    """Largest global gradient norm; null: no clipping."""
    clip_value: float | None
    """Largest absolute value of one number of the gradient, after clip_norm; null: no clipping by value."""
    schedule: ScheduleKind
    warmup_steps: int
    """Linear warm-up from lr / warmup_steps."""
    decay_steps: int
    """Length of the final descent of schedule wsd; the other schedules do not use it."""
    min_lr_fraction: float
    """Where cosine, wsd and linear end, as a fraction of lr."""

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", f"must be positive, got {self.lr}")
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1,
                f"optim.{name}",
                f"must be in 0 .. 1 (1 excluded), got {getattr(self, name)}",
            )
        require(self.eps > 0, "optim.eps", f"must be positive, got {self.eps}")
        require(self.weight_decay >= 0, "optim.weight_decay", f"must be 0 or more, got {self.weight_decay}")
        if self.clip_norm is not None:
            require(
                self.clip_norm > 0,
                "optim.clip_norm",
                f"must be positive, or null for no clipping, got {self.clip_norm}",
            )
        valid = self.clip_value is None or self.clip_value > 0
        require(valid, "optim.clip_value", f"must be positive, or null for no clipping by value, got {self.clip_value}")
        require(self.warmup_steps >= 0, "optim.warmup_steps", f"must be 0 or more, got {self.warmup_steps}")
        require(self.decay_steps >= 0, "optim.decay_steps", f"must be 0 or more, got {self.decay_steps}")
        require(
            0 <= self.min_lr_fraction <= 1, "optim.min_lr_fraction", f"must be in 0 .. 1, got {self.min_lr_fraction}"
        )


@dataclass(slots=True, kw_only=True)
class Fp8Config:
    """Which products of a run in fp8 are taken in fp8, and how; all others are bf16."""

    recipe: Fp8Recipe
    """Where the scales come from."""
    engine: Fp8Engine
    attention: bool
    """Whether the projections of attention are among them."""
    mlp: bool
    keep_first_blocks: int
    """So many blocks at the beginning stay bf16."""
    keep_last_blocks: int
    """So many blocks at the end stay bf16."""
    history_steps: int
    """delayed only: steps whose largest numbers make the scale."""

    def __post_init__(self) -> None:
        for name in ("keep_first_blocks", "keep_last_blocks"):
            require(getattr(self, name) >= 0, f"precision.fp8.{name}", f"must be 0 or more, got {getattr(self, name)}")
        require(self.history_steps >= 1, "precision.fp8.history_steps", f"must be at least 1, got {self.history_steps}")
        some = self.attention or self.mlp
        require(some, "precision.fp8.mlp", "must be true where precision.fp8.attention is false: nothing would be fp8")


@dataclass(slots=True, kw_only=True)
class PrecisionConfig:
    kind: PrecisionKind
    """What matrices are multiplied in; master weights, moments and gradient reduction stay fp32."""
    fp8: Fp8Config
    initial_loss_scale: float
    """fp16 only."""
    loss_scale_growth_interval: int
    """fp16 only: clean steps after which the loss scale doubles; an overflow halves it at once."""

    def __post_init__(self) -> None:
        scale, interval = self.initial_loss_scale, self.loss_scale_growth_interval
        require(scale > 0, "precision.initial_loss_scale", f"must be positive, got {scale}")
        require(interval >= 1, "precision.loss_scale_growth_interval", f"must be at least 1, got {interval}")


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    device: DeviceKind
    """auto: cuda where there is one."""
    replicate: int
    """Copies of the sharded model (HSDP); 1: plain FSDP. Divides the number of ranks."""
    reshard_after_forward: bool | None
    """Free gathered weights after each block's forward: less memory, one more all-gather; null: where they would take
    more than a tenth of the device's memory."""
    activation_checkpointing: ActivationCheckpointing
    """none; selective: keep matrix products and attention, recompute the rest; full: keep block inputs only."""
    compile: bool
    """torch.compile each block (needs a C++ compiler on CPU)."""
    timeout_s: float
    """How long a collective may wait for a lost rank."""

    def __post_init__(self) -> None:
        require(self.replicate >= 1, "parallel.replicate", f"must be at least 1, got {self.replicate}")
        require(self.timeout_s > 0, "parallel.timeout_s", f"must be positive, got {self.timeout_s}")


@dataclass(slots=True, kw_only=True)
class DetectConfig:
    """What is normal and what is not; the gate and the detectors read the same numbers."""

    level_rows: int
    """Rows that the level of loss and gradient norm is the mean of."""
    memory_rows: int
    """Rows over which the slow level forgets: the loss may come back to where it was in them."""
    spread_rows: int
    """Rows that the spread of the noise is learnt from."""
    warmup_rows: int
    """Rows until the bounds are as narrow as they get."""
    warmup_widening: float
    """What bounds are widened by while the learning rate rises; at least 1."""
    gate_sigmas: float
    """Spreads above the level from which the gate refuses; heavy noise counts in its own measure."""
    gate_loss_factor: float
    """The gate refuses no loss below this many times the level."""
    gate_grad_factor: float
    """The gate refuses no gradient norm alone below this many times the level."""
    gate_loss_cap: float
    """The gate refuses a loss of this many times the level, whatever the noise."""
    gate_grad_cap: float
    """The gate refuses a gradient norm of this many times the level, whatever the noise."""
    joint_sigmas: float
    """Spreads from which the gate refuses where loss and gradient norm are both beyond."""
    joint_grad_factor: float
    """Together with the loss, the gate refuses a gradient norm of this many times the level."""
    spike_sigmas: float
    """Spreads, summed over neighbouring rows beyond `slack_sigmas` each, that make a loss spike."""
    slack_sigmas: float
    """Spreads above the level that one row has free before it counts towards a spike."""
    row_sigmas: float
    """Spreads that one row can count at most towards a spike: less than `spike_sigmas` + `slack_sigmas` takes two."""
    lone_sigmas: float
    """Spreads from which one row is a spike by itself where rows are logged several steps apart."""
    spike_forgetting: float
    """Share of the sum that is forgotten with each row."""
    grad_spike_factor: float
    """Times the level from which a gradient norm is a spike."""
    recovered_rows: int
    """Rows back to normal after which an episode is over and its detector armed again; steps where rows are sparser."""
    lingering_rows: int
    """Rows, twice over, after which an incident whose loss has not come back is closed."""
    divergence_rows: int
    """Rows over which a rising trend is a divergence."""
    planned_widening: float = 2.0
    """The gate's bounds on loss and gradient norm are this many times as high within the window of a planned change;
    at least 1. The caps stay."""
    fp8_underflow: float
    """Share of the numbers of a layer group that fp8 makes zero from which its range does not do."""
    fp8_saturated: float
    """Share of the tensors with numbers at twice the range of fp8 or beyond from which it does not do."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "level_rows": 2,
            "memory_rows": 2,
            "spread_rows": 2,
            "warmup_rows": 1,
            "warmup_widening": 1.0,
            "planned_widening": 1.0,
            "gate_loss_factor": 1.0,
            "gate_grad_factor": 1.0,
            "joint_grad_factor": 1.0,
            "gate_loss_cap": self.gate_loss_factor,
            "gate_grad_cap": self.gate_grad_factor,
            "grad_spike_factor": 1.0,
            "recovered_rows": 1,
            "lingering_rows": 1,
            "divergence_rows": 10,
            "slack_sigmas": 0.0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            require(value >= minimum, f"sentinel.detect.{name}", f"must be at least {minimum:g}, got {value}")
        for name in ("gate_sigmas", "joint_sigmas", "spike_sigmas", "row_sigmas", "lone_sigmas"):
            require(getattr(self, name) > 0, f"sentinel.detect.{name}", f"must be positive, got {getattr(self, name)}")
        valid = 0 <= self.spike_forgetting < 1
        require(valid, "sentinel.detect.spike_forgetting", f"must be in 0 .. 1, got {self.spike_forgetting}")
        for name in ("fp8_underflow", "fp8_saturated"):
            share = getattr(self, name)
            require(0 < share <= 1, f"sentinel.detect.{name}", f"must be above 0 and at most 1, got {share}")


@dataclass(slots=True, kw_only=True)
class BudgetConfig:
    per_window: int
    """Within sentinel.policy.window_steps of net progress."""
    per_run: int

    def __post_init__(self) -> None:
        for name in ("per_window", "per_run"):
            value = getattr(self, name)
            require(value >= 0, f"sentinel.policy.budgets.*.{name}", f"must be 0 (never) or more, got {value}")


@dataclass(slots=True, kw_only=True)
class BudgetsConfig:
    skip: BudgetConfig
    rewind: BudgetConfig
    rollback: BudgetConfig
    cool: BudgetConfig
    swap: BudgetConfig
    precision: BudgetConfig
    check: BudgetConfig = field(default_factory=lambda: BudgetConfig(per_window=20, per_run=1000))


@dataclass(slots=True, kw_only=True)
class PolicyConfig:
    watch_iterations: int
    """How long a loss spike may take to recover by itself; it is prolonged while the spike keeps halving."""
    patience_iterations: int
    """How long a loss spike may take to turn, and how long after a sign of trouble the trouble may follow."""
    accept_rise_nats: float
    """Largest lasting step of the loss that is taken for other data, where it never overshot and has no known cause."""
    held_out_tolerance: float = 0.05
    """Share of the expected held-out loss. At an incident a held-out loss up to this far above it means that the state
    is healthy and the data changed; above that the state is damaged."""
    refused_in_row: int
    """Rejected updates in a row, of as many batches, that show that the state is broken and not a batch. So many in one
    incident, in a row or not, also lead to a check of the held-out loss."""
    neighbours: int
    """Batches on either side of the guilty ones that are excluded too where their exclusion alone did not help."""
    rollback_margin_steps: int
    """How long before the onset a checkpoint should be; any before it will do where there is none so old."""
    rollback_window_batches: int
    """Batches around the onset that a rollback excludes."""
    region_steps: int
    """Trouble this near to a place of trouble is the same incident."""
    clean_steps: int
    """Steps past a place of trouble after which its incident is closed and the ladder begins anew."""
    window_steps: int
    """Stretch of net progress that budgets count in; steps that are trained again are no progress."""
    recur_after: int
    """Rewinds and rollbacks in one window after which a cure follows: another source, another precision, a lower lr."""
    swap_after: int
    """Guilty batches in a row that must share a source before it is turned off."""
    cool_factor: float
    """What the learning rate is multiplied with each time."""
    min_lr_scale: float
    """The learning rate is never scaled below this."""
    cool_steps: int
    """Clean steps of net progress after which one cooling is taken back."""
    fall_back_precision: bool
    """Whether a run in fp8 computes in bf16 for a while where the range of fp8 does not do."""
    precision_iterations: int
    """For how long it then does; twice as long each time it must again."""
    budgets: BudgetsConfig

    def __post_init__(self) -> None:
        positive = ("watch_iterations", "patience_iterations", "refused_in_row", "region_steps", "clean_steps")
        for name in (*positive, "window_steps", "recur_after", "swap_after", "cool_steps", "precision_iterations"):
            value = getattr(self, name)
            require(value >= 1, f"sentinel.policy.{name}", f"must be at least 1, got {value}")
        not_negative = ("neighbours", "rollback_margin_steps", "rollback_window_batches", "accept_rise_nats")
        for name in (*not_negative, "held_out_tolerance"):
            value = getattr(self, name)
            require(value >= 0, f"sentinel.policy.{name}", f"must be 0 or more, got {value}")
        factor, least = self.cool_factor, self.min_lr_scale
        require(0 < factor < 1, "sentinel.policy.cool_factor", f"must be between 0 and 1, got {factor}")
        require(0 < least <= 1, "sentinel.policy.min_lr_scale", f"must be above 0 and at most 1, got {least}")


@dataclass(slots=True, kw_only=True)
class SentinelConfig:
    lag: int
    """Steps after which the host reads what the device wrote; 0 waits for every step."""
    probe_every: int
    """Steps between the costlier signals: norms of weights, moments and activations."""
    halt_after_refused: int
    """Updates refused in a row after which the run halts (exit code 3): what is broken will not mend itself."""
    held_out_rows: int = 16
    """Held-out sequences that the check at an incident measures the loss of, always the same ones; rounded up to whole
    micro-batches on every rank. 0: no check, an incident goes straight to the restore."""
    planned_batches: int = 50
    """Batches (steps, for the schedule) after a planned change within which the gate's bounds are wider and the first
    rejected update leads to a check; 0: planned changes are treated like any other."""
    policy: PolicyConfig
    detect: DetectConfig

    def __post_init__(self) -> None:
        require(self.lag >= 0, "sentinel.lag", f"must be 0 or more, got {self.lag}")
        for name in ("held_out_rows", "planned_batches"):
            require(getattr(self, name) >= 0, f"sentinel.{name}", f"must be 0 or more, got {getattr(self, name)}")
        for name in ("probe_every", "halt_after_refused"):
            require(getattr(self, name) >= 1, f"sentinel.{name}", f"must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True, kw_only=True)
class RingConfig:
    slots: int
    """Snapshots in host memory a run can rewind to; 0: none. One buffer more is held for what is being saved."""
    every_steps: int
    """Iterations between snapshots."""
    memory_gb: float | None
    """Host memory of one machine that all its snapshots may take, in GB (1e9 bytes); null: half of what is free."""

    def __post_init__(self) -> None:
        message = f"must be 0 (none) or at least 2, one to keep while the next is taken, got {self.slots}"
        require(self.slots == 0 or self.slots >= 2, "checkpoint.ring.slots", message)
        require(self.every_steps >= 1, "checkpoint.ring.every_steps", f"must be at least 1, got {self.every_steps}")
        valid = self.memory_gb is None or self.memory_gb > 0
        require(valid, "checkpoint.ring.memory_gb", f"must be positive or null, got {self.memory_gb}")


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: int
    """Steps between checkpoints; 0: none by steps. A run that stops or ends always saves."""
    every_minutes: float | None
    """Minutes between checkpoints, by rank 0's clock; null: none by the clock. With every_steps, whichever is first."""
    keep: int
    """How many of the newest checkpoints stay on disk; the newest good one always does."""
    keep_every_steps: int
    """The first checkpoint in every so many steps stays for ever; 0: none."""
    good_after_steps: int
    """Clean steps in a row that must follow before a checkpoint counts as good."""
    retry_s: float = 300.0
    """Seconds for which reading a checkpoint is retried, with growing pauses, after an I/O error on any rank; 0: not at
    all. Then a start exits with 75, and a rollback tries an older checkpoint. Must be below launch.start_within_s to be
    of use: the launcher takes a longer start or restore for a hang."""
    ring: RingConfig

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every_steps"):
            require(getattr(self, name) >= 0, f"checkpoint.{name}", f"must be 0 or more, got {getattr(self, name)}")
        for name in ("keep", "good_after_steps"):
            require(getattr(self, name) >= 1, f"checkpoint.{name}", f"must be at least 1, got {getattr(self, name)}")
        valid = self.every_minutes is None or 0 < self.every_minutes < math.inf
        require(valid, "checkpoint.every_minutes", f"must be positive or null, got {self.every_minutes}")
        valid = 0 <= self.retry_s < math.inf
        require(valid, "checkpoint.retry_s", f"must be 0 or more seconds, and finite, got {self.retry_s}")


@dataclass(slots=True, kw_only=True)
class TelemetryConfig:
    mlflow: bool
    tracking_uri: str | None
    """Any MLflow tracking URI without a password or token; env:NAME: the value of that environment variable, which is
    not written to disk; null: sqlite in run.dir."""
    experiment: str
    """MLflow experiment the run belongs to."""
    exit_wait_s: float
    """How long a finished run waits for MLflow to take the rest; what is left can be sent later."""
    picture: bool
    """Write loss.png when the run ends, unless it was interrupted (exit code 75)."""
    postmortem: bool
    """Write incidents/NNN/ when an incident ends, in a process beside the run."""

    def __post_init__(self) -> None:
        require(self.exit_wait_s >= 0, "telemetry.exit_wait_s", f"must be 0 or more, got {self.exit_wait_s}")
        require(bool(self.experiment), "telemetry.experiment", "must not be empty")


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """What is asked of Slurm, and when a job that ended may begin again."""

    partition: str | None
    account: str | None
    qos: str | None
    time_minutes: int | None
    """Time limit of one job; null: the partition's."""
    gpus_per_node: int | None
    """null: none is asked for, as on a cluster that hands out whole nodes."""
    cpus_per_node: int | None
    """null: what the partition gives to a task that does not ask, often one core."""
    memory_gb: float | None
    """Host memory of a node, in GB (1e9 bytes); 0: all of it; null: the partition's default."""
    options: list[str]
    """Further options of sbatch, one a word: launch.slurm.options=['--constraint=h100']."""
    warn_s: int
    """Seconds before its time is up at which a job is told to save and leave."""
    max_requeues: int
    """Requeues in a row without a newer checkpoint after which a job ends, whatever ended its starts; 0: never requeue.
    A newer checkpoint resets the count, so that a run that advances is never ended by it."""
    max_stalled: int
    """The same limit for starts that the run itself spent without a newer checkpoint: it crashed, or left unsaved.
    Starts that a node failed (health check, node death) do not count here."""
    health: bool
    """Look at every node before each start: devices, memory, disk, clocks, a small all-reduce; false where the cluster
    does so itself."""
    exclude_hours: float = 24.0
    """A node that failed the health check twice is excluded for so many hours since its last failure; 0: never."""
    max_excluded: int = 4
    """Most nodes excluded at a time; never so many that the job could not start."""

    def __post_init__(self) -> None:
        for name in ("time_minutes", "gpus_per_node", "cpus_per_node"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"launch.slurm.{name}", f"must be at least 1 or null, got {value}")
        valid = self.memory_gb is None or 0 <= self.memory_gb < math.inf
        require(valid, "launch.slurm.memory_gb", f"must be 0 (all) or more, or null, got {self.memory_gb}")
        for option in self.options:
            message = f"each is one word that begins with --, got {option!r}"
            require(re.fullmatch(r"--[a-z][\w-]*(=\S+)?", option) is not None, "launch.slurm.options", message)
        require(self.warn_s >= 1, "launch.slurm.warn_s", f"must be at least 1, got {self.warn_s}")
        require(self.max_requeues >= 0, "launch.slurm.max_requeues", f"must be 0 or more, got {self.max_requeues}")
        require(self.max_stalled >= 1, "launch.slurm.max_stalled", f"must be at least 1, got {self.max_stalled}")
        require(self.exclude_hours >= 0, "launch.slurm.exclude_hours", f"must be 0 or more, got {self.exclude_hours}")
        require(self.max_excluded >= 0, "launch.slurm.max_excluded", f"must be 0 or more, got {self.max_excluded}")


@dataclass(slots=True, kw_only=True)
class LaunchConfig:
    kind: LaunchKind
    """local: this machine, now; slurm: a job."""
    nproc: int | None
    """Ranks on one machine; null: one a GPU, or 2 on CPU."""
    threads: int | None
    """CPU threads of one rank; null: the machine's cores shared out."""
    nodes: int
    """Machines."""
    min_nodes: int | None
    """With how few the run may go on where others are gone; null: all. The global batch stays what it is: its sequences
    are shared out again, unevenly where they do not divide. Must leave no more ranks than train.batch_size, and a
    multiple of parallel.replicate."""
    dry_run: bool
    """Print what would be submitted, and submit nothing."""
    hang_after_s: float
    """A rank whose loop has not moved for so long is taken for hung: within ten seconds more it is named, and the run
    is taken down on all machines, to begin again from its newest checkpoint. Longer than the longest step; shorter than
    parallel.timeout_s, after which the ranks that wait for it give up without knowing whom they waited for. A machine
    that is not heard of is given up after as long, or after 30 s where that is less. Never shorter than three intervals
    of the heartbeat files (1 s; above 100 ranks num_ranks / 100 s): 492 s for 16,384 ranks."""
    start_within_s: float
    """What may take longer: the machines' gathering, a start up to the end of its first iteration (reading a
    checkpoint, compiling), a save that waits for its disk, going back to a checkpoint."""
    at_once: int | None
    """Runs of a sweep at the same time on this machine; null: as its cores or GPUs allow."""
    slurm: SlurmConfig

    def __post_init__(self) -> None:
        for name in ("nproc", "threads", "min_nodes", "at_once"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"launch.{name}", f"must be at least 1 or null, got {value}")
        require(self.nodes >= 1, "launch.nodes", f"must be at least 1, got {self.nodes}")
        if self.min_nodes is not None:
            message = f"must not exceed launch.nodes={self.nodes}, got {self.min_nodes}"
            require(self.min_nodes <= self.nodes, "launch.min_nodes", message)
        for name in ("hang_after_s", "start_within_s"):
            value = getattr(self, name)
            require(value > 0, f"launch.{name}", f"must be positive, got {value}")


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """What the machines can do; `harness plan` reckons with it."""

    peak_tflops: float | None
    """Dense bf16 rate of one device, the 100 % of MFU; null: known from the device's name, or no MFU."""
    memory_gb: float | None
    """Memory of one device, in GB (1e9 bytes); null: not known, and nothing is refused for it."""
    memory_gb_s: float | None = None
    """Bandwidth of that memory, in GB/s; null: in proportion to peak_tflops, as on an H200."""
    gpus_per_node: int | None
    """Devices of one machine; null: launch.nproc."""
    intra_node_gb_s: float | None
    """What one device sends to the others of its machine, one way, in GB/s."""
    inter_node_gb_s: float | None
    """What one device sends to other machines, one way, in GB/s."""
    price_per_gpu_hour: float | None
    """Any currency; null: costs are told in time alone."""

    def __post_init__(self) -> None:
        names = ("peak_tflops", "memory_gb", "memory_gb_s", "gpus_per_node", "intra_node_gb_s", "inter_node_gb_s")
        for name in (*names, "price_per_gpu_hour"):
            value = getattr(self, name)
            require(value is None or value > 0, f"cluster.{name}", f"must be positive or null, got {value}")


@dataclass(slots=True, kw_only=True)
class Config:
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

    def __post_init__(self) -> None:
        optim, train, model = self.optim, self.train, self.model
        message = f"must not exceed train.num_steps={train.num_steps}, got {optim.warmup_steps}"
        require(optim.warmup_steps <= train.num_steps, "optim.warmup_steps", message)
        if optim.schedule is ScheduleKind.wsd:
            room = train.num_steps - optim.warmup_steps
            message = f"must fit between the warm-up and the end ({room} steps), got {optim.decay_steps}"
            require(optim.decay_steps <= room, "optim.decay_steps", message)
        if self.precision.kind is PrecisionKind.fp8:
            check_fp8(self)
        kinds = {source.kind for source in self.data.sources.values()}
        if DataKind.embedded in kinds:
            message = f"must be at least 256 for byte-level data (kind=embedded), got {model.vocab_size}"
            require(model.vocab_size >= 256, "model.vocab_size", message)
        if DataKind.synthetic in kinds:
            rare = self.data.synthetic.rare_tokens
            message = f"must leave at least 2 tokens of model.vocab_size={model.vocab_size} to the bulk, got {rare}"
            require(rare <= model.vocab_size - 2, "data.synthetic.rare_tokens", message)


def check_fp8(cfg: Config) -> None:
    """Refuse what fp8 cannot multiply: its products take sides that are multiples of 16."""
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
        message = f"must give matrices of a multiple of {FP8_SIDE} for precision=fp8, gives {side}"
        require(side % FP8_SIDE == 0, key, message)
    rows = (cfg.train.micro_batch_size or 1) * cfg.train.sequence_length
    message = f"must make micro-batches of a multiple of {FP8_SIDE} tokens for precision=fp8, got {rows}"
    require(rows % FP8_SIDE == 0, "train.sequence_length", message)


def check_world(cfg: Config, world_size: int) -> None:
    """Refuse what `world_size` ranks cannot share."""
    replicate, batch = cfg.parallel.replicate, cfg.train.batch_size
    require(
        world_size % replicate == 0,
        "parallel.replicate",
        f"must divide the number of ranks ({world_size}), got {replicate}",
    )
    message = f"must be at least the number of ranks ({world_size}): each takes one sequence or more, got {batch}"
    require(batch >= world_size, "train.batch_size", message)
    if cfg.precision.kind is PrecisionKind.fp8:
        rows = sharing(cfg, world_size).micro_batch_slots
        tokens = rows * cfg.train.sequence_length
        message = f"gives micro-batches of {rows} sequences on {world_size} ranks, which is {tokens} tokens; "
        message += f"must be a multiple of {FP8_SIDE} for precision=fp8"
        require(tokens % FP8_SIDE == 0, "train.micro_batch_size", message)


def sharing(cfg: Config, world_size: int) -> Sharing:
    """How `world_size` ranks share the global batch."""
    train = cfg.train
    return Sharing(batch_size=train.batch_size, world_size=world_size, micro_batch_size=train.micro_batch_size)
