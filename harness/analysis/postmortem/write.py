"""Writes the folder of one incident: evidence, pictures, and the post-mortem as Markdown and HTML.

Evidence and Markdown are written first, without pictures, so that the text exists even if drawing runs out of memory.
The result of a replay in the folder becomes a section of the report.
"""

from __future__ import annotations

from pathlib import Path

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.batch_tokens import reread_batches
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.gather import gather_evidence
from harness.analysis.postmortem.incident_config import overrides_at
from harness.analysis.postmortem.lessons import record_lesson
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.report import html_report, markdown_report
from harness.analysis.postmortem.report.panels import draw
from harness.analysis.postmortem.rules.hypotheses import rank_causes, root_cause
from harness.analysis.postmortem.rules.remedies import remedy_of
from harness.analysis.replay.after_run import SKIPPED_FILE
from harness.analysis.replay.history import read_replay
from harness.analysis.replay.replay_text import render as render_replay
from harness.core.events import Incident
from harness.core.rundir import RunDir, write_atomically

EVIDENCE, MARKDOWN, PAGE = "evidence.json", "postmortem.md", "postmortem.html"


def write_folder(run: RunDir, incident: Incident) -> Path:
    """Write everything about one incident, and its lesson; returns its folder."""
    evidence = gather_evidence(run, incident)
    evidence.hypotheses = markdown_report.hypotheses_of(evidence)
    folder = run.incidents / evidence.folder
    folder.mkdir(parents=True, exist_ok=True)
    schema.write(evidence, folder / EVIDENCE)
    write_atomically(folder / MARKDOWN, markdown_report.render(evidence))
    complete_evidence(run, evidence)
    schema.write(evidence, folder / EVIDENCE)
    record_lesson(run, evidence.folder, lesson_of(evidence))
    panels = draw(evidence, folder)
    text = markdown_report.render(evidence, panels) + replay_section(folder)
    write_atomically(folder / MARKDOWN, text)
    write_atomically(folder / PAGE, html_report.render(text, folder, title=f"{evidence.run.name} {evidence.folder}"))
    return folder


def complete_evidence(run: RunDir, evidence: Evidence) -> None:
    """Add what takes seconds: the overrides that reproduce the configuration, and the tokens of the guilty batches."""
    evidence.run.overrides = overrides_at(run, evidence.incident)
    reread_batches(run, evidence.batches)
    evidence.hypotheses = markdown_report.hypotheses_of(evidence)


def lesson_of(evidence: Evidence) -> str:
    """The line for `lessons.md`; empty if the cause is not known."""
    cause = root_cause(rank_causes(evidence, measure(evidence)))
    if cause is None:
        return ""
    drill = ", drill" if evidence.faults else ""
    return f"{remedy_of(cause.cause, evidence).lesson} ({cause.cause}{drill})"


def replay_section(folder: Path) -> str:
    """The result of `harness replay`, or why there is none, if the folder says so."""
    replayed = read_replay(folder)
    if replayed is None:
        skipped = folder / SKIPPED_FILE
        return f"\n## Replay\n\n{skipped.read_text(encoding='utf-8')}" if skipped.is_file() else ""
    return f"\n## Replay\n\n```text\n{render_replay(replayed)}```\n"
