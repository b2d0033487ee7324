"""Section 2 of the tree: did the loss spike, did it recover, and what caused it?

Rows three sigma above the mean are only candidates, because noise alone gives one in a few hundred rows, and the losses
of real batches have heavier tails than normal noise. A spike counts if a detector of the sentinel confirms it or the
gate rejected the update; otherwise the walk goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import final

from harness.analysis.diagnose.diagnosis import NOT_LOGGED, Answers, Diagnosis, Finds
from harness.analysis.diagnose.log_numbers import (
    RECOVERED_WITHIN,
    WINDOW_ROWS,
    Recovery,
    Spike,
    describe_rare_tokens,
    detected_spikes,
    is_confirmed,
    recovery_of_spike,
    spikes_of,
)
from harness.analysis.diagnose.logged_run import LoggedRun
from harness.core.events import Action, Finding, FindingKind

LONG_TAIL_FACTOR = 30.0
STRATIFY = "data.stratify.rare_below=10"
ELEVATED = "The loss stays elevated: what is the cause and the fix?"
PREVENTION = ["optim.clip_norm=0.5", STRATIFY]


def ask_spikes(answers: Answers, run: LoggedRun, findings: Sequence[Finding]) -> Diagnosis | None:
    """Ask about spikes; None: there is none, or only noise."""
    above = spikes_of(run.records)
    found = detected_spikes(run.records, findings, above)
    confirmed = [spike for spike in above if is_confirmed(spike, findings)] + found
    spike = choose_spike(run, confirmed or above)
    _ask_whether(answers, run, above, found, confirmed, spike)
    if spike is None:
        return None
    recovery = recovery_of_spike(spike, run.records)
    question = "Does the loss recover to mean + 0.5 sigma within 50 steps?"
    answers.ask("Q2.2", question, NOT_LOGGED if recovery.answer is None else recovery.answer, recovery.number)
    if not confirmed:
        number = f"noise alone gives about {0.00135 * len(run.records):.1f} such rows in {len(run.records)}"
        answers.ask("Q2.3", "What caused the spike?", "noise: no detector confirms it and nothing was rejected", number)
        return None
    accepted = run.acceptance_of(spike.at, rows=WINDOW_ROWS)
    if recovery.answer is False and accepted is not None:
        return _ask_accepted(answers, spike, accepted)
    cause = cause_of_spike(spike, run, findings)
    answers.ask("Q2.3", "What caused the spike, and what is the fix?", f"{cause.name}; fix: {cause.fix}", cause.number)
    if recovery.answer is False:
        return _ask_lasting(answers, run, spike, recovery, cause)
    return Diagnosis(
        nodes=answers.nodes,
        finds=Finds.spike,
        conclusion=f"a spike at step {spike.at.step} {recovery.ending}: {cause.name}",
        overrides=cause.overrides,
        replay=_replay_of(cause, spike, run),
    )


def choose_spike(run: LoggedRun, spikes: Sequence[Spike]) -> Spike | None:
    """The spike that did not recover, or else the largest one; of those that did not, rather one without an accepted
    level."""
    lasting = [spike for spike in spikes if recovery_of_spike(spike, run.records).answer is False]
    unexplained = [spike for spike in lasting if run.acceptance_of(spike.at, rows=WINDOW_ROWS) is None]
    return max(unexplained or lasting or spikes, key=lambda spike: spike.sigmas, default=None)


def _ask_whether(
    answers: Answers,
    run: LoggedRun,
    above: Sequence[Spike],
    found: Sequence[Spike],
    confirmed: Sequence[Spike],
    chosen: Spike | None,
) -> None:
    number = f"{len(above)} rows above 3 sigma, {len(confirmed) - len(found)} of them confirmed"
    if found:
        number += f"; {len(found)} more found by the detectors"
    if chosen is not None:
        number += f"; at step {chosen.at.step}: loss {chosen.at.loss:.4g}, {chosen.sigmas:.1f} sigma"
    question = "Is there a step with a loss 3 sigma above the mean of the 100 steps before it?"
    has_window = len(run.records) > WINDOW_ROWS
    if not has_window and chosen is None:
        number = f"only {len(run.records)} rows, more than {WINDOW_ROWS} are needed"
    answers.ask("Q2.1", question, chosen is not None if has_window or chosen is not None else NOT_LOGGED, number)


def _ask_lasting(answers: Answers, run: LoggedRun, spike: Spike, recovery: Recovery, cause: SpikeCause) -> Diagnosis:
    """Q2.4: the loss stays elevated, or an older state was restored before it recovered."""
    checkpoint = run.checkpoint_before(spike.at.step)
    restore = "an older state was restored already" if recovery.is_restored else run.describe_restore(checkpoint)
    overrides = PREVENTION if cause.overrides or not cause.is_known else []
    prevention = f"lower the clipping threshold and stratify rare tokens: {' '.join(PREVENTION)}"
    fix = f"{restore}; {prevention if overrides else cause.fix}"
    damage = f"the optimizer's moments are corrupted by the spike at step {spike.at.step}"
    answers.ask("Q2.4", ELEVATED, fix, damage)
    conclusion = f"the loss did not recover from the spike at step {spike.at.step} {recovery.ending}"
    return Diagnosis(
        nodes=answers.nodes,
        finds=Finds.lasting_spike,
        conclusion=f"{conclusion}: {cause.name}" if cause.is_known else conclusion,
        overrides=overrides,
        restore_step=None if checkpoint is None or recovery.is_restored else checkpoint.step,
        replay=_replay_of(cause, spike, run),
    )


def _ask_accepted(answers: Answers, spike: Spike, accepted: Action) -> Diagnosis:
    """Q2.3 and Q2.4 where the run itself has measured the held-out loss: the weights and moments are not damaged."""
    number = f"iteration {accepted.iteration}: {accepted.reason}"
    answers.ask("Q2.3", "What caused the spike, and what is the fix?", "different data; fix: none", number)
    level = "the new loss" if accepted.level is None else f"the new loss of {accepted.level:.4g}"
    answers.ask("Q2.4", ELEVATED, f"different data, and the run accepted {level}; nothing to restore", number)
    conclusion = f"the loss did not recover from the spike at step {spike.at.step}, because the data changed there"
    return Diagnosis(nodes=answers.nodes, finds=Finds.other, conclusion=f"{conclusion}: the model is healthy")


def _replay_of(cause: SpikeCause, spike: Spike, run: LoggedRun) -> list[str]:
    """Arguments of the replay that answers what caused the spike; empty: the log shows it."""
    return [] if cause.is_known else [*run.replay_arguments(spike.at.iteration), "--batch"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeCause:
    name: str
    number: str
    """What shows it."""
    fix: str
    overrides: list[str] = field(default_factory=list)
    """The fix as overrides of `harness train`; empty: no config key makes it."""
    is_known: bool = True


def cause_of_spike(spike: Spike, run: LoggedRun, findings: Sequence[Finding]) -> SpikeCause:
    """The cause from gradient norm, learning rate and batch, in that order."""
    before = [
        record.grad_norm
        for record in run.records[: spike.position]
        if math.isfinite(record.grad_norm) and not record.refused
    ][-WINDOW_ROWS:]
    usual = mean(before) if before and run.has_gradients else 0.0
    number = f"gradient norm {spike.at.grad_norm:.4g} (mean {usual:.4g})" if usual else f"gradient norm {NOT_LOGGED}"
    if usual and not spike.at.grad_norm <= LONG_TAIL_FACTOR * usual:
        return _long_tail(f"{number}: more than 30 times")
    near = [finding for finding in findings if abs(finding.iteration - spike.at.iteration) <= RECOVERED_WITHIN]
    for kind, name, fix in (
        (FindingKind.lr_jump, "a bug in the learning-rate schedule", "repair the code that set the rate"),
        (FindingKind.duplicate_batch, "a bug in the data loader", "repair the loader so that no batch is repeated"),
    ):
        message = next((finding.message for finding in near if finding.kind is kind), None)
        if message is not None:
            return SpikeCause(name=name, number=f"{number}; {message}", fix=fix)
    if (rare_tokens := describe_rare_tokens(spike, run.records)) is not None:
        return _long_tail(f"{number}; {rare_tokens}")
    rate = "no jump of the learning rate" if math.isfinite(spike.at.lr) else f"learning rate {NOT_LOGGED}"
    batch = "no duplicate batch" if spike.at.fingerprint else f"batch {NOT_LOGGED}"
    return SpikeCause(name="not known", number=f"{number}; {rate}; {batch}", fix="replay the step", is_known=False)


def _long_tail(number: str) -> SpikeCause:
    fix = f"stratify rare tokens: {STRATIFY}"
    return SpikeCause(name="a long-tail token in the batch", number=number, fix=fix, overrides=[STRATIFY])
