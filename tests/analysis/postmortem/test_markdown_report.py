"""The rendered reports: golden Markdown, self-contained HTML, and all pictures."""

from __future__ import annotations

import re
import shlex
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.evidence import Evidence, RunFacts
from harness.analysis.postmortem.report import html_report, markdown_report
from harness.analysis.postmortem.report.incident_text import FILES, NOT_MEASURED, action_lines
from harness.analysis.postmortem.report.panels import PAINTERS, draw
from harness.analysis.postmortem.rules.causes import Cause, Panel
from harness.analysis.postmortem.write import EVIDENCE, MARKDOWN, PAGE, write_folder
from harness.core.events import ActionKind, Event, FindingKind, RunStarted, TrialMeasured
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import ONSET, evidence_of, write
from tests.composed import load

GOLDEN = Path(__file__).parent / "golden"
OVERRIDES = ["optim.lr=0.001", "optim.clip_norm=1.0", "precision=fp16", "train.num_steps=400"]
SECTIONS = (
    "- What: ",
    "- Why: ",
    "- Done: ",
    "- Change: ",
    "- Cost: ",
    "## 1. Symptoms",
    "## 2. Hypotheses",
    "## 3. Discriminating evidence",
    "## 4. Root cause",
    "## 5. Remediation",
    "## 6. Verification",
    "## 7. Lesson",
    "## 8. Evidence",
)


def story(tmp_path: Path, name: str) -> Evidence:
    make: Callable[[], list[Event]] = getattr(stories, name)
    settings = {"overflow": stories.FP16, "unfit": stories.FP8, "hot_start": stories.HOT}.get(name, stories.SETTINGS)
    evidence = evidence_of(write(tmp_path / "run", make(), settings))
    evidence.run.path, evidence.run.overrides = "runs/run", OVERRIDES
    return evidence


@pytest.mark.parametrize("name", ["poisoned", "one_rank", "overflow", "duplicated", "unfit", "broken_update"])
def test_markdown_equals_golden_file(tmp_path: Path, name: str) -> None:
    assert markdown_report.render(story(tmp_path, name)) == (GOLDEN / f"{name}.md").read_text()


def test_summary_and_all_sections_in_order(tmp_path: Path) -> None:
    text = markdown_report.render(story(tmp_path, "poisoned"))
    places = [text.index(f"\n{section}") for section in SECTIONS]
    assert places == sorted(places)


def test_symptoms_leave_out_the_speed(tmp_path: Path) -> None:
    slow = (FindingKind.slow, FindingKind.speed_recovered)
    log = [*stories.poisoned(), *(stories.finding(kind, ONSET + at, "speed") for at, kind in enumerate(slow))]
    text = markdown_report.render(evidence_of(write(tmp_path / "run", log)))
    assert "\n- findings: rejected update, grad_spike\n" in text


@pytest.mark.parametrize("name", ["optim.lr=10,optim.beta2=0.99", "with space"])
def test_commands_of_a_run_with_any_name_compose(tmp_path: Path, name: str) -> None:
    evidence = story(tmp_path, "broken_update")
    evidence.run.path, evidence.run.name, evidence.run.overrides = f"a sweep/{name}", name, OVERRIDES[:2]
    evidence.checkpoint = "step-00000140-gen-0"
    text = markdown_report.render(evidence)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("      harness ")]
    trained = [load(arguments).run for _, command, *arguments in commands if command == "train"]
    repetition = f"verify-{name}-001"
    assert [(run.dir, run.name) for run in trained] == [("a sweep", name), ("a sweep", repetition)]
    assert commands[-1] == ["harness", "verify", f"a sweep/{name}", "--incident", "1", "--log", f"a sweep/{repetition}"]


def test_a_run_that_began_with_imported_weights_is_not_repeated_from_its_seed(tmp_path: Path) -> None:
    log = stories.poisoned()
    imported = [
        replace(each, resumed_from="step-00000000-gen-0") if isinstance(each, RunStarted) else each for each in log
    ]
    evidence = evidence_of(write(tmp_path / "runs" / "run", imported))
    evidence.run.path, evidence.run.overrides = "runs/run", OVERRIDES
    text = markdown_report.render(evidence)
    section = text[text.index("## 6. Verification") : text.index("## 7. Lesson")]
    assert "harness train" not in section
    assert "began with step-00000000-gen-0: import the same weights first" in section
    assert "`harness checkpoint import MODEL runs/verify-run-001`" in section
    assert "harness verify runs/run --incident 1 --log runs/verify-run-001" in section


def test_missing_measurements_are_reported_as_not_measured() -> None:
    bare = Evidence(folder="001", run=RunFacts(name="run", path="run"), incident=stories.ended())
    text = markdown_report.render(bare)
    assert "## 4. Root cause\nnot known yet\n" in text
    assert f"- pre-spike loss (50-step EMA): {NOT_MEASURED}" in text
    assert f"- batches: {NOT_MEASURED}" in text
    assert " -> rules out " not in text, "nothing was measured"


def test_every_remedy_that_was_tried_is_listed_with_its_numbers() -> None:
    tried = [
        TrialMeasured(
            time=0.0,
            iteration=126,
            incident=1,
            remedy=remedy,
            steps=10,
            num_refused=refused,
            findings=findings,
            held_out_before=6.1,
            held_out_loss=loss,
            grad_norm_before=1.5,
            grad_norm=2.0,
            seconds=3.0,
        )
        for remedy, refused, findings, loss in (
            ("unchanged", 1, ["loss_spike"], 25.4),
            ("lower_lr", 0, [], 5.2),
        )
    ]
    bare = Evidence(folder="001", run=RunFacts(name="run", path="run"), incident=stories.ended(), others=[*tried])
    text = markdown_report.render(bare)
    assert "| 126 | unchanged | 10 | 1 | 6.1 -> 25.4 | 1.5 -> 2 | loss_spike | 3.00 s |\n" in text
    assert "| 126 | lower_lr | 10 | 0 | 6.1 -> 5.2 | 1.5 -> 2 | none | 3.00 s |\n" in text


def test_batches_of_a_restore_that_failed_are_not_excluded(tmp_path: Path) -> None:
    def lines(*, is_torn: bool) -> list[str]:
        actions = [stories.action(kind, ONSET, exclude=[140, 150]) for kind in (ActionKind.rewind, ActionKind.rollback)]
        results = [
            stories.outcome(ActionKind.rewind, ONSET, succeeded=False),
            stories.outcome(ActionKind.rollback, ONSET, succeeded=False, is_torn=is_torn),
        ]
        log = stories.log_of({}, [actions[0], results[0], actions[1], results[1], stories.ended()])
        return action_lines(evidence_of(write(tmp_path / "run", log)))

    assert lines(is_torn=False) == [
        f"rewind, batches 140 to 150 not excluded, failed (iteration {ONSET})",
        f"rollback, batches 140 to 150 not excluded, failed (iteration {ONSET})",
    ]
    assert lines(is_torn=True)[1] == f"rollback, batches 140 to 150 excluded, failed (iteration {ONSET})"


def test_a_batch_without_a_token_to_predict_is_a_gap_in_the_pictures(tmp_path: Path) -> None:
    changes = {ONSET: stories.refused(loss=6.0, grad_norm=9.0), ONSET + 3: stories.refused(loss=0.0, grad_norm=0.0)}
    evidence = evidence_of(write(tmp_path / "run", stories.log_of(changes, [stories.ended()])))
    for panel in (Panel.loss, Panel.gradient):
        figure = Figure()
        assert PAINTERS[panel](figure, evidence)
        (axes,) = figure.axes
        drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
        drawn += [np.asarray(dots.get_offsets(), dtype=float)[:, 1] for dots in axes.collections]
        assert min(float(np.nanmin(values)) for values in drawn if values.size) > 0


def test_empty_pictures_are_left_out_and_removed(tmp_path: Path) -> None:
    (tmp_path / FILES[Panel.scale]).write_bytes(b"of an earlier report")
    bare = Evidence(folder="001", run=RunFacts(name="run", path="run"), incident=stories.ended())
    assert draw(bare, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("poisoned", "Loss spike, rejected"),
        ("one_rank", "Non-finite gradient"),
        ("overflow", "Non-finite loss"),
        ("duplicated", "Duplicate batches"),
        ("broken_update", "Non-finite weights"),
        ("hot_start", "Non-finite loss"),
        ("rate_jump", "Jump of the learning rate"),
    ],
)
def test_title_says_what_happened(tmp_path: Path, name: str, title: str) -> None:
    assert markdown_report.render(story(tmp_path, name)).startswith(f"# {title}: incident ")


def test_incident_that_ends_in_nan_did_not_recover(tmp_path: Path) -> None:
    text = markdown_report.render(story(tmp_path, "broken_update"))
    assert "- recovery loss (50 steps after the peak): did not recover: NaN\n" in text
    assert "; halted the run\n" in text
    assert "still open" not in text


def test_nothing_but_the_summary_is_said_twice(tmp_path: Path) -> None:
    for name in ("poisoned", "one_rank", "overflow"):
        lines = markdown_report.render(story(tmp_path / name, name)).splitlines()
        texts = [line.lstrip("- ").partition(": ")[2] or line for line in lines if len(line) > 40]
        assert len(texts) == len(set(texts)), name


def test_hypotheses_are_in_the_evidence(tmp_path: Path) -> None:
    evidence = story(tmp_path, "poisoned")
    found = {each.cause: each for each in markdown_report.hypotheses_of(evidence)}
    assert set(found) == set(Cause)
    assert (found["long-tail token"].status, found["other data"].status) == ("likely", "not examined")
    assert found["other data"].text == "the held-out loss was not checked"


def test_fp8_panel_is_drawn_for_fp8_runs(tmp_path: Path) -> None:
    figure = Figure()
    assert PAINTERS[Panel.scale](figure, story(tmp_path / "unfit", "unfit"))
    labels = [axes.get_legend_handles_labels()[1] for axes in figure.axes]
    assert labels == [["underflow, worst layer group", "in bf16"], ["activations", "weights"]]
    assert not PAINTERS[Panel.scale](Figure(), story(tmp_path / "poisoned", "poisoned"))


def test_page_needs_no_network_and_escapes_data(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    text = (
        "# A <b>\n\n- one `<i>`\n  - two\n\n1. three\n\n- four:\n\n      harness train 'a' <b>\n\n"
        "![one](a.png)\n![gone](../b.png)\n"
    )
    page = html_report.render(text, tmp_path, title="x & y")
    nested = "<li>one <code>&lt;i&gt;</code>\n<ul>\n<li>two</li>\n</ul>\n</li>"
    assert f"<h1>A &lt;b&gt;</h1>\n<ul>\n{nested}\n</ul>" in page
    assert "</ul>\n<ol>\n<li>three</li>\n</ol>" in page
    assert "<pre><code>harness train 'a' &lt;b&gt;\n</code></pre>" in page
    assert 'src="data:image/png;base64,iVBORw=="' in page
    assert "gone: b.png is missing" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?://|<script|<link", page)


def test_folder_is_complete_and_can_be_written_again(tmp_path: Path) -> None:
    run = write(tmp_path / "run", stories.poisoned())
    incident = evidence_of(run).incident
    folder = write_folder(run, incident)
    first = {path.name for path in folder.iterdir()}
    pictures = [FILES[panel] for panel in Panel if panel is not Panel.scale]  # fp32 has no loss scale
    assert {EVIDENCE, MARKDOWN, PAGE, *pictures} == first
    again = schema.read(folder / EVIDENCE)
    assert again.incident == incident
    assert len(again.hypotheses) == len(Cause)
    for name in pictures:
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (836, 297)
    assert (folder / MARKDOWN).read_text().count("![panel") == len(pictures)
    assert write_folder(run, incident) == folder
    assert {path.name for path in folder.iterdir()} == first
