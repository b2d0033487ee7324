"""Write the folder of one incident: evidence, pictures, and the post-mortem as Markdown and HTML.

The evidence and the Markdown come first, without pictures: whoever is in a hurry, or out of memory, has the words.
A replay that lies in the folder becomes a section of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.batch_tokens import reread
from harness.analysis.postmortem.gather import gather
from harness.analysis.postmortem.overrides import overrides_in
from harness.analysis.postmortem.report import html_report, markdown_report
from harness.analysis.postmortem.report.panels import draw
from harness.analysis.replay.wording import render as words_of_replay
from harness.core.events import Incident
from harness.core.rundir import RunDir, write_atomically

EVIDENCE, MARKDOWN, PAGE = "evidence.json", "postmortem.md", "postmortem.html"
REPLAY = "replay.json"


def write_folder(run: RunDir, incident: Incident) -> Path:
    """Everything about one incident; returns its folder."""
    evidence = gather(run, incident)
    folder = run.incidents / evidence.folder
    folder.mkdir(parents=True, exist_ok=True)
    schema.write(evidence, folder / EVIDENCE)
    write_atomically(folder / MARKDOWN, markdown_report.render(evidence))
    evidence.run.overrides = overrides_in(run)
    reread(run, evidence.batches)
    schema.write(evidence, folder / EVIDENCE)
    panels = draw(evidence, folder)
    words = markdown_report.render(evidence, panels) + replay_section(folder)
    write_atomically(folder / MARKDOWN, words)
    write_atomically(folder / PAGE, html_report.render(words, folder, title=f"{evidence.run.name} {evidence.folder}"))
    return folder


def replay_section(folder: Path) -> str:
    """What a replay of the guilty step showed, where one was made."""
    try:
        replayed = json.loads((folder / REPLAY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return f"\n## Replay\n\n```text\n{words_of_replay(replayed)}```\n"
