"""The worked example of the post-mortem template, built from its numbers: a rare token three times in one batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.report import markdown_report
from harness.analysis.postmortem.rules.causes import Cause, CauseStatus, Panel, RuleResult
from harness.analysis.postmortem.rules.hypotheses import rank_causes
from harness.analysis.postmortem.rules.remedies import remedy_of
from harness.analysis.postmortem.verification import verification_of
from harness.config.optim import OptimConfig, ScheduleKind
from harness.core.events import ActionKind, Event, FindingKind, RunEnded, RunStarted, StepRecord
from harness.optim.schedule import schedule_factor
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import evidence_of, finding, write
from tests.sentinel.series import record

SPIKE, LAST = 312, 520
SETTINGS = """\
run: {seed: 42}
train: {num_steps: 2000, batch_size: 8, sequence_length: 32}
optim: {lr: 0.0003, beta1: 0.9, beta2: 0.95, eps: 1.0e-08, weight_decay: 0.1, decay_embeddings: false, clip_norm: 1.0,
  clip_value: null, schedule: cosine, warmup_steps: 100, decay_steps: 0, min_lr_fraction: 0.34}
precision: {kind: fp32}
data: {sources: {main: {kind: files}}}
"""
OPTIM = OptimConfig(
    lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decay_embeddings=False, clip_norm=1.0, clip_value=None,
    schedule=ScheduleKind.cosine, warmup_steps=100, decay_steps=0, min_lr_fraction=0.34,
)  # fmt: skip
RARE = 4711
ORDINARY = [[4000, 1, 6], [4001, 1, 9], [4002, 2, 31]]
USUAL_LOSSES = [0, 5, 20, 40, 60, 80, 40, 8, 3, 0, 0, 0, 0, 0, 0, 0]
SPIKE_LOSSES = [0, 2, 10, 20, 30, 50, 60, 30, 20, 8, 3, 2, 14, 3, 1, 0]
"""Token losses with a second mode in the bin from 12 nats on."""


def row(at: int, **facts: Any) -> StepRecord:
    noise = ((at * 7919) % 101 - 50) / 50
    after = at - SPIKE
    loss = 2.31 + 0.01 * noise
    if after >= 0:
        loss = {0: 5.1, 1: 5.84}.get(after, 3.40 + 2.3 * math.exp(-after / 10)) + 0.01 * noise * (after > 1)
    probe: dict[str, Any] = {}
    if at % 10 == 0 or at in (SPIKE, SPIKE + 1):
        factor = 3.2 if after in (0, 1) else 1.0
        probe = {
            "group_param_norms": {"embedding": 3.0, "blocks.0": 9.0},
            "param_norm": 10.0,
            "v_norm": 0.03,
            "square_ratio": 1.1,
            "activation_rms": {"embedding": 0.5 * factor, "blocks.0": 0.8},
            "token_loss_counts": SPIKE_LOSSES if after in (0, 1) else USUAL_LOSSES,
        }
    given: dict[str, Any] = {
        "time": 1.8e9 + at,
        "lr": 3e-4 * schedule_factor(OPTIM, step=at - 1, num_steps=2000),
        "tokens": at * 256,
        "step_time_s": 0.1,
        "group_grad_norms": {"embedding": 0.2, "blocks.0": 0.55},
        "batch": {"fingerprint": f"{at:016x}", "entropy_nats": 3.1 + 0.05 * noise, "rarest": ORDINARY},
    }
    return record(at, loss, 0.6 + 0.02 * noise, **(given | probe | facts))


def log_of_example(*, rarest: list[list[int]], embedding: float = 46.5, grad_norm: float = 47.2) -> list[Event]:
    rows: list[Event] = [row(at) for at in range(1, LAST)]
    assert isinstance(rows[SPIKE - 1], StepRecord)
    batch = rows[SPIKE - 1].batch | {"rarest": rarest}  # type: ignore[attr-defined]
    norms = {"embedding": embedding, "blocks.0": math.sqrt(max(grad_norm**2 - embedding**2, 0.01))}
    rows[SPIKE - 1] = replace(row(SPIKE, batch=batch, group_grad_norms=norms), grad_norm=grad_norm)
    found = [
        finding(FindingKind.grad_spike, SPIKE, "gradient norm 47.2 against at most 18"),
        finding(FindingKind.loss_spike, SPIKE + 1, "loss 5.84, far above its level", onset=SPIKE),
    ]
    end = stories.ended(
        last=SPIKE + 1, onset=SPIKE, onset_step=SPIKE, kinds=["grad_spike", "loss_spike"], verdict="lingering",
        spike_type=2, actions=["watch"],
    )  # fmt: skip
    others = [stories.action(ActionKind.watch, SPIKE + 1, onset=SPIKE), *found, end]
    start = RunStarted(time=1.8e9, iteration=0, world_size=1, num_steps=2000, step=0)
    done = RunEnded(time=1.8e9 + LAST, iteration=LAST, step=LAST, exit_code=75, reason="asked to stop")
    return sorted([start, *rows, *others, done], key=lambda event: event.iteration)


BURST = [[RARE, 3, 5], *ORDINARY]


def gather(tmp_path: Path, **facts: Any) -> Evidence:
    return evidence_of(write(tmp_path / "19-spike-001", log_of_example(**{"rarest": BURST, **facts}), SETTINGS))


def by_cause(evidence: Evidence) -> dict[Cause, RuleResult]:
    return {result.cause: result for result in rank_causes(evidence, measure(evidence))}


def test_symptoms_are_those_of_the_template(tmp_path: Path) -> None:
    numbers = gather(tmp_path).numbers
    assert (numbers.onset, numbers.onset_step, numbers.onset_cursor) == (SPIKE, SPIKE, SPIKE)
    assert numbers.level == pytest.approx(2.31, abs=0.01)
    assert (numbers.peak, numbers.peak_iteration, numbers.peak_refused) == (5.84, SPIKE + 1, False)
    assert numbers.loss_after_50 == pytest.approx(3.40, abs=0.05)
    assert numbers.peak_grad == 47.2
    assert numbers.usual_grad == pytest.approx(0.6, abs=0.01)
    assert (numbers.has_recovered, numbers.resumed_step) == (False, None)


def test_long_tail_token_is_first_and_the_panels_rule_out_the_others(tmp_path: Path) -> None:
    evidence = gather(tmp_path)
    results = by_cause(evidence)
    first = next(iter(results.values()))
    assert (first.cause, first.status) == (Cause.long_tail_token, CauseStatus.likely)
    shown = {reason.panel: reason.text for reason in (first.reason, *first.details)}
    for panel, said in (
        (Panel.tokens, "4711 x3 of 5 in the corpus"),
        (Panel.gradient, "gradient norm 47.2, 78.6 times the usual 0.6, 99% of it in the embedding"),
        (Panel.activations, "3.2 times usual"),
        (Panel.token_losses, "in a mode near 12 nats"),
    ):
        assert said in shown[panel]
    expected = {
        Cause.numerical_cascade: Panel.activations,
        Cause.lr_discontinuity: Panel.rate,
        Cause.data_duplicate: Panel.tokens,
    }
    assert {cause: (results[cause].status, results[cause].reason.panel) for cause in expected} == {
        cause: (CauseStatus.ruled_out, panel) for cause, panel in expected.items()
    }
    assert "batches 311 and 313" in results[Cause.data_duplicate].reason.text
    assert [cause for cause, result in results.items() if result.status is CauseStatus.likely] == [
        Cause.long_tail_token
    ]


def test_remedy_and_verification_have_the_numbers_of_the_template(tmp_path: Path) -> None:
    evidence = gather(tmp_path)
    remedy = remedy_of(Cause.long_tail_token, evidence)
    assert remedy.overrides == ["optim.clip_norm=0.5", "data.stratify.rare_below=10"]
    wanted = verification_of(evidence, remedy)
    assert (wanted.seed, wanted.tolerance, wanted.clip_norm) == (42, 0.05, 0.5)
    assert wanted.guilty_limit == pytest.approx(2.5, abs=0.02)
    assert wanted.grad_limit == pytest.approx(3.0, abs=0.05)
    assert (wanted.grad_first, wanted.grad_last) == (300, 400)


def test_document_states_the_numbers(tmp_path: Path) -> None:
    text = markdown_report.render(gather(tmp_path))
    for line in (
        "# Loss spike: incident 001 of 19-spike-001",
        "- step where it began: 312 (iteration 312)",
        "- peak loss: 5.84 (iteration 313)",
        "- recovery loss (50 steps after the peak): did not recover: 3.4",
        "- precision: fp32",
        "- batch index: 312",
        "- unusual tokens in that batch: 4711 x3 of 5 in the corpus (batch 312)",
        "1. long-tail token: likely",
        "- spike type: 2 (lingering)",
    ):
        assert f"\n{line}" in f"\n{text}", line
    assert "- learning rate: 0.000294 " in text


def test_ordinary_rare_tokens_are_not_blamed(tmp_path: Path) -> None:
    evidence = gather(tmp_path, rarest=ORDINARY)
    result = by_cause(evidence)[Cause.long_tail_token]
    assert result.status is CauseStatus.ruled_out
    assert result.reason.text.startswith("none flagged")
    assert "- unusual tokens in that batch: none flagged" in markdown_report.render(evidence)


def test_flagged_token_without_a_large_gradient_is_not_blamed(tmp_path: Path) -> None:
    results = by_cause(gather(tmp_path, grad_norm=0.9, embedding=0.8))
    assert results[Cause.long_tail_token].status is CauseStatus.ruled_out
    assert results[Cause.long_tail_token].reason.panel is Panel.gradient


def test_gradient_outside_the_embedding_speaks_against_the_token(tmp_path: Path) -> None:
    result = by_cause(gather(tmp_path, embedding=2.0))[Cause.long_tail_token]
    assert result.status is CauseStatus.possible
    assert result.against is not None
    assert "of the gradient norm is in the embedding" in result.against.text


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3, 4, 6])
@pytest.mark.parametrize("factor", [10.0, 35.0, 200.0])
def test_other_magnitudes_of_the_same_story(tmp_path: Path, count: int, factor: float) -> None:
    """Two occurrences of a token that is not that rare are ordinary; more are not, at any size of the spike."""
    grad_norm = 0.6 * factor
    corpus = count + 1 if count > 2 else 30
    evidence = gather(
        tmp_path, rarest=[[RARE, count, corpus], *ORDINARY], grad_norm=grad_norm, embedding=0.98 * grad_norm
    )
    status = by_cause(evidence)[Cause.long_tail_token].status
    assert status is (CauseStatus.likely if count > 2 else CauseStatus.ruled_out)
