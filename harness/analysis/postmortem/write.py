"""Writes the folder of one incident: evidence, pictures, and the post-mortem as Markdown and HTML.

Evidence and Markdown are written first, without pictures, so that the text exists even if drawing runs out of memory.
The result of a replay in the folder becomes a section of the report.
"""

from __future__ import annotations

from pathlib import Path

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.batch_tokens import reread_batches
from harness.analysis.postmortem.gather import gather_evidence
from harness.analysis.postmortem.overrides import overrides_in
from harness.analysis.postmortem.report import html_report, markdown_report
from harness.analysis.postmortem.report.panels import draw
from harness.analysis.replay.after_run import SKIPPED_FILE
from harness.analysis.replay.history import read_replay
from harness.analysis.replay.replay_text import render as render_replay
from harness.core.events import Incident
from harness.core.rundir import RunDir, write_atomically

EVIDENCE, MARKDOWN, PAGE = "evidence.json", "postmortem.md", "postmortem.html"


def write_folder(run: RunDir, incident: Incident) -> Path:
    """Write everything about one incident; returns its folder."""
    evidence = gather_evidence(run, incident)
    folder = run.incidents / evidence.folder
    folder.mkdir(parents=True, exist_ok=True)
    schema.write(evidence, folder / EVIDENCE)
    write_atomically(folder / MARKDOWN, markdown_report.render(evidence))
    evidence.run.overrides = overrides_in(run)
    reread_batches(run, evidence.batches)
    schema.write(evidence, folder / EVIDENCE)
    panels = draw(evidence, folder)
    text = markdown_report.render(evidence, panels) + replay_section(folder)
    write_atomically(folder / MARKDOWN, text)
    write_atomically(folder / PAGE, html_report.render(text, folder, title=f"{evidence.run.name} {evidence.folder}"))
    return folder


def replay_section(folder: Path) -> str:
    """The result of `harness replay`, or why there is none, if the folder says so."""
    replayed = read_replay(folder)
    if replayed is None:
        skipped = folder / SKIPPED_FILE
        return f"\n## Replay\n\n{skipped.read_text(encoding='utf-8')}" if skipped.is_file() else ""
    return f"\n## Replay\n\n```text\n{render_replay(replayed)}```\n"
