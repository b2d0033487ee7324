"""A run in progress: everything that the training loop works with, and how one step report is processed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from harness.build import Parts
from harness.config.errors import EXIT_HALTED
from harness.config.schema import Config
from harness.control.stop_requests import StopRequest
from harness.control.watcher import Watcher
from harness.core.events import Action, Intervention, ReducedRecord, StepRecord
from harness.core.gc_schedule import GcSchedule
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.telemetry.event_reporter import EventReporter
from harness.telemetry.heartbeat import Heartbeat
from harness.telemetry.step_profiler import StepProfiler


class Ending(NamedTuple):
    """Why the loop ends."""

    exit_code: int
    reason: str
    after: int = 0
    """The last iteration to issue. If ranks disagree, one rank may read the record that says so before the others do.
    It keeps issuing iterations until the others have read it too; otherwise they would hang in a collective."""

    @property
    def is_halt(self) -> bool:
        return self.exit_code == EXIT_HALTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run in progress on this rank."""

    cfg: Config
    directory: RunDir
    parts: Parts
    state: RunState
    reporter: EventReporter
    stop: StopRequest
    inbox: Watcher | None
    """Operator commands; on rank 0 only."""
    heartbeat: Heartbeat
    gc_schedule: GcSchedule
    profiler: StepProfiler
    pause: Intervention | None = None
    """The operator's pause that a restart inside the job has interrupted; the loop begins paused."""

    def read_record(self, facts: HostFacts, values: Tensor) -> StepRecord:
        """Turn a step report into its record."""
        record = unpack_report(
            self.parts.signals.layout,
            facts,
            values,
            dim=self.cfg.model.dim,
            dynamic_scale=self.parts.loss_scale.growth_interval is not None,
            clip_norm=self.cfg.optim.clip_norm,
            replicate=self.parts.world.replicate,
        )
        record.beta2 = self.cfg.optim.beta2 if facts.probed else None
        return record

    def log_step(self, facts: HostFacts, values: Tensor) -> StepRecord:
        """Turn a step report into its record, and write the record to the event log."""
        record = self.read_record(facts, values)
        logged = self.reporter.emit_step(record, posted_s=facts.posted_s, batch_tokens=facts.batch_tokens)
        self.heartbeat.set_progress(logged, left_s=self.reporter.left_s(logged))
        return logged

    def process_report(
        self, facts: HostFacts, values: Tensor, *, is_halted: bool = False
    ) -> tuple[ReducedRecord, Action | None]:
        """Log one step report, correct the step counter, run the detectors and the policy; returns the policy's action.

        After a halt, and where ranks disagree, the report is only logged.
        """
        parts, state = self.parts, self.state
        if measured := parts.check.receive(facts.iteration):
            self.reporter.emit_event(measured)
            parts.sentinel.on_held_out_measured(measured)
        record = self.log_step(facts, values)
        state.correct_step(refused=record.refused)
        if is_halted or record.digests:
            return record, None
        findings, action = parts.sentinel.process_record(record)
        for finding in findings:
            self.reporter.emit_event(finding)
        policy = parts.sentinel.policy
        parts.checkpoints.on_step_record(
            record,
            state,
            doubtful_since=policy.doubtful_since,
            is_busy=policy.is_busy,
            remembered=parts.sentinel.memory,
        )
        return record, action
