"""Causes of lost time: why a second of a run is in no kept step, and what each cause has cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from harness.config.errors import EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core.events import EndCause, RunEnded, RunRestarted


class LossCause(StrEnum):
    """Why a second of wall time is in no kept step."""

    first_start = "first start"
    killed_rank = "killed rank"
    hung_rank = "hung rank"
    error = "error in a rank"
    out_of_memory = "out of memory"
    lost_launcher = "lost launcher"
    lost_node = "lost node"
    storage = "storage"
    unknown = "unknown failure"
    stopped = "stop and resume"
    rollback = "rewind or rollback"
    trial = "trials of remedies"
    rejected = "rejected updates"
    checkpoint = "checkpoints"
    evaluation = "evaluation"
    paused = "pause"


CAUSE_MEANINGS = {
    LossCause.first_start: "from the start event of a new run to its first step",
    LossCause.killed_rank: "a rank was killed by a signal",
    LossCause.hung_rank: "a rank made no progress, and the launcher restarted all ranks",
    LossCause.error: "a rank raised an exception",
    LossCause.out_of_memory: "a rank ran out of memory",
    LossCause.lost_launcher: "the launcher ended without a word: killed, or lost with its machine",
    LossCause.lost_node: "another machine of the job was lost",
    LossCause.storage: "a checkpoint could not be read, or was damaged and an older one was used",
    LossCause.unknown: "a start failed, and the log does not say why",
    LossCause.stopped: "the run was stopped, by a person, a scheduler or itself, and resumed later",
    LossCause.rollback: "the sentinel or an operator restored an older state",
    LossCause.trial: "remedies were tried after a restore",
    LossCause.rejected: "the gate rejected the update",
    LossCause.checkpoint: "training waited for a snapshot or for the last checkpoint",
    LossCause.evaluation: "computing the held-out loss",
    LossCause.paused: "paused by an operator",
}
"""Cause -> its meaning on the page."""

CAUSES_OF_ENDS = {
    EndCause.killed_rank: LossCause.killed_rank,
    EndCause.hung_rank: LossCause.hung_rank,
    EndCause.error: LossCause.error,
    EndCause.out_of_memory: LossCause.out_of_memory,
    EndCause.lost_node: LossCause.lost_node,
    EndCause.lost_storage: LossCause.storage,
}


def loss_cause(failure: RunRestarted | RunEnded | None) -> LossCause:
    """The cause of the time until the next start; `failure` is the event that ended the start before, if there is one.

    Logs of older versions have no `cause`.
    """
    if failure is None:
        return LossCause.lost_launcher
    if failure.cause in CAUSES_OF_ENDS:
        return CAUSES_OF_ENDS[EndCause(failure.cause)]
    is_planned = isinstance(failure, RunEnded) and failure.exit_code in (EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED)
    return LossCause.stopped if is_planned else LossCause.unknown


@final
@dataclass(slots=True)
class LostTime:
    """What one cause has cost."""

    seconds: float = 0.0
    times: int = 0
    """How often it happened."""
    steps: int = 0
    """Steps that were rejected, or trained again."""
