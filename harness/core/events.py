"""The events of a run: dataclasses that are written to `events.jsonl`, one JSON object per line.

Every tool reads a run through this log, also long after its processes have exited. The field names are the format on
disk; `harness.core.event_json` writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


@dataclass(slots=True, kw_only=True)
class Event:
    """The fields that all events share."""

    name: ClassVar[str]
    """Value of the key `event` on disk."""
    time: float
    """Wall clock, in seconds since 1970."""
    iteration: int
    """The iteration that the event belongs to."""


@dataclass(slots=True, kw_only=True)
class RunStarted(Event):
    """A run starts or resumes."""

    name: ClassVar[str] = "run_started"
    world_size: int
    """Number of ranks."""
    num_steps: int
    """`train.num_steps`: the updates after which the run is done."""
    step: int
    """Updates applied so far: 0 in a new run, more after a resume."""
    resumed_from: str | None = None
    """Name of the checkpoint directory, or `snapshot of iteration N` in memory; None in a new run."""
    in_memory: bool = False
    """The state came from a snapshot in memory, not from disk."""
    fetched_ranks: list[int] = field(default_factory=list)
    """Ranks whose part of the state came from the memory of another rank."""
    machines: dict[str, list[int]] = field(default_factory=dict)
    """Machine -> its ranks; empty: unknown (older logs)."""


TOKEN_LOSS_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0)
"""Bin edges of the histogram of token losses, in nats."""

RankSpread = dict[str, Any]
"""Summary of one number over all ranks: `median`, `spread` (a robust sigma) and `worst`: [[rank, value], ...], at most
four entries, the farthest from the median first. Its size does not grow with the number of ranks."""

Fp8Health = dict[str, Any]
"""Range statistics of one kind of fp8 tensor: `underflow` (share of the nonzero values that were quantized to zero),
`saturated` (share of the tensors whose amax was at least twice the fp8 range) and `scale_log2`: [smallest, largest]
exponent of the scales."""


@dataclass(slots=True, kw_only=True)
class ReducedRecord(Event):
    """One iteration after the all-reduce: the only input of detectors and policy.

    Every field comes from the reduced vector or from state that is equal on every rank. The exception is `time`, which
    is logged only and decides nothing. Values that differ between ranks belong in `StepRecord`.
    """

    step: int
    """Updates applied so far, this one included unless it was rejected."""
    cursor: int
    """Batch index consumed."""
    tokens: int
    """Tokens consumed since the start of the run."""
    loss: float
    """Mean loss of the global batch, in nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of this update."""
    refused: bool
    """Whether the gate rejected the update."""
    stop_requested: bool
    """At least one rank received a stop request; all ranks stop after the same iteration."""
    save_requested: bool = False
    """`checkpoint.every_minutes` has passed; all ranks save after the same iteration."""
    command_waits: bool = False
    """An operator command is waiting; all ranks read it at the same iteration."""
    z_loss: float | None = None
    """Mean z-loss of the global batch, in nats per token."""
    loss_scale: float | None = None
    """Dynamic loss scale of this step; None: the precision has none."""
    group_grad_norms: dict[str, float] = field(default_factory=dict)
    """Gradient norm before clipping, by layer group."""
    param_norm: float | None = None
    """Norm of all weights; only where probed, like the norms below."""
    group_param_norms: dict[str, float] = field(default_factory=dict)
    """Norm of the weights, by layer group."""
    v_norm: float | None = None
    """Norm of Adam's second moment."""
    beta2: float | None = None
    """Smallest factor by which an update decays the second moment; only where probed."""
    update_ratio: float | None = None
    """Norm of the update that the moments imply, divided by the norm of the weights."""
    square_ratio: float | None = None
    """Clipped gradient divided by the root of Adam's second moment, in the layer group where that is largest. About 1
    is normal; a value far above 1 means that the moment is stale."""
    group_update_ratios: dict[str, float] = field(default_factory=dict)
    """`update_ratio` of each layer group."""
    group_square_ratios: dict[str, float] = field(default_factory=dict)
    """`square_ratio` of each layer group; without the groups that Muon updates."""
    attention_logits: dict[str, float] = field(default_factory=dict)
    """Largest attention logit of the sampled queries of a rank, mean over the ranks, by block; 0 if it is negative."""
    output_entropy: float | None = None
    """Mean entropy of the output distribution at sampled positions, in nats."""
    activation_rms: dict[str, float] = field(default_factory=dict)
    """Root mean square of the residual stream after each sampled layer."""
    source_losses: dict[str, float] = field(default_factory=dict)
    """Mean loss by data source, for the sources in this batch, in nats per token."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Upper limits of the gate for `loss` and `grad_norm`: it rejects an update beyond either."""
    ranks: dict[str, RankSpread] = field(default_factory=dict)
    """Spread over the ranks of loss, grad_norm (before the reduction; as if all had the largest share of the batch),
    step_time_s (host time outside collectives, in seconds) and, on CUDA, device_time_s (kernels of the loss head, in
    seconds)."""
    nonfinite_ranks: list[int] = field(default_factory=list)
    """Ranks whose own loss or own gradient was not finite before the reduction."""
    mismatched_ranks: list[int] = field(default_factory=list)
    """Ranks whose weights differ from those of their replicas."""
    changed_ranks: list[int] = field(default_factory=list)
    """Ranks whose weights changed between the last two updates, without an update."""
    recomputed: int | None = None
    """The first micro-batch was computed twice and compared bit by bit: 0: each rank computed its own rows again; k:
    those of the rank k places on. None: not in this step."""
    corrupted_ranks: list[int] = field(default_factory=list)
    """Ranks whose two computations differ. If rows of other ranks were computed, both ranks of a difference, unless one
    differs from two others."""
    corrupted: str = ""
    """What differs first, in the order of computation: an output, the losses or a gradient."""
    corrupted_groups: list[str] = field(default_factory=list)
    """The layer group of `corrupted`; all groups outside the blocks for their gradients, which are reduced together."""
    weight_digest: str = ""
    """Digest of all weights that this step was computed with, hexadecimal; independent of the number of ranks."""
    weight_norm: float | None = None
    """Norm of all weights that this step was computed with."""
    digests: dict[str, list[int]] = field(default_factory=dict)
    """Digest of all decisions and of this step's branches -> ranks that computed it (at most four). Empty if all ranks
    agree."""
    median_step_s: float = 0.0
    """Median over the ranks of the last step time, in seconds, each by its own clock; 0: not measured."""
    batch_tokens: int = 0
    """Tokens of the global batch; 0: not known, as in old logs."""
    fingerprint: str = ""
    """Sum of the fingerprints of all rows of the global batch, hexadecimal; empty: not measured."""
    other_data: dict[str, list[int]] = field(default_factory=dict)
    """What differs -> ranks that read different data from the rest. `plan`: corpus, order or ledger; `rows`: the tokens
    of a row that two ranks read."""
    in_planned_change: bool = False
    """The batch lies in the window after a planned change of the data or of the schedule."""
    in_fp8: bool | None = None
    """Whether this step used fp8 GEMMs; None in a run without fp8."""
    fp8: dict[str, Fp8Health] = field(default_factory=dict)
    """Range statistics of activations, weights and gradients in fp8; only where probed."""
    fp8_underflow: dict[str, float] = field(default_factory=dict)
    """Share of the values that underflowed in fp8, by layer group, for the worst kind of tensor; only where probed."""
    token_loss_counts: list[int] = field(default_factory=list)
    """Histogram of token losses: token count below each edge of `TOKEN_LOSS_EDGES`, then of the rest; only where
    probed."""

    @property
    def is_empty(self) -> bool:
        """The document mask left no rank a token to predict. The gate rejected the update, and nothing is wrong."""
        return self.refused and self.loss == self.grad_norm == 0


@dataclass(slots=True, kw_only=True)
class StepRecord(ReducedRecord):
    """One iteration as it is logged: the reduced record, and measurements of rank 0.

    The fields of this class differ between ranks. They are for readers and decide nothing.
    """

    name: ClassVar[str] = "step"
    tokens_per_s: float
    """Throughput of all ranks together, averaged over recent iterations."""
    step_time_s: float
    """Duration of this iteration, in seconds."""
    flops_per_s: float
    """Model FLOP/s of all ranks together."""
    mfu: float | None = None
    """Model FLOP/s divided by the peak of the hardware; None: the peak is unknown."""
    memory_bytes: int | None = None
    """Peak memory of rank 0's device, or of its process on CPU."""
    loader_wait_s: float | None = None
    """Seconds for which rank 0 waited for the batch: its computation, unless it was prefetched, and the start of the
    copy to the device."""
    batch: dict[str, Any] = field(default_factory=dict)
    """Facts about the batch: `fingerprint` and `rows` (by source) of the global batch, `entropy_nats` and `rarest`
    (tokens) of rank 0's own rows."""


@dataclass(slots=True, kw_only=True)
class EvalRecord(Event):
    """Result of a periodic evaluation on held-out data."""

    name: ClassVar[str] = "eval"
    step: int
    """Updates applied so far."""
    loss: float
    """Mean loss, in nats per token."""
    tokens: int
    """Held-out tokens that the mean is taken over."""


@dataclass(slots=True, kw_only=True)
class TaskEvaluated(Event):
    """Result of one task of lm-evaluation-harness on an exported checkpoint; computed beside training."""

    name: ClassVar[str] = "task_evaluated"
    step: int
    """Updates applied at the checkpoint. `iteration` is that of the checkpoint too, not of the time of the result."""
    directory: str
    """Name of the checkpoint directory."""
    task: str
    metrics: dict[str, float]
    """Metric -> value, such as acc, acc_stderr, acc_norm; with `,FILTER` behind it if the task has several filters."""
    num_examples: int
    seconds: float
    """Duration of the evaluation of all tasks, with the export."""
    blocked_s: float = 0.0
    """Seconds for which the end of the run waited for this and the other results of its last checkpoint."""


@dataclass(slots=True, kw_only=True)
class HeldOutMeasured(Event):
    """Loss on the fixed held-out rows, measured at the start and at every checkpoint.

    The check during an incident is compared with it.
    """

    name: ClassVar[str] = "held_out"
    step: int
    """Updates applied so far."""
    loss: float
    """Mean loss, in nats per token."""
    rows: str = ""
    """Hash of the rows: only losses of the same rows are compared. Empty in older logs."""


@dataclass(slots=True, kw_only=True)
class ChangePlanned(Event):
    """A planned change of the data or of the schedule starts. The gate's bounds are wider until its window ends."""

    name: ClassVar[str] = "planned_change"
    step: int
    """Updates applied so far."""
    cursor: int
    """Batch index of the next step."""
    until: int
    """The window ends before this batch index; for a change of the schedule, before this step."""
    reason: str
    """What changes, in one line."""
    first: int | None = None
    """The window begins at this batch index or step. A batch that is given back there has a lower index. None: a log of
    an older version."""


@dataclass(slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    name: ClassVar[str] = "checkpoint"
    step: int
    """Updates applied when the state was taken."""
    directory: str
    """Name of its directory below `checkpoints/`."""
    seconds: float
    """From the capture of the state until it was durable on disk."""
    blocked_s: float = 0.0
    """Seconds for which training waited."""
    bytes: int = 0
    """Size on disk."""


@dataclass(slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written. Training continues and saves again when the next one is due."""

    name: ClassVar[str] = "checkpoint_failed"
    step: int
    """Updates applied when the state was taken."""
    reason: str
    """The error, in one line."""


@dataclass(slots=True, kw_only=True)
class CheckpointJudged(Event):
    """The health of a checkpoint is known, from later steps or from a check of its files."""

    name: ClassVar[str] = "checkpoint_judged"
    directory: str
    """Name of its directory below `checkpoints/`."""
    health: str
    """good, tainted (saved from a bad state) or damaged (files differ from what was written)."""
    reason: str
    """Why, in one line."""


class FindingKind(StrEnum):
    """The kinds of anomaly that detectors report."""

    nonfinite = "nonfinite"
    loss_spike = "loss_spike"
    grad_spike = "grad_spike"
    divergence = "divergence"
    level_shift = "level_shift"
    never_learned = "never_learned"
    """The loss stays near that of a model that knows no context."""
    weight_drift = "weight_drift"
    v_stale = "v_stale"
    lr_jump = "lr_jump"
    duplicate_batch = "duplicate_batch"
    optimizer_reset = "optimizer_reset"
    scale_collapse = "scale_collapse"
    fp8_range = "fp8_range"
    slow = "slow"
    speed_recovered = "speed_recovered"
    """The end of `slow`."""
    rank_outlier = "rank_outlier"
    replica_mismatch = "replica_mismatch"
    weights_changed = "weights_changed"
    """Weights changed without an update."""
    data_mismatch = "data_mismatch"
    corruption = "corruption"
    """A micro-batch that was computed twice differs."""
    corrupting_rank = "corrupting_rank"
    """It differed again: the rank computes wrong numbers."""
    corruption_passed = "corruption_passed"
    """It did not differ again: the error was transient."""
    precursor = "precursor"
    """A slow trend that reaches its bound soon; the loss shows nothing yet."""


class PrecursorSignal(StrEnum):
    """The signals whose trend is forecast."""

    attention_logit = "largest attention logit"
    update_ratio = "update norm over weight norm"
    fp8_underflow = "share of values that underflow in fp8"


ABOUT_SPEED = frozenset({FindingKind.slow, FindingKind.speed_recovered})
"""Findings about the speed of a run, not about its numerics."""


@dataclass(slots=True, kw_only=True)
class Finding(Event):
    """A detector reports an anomaly, once, at the iteration whose record triggered it."""

    name: ClassVar[str] = "finding"
    kind: FindingKind
    step: int
    """Updates applied so far."""
    onset: int
    """The iteration where it probably started, at or before this one."""
    value: float
    """The measured number."""
    bound: float
    """The limit that the number exceeded."""
    message: str
    """Explanation for a person, in one line."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that caused it; empty: unknown."""
    groups: list[str] = field(default_factory=list)
    """Layer groups that caused it; empty: unknown."""
    cursors: list[int] = field(default_factory=list)
    """Batch indices that may have caused it."""
    signal: str = ""
    """Precursor: the signal that rises, a `PrecursorSignal`."""
    forecast_steps: int | None = None
    """Precursor: steps until the signal reaches its bound."""


class ActionKind(StrEnum):
    """What the policy can do, from the mildest to the strongest action."""

    watch = "watch"
    skip = "skip"
    check = "check"
    """Measure the held-out loss of the current weights, to tell a damaged state from different data."""
    accept = "accept"
    """The state is healthy and the data changed: adopt its loss as the new level and consume the skipped batches."""
    rewind = "rewind"
    rollback = "rollback"
    cool = "cool"
    swap = "swap"
    include = "include"
    """An operator re-includes excluded batches."""
    reweight = "reweight"
    """An operator changes the weights of data sources."""
    precision = "precision"
    qk_clip = "qk_clip"
    """Clip the attention logits after every update from now on."""
    trial = "trial"
    """Train a few steps with each of several remedies, from the same state on the same batches, and compare."""
    halt = "halt"


BY_OPERATOR = 0
"""Incident number of an operator's action."""


@dataclass(slots=True, kw_only=True)
class Action(Event):
    """A decision of the policy, equal on every rank. Its result is an `Outcome`."""

    name: ClassVar[str] = "action"
    kind: ActionKind
    step: int
    """Updates applied so far."""
    incident: int
    """Number of the incident that it answers, counted from 1; `BY_OPERATOR`: none."""
    reason: str
    """Why, in one line."""
    onset: int
    """Rewind and rollback: the restored state must be from before this iteration."""
    exclude: list[int] = field(default_factory=list)
    """First and last batch index to exclude for the rest of the run; empty: none."""
    lr_scale: float | None = None
    """Cool: factor on the learning rate from now on; 1 ends the cooling."""
    source: str | None = None
    """Swap: the data source to turn off."""
    weights: dict[str, float] = field(default_factory=dict)
    """Reweight: data source -> its new weight."""
    in_fp8: bool | None = None
    """Precision: true switches the GEMMs to fp8, false to bf16."""
    until: int | None = None
    """Cool and precision: the iteration at which it ends. None with precision: until the end of the run."""
    level: float | None = None
    """Check: the held-out loss of a healthy state. Accept: the loss that the gate adopts as its new level. In nats per
    token."""
    grad_level: float | None = None
    """Accept: the gradient norm that the gate adopts as its new level."""
    give_back: list[list[int]] = field(default_factory=list)
    """Accept, include and a skip that blames no batch: first and last batch index of each range that is consumed after
    all: next if the run has passed it, else in its place."""
    candidates: list[dict[str, Any]] = field(default_factory=list)
    """Trial: the remedies in the order in which they are tried, the least intrusive first: `remedy`, and `lr_scale` or
    `exclude` where it has one."""
    num_steps: int | None = None
    """Trial: steps that each remedy trains."""

    @property
    def label(self) -> str:
        """The kind for people; `lr` for an operator's change of the learning rate, which may also raise it."""
        return "lr" if self.kind is ActionKind.cool and self.incident == BY_OPERATOR else str(self.kind)


@dataclass(slots=True, kw_only=True)
class Outcome(Event):
    """The result of an action."""

    name: ClassVar[str] = "outcome"
    kind: ActionKind
    incident: int
    """Number of the incident, counted from 1."""
    succeeded: bool
    """False: there was no state to restore, or the action failed. The policy then chooses again."""
    step: int
    """Updates applied, after the action."""
    target: str = ""
    """What was restored: the iteration of a snapshot or the directory of a checkpoint."""
    steps_lost: int = 0
    """Updates that were undone; of a trial, all iterations that were not kept."""
    tokens_lost: int = 0
    """Tokens consumed since the restored state, also by rejected updates; of a trial, by all iterations that were not
    kept."""
    seconds: float = 0.0
    """Duration of the action."""
    reason: str = ""
    """Why it failed; empty: unknown, or it did not fail."""
    is_torn: bool = False
    """A restore failed halfway: the weights are partly old and partly restored, and the run must halt."""
    held_out_loss: float | None = None
    """Check: loss of the current weights on the fixed held-out rows, in nats per token."""
    remedy: str = ""
    """Trial: the remedy that won."""
    kept_steps: int = 0
    """Trial: iterations of the chosen remedy that are kept; their step records follow. 0: they are trained again."""

    @property
    def has_excluded(self) -> bool:
        """Whether the batches of the action are excluded: a restore excludes them before it loads anything."""
        return self.succeeded or self.is_torn


@dataclass(slots=True, kw_only=True)
class TrialMeasured(Event):
    """The result of one remedy of a trial. Its steps have no step records, unless the outcome keeps them."""

    name: ClassVar[str] = "trial"
    incident: int
    """Number of the incident, counted from 1."""
    remedy: str
    """What was tried, as in the candidates of the action."""
    steps: int
    """Iterations that it trained."""
    num_refused: int
    """Updates among them that the gate rejected."""
    findings: list[str]
    """Kinds of findings that show damage, in order of appearance."""
    held_out_before: float
    """Loss of the common starting state on the fixed held-out rows, in nats per token."""
    held_out_loss: float
    """Loss on the same rows after the steps."""
    grad_norm_before: float
    """Median gradient norm of the first steps, before clipping."""
    grad_norm: float
    """Median gradient norm of the last steps, before clipping."""
    seconds: float
    """Duration."""
    tokens: int = 0
    """Tokens that the iterations consumed; 0 in a log of an older version."""


@dataclass(slots=True, kw_only=True)
class Incident(Event):
    """One anomaly from its onset to its outcome. Logged when the policy closes it, or at the end of the run."""

    name: ClassVar[str] = "incident"
    number: int
    """The number used in actions and outcomes, counted from 1."""
    kinds: list[str]
    """Kinds of its findings in order of appearance, those of rejected updates included."""
    onset: int
    """The iteration where it probably started."""
    onset_step: int
    """The step of that iteration."""
    last: int
    """The last iteration with a finding."""
    last_step: int
    """The step of that iteration."""
    verdict: str
    """Outcome: harmless, recovered, accepted, cured, undone, or open."""
    spike_type: int | None = None
    """By the trajectory of the loss: 1 recovered, 2 lingering, 3 divergent; None: no loss spike, or undone before its
    trajectory was known."""
    is_open: bool = False
    """The run ended before the incident did."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that caused it; empty: unknown."""
    groups: list[str] = field(default_factory=list)
    """Layer groups that caused it; empty: unknown."""
    cursors: list[int] = field(default_factory=list)
    """Batch indices that may have caused it."""
    actions: list[str] = field(default_factory=list)
    """Kinds of the actions taken, in order."""


@dataclass(slots=True, kw_only=True)
class Intervention(Event):
    """A person changed a run: an operator command, or a resume with another configuration."""

    name: ClassVar[str] = "intervention"
    who: str
    """Name of the user."""
    reason: str
    """Why, as the user gave it."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What changed: config key -> [old, new], or the command and its effects."""


@dataclass(slots=True, kw_only=True)
class FaultInjected(Event):
    """A drill is about to inject a fault. Written to `faults.jsonl` by the rank that injects it."""

    name: ClassVar[str] = "fault"
    number: int
    """Index of the fault in the drill's plan, counted from 0."""
    kind: str
    """A `FaultKind`."""
    rank: int
    """The rank that injects it."""
    message: str
    """What is changed and how, in one line."""


@dataclass(slots=True, kw_only=True)
class SystemSampled(Event):
    """Load of one machine. Written to `system/rank-NNNNN.jsonl` by the first rank of that machine, outside the step.

    `iteration` is the one that the rank is in. GPUs are those that the rank sees, in their order; None: not measured.
    """

    name: ClassVar[str] = "system"
    rank: int
    """The rank that samples."""
    host: str
    """Name of the machine."""
    every_s: float
    """Seconds between samples; doubled whenever half of the samples are dropped."""
    cpu_load: float
    """Load average of one minute, divided by the number of cores."""
    host_memory_bytes: int | None = None
    """Memory in use on the machine."""
    host_memory_total_bytes: int | None = None
    """Memory of the machine."""
    process_memory_bytes: int | None = None
    """Resident memory of the rank that samples."""
    gpu_utilization: list[float | None] = field(default_factory=list)
    """Share of the time in which a kernel ran, by GPU, as NVML measures it."""
    gpu_memory_bytes: list[int | None] = field(default_factory=list)
    """Memory in use, by GPU, all processes together."""
    gpu_power_w: list[float | None] = field(default_factory=list)
    """Power draw in watts, by GPU."""
    gpu_temperature_c: list[float | None] = field(default_factory=list)
    """Temperature in degrees Celsius, by GPU."""


@dataclass(slots=True, kw_only=True)
class DrillScored(Event):
    """The score of a drill, appended to its log after the run has ended."""

    name: ClassVar[str] = "drill"
    scenario: str
    """Name of the scenario."""
    passed: bool
    """Whether every bound held."""
    scores: dict[str, float] = field(default_factory=dict)
    """Measurement -> value; true and false are 1 and 0. What could not be measured is omitted."""


class EndCause(StrEnum):
    """Why a start ended before its time, as far as the launcher knows."""

    unknown = ""
    out_of_memory = "out of memory"
    lost_storage = "lost storage"
    hung_rank = "hung rank"
    killed_rank = "killed rank"
    lost_node = "lost node"
    planned = "planned"
    """No failure: the launcher restarts the run on other machines."""
    error = "error"
    """An exception in a rank; its traceback is in the log of the launcher."""


@dataclass(slots=True, kw_only=True)
class RunRestarted(Event):
    """A rank or a machine failed, and the launcher starts all ranks again inside the same job. `time` is when it
    noticed the failure. A `RunStarted` follows."""

    name: ClassVar[str] = "run_restarted"
    step: int
    """Updates that were logged before the failure."""
    number: int
    """Restarts of this launcher so far, counted from 1."""
    reason: str
    """What failed, in one line."""
    cause: str = ""
    """Kind of the failure, a value of `EndCause`."""
    stopped_s: float = 0.0
    """Seconds from the notice until all ranks were stopped."""
    out: dict[str, str] = field(default_factory=dict)
    """Machine that the run no longer uses since this restart -> why."""
    replaced_by: dict[str, str] = field(default_factory=dict)
    """Machine that the run no longer uses -> the spare that took over its ranks. Without an entry, none did."""
    num_nodes: int = 0
    """Machines that run ranks from now on; 0: unknown (older logs)."""


@dataclass(slots=True, kw_only=True)
class RunEnded(Event):
    """A start of the run ends. After a crash the launcher writes it, with the time of the last event before it."""

    name: ClassVar[str] = "run_ended"
    step: int
    """Updates applied."""
    exit_code: int
    """0 done, 1 crashed, 2 invalid config, 3 halted by the sentinel, 75 interrupted and resumable."""
    reason: str
    """Why, in one line."""
    cause: str = ""
    """Kind of the failure, a value of `EndCause`; empty if the run ended by itself."""


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        RunStarted,
        StepRecord,
        EvalRecord,
        TaskEvaluated,
        HeldOutMeasured,
        ChangePlanned,
        CheckpointSaved,
        CheckpointFailed,
        CheckpointJudged,
        Finding,
        Action,
        Outcome,
        TrialMeasured,
        Incident,
        Intervention,
        FaultInjected,
        SystemSampled,
        DrillScored,
        RunRestarted,
        RunEnded,
    )
}
