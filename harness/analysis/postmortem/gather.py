"""Collects the evidence of one incident from a run directory.

How: the event log is read twice: first all events except ordinary steps, to locate the incident; then only the steps
around it. The log index (`harness.telemetry.log_index`) gives both positions; without an index, both passes scan the
raw lines. This also works on a live run and on a killed one: an incident without an end event is reconstructed from
its actions and findings.
A remark is a stretch of duplicate batches outside every incident. Only rank 0 sees duplicates, so the policy must not
act on them, but somebody has to repair the loader.
Left out: tokens of the guilty batches (`harness.analysis.postmortem.batch_tokens`) and the overrides that reproduce the
configuration (`harness.analysis.postmortem.incident_config`). Both take seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from harness.analysis.postmortem.costs import cost_of
from harness.analysis.postmortem.evidence import (
    OTHERS,
    Cost,
    Evidence,
    GuiltyBatch,
    IncidentNumbers,
    RunFacts,
    Token,
)
from harness.analysis.postmortem.incident_config import settings_at
from harness.analysis.postmortem.incident_numbers import AFTER_RECORDS, incident_numbers, repeated_iterations
from harness.analysis.postmortem.recorded_batch import entropy, rarest
from harness.analysis.replay.history import read_replay
from harness.analysis.replay.measured_step import add_measurements
from harness.analysis.replay.verdict import reproduced_iteration
from harness.checkpoint.catalog import Health, list_checkpoints
from harness.config import compose, conf_files
from harness.config.errors import ConfigError, StorageError, require
from harness.core.batch_sizes import read_token_schedule
from harness.core.credentials import without_credentials
from harness.core.events import (
    ABOUT_SPEED,
    Action,
    ActionKind,
    CheckpointSaved,
    Event,
    FaultInjected,
    Finding,
    FindingKind,
    Incident,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
    StepRecord,
    TrialMeasured,
)
from harness.core.rundir import RunDir
from harness.sentinel.policy.policy_state import RESTORES
from harness.telemetry.event_log import read_non_step_events, read_steps, tail

BEFORE, AFTER = 200, 50
"""Iterations before and after an incident that belong to its evidence."""
MOST_RECORDS, NEAR = 800, 150
"""More records than this are thinned. Kept are those within `NEAR` iterations of the onset, rejected updates, and
iterations with a finding."""
MOST_BATCHES = 8
REMARK_GAP = 50
"""Duplicate batches within this many iterations belong to one remark."""
OPEN, REMARK = "open", "remark"
SCHEDULE_KEYS = ("batch_size", "batch_size_warmup", "sequence_length")
RECENT_BYTES = 32 << 20


def recent_steps(path: Path, num_bytes: int = RECENT_BYTES) -> list[StepRecord]:
    """Step records in the last `num_bytes` of a log."""
    return [event for event in tail(path, num_bytes) if isinstance(event, StepRecord)]


def incidents(log: Sequence[Event]) -> list[Incident]:
    """All incidents of a log in order, including those without an end event."""
    known = {event.number: event for event in log if isinstance(event, Incident)}
    for number in sorted({event.incident for event in log if isinstance(event, Action)} - {0} - set(known)):
        known[number] = _reconstruct_incident(number, log)
    return [known[number] for number in sorted(known)]


def _reconstruct_incident(number: int, log: Sequence[Event]) -> Incident:
    actions = [event for event in log if isinstance(event, Action) and event.incident == number]
    named = [action.onset for action in actions if action.kind not in RESTORES]  # a restore has a margin before it
    first, last = min(named or [action.onset for action in actions]), max(action.iteration for action in actions)
    found = [event for event in log if isinstance(event, Finding) and first <= event.iteration <= last]
    onset = min((max(first, finding.onset) for finding in found), default=first)
    onset_step = max(0, actions[0].step - max(0, actions[0].iteration - onset))
    return Incident(
        time=actions[-1].time,
        iteration=last,
        number=number,
        kinds=list(dict.fromkeys(str(finding.kind) for finding in found)),
        onset=onset,
        onset_step=onset_step,
        last=last,
        last_step=max(action.step for action in actions),
        verdict=OPEN,
        is_open=True,
        ranks=sorted({rank for finding in found for rank in finding.ranks}),
        groups=list(dict.fromkeys(group for finding in found for group in finding.groups)),
        cursors=sorted({cursor for finding in found for cursor in finding.cursors}),
        actions=list(dict.fromkeys(str(action.kind) for action in actions)),
    )


def remarks(log: Sequence[Event]) -> list[Incident]:
    """Stretches of duplicate batches outside every incident."""
    spans = [(incident.onset - REMARK_GAP, incident.last + REMARK_GAP) for incident in incidents(log)]
    duplicates = [
        event
        for event in log
        if isinstance(event, Finding)
        and event.kind is FindingKind.duplicate_batch
        and not any(first <= event.iteration <= last for first, last in spans)
    ]
    stretches: list[list[Finding]] = []
    for finding in duplicates:
        if stretches and 0 <= finding.iteration - stretches[-1][-1].iteration <= REMARK_GAP:
            stretches[-1].append(finding)
        else:
            stretches.append([finding])
    return [_make_remark(number, stretch) for number, stretch in enumerate(stretches, start=1)]


def _make_remark(number: int, stretch: Sequence[Finding]) -> Incident:
    first, last = stretch[0], stretch[-1]
    return Incident(
        time=last.time,
        iteration=last.iteration,
        number=number,
        kinds=[str(first.kind)],
        onset=first.iteration,
        onset_step=first.step,
        last=last.iteration,
        last_step=last.step,
        verdict=REMARK,
        cursors=sorted({cursor for finding in stretch for cursor in finding.cursors}),
    )


def folder_of(incident: Incident) -> str:
    """Name of the incident's folder in `incidents/`."""
    return f"remark-{incident.number:03}" if incident.verdict == REMARK else f"{incident.number:03}"


def find_incident(run: RunDir, number: int) -> Incident:
    """The incident with this number; `ConfigError` if there is none."""
    known = incidents(read_non_step_events(run.events))
    found = next((incident for incident in known if incident.number == number), None)
    if found is None:
        numbers = ", ".join(str(incident.number) for incident in known) or "none"
        raise ConfigError("--incident", f"{run.path} has no incident {number}; incidents of this run: {numbers}")
    return found


def gather_evidence(run: RunDir, incident: Incident) -> Evidence:
    """Everything the run directory holds about one incident; unreadable files are skipped."""
    require(run.events.exists(), str(run.path), f"is not a run directory: it has no {run.events.name}")
    log = read_non_step_events(run.events)
    first, last = incident.onset - BEFORE, incident.last + AFTER
    faults = [event for event in read_non_step_events(run.faults) if isinstance(event, FaultInjected)]
    is_remark = incident.verdict == REMARK
    summary = summarize_incident(run, incident, log, read_run_facts(run, log))
    records = [record for record in summary.records if record.iteration <= last]
    findings = summary.findings
    replayed = read_replay(run.incidents / folder_of(incident)) or {}
    add_measurements(records, replayed)
    evidence = Evidence(
        folder=folder_of(incident),
        run=summary.run,
        incident=incident,
        findings=findings,
        actions=[] if is_remark else [e for e in log if isinstance(e, Action) and e.incident == incident.number],
        outcomes=summary.outcomes,
        faults=[fault for fault in faults if first <= fault.iteration <= last],
        others=[event for event in log if _is_context(event, first, last, number=0 if is_remark else incident.number)],
        earlier=[] if is_remark else [other for other in incidents(log) if other.number < incident.number],
        numbers=summary.numbers,
        cost=summary.cost,
    )
    evidence.reproduced = reproduced_iteration(replayed)
    evidence.checkpoint = newest_checkpoint_before(run, log, evidence.onset)
    evidence.batches = _guilty_batches(evidence, records)
    evidence.records = _thin_records(records, incident.onset, {finding.iteration for finding in findings})
    evidence.num_thinned = len(records) - len(evidence.records)
    return evidence


def _is_context(event: Event, first: int, last: int, *, number: int) -> bool:
    """Whether an event belongs to `others`: within the window, a start or an intervention before it, or a trial of
    incident `number`."""
    earliest = 0 if isinstance(event, RunStarted | Intervention) else first
    if isinstance(event, TrialMeasured):
        return event.incident == number
    return isinstance(event, OTHERS) and earliest <= event.iteration <= last


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """The numbers and the cost of an incident, and the events that they come from."""

    incident: Incident
    run: RunFacts
    """With the ranks of the start in which the incident began, and the configuration of the incident."""
    numbers: IncidentNumbers
    cost: Cost
    records: list[StepRecord]
    findings: list[Finding]
    outcomes: list[Outcome]


def summarize_incident(run: RunDir, incident: Incident, log: Sequence[Event], facts: RunFacts) -> IncidentSummary:
    """Numbers and cost of one incident; the only source of them for all reports. `log`: all events except steps."""
    is_remark = incident.verdict == REMARK
    ranks = ranks_at(incident, log, default=facts.world_size)
    facts = replace(facts, world_size=ranks, settings=settings_at(run, incident, facts.settings))
    outcomes = [] if is_remark else [e for e in log if isinstance(e, Outcome) and e.incident == incident.number]
    findings = [event for event in log if isinstance(event, Finding) and _belongs_to(event, incident)]
    records = read_steps(run.events, incident.onset - BEFORE, incident.last + AFTER_RECORDS)
    numbers = incident_numbers(incident, records, findings)
    onset = incident.onset if numbers.onset is None else numbers.onset
    repeated = repeated_iterations(records, onset, numbers.sigma)
    schedule = read_token_schedule(run, {name: facts.settings.get(f"train.{name}") for name in SCHEDULE_KEYS})
    cost = cost_of(incident, numbers, records, outcomes, facts, schedule, repeated)
    return IncidentSummary(
        incident=incident, run=facts, numbers=numbers, cost=cost, records=records, findings=findings, outcomes=outcomes
    )


def ranks_at(incident: Incident, log: Iterable[Event], *, default: int) -> int:
    """Ranks of the start in which an incident began: those of a later start may be others."""
    actions = [event for event in log if isinstance(event, Action) and event.incident == incident.number]
    began = (
        incident.time if incident.verdict == REMARK else min((action.time for action in actions), default=incident.time)
    )
    starts = [event.world_size for event in log if isinstance(event, RunStarted) and event.time <= began]
    return starts[-1] if starts else default


def state_of_incident(verdict: str, *, has_halted: bool, has_ended: bool) -> str:
    """How an incident ended. In a run that has ended none is open: it halted the run, or the run ended before it."""
    if verdict != OPEN:
        return verdict
    if has_halted:
        return "halted the run"
    return "not settled when the run ended" if has_ended else OPEN


def newest_checkpoint_before(run: RunDir, log: Iterable[Event], onset: int) -> str:
    """Name of the newest checkpoint from before an iteration that is on disk and neither tainted nor damaged."""
    saved = [event for event in log if isinstance(event, CheckpointSaved) and event.iteration < onset]
    try:
        usable = {each.name for each in list_checkpoints(run.checkpoints) if each.health is not Health.tainted}
    except StorageError:
        return ""
    return next((event.directory for event in reversed(saved) if event.directory in usable), "")


def _belongs_to(finding: Finding, incident: Incident) -> bool:
    """Whether a finding lies between the incident's onset and end. Findings about speed and duplicate batches may also
    lie up to `REMARK_GAP` iterations outside."""
    if finding.kind in ABOUT_SPEED | {FindingKind.duplicate_batch}:
        return incident.onset - REMARK_GAP <= finding.iteration <= incident.last + REMARK_GAP
    return incident.onset <= finding.iteration <= incident.last or incident.onset <= finding.onset <= incident.last


def read_run_facts(run: RunDir, log: Sequence[Event]) -> RunFacts:
    """Facts about the whole run, from its manifest, configuration and log."""
    manifest, tracking = _json(run.manifest), _json(run.mlflow)
    starts = [event for event in log if isinstance(event, RunStarted)]
    end = next((event for event in reversed(log) if isinstance(event, RunEnded | RunStarted)), None)
    device = manifest.get("hardware", manifest)
    return RunFacts(
        name=run.path.resolve().name,
        path=str(run.path),
        settings=settings_of(run),
        world_size=starts[-1].world_size if starts else 1,
        commit=str(manifest.get("commit") or ""),
        device=str(device.get("device") or "") if isinstance(device, dict) else "",
        tracking=" ".join(
            without_credentials(str(tracking[key])) for key in ("tracking_uri", "run_id") if key in tracking
        ),
        ended=f"{end.reason} (exit code {end.exit_code})" if isinstance(end, RunEnded) else "",
    )


def settings_of(run: RunDir) -> dict[str, Any]:
    """The configuration with dotted keys, from any version; empty if it cannot be read.

    Credentials are removed, because evidence is shared.
    """
    try:
        settings = compose.flat(conf_files.read_tree(run.config))
    except (ConfigError, StorageError):
        return {}
    return {key: without_credentials(value) if isinstance(value, str) else value for key, value in settings.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _guilty_batches(evidence: Evidence, records: Sequence[StepRecord]) -> list[GuiltyBatch]:
    """Batches that may have caused the incident, most certain first: rejected, skipped, at the onset, in findings."""
    refused = [
        record.cursor
        for record in records
        if record.refused and not record.is_empty and record.iteration >= evidence.onset
    ]
    skipped = [
        index
        for action in evidence.actions
        if action.kind is ActionKind.skip and len(action.exclude) == 2
        for index in range(action.exclude[0], min(action.exclude[1] + 1, action.exclude[0] + MOST_BATCHES))
    ]
    of_data = [finding for finding in evidence.findings if finding.kind not in ABOUT_SPEED]
    named = [cursor for finding in of_data for cursor in reversed(finding.cursors)]
    onset = [record.cursor for record in records if record.iteration == evidence.onset]
    blamed = list(dict.fromkeys([*refused, *skipped, *onset, *named]))[:MOST_BATCHES]
    return [_guilty_batch(index, records) for index in blamed]


def _guilty_batch(index: int, records: Sequence[StepRecord]) -> GuiltyBatch:
    seen = [record for record in records if record.cursor == index]
    if not seen:
        return GuiltyBatch(index=index)
    record = next((row for row in seen if row.token_loss_counts), seen[0])
    batch = record.batch
    return GuiltyBatch(
        index=index,
        iteration=seen[0].iteration,
        refused=any(row.refused for row in seen),
        loss=seen[0].loss,
        fingerprint=str(batch.get("fingerprint", "")),
        entropy_nats=entropy(record),
        rows=batch.get("rows", {}),
        source_losses=record.source_losses,
        rarest=[Token(token=t, text="", num_in_batch=batch_n, num_in_corpus=n) for t, batch_n, n in rarest(record)],
        token_loss_counts=record.token_loss_counts,
    )


def _thin_records(records: list[StepRecord], onset: int, suspected: set[int]) -> list[StepRecord]:
    """At most about `MOST_RECORDS`: all that matter, and the rest at even intervals."""
    if len(records) <= MOST_RECORDS:
        return records
    matters = [abs(r.iteration - onset) <= NEAR or r.refused or r.iteration in suspected for r in records]
    every = max(2, (len(records) - sum(matters)) // max(1, MOST_RECORDS - sum(matters)) + 1)
    return [record for number, record in enumerate(records) if matters[number] or number % every == 0]
