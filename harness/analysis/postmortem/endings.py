"""Why a run ended before its time: causes that no step record shows.

Why: out of memory, a lost file system or a killed process end a run without an incident. The launcher knows the cause
and logs it with the end of the run; the post-mortem must name it instead of "no incidents".
How: the kind of the failure is a field of the last `run_ended` event. Logs of earlier versions have no kind; their
cause is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.config.errors import EXIT_DONE
from harness.core.events import EndCause, Event, RunEnded, RunStarted

ADVICE = {
    EndCause.out_of_memory: "apply the change named above, then rerun the same command to resume",
    EndCause.lost_storage: "check the mount of that path on every node; then rerun the same command to resume",
    EndCause.hung_rank: "read the stacks of that rank in its logs; check its GPU and network; then rerun the command",
    EndCause.killed_rank: "find who sent the signal: an operator, the scheduler, or the kernel for want of memory",
    EndCause.lost_node: "check the health of that node; then rerun the same command to resume",
    EndCause.planned: "rerun the same command to resume",
    EndCause.error: "read the traceback in the log of that rank",
}
"""Cause -> what to do first."""


class RunEnding(NamedTuple):
    """How a run ended before its time."""

    cause: EndCause
    step: int
    exit_code: int
    reason: str

    @property
    def line(self) -> str:
        cause = self.cause or "not known"
        advice = f"; to do: {ADVICE[self.cause]}" if self.cause in ADVICE else ""
        return f"ended at step {self.step} with exit code {self.exit_code}; cause: {cause}; {self.reason}{advice}"


def find_ending(log: Sequence[Event]) -> RunEnding | None:
    """How the last start of a run failed; None if it runs, is done, was stopped, or was halted by the sentinel."""
    last = next((event for event in reversed(log) if isinstance(event, RunEnded | RunStarted)), None)
    if not isinstance(last, RunEnded) or last.exit_code == EXIT_DONE or not last.cause:
        return None
    known = {str(cause): cause for cause in EndCause}
    return RunEnding(known.get(last.cause, EndCause.unknown), last.step, last.exit_code, last.reason)
