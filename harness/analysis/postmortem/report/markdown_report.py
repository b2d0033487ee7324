"""Renders the post-mortem of an incident as Markdown: a summary, then seven sections and the evidence.

A pure function of the evidence. The summary is for the engineer on call. Symptoms with numbers come before hypotheses.
A number that is not in the log is "not measured"; a cause with a score below `KNOWN` is "not known yet".
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.postmortem.evidence import Evidence, GuiltyBatch, Hypothesis
from harness.analysis.postmortem.gather import state_of_incident
from harness.analysis.postmortem.measures import Measures, measure
from harness.analysis.postmortem.rare_tokens import flag_tokens
from harness.analysis.postmortem.report.incident_text import (
    FILES,
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
    kind_names,
    loss_path,
    panel_name,
    printable,
    recovery_text,
    resumption_text,
    title_of,
    token_texts,
    trial_table,
)
from harness.analysis.postmortem.rules.causes import CauseStatus, Panel, RuleResult
from harness.analysis.postmortem.rules.hypotheses import rank_causes, root_cause
from harness.analysis.postmortem.rules.remedies import Remedy, import_weights_command, remedy_of, restore_commands
from harness.analysis.postmortem.verification import verification_of
from harness.config.command_line import shell_command
from harness.core.events import ABOUT_SPEED, ActionKind

MOST_BATCHES, MOST_TOKENS = 4, 5


def render(evidence: Evidence, panels: Sequence[Panel] = ()) -> str:
    """The whole report; `panels` are the pictures that were drawn."""
    measures = measure(evidence)
    ranked = rank_causes(evidence, measures)
    cause = root_cause(ranked)
    remedy = None if cause is None else remedy_of(cause.cause, evidence)
    parts = [
        *_summary(evidence, measures, cause, remedy),
        *_symptoms(evidence, measures),
        *_hypotheses(ranked),
        *_root_cause(evidence, remedy),
        *_remediation(evidence, remedy),
        *_verification(evidence, remedy),
        *_lesson(remedy),
        *_evidence(evidence, measures),
        *_pictures(panels),
    ]
    return "\n".join(parts).rstrip() + "\n"


def hypotheses_of(evidence: Evidence) -> list[Hypothesis]:
    """All causes as they are written to `evidence.json`, the likeliest first."""
    return [
        Hypothesis(
            cause=str(result.cause),
            score=result.score,
            status=str(result.status),
            text="; ".join(reason.text for reason in (result.reason, *result.details)),
            panel=int(result.reason.panel or 0),
        )
        for result in rank_causes(evidence, measure(evidence))
    ]


def state_text(evidence: Evidence) -> str:
    """How the incident ended."""
    has_halted = any(action.kind is ActionKind.halt for action in evidence.actions)
    return state_of_incident(evidence.incident.verdict, has_halted=has_halted, has_ended=bool(evidence.run.ended))


def _summary(evidence: Evidence, measures: Measures, cause: RuleResult | None, remedy: Remedy | None) -> list[str]:
    """What an engineer on call needs in the first half minute."""
    run, numbers = evidence.run, evidence.numbers
    grads = f"gradient norm {format_number(numbers.peak_grad)} (usually {format_number(numbers.usual_grad)})"
    changes = "" if remedy is None else " ".join(remedy.overrides)
    change = f"`{changes}`" if changes else NOT_KNOWN if remedy is None else "no config key; see section 5"
    drill = []
    if evidence.faults:
        fault, num = evidence.faults[0], len(evidence.faults)
        struck = f"rank {fault.rank}, iteration {fault.iteration}" + (f"; {num} times in all" if num > 1 else "")
        drill = [f"- Drill, injected fault: {fault.message} ({struck})"]
    return [
        f"# {title_of(evidence, measures)}: incident {evidence.folder} of {run.name}, "
        + format_time(_onset_time(evidence)),
        "",
        f"- What: loss {loss_path(numbers)}, {grads}; {state_text(evidence)}",
        f"- Why: {NOT_KNOWN if cause is None else f'{cause.cause} ({cause.score:.2f})'}",
        f"- Done: {action_counts(evidence) or 'no action'}",
        f"- Change: {change}",
        f"- Cost: {cost_text(evidence.cost)}",
        *drill,
        "",
    ]


def _onset_time(evidence: Evidence) -> float:
    record = next((record for record in evidence.records if record.iteration >= evidence.onset), None)
    return evidence.incident.time if record is None else record.time


def _symptoms(evidence: Evidence, measures: Measures) -> list[str]:
    numbers, run = evidence.numbers, evidence.run
    peak = ""
    if numbers.peak_iteration is not None:
        refused = ", rejected: it did not reach the weights" if numbers.peak_refused else ""
        peak = f" (iteration {numbers.peak_iteration}{refused})"
    cursors = [record.cursor for record in measures.during]
    seen = f"; the incident covers batches {min(cursors)} to {max(cursors)}" if len(set(cursors)) > 1 else ""
    index = NOT_MEASURED if numbers.onset_cursor is None else f"{numbers.onset_cursor}{seen}"
    late = (
        []
        if numbers.loss_after_500 is None
        else [f"- loss 500 steps after the peak: {format_number(numbers.loss_after_500)}"]
    )
    kinds = [kind for kind in evidence.kinds() if kind not in ABOUT_SPEED]
    schedule = str(run.settings.get("optim.schedule") or "")
    return [
        "## 1. Symptoms",
        f"- step where it began: {evidence.onset_step} (iteration {evidence.onset})",
        f"- findings: {', '.join(kind_names(kinds)) or NOT_MEASURED}",
        f"- pre-spike loss (50-step EMA): {format_number(numbers.level)}",
        f"- peak loss: {format_number(numbers.peak)}{peak}",
        f"- recovery loss (50 steps after the peak): {recovery_text(numbers)}",
        *late,
        f"- pre-spike trajectory resumed: {resumption_text(numbers)}",
        f"- gradient norm before clipping: {format_number(numbers.peak_grad)} "
        f"(usually {format_number(numbers.usual_grad)})",
        f"- learning rate: {format_number(measures.onset_lr)} (before: {format_number(measures.usual_lr)}"
        f"{f'; schedule {schedule}' if schedule else ''})",
        f"- precision: {run.precision}",
        f"- batch index: {index}",
        f"- unusual tokens in that batch: {_unusual(evidence, measures)}",
        "",
    ]


def _unusual(evidence: Evidence, measures: Measures) -> str:
    """The flagged tokens of the incident's batches, or that there are none."""
    judged = [(batch, flag_tokens(batch, evidence, measures.before)) for batch in evidence.batches]
    known = [(batch, flagged) for batch, flagged in judged if flagged is not None]
    for batch, flagged in known:
        if flagged:
            return f"{', '.join(token_texts(flagged)[:MOST_TOKENS])} (batch {batch.index})"
    if not known:
        return NOT_MEASURED
    is_part = evidence.run.num_shares > 1 and not all(batch.is_whole for batch, _ in known)
    return f"none flagged{' in the rows of rank 0' if is_part else ''}"


def _hypotheses(ranked: Sequence[RuleResult]) -> list[str]:
    """Sections 2 and 3: the ranking, then the observation behind each place in it."""
    listed = [result for result in ranked if result.status in (CauseStatus.likely, CauseStatus.possible)]
    places = {result.cause: f"H{place}" for place, result in enumerate(listed, start=1)}
    of_status = {
        status: [result for result in ranked if result.status is status]
        for status in (CauseStatus.ruled_out, CauseStatus.not_examined)
    }
    ranking = [
        f"{place}. {result.cause}: {result.status} ({result.score:.2f}), {panel_name(result.reason.panel)}"
        for place, result in enumerate(listed, start=1)
    ]
    names = [
        f"- {status}: {', '.join(str(result.cause) for result in results)}"
        for status, results in of_status.items()
        if results
    ]
    lines = []
    for result in listed:
        place = places[result.cause]
        reasons = [(reason, "favors") for reason in (result.support, *result.details)]
        reasons += [(result.against, "speaks against")]
        lines += [f"- {panel_name(each.panel)}: {each.text} -> {verb} {place}" for each, verb in reasons if each]
    for status, results in of_status.items():
        end = "rules out {}" if status is CauseStatus.ruled_out else "{} is not examined"
        lines += [f"- {panel_name(r.reason.panel)}: {r.reason.text} -> {end.format(r.cause)}" for r in results]
    return [
        "## 2. Hypotheses",
        *(ranking or ["none: the log has no evidence for any known cause"]),
        *names,
        "",
        "## 3. Discriminating evidence",
        *lines,
        "",
    ]


def _root_cause(evidence: Evidence, remedy: Remedy | None) -> list[str]:
    spike_type = evidence.incident.spike_type
    return [
        "## 4. Root cause",
        NOT_KNOWN if remedy is None else remedy.sentence,
        "",
        f"- spike type: {TYPES.get(spike_type, str(spike_type))}",
        "",
    ]


def _remediation(evidence: Evidence, remedy: Remedy | None) -> list[str]:
    halted = next((action for action in evidence.actions if action.kind is ActionKind.halt), None)
    restore, commands = restore_commands(evidence)
    return [
        "## 5. Remediation",
        *[f"- by the sentinel: {line}" for line in action_lines(evidence)],
        *(["", *table, ""] if (table := trial_table(evidence)) else []),
        *([f"- the run halted: {halted.reason}"] if halted is not None else []),
        *([f"- {restore}:", "", *(f"      {line}" for line in commands), ""] if restore else []),
        f"- change: {NOT_KNOWN if remedy is None else remedy.change}",
        "",
    ]


def _verification(evidence: Evidence, remedy: Remedy | None) -> list[str]:
    wanted = verification_of(evidence, remedy)
    seed = NOT_MEASURED if wanted.seed is None else wanted.seed
    number = str(evidence.incident.number)
    is_remark = evidence.folder.startswith("remark")
    log = ["--log", wanted.folder] if wanted.train or evidence.first_weights else []
    check = shell_command("harness", "verify", evidence.run.path, "--incident", number, *log)
    train = [f"      {shell_command('harness', 'train', *wanted.train)}"] if wanted.train else []
    imports = import_weights_command(wanted.folder)
    is_whole = wanted.through == evidence.run.settings.get("train.num_steps")
    stop = "" if is_whole else f", then stop it (`{shell_command('harness', 'ctl', wanted.folder, 'stop')}`)"
    first = f"- the run began with {evidence.first_weights}: import the same weights first (`{imports}`)"
    return [
        "## 6. Verification",
        *([first] if evidence.first_weights else []),
        f"- re-run with seed {seed} and the change through step {wanted.through}{stop}:",
        "",
        *train,
        *([] if is_remark else [f"      {check}"]),
        "",
        *[f"- expect {line}" for line in wanted.expectations()],
        "",
    ]


def _lesson(remedy: Remedy | None) -> list[str]:
    return ["## 7. Lesson", NOT_KNOWN if remedy is None else remedy.lesson, ""]


def _evidence(evidence: Evidence, measures: Measures) -> list[str]:
    incident, run = evidence.incident, evidence.run
    return [
        "## 8. Evidence",
        *([f"- MLflow run: {run.tracking}"] if run.tracking else []),
        f"- ranks named by findings: {join_names(incident.ranks)}; layer groups: {join_names(incident.groups)}",
        f"- activation RMS by layer: {_activations(measures)}",
        *(_batch_lines(evidence.batches) or [f"- batches: {NOT_MEASURED}"]),
        "",
    ]


def _activations(measures: Measures) -> str:
    probed = next((record for record in measures.during if record.activation_rms), None)
    if probed is None:
        return NOT_MEASURED
    layers = ", ".join(f"{name} {format_number(value, 3)}" for name, value in probed.activation_rms.items())
    return f"{layers} (iteration {probed.iteration}, {panel_name(Panel.activations)})"


def _batch_lines(batches: Sequence[GuiltyBatch]) -> list[str]:
    lines = []
    for batch in batches[:MOST_BATCHES]:
        facts = [f"fingerprint {batch.fingerprint}" if batch.fingerprint else "fingerprint not measured"]
        facts += [] if batch.entropy_nats is None else [f"entropy {batch.entropy_nats:.2f} nats"]
        facts += [f"{count} rows of {name}" for name, count in batch.rows.items() if count]
        facts += ["update rejected"] if batch.refused else []
        not_read = [] if batch.reread else ["tokens not compared with the data on disk"]
        facts += ["DIFFERS from the data on disk now"] if batch.is_changed else not_read
        lines.append(f"- batch {batch.index}: {', '.join(facts)}")
        lines += [f"  - `{printable(sample)}`" for sample in batch.samples[:2]]
    return lines


def _pictures(panels: Sequence[Panel]) -> list[str]:
    if not panels:
        return []
    return ["## Panels", "", *[f"![{panel_name(panel)}: {TITLES[panel]}]({FILES[panel]})" for panel in panels]]
