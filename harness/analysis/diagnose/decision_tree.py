"""Diagnoses a run with a decision tree, question by question; a pure function of what was logged.

Why: the order of the questions matters, and the log already holds most answers.
How: there are four sections of numbered questions: is anything non-finite (1), did the loss spike (2), did a narrow
format overflow (3), does the loss rise slowly (4). The walk stops at the first section with an answer. A question that
the log cannot answer is answered "not in the log" and rules nothing out; the walk goes on.
Left out: questions that need the weights (1.3, the first operation with a non-finite value; 3.3, the step in fp32).
`harness replay` answers them, and the walk uses its results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.analysis.diagnose.diagnosis import Answers, Diagnosis, Finds
from harness.analysis.diagnose.log_numbers import run_detectors
from harness.analysis.diagnose.logged_run import LoggedRun
from harness.analysis.diagnose.nonfinite_section import ask_non_finite
from harness.analysis.diagnose.precision_section import ask_overflow
from harness.analysis.diagnose.rise_section import ask_slow_rise
from harness.analysis.diagnose.spike_section import ask_spikes
from harness.config.sentinel import DetectConfig
from harness.core.events import ABOUT_SPEED, Finding, FindingKind

HARMLESS = ABOUT_SPEED | {FindingKind.grad_spike, FindingKind.v_stale}
"""Findings that need no action by themselves."""


def walk(run: LoggedRun, *, detect: DetectConfig) -> Diagnosis:
    """Walk the tree over the log of a run."""
    answers = Answers()
    if not run.records:
        return Diagnosis(nodes=answers.nodes, finds=Finds.nothing, conclusion="the log has no steps yet")
    findings = run_detectors(run.records, detect, events=run.events)
    return (
        ask_non_finite(answers, run)
        or ask_spikes(answers, run, findings)
        or ask_overflow(answers, run, findings)
        or ask_slow_rise(answers, run, findings)
        or _ask_other_findings(answers, run, findings)
    )


def _ask_other_findings(answers: Answers, run: LoggedRun, findings: Sequence[Finding]) -> Diagnosis:
    """Findings and rejected updates outside the tree's questions. Overflows of a loss scale that adapted are none."""
    overflows = {record.iteration for record in run.records if run.is_expected_overflow(record)}
    others = [f for f in findings if not (f.kind is FindingKind.nonfinite and f.iteration in overflows)]
    kinds = Counter(str(finding.kind) for finding in others)
    grave = [finding for finding in others if finding.kind not in HARMLESS]
    rejected = [record for record in run.records if record.refused and not record.is_empty]
    refused = [record for record in rejected if record.iteration not in overflows]
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "none"
    number = f"findings: {counts}; rejected updates: {len(refused)}"
    if overflows:
        number += f", and {len(overflows)} by the loss scale"
    answers.ask("other", "Did the detectors find anything else that needs an action?", bool(grave or refused), number)
    finds, conclusion = Finds.nothing, "healthy"
    if grave:
        finds, conclusion = Finds.other, f"{grave[0].kind} at step {grave[0].step}: {grave[0].message}"
    elif refused:
        finds = Finds.other
        updates = f"{len(refused)} {'update' if len(refused) == 1 else 'updates'}"
        conclusion = f"the gate rejected {updates}, the first at iteration {refused[0].iteration}"
    return Diagnosis(nodes=answers.nodes, finds=finds, conclusion=conclusion)


def render(diagnosis: Diagnosis, commands: Sequence[str] = ()) -> str:
    """All questions with answers, the conclusion, and the commands of the fix, as text."""
    lines = []
    for node in diagnosis.nodes:
        lines += [f"{node.question:<5} {node.text}", f"      {node.answer} ({node.number})"]
    return "\n".join([*lines, f"=> {diagnosis.conclusion}", *(f"   {command}" for command in commands)])
