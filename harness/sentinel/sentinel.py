"""The sentinel of one rank: what the detectors suspect and what the policy decides, and a digest of all decisions.

Every rank feeds it the same records in the same order, so every rank decides alike. The digest covers all findings and
decisions, and the branches of the step that it travels in: ranks that part are named by the record of that step. It
covers whole numbers and names only: devices of two kinds may round a float differently.
The detectors forget with a rewind, the policy never does.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self, final

from harness.config.sentinel import SentinelConfig
from harness.core.events import Action, ActionKind, Event, Finding, HeldOutMeasured, Incident, Outcome, ReducedRecord
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.device.slots import DIGEST_BITS
from harness.sentinel.policy.incident_log import IncidentLog
from harness.sentinel.policy.open_incident import IncidentVerdict
from harness.sentinel.policy.policy import Policy


class StepVerdict(NamedTuple):
    findings: list[Finding]
    action: Action | None


@final
@dataclass(slots=True)
class Sentinel:
    cfg: SentinelConfig
    detectors: Detectors
    policy: Policy
    digest: int = 0
    """Of every finding and decision so far, in order."""
    probe_next_step: bool = False
    """A step in fp8 raised suspicion, or fp8 begins anew: the next step is probed, for whatever follows is answered
    otherwise where fp8 did it."""
    incident_log: IncidentLog = field(default_factory=IncidentLog)
    """For reports; nothing is decided by it."""

    @classmethod
    def start(cls, cfg: SentinelConfig) -> Self:
        return cls(cfg, Detectors(cfg.detect), Policy.start(cfg.policy, lag=cfg.lag))

    def process_record(self, record: ReducedRecord) -> StepVerdict:
        """What to make of an iteration."""
        findings = self.detectors.observe(record)
        for found in findings:
            self._digest((found.kind, found.iteration, found.onset, found.ranks, found.groups, found.cursors))
        self.probe_next_step = bool(findings) and record.in_fp8 is True
        action = self.policy.decide(record, findings)
        for closed in self.policy.closed:
            if closed.verdict is IncidentVerdict.accepted:
                self.detectors.accept_level()
        self.incident_log.on_record(record, findings, self.policy.policy_state)
        return StepVerdict(findings, self._record_action(action))

    def on_outcome(self, outcome: Outcome) -> Action | None:
        """What is to be done after an action came to something."""
        action = self.policy.on_outcome(outcome)
        self.incident_log.close_ended(outcome.time, outcome.iteration, self.policy.policy_state)
        return self._record_action(action)

    def on_held_out_measured(self, event: HeldOutMeasured) -> None:
        """The held-out loss was measured while nothing was wrong; the policy compares with it later."""
        self.policy.on_held_out_measured(event)

    def drain_events(self, *, last: bool = False) -> list[Incident]:
        """Incidents that ended since this was last asked; with `last`, as a run ends, those still open too."""
        return self.incident_log.drain(self.policy.policy_state.open_incidents if last else ())

    def on_operator_action(self, action: Action) -> None:
        """Take note of what a person decided."""
        self.policy.policy_state.on_action(action)
        self._record_action(action)

    def _record_action(self, action: Action | None) -> Action | None:
        if action is not None:
            self.incident_log.on_action(action)
            said = {name: value for name, value in asdict(action).items() if name not in ("time", "reason")}
            self._digest(said)
            if action.lr_scale is not None:
                self.detectors.expect_lr_change()
            if action.kind is ActionKind.accept:
                self.detectors.accept_level(loss=action.level, grad_norm=action.grad_level)
            if action.in_fp8:
                self.probe_next_step = True
        return action

    def digest_with(self, branches: tuple[int | bool | None, ...]) -> int:
        """The digest, and the branches of the step that it travels in."""
        return _digest_of(branches, self.digest)

    def _digest(self, said: object) -> None:
        self.digest = _digest_of(said, self.digest)

    def memory(self) -> dict[str, Any]:
        """What goes into a snapshot: plain data."""
        return {"detectors": self.detectors.state(), "policy": self.policy.state(), "digest": self.digest}

    def rewind(self, memory: dict[str, Any]) -> None:
        """The detectors as they were at a snapshot; as at the start of a run where nothing was remembered."""
        detect = self.cfg.detect
        self.detectors = Detectors.restore(detect, memory["detectors"]) if memory else Detectors(detect)

    def resume(self, memory: dict[str, Any], since: Iterable[Event]) -> None:
        """As at a checkpoint, the policy brought forward by what the log holds since: no decision is ever forgotten."""
        self.rewind(memory)
        if memory:
            self.policy = Policy.restore(self.cfg.policy, memory["policy"])
            self.digest = memory["digest"]
        for _ in self.policy.choose_actions(since):
            pass


def _digest_of(said: object, before: int) -> int:
    return zlib.crc32(repr(said).encode(), before) % (1 << DIGEST_BITS)
