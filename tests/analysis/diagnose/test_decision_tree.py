"""Every branch of the decision tree; every exit code is reached."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from harness.analysis.diagnose.decision_tree import render, walk
from harness.analysis.diagnose.diagnosis import Diagnosis, Finds
from harness.analysis.diagnose.logged_run import LoggedRun
from harness.core.events import Action, ActionKind, StepRecord
from tests.sentinel.series import config, losses, norms, record, records

NUM = 600
DETECT = config()
LONG_TAIL = "a long-tail token in the batch; fix: stratify rare tokens: data.stratify.rare_below=10"


def rows(changes: dict[int, dict[str, Any]] | None = None, num: int = NUM) -> list[StepRecord]:
    """A healthy run with some rows changed."""
    log = [replace(row, lr=0.001) for row in records(losses(num), norms(num))]
    for at, facts in (changes or {}).items():
        log[at] = replace(log[at], **facts)
    return log


def diagnose(log: list[StepRecord], **settings: Any) -> Diagnosis:
    known = {key.replace("__", "."): value for key, value in settings.items()}
    return walk(LoggedRun(records=log, settings=known), detect=DETECT)


def questions(diagnosis: Diagnosis) -> list[str]:
    return [node.question for node in diagnosis.nodes]


def test_healthy_run_reaches_the_end_of_the_tree() -> None:
    found = diagnose(rows(), precision__kind="bf16")
    assert found.finds is Finds.nothing
    assert questions(found) == ["Q1.1", "Q2.1", "Q3.1", "Q4.1", "other"]
    assert render(found).endswith("=> healthy")
    assert diagnose([]).conclusion == "the log has no steps yet"


def test_batches_without_a_token_to_predict_are_healthy() -> None:
    found = diagnose(rows({300: {"loss": 0.0, "grad_norm": 0.0, "refused": True}}), precision__kind="bf16")
    assert found.finds is Finds.nothing
    assert "rejected updates: 0" in render(found)


def test_non_finite_values_are_located_by_step_rank_and_layer() -> None:
    broken = {"loss": math.nan, "refused": True, "nonfinite_ranks": [3], "group_grad_norms": {"head": math.nan}}
    found = diagnose(rows({400: broken}), precision__kind="fp32")
    assert found.finds is Finds.not_finite
    assert questions(found) == ["Q1.1", "Q1.2", "Q1.3", "Q1.4"]
    assert found.nodes[0].answer == "yes: the loss"
    assert "ranks 3; layer groups head" in render(found)
    assert "every such update was rejected: no weight changed" in render(found)


def test_recovered_spike_and_its_cause() -> None:
    spike = {at: {"loss": 6.0} for at in (400, 401)}
    loud = diagnose(rows(spike | {400: {"loss": 6.0, "grad_norm": 40.0}}))
    assert (loud.finds, questions(loud)) == (Finds.spike, ["Q1.1", "Q2.1", "Q2.2", "Q2.3"])
    assert loud.nodes[-1].answer == LONG_TAIL
    assert loud.overrides == ["data.stratify.rare_below=10"]
    jump = diagnose(rows(spike | {at: {"loss": 6.0, "lr": 0.05} for at in (399, 400)}))
    assert jump.nodes[-1].answer == "a bug in the learning-rate schedule; fix: repair the code that set the rate"
    crowd = rows(spike)
    for row in crowd:
        row.batch = {"rarest": [[9, 90 if row.step == 400 else 2, 5]]}
    assert diagnose(crowd).nodes[-1].answer == LONG_TAIL
    unknown = diagnose(rows(spike))
    assert unknown.nodes[-1].answer == "not known; fix: replay the step"
    assert unknown.replay == ["--iteration", "400", "--batch"]
    twice = rows(spike)
    for row in twice:
        row.fingerprint = f"{row.cursor - (row.cursor == 400)}"
    assert diagnose(twice).nodes[-1].answer.startswith("a bug in the data loader")


def test_spike_that_does_not_recover() -> None:
    found = diagnose(rows({at: {"loss": 4.5 + 0.01 * (at % 3)} for at in range(400, NUM)}))
    assert (found.finds, questions(found)[-1]) == (Finds.lasting_spike, "Q2.4")


def test_a_loss_that_the_run_accepted_as_other_data_damaged_nothing() -> None:
    """The run measured the held-out loss, which had not risen. Another spike that did not recover comes first."""
    log = rows({at: {"loss": 4.5 + 0.01 * (at % 3)} for at in range(400, NUM)})
    reason = "the held-out loss is at its expected level: the weights are healthy, the data changed"
    accepted = Action(
        time=0.0, iteration=403, kind=ActionKind.accept, step=403, incident=1, reason=reason, onset=400, level=4.5
    )
    found = walk(LoggedRun(records=log, events=[accepted]), detect=DETECT)
    assert (found.finds, found.restore_step, found.overrides) == (Finds.other, None, [])
    assert found.nodes[-1].question == "Q2.4"
    assert found.nodes[-1].number == f"iteration 403: {reason}"
    assert "moments" not in render(found)
    assert found.conclusion.endswith("because the data changed there: the model is healthy")
    for other in (replace(accepted, onset=450, iteration=460), replace(accepted, level=4.0)):
        assert walk(LoggedRun(records=log, events=[other]), detect=DETECT).finds is Finds.lasting_spike


def test_three_sigma_noise_is_not_a_spike() -> None:
    found = diagnose(rows({400: {"loss": 3.28}}))
    assert questions(found)[:4] == ["Q1.1", "Q2.1", "Q2.2", "Q2.3"]
    assert "0 of them confirmed" in found.nodes[1].number
    assert found.nodes[3].answer.startswith("noise")
    assert found.finds is Finds.nothing


def test_persistent_overflow() -> None:
    scales = {at: {"loss_scale": 65536.0} for at in range(NUM)}
    broken = {
        at: {"loss": math.nan, "grad_norm": math.inf, "refused": True, "loss_scale": 0.5} for at in range(400, 405)
    }
    found = diagnose(rows(scales | broken), precision__kind="fp16", optim__lr=0.001)
    assert found.finds is Finds.overflow
    assert questions(found) == ["Q1.1", "Q1.2", "Q1.3", "Q3.1", "Q3.2", "Q3.3", "Q3.4"]
    assert "collapsed below 1" in render(found)
    assert found.overrides == ["precision=bf16", "optim.lr=0.0005"]
    assert found.replay == ["--iteration", "400", "--precision", "fp32"]


def test_search_for_the_loss_scale_is_healthy() -> None:
    """An fp16 run that starts with overflows until its loss scale fits."""
    log = rows({at: {"loss_scale": 65536.0} for at in range(NUM)})
    for at in range(3):
        log[at] = replace(log[at], grad_norm=math.inf, refused=True, loss_scale=2.0 ** (19 - at))
    found = diagnose(log, precision__kind="fp16")
    assert found.finds is Finds.nothing
    assert questions(found) == ["Q1.1", "Q2.1", "Q3.1", "Q3.2", "Q3.3", "Q3.4", "Q4.1", "other"]
    assert "none needed: the loss scale has adapted" in render(found)
    assert found.nodes[0].answer == "not the loss; only the gradient norm, under a loss scale: see section 3"


@pytest.mark.parametrize(
    ("change", "question", "conclusion"),
    [
        (lambda at: {"lr": 0.001 + 1e-6 * at}, "Q4.2", "schedule is misconfigured"),
        (
            lambda at: {"group_param_norms": {"head": 2.0 ** (at / 100)}},
            "Q4.3",
            "head climbs: weight decay is too low",
        ),
        (lambda at: {"grad_norm": 0.3 + at / 300}, "Q4.4", "halve it"),
    ],
)
def test_slowly_rising_loss(change: Any, question: str, conclusion: str) -> None:
    """The rise is too slow for any spike detector."""
    random = Random(3)
    log = [record(at, 3.0 + max(0, at - 150) / 3000 + random.gauss(0, 0.03), 0.3, lr=0.001) for at in range(400)]
    found = diagnose([replace(row, **change(row.step)) for row in log])
    assert (found.finds, questions(found)[-1]) == (Finds.divergence, question)
    assert conclusion in found.conclusion


def test_fp8_underflow_is_found() -> None:
    health = {"activations": {"underflow": 0.1, "saturated": 0.0, "scale_log2": [4, 14]}}
    probed = {at: {"in_fp8": True, "fp8": health, "fp8_underflow": {"blocks.1": 0.01}} for at in range(0, NUM, 10)}
    calm = diagnose(rows(probed), precision__kind="fp8")
    assert (calm.finds, questions(calm)) == (Finds.nothing, ["Q1.1", "Q2.1", "Q3.1", "Q3.5", "Q4.1", "other"])
    probed[400] |= {"fp8_underflow": {"blocks.1": 0.6}}
    found = diagnose(rows(probed | {at: {"in_fp8": False} for at in range(402, 410)}), precision__kind="fp8")
    assert found.finds is Finds.other
    (fit,) = [node for node in found.nodes if node.question == "Q3.5"]
    assert (fit.answer, fit.number) == (
        "no",
        "at most 60% of the values of a layer group underflowed (blocks.1); 8 of 600 rows were computed in bf16",
    )
    assert render(found).endswith(
        "=> fp8_range at step 400: 60% of the values of blocks.1 underflow to zero in fp8, above 25%"
    )
    assert "not in the log (fp8 underflow was not probed)" in render(diagnose(rows(), precision__kind="fp8"))


def test_findings_outside_the_tree_are_reported() -> None:
    log = rows()
    for row in log:
        row.fingerprint = f"{row.cursor - (row.cursor == 300)}"
    twice = diagnose(log)
    assert twice.finds is Finds.other
    assert "batch 300 holds the same tokens as batch 299" in twice.conclusion
    refused = diagnose(rows({300: {"refused": True}}))
    assert refused.finds is Finds.other
    assert "rejected 1 update, " in refused.conclusion
