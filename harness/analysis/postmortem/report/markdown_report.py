"""Renders the post-mortem of an incident as Markdown: summary, spike record and post-mortem.

A pure function of the evidence. Symptoms with numbers come before hypotheses. A section without measurements says
"not measured"; a cause with a score below `KNOWN` is "not known yet".
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures, measure
from harness.analysis.postmortem.report.incident_text import (
    FILES,
    MOST_LINES,
    NOT_KNOWN,
    NOT_MEASURED,
    TITLES,
    TYPES,
    action_counts,
    action_lines,
    cost_text,
    format_number,
    format_time,
    join_names,
    panel_name,
    printable,
    token_texts,
)
from harness.analysis.postmortem.rules.causes import Panel, RuleResult
from harness.analysis.postmortem.rules.hypotheses import KNOWN, rank_causes, root_cause
from harness.analysis.postmortem.rules.remedies import Check, Remedy, check_of, remedy_of
from harness.core.events import ActionKind


def render(evidence: Evidence, panels: Sequence[Panel] = ()) -> str:
    """The whole report; `panels` are the pictures that were drawn."""
    measures = measure(evidence)
    ranked = rank_causes(evidence, measures)
    cause = root_cause(ranked)
    remedy = None if cause is None else remedy_of(cause.cause, evidence)
    check = check_of(None if cause is None else cause.cause, remedy, evidence, measures)
    parts = [
        *_heading(evidence, cause, remedy),
        *_spike(evidence, measures, cause, remedy),
        *_report(evidence, measures, ranked),
        *_answers(remedy, check),
        *_samples(evidence),
        *_pictures(panels),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _heading(evidence: Evidence, cause: RuleResult | None, remedy: Remedy | None) -> list[str]:
    incident, run = evidence.incident, evidence.run
    drill = []
    if evidence.faults:
        fault, num = evidence.faults[0], len(evidence.faults)
        struck = f"rank {fault.rank}, iteration {fault.iteration}" + (f"; {num} times in all" if num > 1 else "")
        drill = [f"- Drill, injected fault: {fault.message} ({struck})"]
    kinds = ", ".join(evidence.kinds()) or NOT_MEASURED
    state = "still open" if incident.is_open else incident.verdict
    verdict = NOT_KNOWN if cause is None else f"{cause.cause} ({cause.score:.2f})"
    done = action_counts(evidence) or "no action"
    return [
        f"# Incident {evidence.folder} of {run.name}, {format_time(_onset_time(evidence))}",
        "",
        f"- What: {kinds}, iterations {incident.onset} to {incident.last}; {state}",
        f"- Why: {verdict}",
        f"- Done: {done}",
        f"- Change: {NOT_KNOWN if remedy is None else remedy.change}",
        f"- Cost: {cost_text(evidence)}",
        *drill,
        "",
    ]


def _onset_time(evidence: Evidence) -> float:
    record = next((record for record in evidence.records if record.iteration >= evidence.onset), None)
    return evidence.incident.time if record is None else record.time


def _spike(evidence: Evidence, measures: Measures, cause: RuleResult | None, remedy: Remedy | None) -> list[str]:
    """The spike record: symptoms, evidence, classification, action, outcome."""
    incident, run = evidence.incident, evidence.run
    cursors = [record.cursor for record in measures.during]
    blamed = ", ".join(str(batch.index) for batch in evidence.batches) or "none"
    seen = f"{min(cursors)} to {max(cursors)}" if cursors else NOT_MEASURED
    usual_grad = format_number(measures.usual_grad)
    return [
        f"## Spike #{incident.number}",
        "",
        "### Symptoms",
        f"- Pre-spike loss: {format_number(measures.level)}",
        f"- Peak loss: {format_number(None if measures.peak is None else measures.peak.loss)}",
        f"- Recovery loss (50 steps later): {format_number(measures.recovery_loss)}",
        f"- Grad norm peak: {format_number(measures.peak_grad)} (pre-clip; usually {usual_grad})",
        "",
        "### Evidence",
        f"- mlflow run: {run.tracking or NOT_MEASURED}",
        f"- Batch index range: {seen}; guilty: {blamed}",
        f"- Token histogram for offending batches: {panel_name(Panel.tokens)}",
        f"- Per-layer activation L2 at spike: {_activations(measures)}",
        f"- Guilty ranks: {join_names(incident.ranks)}; layer groups: {join_names(incident.groups)}",
        "",
        "### Classification",
        f"- Type: {TYPES.get(incident.spike_type, str(incident.spike_type))}",
        f"- Root cause: {NOT_KNOWN if cause is None else cause.cause}",
        "",
        "### Recovery action",
        *([f"- {line}" for line in action_lines(evidence)] or ["- none"]),
        "",
        "### Outcome",
        *_outcome(evidence, measures),
        f"- Cost of incident: {cost_text(evidence)}",
        "",
        "### Lessons / followups",
        f"- {NOT_KNOWN if remedy is None else remedy.lesson}",
        "",
    ]


def _report(evidence: Evidence, measures: Measures, ranked: Sequence[RuleResult]) -> list[str]:
    """Sections 1 to 3 of the post-mortem: symptoms, hypotheses, discriminating evidence."""
    incident, run, peak = evidence.incident, evidence.run, measures.peak
    recovery = format_number(measures.recovery_loss) if measures.has_recovered is not False else "did not recover"
    if measures.has_recovered is False:
        recovery += f": {format_number(measures.recovery_loss)}"
    usual_grad = format_number(measures.usual_grad)
    likely = [result for result in ranked if result.support is not None][:5]
    return [
        f"# Loss spike post-mortem: {format_time(_onset_time(evidence))}, {run.name}",
        "",
        "## 1. Symptoms",
        f"- step where spike began: {incident.onset_step} (iteration {incident.onset})",
        f"- pre-spike loss (50-step EMA): {format_number(measures.ema)}",
        f"- peak loss: {format_number(None if peak is None else peak.loss)}"
        + ("" if peak is None else f" (iteration {peak.iteration}{', refused' if peak.refused else ''})"),
        f"- recovery loss (50 steps after peak): {recovery}",
        f"- grad-norm pre-clip at spike: {format_number(measures.peak_grad)} (usually {usual_grad})",
        f"- LR at spike: {format_number(measures.onset_lr)} (before: {format_number(measures.usual_lr)})",
        f"- dtype regime: {run.precision}",
        f"- batch index in the spike step: {measures.during[0].cursor if measures.during else NOT_MEASURED}",
        f"- corpus tokens in that batch that look unusual: {_unusual(evidence)}",
        "",
        "## 2. Hypotheses",
        *(
            [
                f"{place}. {result.cause} ({result.score:.2f}): {support.text} ({panel_name(support.panel)})"
                for place, result in enumerate(likely, start=1)
                if (support := result.support) is not None
            ]
            or ["none: the log has no evidence for any known cause"]
        ),
        "",
        "## 3. Discriminating evidence",
        *_discriminating(ranked, likely),
        "",
    ]


def _discriminating(ranked: Sequence[RuleResult], likely: Sequence[RuleResult]) -> list[str]:
    lines = []
    places = {result.cause: f"H{place}" for place, result in enumerate(likely, start=1)}
    for result in likely[:3]:
        if result.support is not None and result.score >= KNOWN:
            panel = panel_name(result.support.panel)
            lines.append(f"- {panel}: {result.support.text} -> favors {places[result.cause]}")
    for result in ranked:
        if result.against is not None and result.score < KNOWN:
            hypothesis = places.get(result.cause, result.cause)
            lines.append(f"- {panel_name(result.against.panel)}: {result.against.text} -> rules out {hypothesis}")
    return lines[:MOST_LINES] or [NOT_MEASURED]


def _answers(remedy: Remedy | None, check: Check) -> list[str]:
    """Sections 4 to 7 of the post-mortem: root cause, remediation, verification, lesson."""
    overrides = [] if remedy is None else remedy.overrides
    return [
        "## 4. Root cause",
        NOT_KNOWN if remedy is None else remedy.sentence,
        "",
        "## 5. Remediation",
        f"- {NOT_KNOWN if remedy is None else remedy.change}",
        *([f"- `{' '.join(overrides)}`"] if overrides else ["- no config key makes this change"] if remedy else []),
        "",
        "## 6. Verification",
        f"- Re-run with seed {NOT_MEASURED if check.seed is None else check.seed} through step "
        f"{NOT_MEASURED if check.steps is None else check.steps}:",
        "",
        *[f"      {line}" for line in check.commands],
        "",
        *[f"- expect {line}" for line in check.expect],
        "",
        "## 7. Lesson",
        NOT_KNOWN if remedy is None else remedy.lesson,
        "",
    ]


def _outcome(evidence: Evidence, measures: Measures) -> list[str]:
    incident = evidence.incident
    halted = next((action for action in evidence.actions if action.kind is ActionKind.halt), None)
    if halted is not None:
        return [f"- The run halted: {halted.reason}"]
    state, loss = "still open" if incident.is_open else incident.verdict, format_number(measures.recovery_loss)
    match measures.has_recovered:
        case None:
            return [f"- {state}; the loss fifty steps later was {NOT_MEASURED}"]
        case True:
            return [f"- {state}; the loss is back at {loss} fifty steps after its peak"]
        case _:
            before = format_number(measures.level)
            return [f"- {state}; the loss is {loss} fifty steps after its peak (before the incident {before})"]


def _activations(measures: Measures) -> str:
    probed = next((record for record in measures.during if record.activation_rms), None)
    if probed is None:
        return NOT_MEASURED
    layers = ", ".join(f"{name} {format_number(value, 3)}" for name, value in probed.activation_rms.items())
    return f"RMS at iteration {probed.iteration}: {layers} ({panel_name(Panel.activations)})"


def _unusual(evidence: Evidence) -> str:
    batch = next((batch for batch in evidence.batches if batch.rarest), None)
    if batch is None:
        return NOT_MEASURED
    return f"{', '.join(token_texts(batch)[:5])} (batch {batch.index})" if batch.rarest else "none flagged"


def _samples(evidence: Evidence) -> list[str]:
    lines = ["## Guilty batches"]
    if not evidence.batches:
        return [*lines, NOT_MEASURED, ""]
    for batch in evidence.batches[:4]:
        facts = [f"fingerprint {batch.fingerprint}" if batch.fingerprint else "fingerprint not measured"]
        facts += [] if batch.entropy_nats is None else [f"entropy {batch.entropy_nats:.2f} nats"]
        facts += [f"{count} rows of {name}" for name, count in batch.rows.items() if count]
        facts += ["update refused"] if batch.refused else []
        facts += (
            ["DIFFERS from the data on disk now"]
            if batch.is_changed
            else []
            if batch.reread
            else ["tokens not compared with the data on disk"]
        )
        lines.append(f"- batch {batch.index}: {', '.join(facts)}")
        lines += [f"  - `{printable(sample)}`" for sample in batch.samples[:2]]
    return [*lines, ""]


def _pictures(panels: Sequence[Panel]) -> list[str]:
    if not panels:
        return []
    return ["## Panels", "", *[f"![{panel_name(panel)}: {TITLES[panel]}]({FILES[panel]})" for panel in panels]]
