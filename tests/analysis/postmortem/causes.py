"""The root cause that the post-mortem of each numeric drill must report."""

from __future__ import annotations

from pathlib import Path

from harness.analysis.postmortem.gather import gather_evidence, incidents, remarks
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.rules.causes import Cause
from harness.analysis.postmortem.rules.hypotheses import rank_causes, root_cause
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_non_step_events

INJECTED = {
    "nan_loss": Cause.corrupted_rank,
    "nan_activation": Cause.corrupted_rank,
    "nan_grad": Cause.corrupted_rank,
    "inf_grad": Cause.corrupted_rank,
    "big_grad": Cause.corrupted_rank,
    "bit_flip": Cause.corrupted_rank,
    "bit_flip_weight": Cause.corrupted_rank,
    "replica_mismatch": Cause.corrupted_rank,
    "corrupt_activation": Cause.corrupted_rank,
    "corrupt_weight_read": Cause.corrupted_rank,
    "corrupt_gradient": Cause.corrupted_rank,
    "corrupting_rank": Cause.corrupted_rank,
    "stuck_bit": Cause.corrupted_rank,
    "poisoned_batch": Cause.long_tail_token,
    "poisoned_burst": Cause.long_tail_token,
    "scrambled_batch": Cause.scrambled_data,
    "duplicate_batch": Cause.data_duplicate,
    "repeated_batch": Cause.data_duplicate,
    "data_shift": Cause.other_data,
    "data_shift_planned": Cause.planned_change,
    "lr_spike": Cause.lr_discontinuity,
    "warmup_cut": Cause.lr_discontinuity,
    "beta2_stale": Cause.beta2_stale,
    "optimizer_reset": Cause.optimizer_reset,
    "fp16_overflow": Cause.fp16_overflow,
    "fp8_outlier": Cause.fp8_range,
    "logit_growth": Cause.structural,
    "slow_logit_growth": Cause.structural,
    "rising_lr": Cause.lr_discontinuity,
    "slow_gradient_growth": Cause.beta2_stale,
    "fp8_creep": Cause.fp8_range,
}


def blamed(directory: Path) -> Cause | None:
    """The root cause of the first incident of a run, or else of its first remark; None: not known."""
    run = RunDir(directory)
    log = read_non_step_events(run.events)
    evidence = gather_evidence(run, (incidents(log) or remarks(log))[0])
    first = root_cause(rank_causes(evidence, measure(evidence)))
    return None if first is None else first.cause
