"""The sentinel of one rank: runs the detectors and the policy on each record, and keeps a digest of all decisions.

Every rank processes the same records in the same order, so every rank takes the same decisions. Each rank sends its
digest with the signals of the next step. The digest covers all findings and actions, and the branches of that step
(probe, precision, ...); ranks that disagree are named by the record of that step. It covers integers and names only,
because two kinds of devices may round a float differently.
A rewind restores the detectors to the snapshot. It never restores the policy: no decision is forgotten.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self, final

from harness.config.sentinel import SentinelConfig
from harness.core.events import (
    Action,
    ActionKind,
    Event,
    Finding,
    HeldOutMeasured,
    Incident,
    Outcome,
    ReducedRecord,
    RunStarted,
    TrialMeasured,
)
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.device.slots import DIGEST_BITS
from harness.sentinel.policy.incident_log import IncidentLog
from harness.sentinel.policy.log_events import DecisionKey, JudgedRecord, PolicyEvent, decision_key, drop_known
from harness.sentinel.policy.open_incident import IncidentVerdict
from harness.sentinel.policy.policy import Policy

NOT_DIGESTED = ("time", "reason")
"""Fields of an action that may differ between ranks or versions."""


class StepVerdict(NamedTuple):
    """The findings and the action of one record."""

    findings: list[Finding]
    action: Action | None


@final
@dataclass(slots=True)
class Sentinel:
    cfg: SentinelConfig
    detectors: Detectors
    policy: Policy
    digest: int = 0
    """CRC of every finding and action so far, in order."""
    probe_at: set[int] = field(default_factory=set)
    """Iterations after which a step is probed, because an fp8 step had a finding or fp8 was switched on again: the
    response differs if fp8 is the cause. It is the first step that begins after the record has been read. A resume
    knows the same iterations, from its state and the log."""
    incident_log: IncidentLog = field(default_factory=IncidentLog)
    """For reports; no decision depends on it."""
    machines: dict[str, list[int]] = field(default_factory=dict)
    """Machine -> its ranks, as the last start logged them."""
    schedule_changed_at: int = -1
    """The iteration after which the newest resume with another learning-rate schedule began; -1: there was none."""
    decided: list[DecisionKey] = field(default_factory=list)
    """Actions and outcomes since the last record. The log has them behind that record."""

    @classmethod
    def start(cls, cfg: SentinelConfig) -> Self:
        return cls(cfg, Detectors(cfg.detect), Policy.start(cfg.policy, lag=cfg.lag))

    @property
    def repeats_check(self) -> bool:
        """Whether the next step computes a micro-batch twice, because the last such check found a difference."""
        return self.detectors.corruption.is_repeating

    def process_record(self, record: ReducedRecord) -> StepVerdict:
        """Run the detectors and the policy on the record of one iteration."""
        self.decided = []
        findings = self.detectors.observe(record)
        for found in findings:
            self._add_to_digest((found.kind, found.iteration, found.onset, found.ranks, found.groups, found.cursors))
        self._request_probe(record, findings)
        action = self.policy.decide(record, findings)
        for closed in self.policy.closed:
            if closed.verdict is IncidentVerdict.accepted:
                self.detectors.accept_level()
        self.incident_log.on_record(record, findings, self.policy.policy_state)
        return StepVerdict(findings, self._record_action(action))

    def on_run_started(self, event: RunStarted) -> None:
        """Record a start of the run: what the detectors know of a rank holds for the machine that it was on."""
        self.machines = event.machines
        self.detectors.on_start(event.machines)

    def on_outcome(self, outcome: Outcome) -> Action | None:
        """Return the follow-up of an action whose outcome is known, or None."""
        self.decided.append(decision_key(outcome))
        action = self.policy.on_outcome(outcome)
        self.incident_log.close_ended(outcome.time, outcome.iteration, self.policy.policy_state)
        return self._record_action(action)

    def on_held_out_measured(self, event: HeldOutMeasured) -> None:
        """Record a held-out loss that was measured outside of an incident; the policy compares with it later."""
        self.policy.on_held_out_measured(event)

    def on_trial_measured(self, event: TrialMeasured) -> None:
        """Record the result of one candidate of a trial."""
        self.policy.on_trial_measured(event)

    def drain_events(self, *, last: bool = False) -> list[Incident]:
        """Return the incidents closed since the last call; with `last`, at the end of a run, the open ones too."""
        return self.incident_log.drain(self.policy.policy_state.open_incidents if last else ())

    def on_operator_action(self, action: Action) -> None:
        """Record an action that an operator requested."""
        self.policy.policy_state.on_action(action)
        self._record_action(action)

    def _record_action(self, action: Action | None) -> Action | None:
        if action is not None:
            self.decided.append(decision_key(action))
            self.incident_log.on_action(action)
            self._add_to_digest({name: value for name, value in asdict(action).items() if name not in NOT_DIGESTED})
            if action.lr_scale is not None:
                self.detectors.expect_lr_change()
            if action.kind is ActionKind.accept:
                self.detectors.accept_level(loss=action.level, grad_norm=action.grad_level)
            self._request_probe_after(action)
        return action

    def _request_probe(self, record: ReducedRecord, findings: Sequence[Finding]) -> None:
        """Request a probe if an fp8 step had a finding, and forget the requests of earlier iterations."""
        self.probe_at = {iteration for iteration in self.probe_at if iteration >= record.iteration}
        if findings and record.in_fp8:
            self.probe_at.add(record.iteration + self.cfg.lag)

    def _request_probe_after(self, action: Action) -> None:
        """Request a probe if fp8 is switched on again."""
        if action.in_fp8:
            self.probe_at.add(action.iteration + self.cfg.lag)

    def digest_with(self, branches: tuple[int | bool | None, ...]) -> int:
        """The digest extended by the branches of the step that it is sent with."""
        return _extend_digest(self.digest, branches)

    def _add_to_digest(self, value: object) -> None:
        self.digest = _extend_digest(self.digest, value)

    def memory(self) -> dict[str, Any]:
        """The part of a snapshot or checkpoint that belongs to the sentinel, as plain data."""
        return {
            "detectors": self.detectors.state(),
            "policy": self.policy.state(),
            "digest": self.digest,
            "decided": [list(key) for key in self.decided],
            "incidents": self.incident_log.state(),
            "probe_at": sorted(self.probe_at),
        }

    def copy(self) -> Self:
        """A sentinel with the same detectors and policy, to find out what it would do."""
        other = type(self).start(self.cfg)
        other.resume(self.memory(), ())
        return other

    def rewind(self, memory: dict[str, Any], *, iteration: int | None = None) -> None:
        """Restore the detectors from the snapshot of an iteration; to their initial state if the snapshot has none.

        If the learning-rate schedule was changed since, its next value is no jump.
        """
        detect = self.cfg.detect
        self.detectors = Detectors.restore(detect, memory["detectors"]) if memory else Detectors(detect)
        self.detectors.on_start(self.machines)
        if iteration is not None and iteration <= self.schedule_changed_at:
            self.detectors.expect_lr_change()

    def resume(self, memory: dict[str, Any], since: Iterable[Event], *, iteration: int | None = None) -> None:
        """Restore from the checkpoint of an iteration, then update the policy from the events logged since: no decision
        is lost."""
        self.rewind(memory, iteration=iteration)
        if memory:
            self.policy = Policy.restore(self.cfg.policy, memory["policy"], lag=self.cfg.lag)
            self.digest = memory["digest"]
            self.decided = memory.get("decided", [])
            self.probe_at = set(memory.get("probe_at", ()))
            self.incident_log = IncidentLog.restore(memory["incidents"]) if "incidents" in memory else IncidentLog()
        since = list(since)
        for event, _ in self.policy.fold(drop_known(since, self.decided)):
            self._follow(event)
        self.incident_log.end_resume(since, self.policy.policy_state)

    def _follow(self, event: JudgedRecord | PolicyEvent) -> None:
        """Update what is kept beside the policy from an event that it has processed. Records that a restore undid, and
        those after a halt, were only logged."""
        policy_state = self.policy.policy_state
        match event:
            case JudgedRecord(record, findings):
                self.decided = []
                if not policy_state.is_awaiting and not policy_state.is_halted:
                    self._request_probe(record, findings)
                    self.incident_log.on_record(record, findings, policy_state)
            case Action():
                self.decided.append(decision_key(event))
                self._request_probe_after(event)
                self.incident_log.on_action(event)
            case Outcome():
                self.decided.append(decision_key(event))
                self.incident_log.close_ended(event.time, event.iteration, policy_state)
            case _:
                pass


def _extend_digest(digest: int, value: object) -> int:
    return zlib.crc32(repr(value).encode(), digest) % (1 << DIGEST_BITS)
