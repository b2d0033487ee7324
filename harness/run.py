"""A run that goes on: everything the loop holds in its hands, and why it may end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from harness.build import Parts
from harness.config.errors import EXIT_HALTED
from harness.config.schema import Config
from harness.control.stop_requests import StopRequest
from harness.control.watcher import Watcher
from harness.core.events import StepRecord
from harness.core.gc_schedule import Collector
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.sentinel.device.step_report import HostFacts, unpack
from harness.telemetry.event_reporter import Narrator
from harness.telemetry.heartbeat import Heartbeat


class Ending(NamedTuple):
    """Why the loop ends."""

    exit_code: int
    reason: str
    after: int = 0
    """The iteration after which it ends. Where ranks have parted, one of them may read the record that says so before
    the others do; it goes on until they read it too, or they would wait for it."""

    @property
    def is_halt(self) -> bool:
        return self.exit_code == EXIT_HALTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that goes on."""

    cfg: Config
    directory: RunDir
    parts: Parts
    state: RunState
    narrator: Narrator
    stop: StopRequest
    inbox: Watcher | None
    """On rank 0 alone."""
    heart: Heartbeat
    collector: Collector

    def tell(self, facts: HostFacts, values: Tensor) -> StepRecord:
        """The record of an iteration, as it goes into the log."""
        record = unpack(
            self.parts.signals.layout,
            facts,
            values,
            dim=self.cfg.model.dim,
            dynamic_scale=self.parts.scale.growth_interval is not None,
            clip_norm=self.cfg.optim.clip_norm,
            replicate=self.parts.world.replicate,
        )
        record.beta2 = self.cfg.optim.beta2 if facts.probed else None
        told = self.narrator.emit_step(record, posted_s=facts.posted_s)
        self.heart.learn(told)
        return told
