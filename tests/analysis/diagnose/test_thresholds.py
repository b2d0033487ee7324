"""Each question of the tree on both sides of its threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.diagnose.decision_tree import render, walk
from harness.analysis.diagnose.diagnosis import NOT_LOGGED, Diagnosis, Finds, Node
from harness.analysis.diagnose.fix_commands import fix_commands
from harness.analysis.diagnose.logged_run import LoggedRun
from harness.checkpoint.catalog import Checkpoint, Health
from harness.core.events import EvalRecord, Event, HeldOutMeasured, RunEnded, StepRecord
from tests.sentinel.series import config, record

MEAN, SIGMA = 3.0, 0.1
DETECT = config()
Change = Callable[[int], dict[str, Any]]


def flat_log(num: int = 400, *, changes: dict[int, dict[str, Any]] | None = None, every: Change | None = None) -> Any:
    """A log with mean 3 and standard deviation 0.1 exactly: every window of 100 rows holds each value 50 times."""
    rows = [record(at, MEAN + SIGMA * (-1) ** at, 1.0, lr=0.001) for at in range(num)]
    if every is not None:
        rows = [replace(row, **every(row.step)) for row in rows]
    for at, facts in (changes or {}).items():
        rows[at] = replace(rows[at], **facts)
    return rows


def diagnose(
    records: Sequence[StepRecord],
    settings: dict[str, Any] | None = None,
    *,
    events: Sequence[Event] = (),
    checkpoints: Sequence[Checkpoint] | None = (),
    replays: Sequence[dict[str, Any]] = (),
) -> Diagnosis:
    known = {"precision.kind": "fp32"} | (settings or {})
    run = LoggedRun(records=records, settings=known, events=events, checkpoints=checkpoints, replays=replays)
    return walk(run, detect=DETECT)


def node(found: Diagnosis, question: str) -> Node:
    return next(node for node in found.nodes if node.question == question)


def checkpoint(step: int, health: Health = Health.good, generation: int = 0) -> Checkpoint:
    path = Path(f"step-{step:08d}-gen-{generation}")
    return Checkpoint(path=path, step=step, generation=generation, health=health)


# Section 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_q11_any_non_finite_loss(value: float) -> None:
    found = diagnose(flat_log(changes={200: {"loss": value, "refused": True}}))
    assert found.finds is Finds.not_finite
    assert node(found, "Q1.1").answer == "yes: the loss"
    assert node(diagnose(flat_log()), "Q1.1").answer == "no"


def test_q11_names_the_gradient_if_only_that_is_broken() -> None:
    found = diagnose(flat_log(changes={200: {"grad_norm": math.nan, "refused": True}}))
    assert found.finds is Finds.not_finite
    assert node(found, "Q1.1").answer == "yes: the gradient norm; the loss is finite in every row"
    assert found.overrides == ["optim.clip_value=100"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("fp32", "log(0) or 0/0"), ("bf16", "exponent overflow near 1e38"), ("fp8", "saturates"), ("fp16", "65504")],
)
def test_q12_by_number_format(kind: str, text: str) -> None:
    found = diagnose(flat_log(changes={200: {"loss": math.nan, "refused": True}}), {"precision.kind": kind})
    assert text in node(found, "Q1.2").number
    assert found.finds is (Finds.overflow if kind == "fp16" else Finds.not_finite), "fp16 goes to section 3"


def test_q11_counts_the_rejected_rows_among_those_that_are_not_finite() -> None:
    changes = {200: {"loss": math.nan, "refused": True}, 201: {"loss": math.nan}, 300: {"loss": 6.0, "refused": True}}
    number = node(diagnose(flat_log(changes=changes)), "Q1.1").number
    assert number.startswith("loss in 2 of 400 rows, gradient norm in 0; of these rows, rejected: 1")


def test_q12_not_in_the_log_goes_on() -> None:
    run = LoggedRun(records=flat_log(changes={200: {"loss": math.nan}}))
    found = walk(run, detect=DETECT)
    assert node(found, "Q1.2").answer == NOT_LOGGED
    assert [asked.question for asked in found.nodes] == ["Q1.1", "Q1.2", "Q1.3", "Q1.4"]


def replayed(nature: str = "deterministic", **seen: Any) -> dict[str, Any]:
    point = {"forward": "", "broken_weights": "", "backward": "", "gradients": []} | seen
    return {"iteration": 200, "nature": nature, "seen": {"0": point} if seen else {}}


@pytest.mark.parametrize(
    ("replay", "overrides", "text"),
    [
        (replayed(forward="blocks.0.attention: softmax"), ["optim.lr=0.0005"], "model.qk_norm=true"),
        (replayed(forward="head logits"), ["model.z_loss=1e-4"], "log-softmax"),
        (replayed(forward="loss: log-softmax"), ["model.z_loss=1e-4"], "log-softmax"),
        (replayed(forward="blocks.0.mlp: SwiGLU product"), ["optim.lr=0.0005"], "half the learning rate"),
        (replayed(backward="embedding"), ["optim.clip_value=100"], "before the norm"),
        (replayed(broken_weights="head", forward="head logits"), [], "before head was damaged"),
        (replayed("transient"), [], "test the machine"),
        (replayed(), [], "the replay shows none"),
    ],
)
def test_q14_is_the_fix_for_the_origin(replay: dict[str, Any], overrides: list[str], text: str) -> None:
    rows = flat_log(changes={200: {"loss": math.nan, "refused": True}})
    found = diagnose(rows, {"optim.lr": 0.001}, replays=[replay])
    assert found.overrides == overrides
    assert text in node(found, "Q1.4").answer
    assert found.replay == []


def test_q14_without_a_replay_asks_for_one_and_restores_if_weights_changed() -> None:
    changes = {at: {"loss": math.nan} for at in range(200, 400)}
    found = diagnose(flat_log(changes=changes), checkpoints=[checkpoint(100), checkpoint(199), checkpoint(200)])
    assert found.replay == ["--iteration", "200"]
    assert found.restore_step == 199
    assert "restore step-00000199-gen-0 (step 199); find the operation first" in node(found, "Q1.4").answer
    nothing = diagnose(flat_log(changes=changes), checkpoints=[checkpoint(199, Health.tainted)])
    assert "a full re-train" in node(nothing, "Q1.4").answer


# Section 2


@pytest.mark.parametrize(("sigmas", "answer"), [(2.999, "no"), (3.001, "yes")])
def test_q21_three_sigma(sigmas: float, answer: str) -> None:
    found = diagnose(flat_log(changes={200: {"loss": MEAN + sigmas * SIGMA}}))
    assert node(found, "Q2.1").answer == answer


def test_q23_one_outlier_is_noise_unless_it_is_confirmed() -> None:
    row = {"loss": MEAN + 6 * SIGMA}
    outlier = diagnose(flat_log(changes={200: row}))
    assert outlier.finds is Finds.nothing
    assert node(outlier, "Q2.3").answer == "noise: no detector confirms it and nothing was rejected"
    assert diagnose(flat_log(changes={200: row | {"refused": True}})).finds is Finds.spike
    assert diagnose(flat_log(changes={at: {"loss": 6.0} for at in (200, 201)})).finds is Finds.spike


@pytest.mark.parametrize(("at", "answer"), [(99, NOT_LOGGED), (100, "yes")])
def test_q21_needs_a_hundred_rows_before(at: int, answer: str) -> None:
    assert node(diagnose(flat_log(at + 1, changes={at: {"loss": 3.31}})), "Q2.1").answer == answer


def test_q21_spike_of_the_detectors_is_not_denied() -> None:
    """In the first hundred rows only the detectors can see a spike: section 2 reports it."""
    found = diagnose(flat_log(changes={at: {"loss": 9.0} for at in range(60, 64)}))
    assert found.finds is Finds.spike
    assert node(found, "Q2.1").answer == "yes"
    assert "0 rows above 3 sigma, 0 of them confirmed; 1 more found by the detectors" in node(found, "Q2.1").number


@pytest.mark.parametrize("outlier", [1e8, 1e200])
def test_q21_an_outlier_hides_no_spike_after_it_has_left_the_hundred_steps(outlier: float) -> None:
    found = diagnose(flat_log(changes={110: {"loss": outlier}, 300: {"loss": 3.31}}))
    assert node(found, "Q2.1").number.startswith("2 rows above 3 sigma")


def test_q21_a_huge_loss_before_a_spike_of_the_detectors() -> None:
    found = diagnose(flat_log(changes={30: {"loss": 1e200}} | {at: {"loss": 9.0} for at in range(60, 64)}))
    assert "2 more found by the detectors" in node(found, "Q2.1").number


def spiked(after: Change, num: int = 400) -> list[StepRecord]:
    """A spike at step 200 to which the detectors agree, followed by chosen rows."""
    changes = {200: {"loss": 6.0}} | {at: after(at) for at in range(201, num)}
    rows: list[StepRecord] = flat_log(num, changes=changes)
    return rows


RECOVERED = MEAN + 0.5 * SIGMA


@pytest.mark.parametrize(("loss", "finds"), [(RECOVERED - 1e-9, Finds.spike), (RECOVERED + 1e-3, Finds.lasting_spike)])
def test_q22_level_of_recovery(loss: float, finds: Finds) -> None:
    found = diagnose(spiked(lambda _at: {"loss": loss}))
    assert found.finds is finds


@pytest.mark.parametrize(("back_at", "finds"), [(246, Finds.spike), (247, Finds.lasting_spike)])
def test_q22_recovery_within_fifty_steps(back_at: int, finds: Finds) -> None:
    """Five rows must be back by step 250."""
    found = diagnose(spiked(lambda at: {"loss": 3.0 if at >= back_at else 5.0}))
    assert found.finds is finds


def test_q22_one_low_row_is_not_a_recovery() -> None:
    found = diagnose(spiked(lambda at: {"loss": 3.0 if at == 210 else 5.0}))
    assert found.finds is Finds.lasting_spike


def test_q22_rows_after_a_restore_do_not_count() -> None:
    rows = spiked(lambda _at: {"loss": 5.0}, num=221)
    again = [replace(row, iteration=row.iteration + 41, loss=3.0, step=row.step) for row in flat_log(300)[180:]]
    found = diagnose([*rows, *again], checkpoints=[checkpoint(180)])
    assert found.finds is Finds.lasting_spike
    assert "not back when an older state was restored at step 180, 20 rows after it" in node(found, "Q2.2").number
    assert "an older state was restored already" in node(found, "Q2.4").answer
    assert found.restore_step is None


@pytest.mark.parametrize(("num_rows", "finds"), [(4, Finds.spike), (5, Finds.lasting_spike)])
def test_q22_a_restore_soon_after_the_spike_says_nothing(num_rows: int, finds: Finds) -> None:
    rows = spiked(lambda _at: {"loss": 5.0}, num=201 + num_rows)
    again = [replace(row, iteration=row.iteration + 100) for row in flat_log(300)[180:]]
    found = diagnose([*rows, *again])
    assert found.finds is finds
    assert f"restored at step 180, {num_rows} rows after it" in node(found, "Q2.2").number
    is_known = finds is Finds.lasting_spike
    assert node(found, "Q2.2").answer == ("no" if is_known else NOT_LOGGED)
    assert ("a spike at step 200 that a restore undid 4 rows later" in found.conclusion) != is_known


def test_q22_a_rejected_spike_damages_no_moments() -> None:
    """The learning rate jumps, the next two updates are rejected, and an older state is restored."""
    rejected = {"loss": 6.0, "grad_norm": 20.0, "refused": True, "step": 200}
    rows = flat_log(203, changes={200: {"lr": 0.1}, 201: rejected, 202: rejected})
    again = [replace(row, iteration=row.iteration + 5) for row in flat_log(300)[198:]]
    found = diagnose([*rows, *again])
    assert found.finds is Finds.spike
    assert "not back in 0 rows, but its update was rejected" in node(found, "Q2.2").number
    assert node(found, "Q2.3").answer.startswith("a bug in the learning-rate schedule; fix: repair the code")
    wanted = "a spike at step 200 whose update was rejected: a bug in the learning-rate schedule"
    assert (found.conclusion, found.overrides, found.replay) == (wanted, [], [])


def test_q24_a_known_cause_is_repaired_instead() -> None:
    rows = spiked(lambda _at: {"loss": 5.0})
    rows[200].lr = 0.1
    found = diagnose(rows, checkpoints=[checkpoint(150)])
    assert [asked.question for asked in found.nodes] == ["Q1.1", "Q2.1", "Q2.2", "Q2.3", "Q2.4"]
    assert node(found, "Q2.4").answer == ("restore step-00000150-gen-0 (step 150); repair the code that set the rate")
    assert found.conclusion.endswith("within 50 steps: a bug in the learning-rate schedule")
    assert (found.overrides, found.replay, found.restore_step) == ([], [], 150)


def test_q22_too_young_to_tell() -> None:
    found = diagnose(spiked(lambda _at: {"loss": 5.0}, num=230))
    assert node(found, "Q2.2").answer == NOT_LOGGED
    assert found.finds is Finds.spike
    assert "less than 50 steps ago" in found.conclusion


def test_q22_lasting_spike_is_preferred_to_a_larger_one_that_recovered() -> None:
    changes = {200: {"loss": 20.0}} | {at: {"loss": 5.0} for at in range(320, 400)}
    found = diagnose(flat_log(changes=changes))
    assert found.finds is Finds.lasting_spike
    assert "step 320" in found.conclusion


@pytest.mark.parametrize(("norm", "cause"), [(30.0, "not known"), (30.1, "a long-tail token in the batch")])
def test_q23_thirty_times_the_mean_gradient_norm(norm: float, cause: str) -> None:
    rows = spiked(lambda _at: {"loss": 3.0})
    rows[200].grad_norm = norm
    found = diagnose(rows)
    assert found.finds is Finds.spike
    assert node(found, "Q2.3").answer.startswith(cause)


def test_q24_names_checkpoint_fix_and_commands() -> None:
    states = [checkpoint(100), checkpoint(150), checkpoint(199, Health.tainted), checkpoint(250)]
    found = diagnose(spiked(lambda _at: {"loss": 5.0}), checkpoints=states)
    assert found.restore_step == 150
    assert "restore step-00000150-gen-0 (step 150)" in node(found, "Q2.4").answer
    reason = "--reason 'the loss did not recover from the spike at step 200 within 50 steps' --wait"
    assert fix_commands(found, run="runs/a", is_running=True, overrides=["model=tiny", "optim.clip_norm=1"]) == [
        "harness replay runs/a --iteration 200 --batch",
        f"harness ctl runs/a rollback --to 150 {reason}",
        f"harness ctl runs/a stop {reason}",
        "harness train model=tiny optim.clip_norm=0.5 data.stratify.rare_below=10 run.dir=runs run.name=a"
        " run.resume=changed",
    ]
    ended = fix_commands(found, run="runs/a", is_running=False, overrides=["model=tiny"])
    assert [command.split()[1] for command in ended] == ["replay", "train", "ctl"], (
        "only a running run can be rolled back"
    )
    (_, train, _) = fix_commands(found, run="runs/optim.lr=10,optim.beta2=0.99", is_running=False, overrides=[])
    assert """ run.dir=runs 'run.name="optim.lr=10,optim.beta2=0.99"' """ in train
    nothing = diagnose(spiked(lambda _at: {"loss": 5.0}))
    assert "the cost is a full re-train" in node(nothing, "Q2.4").answer
    not_known = diagnose(spiked(lambda _at: {"loss": 5.0}), checkpoints=None)
    assert node(not_known, "Q2.4").answer.startswith("restore a checkpoint from before it, if there is one; ")


def test_q24_of_a_finished_run_is_a_new_run() -> None:
    rows = spiked(lambda _at: {"loss": 5.0})
    ended = RunEnded(time=0.0, iteration=400, step=400, exit_code=0, reason="all steps done")
    run = LoggedRun(records=rows, events=[ended], settings={"train.num_steps": 400}, checkpoints=[checkpoint(150)])
    assert run.is_finished
    assert not replace(run, settings={"train.num_steps": 401}).is_finished
    assert not replace(run, settings={}).is_finished
    commands = fix_commands(walk(run, detect=DETECT), run="runs/a", is_running=False, is_finished=True, overrides=[])
    assert commands == [
        "harness replay runs/a --iteration 200 --batch",
        "harness train optim.clip_norm=0.5 data.stratify.rare_below=10 run.dir=runs run.name=a-fixed",
    ]


# Section 3

FP16 = {"precision.kind": "fp16", "optim.lr": 0.001}
OVERFLOW: dict[str, Any] = {"grad_norm": math.inf, "refused": True}


def scaled(scales: Callable[[int], float], broken: Sequence[int] = (200,)) -> list[StepRecord]:
    rows: list[StepRecord] = flat_log(every=lambda at: {"loss_scale": scales(at)}, changes={})
    return [replace(row, **OVERFLOW) if row.step in broken else row for row in rows]


def test_q31_only_for_narrow_formats() -> None:
    assert "Q3.1" not in [asked.question for asked in diagnose(flat_log()).nodes]
    assert node(diagnose(flat_log(), {"precision.kind": "bf16"}), "Q3.1").answer == "no"
    assert node(diagnose(scaled(lambda at: 8.0 if at <= 200 else 4.0), FP16), "Q3.1").answer == "yes"


def test_q31_without_gradient_norms_or_a_format() -> None:
    found = walk(LoggedRun(records=[replace(row, grad_norm=0.0) for row in flat_log()]), detect=DETECT)
    assert node(found, "Q3.1").answer == NOT_LOGGED
    assert found.finds is Finds.nothing


@pytest.mark.parametrize(
    ("lowest", "answer", "finds"),
    [(1.0, "it halves at overflows", Finds.nothing), (0.5, "it collapsed below 1", Finds.overflow)],
)
def test_q32_collapse_below_one(lowest: float, answer: str, finds: Finds) -> None:
    found = diagnose(scaled(lambda at: 2.0 if at <= 200 else lowest), FP16)
    assert node(found, "Q3.2").answer.startswith(answer)
    assert found.finds is finds


def test_q32_constant_scale() -> None:
    found = diagnose(scaled(lambda _at: 1024.0), FP16)
    assert node(found, "Q3.2").answer == "it is constant: dynamic scaling is not engaged"
    assert found.overrides == ["precision=bf16"]
    last = diagnose(scaled(lambda _at: 1024.0, broken=(399,)), FP16)
    assert node(last, "Q3.2").answer == NOT_LOGGED, "no row shows what the scale did next"


def test_q33_uses_the_replay_in_fp32() -> None:
    rows = scaled(lambda at: 2.0 if at <= 200 else 1.0)
    rows[200].loss = math.nan
    unsure = diagnose(rows, FP16)
    assert unsure.replay == ["--iteration", "200", "--precision", "fp32"]
    verdict = {"iteration": 200, "precision_verdict": "an overflow of fp16"}
    found = diagnose(rows, FP16, replays=[verdict])
    assert node(found, "Q3.3").answer == "an overflow of fp16"
    assert found.replay == []


# Section 4


def rising(num: int = 400, every: Change = lambda _at: {}) -> list[StepRecord]:
    """A loss that rises by less than the noise, so that no spike is seen."""
    rows = [record(at, MEAN + 4e-4 * at + 0.05 * (-1) ** at, 1.0, lr=0.001) for at in range(num)]
    return [replace(row, **every(row.step)) for row in rows]


@pytest.mark.parametrize(("num", "answer"), [(199, NOT_LOGGED), (200, "yes")])
def test_q41_two_hundred_rows(num: int, answer: str) -> None:
    assert node(diagnose(rising(num)), "Q4.1").answer == answer
    assert node(diagnose(flat_log()), "Q4.1").answer == "no"


@pytest.mark.parametrize(("slope", "answer"), [(0.0, "no"), (1e-9, "yes")])
def test_q42_learning_rate(slope: float, answer: str) -> None:
    found = diagnose(rising(every=lambda at: {"lr": 0.001 + slope * at}))
    assert node(found, "Q4.2").answer == answer
    assert (found.conclusion.startswith("the schedule is misconfigured: it rises after")) == (answer == "yes")
    warming = diagnose(rising(every=lambda at: {"lr": 1e-6 * (at + 1)}), {"optim.warmup_steps": 500, "optim.lr": 1.0})
    assert "the warm-up of 500 steps still raises it" in warming.conclusion
    assert warming.overrides == ["optim.lr=0.5"]
    assert node(diagnose(rising(every=lambda _at: {"lr": math.nan})), "Q4.2").answer == NOT_LOGGED


@pytest.mark.parametrize(
    ("last", "answer", "direction", "overrides"),
    [
        (20.0, "no", "", []),
        (20.1, "yes", "climbs: weight decay is too low", ["optim.weight_decay=0.2"]),
        (5.0, "no", "", []),
        (4.9, "yes", "collapses: weight decay is too high", ["optim.weight_decay=0.05"]),
        (0.0, "yes", "collapses: weight decay is too high", ["optim.weight_decay=0.05"]),
    ],
)
def test_q43_twofold_change_and_its_direction(last: float, answer: str, direction: str, overrides: list[str]) -> None:
    rows = rising()
    rows[200].group_param_norms = {"head": 10.0, "norm": 1.0}
    rows[399].group_param_norms = {"head": last, "norm": 1.1}
    found = diagnose(rows, {"optim.weight_decay": 0.1}, checkpoints=[checkpoint(150)])
    assert node(found, "Q4.3").answer == answer
    assert found.overrides == overrides
    assert direction in found.conclusion
    assert (found.restore_step == 150) == (answer == "yes")


def test_q43_starts_a_decay_that_is_zero_and_needs_two_probes() -> None:
    rows = rising(every=lambda at: {"group_param_norms": {"head": 2.0 ** (at / 100)}})
    assert diagnose(rows, {"optim.weight_decay": 0.0}).overrides == ["optim.weight_decay=0.1"]
    assert node(diagnose(rising()), "Q4.3").answer == NOT_LOGGED


@pytest.mark.parametrize(("factor", "answer"), [(1.1, "no"), (1.11, "yes")])
def test_q44_gradient_norm(factor: float, answer: str) -> None:
    found = diagnose(rising(every=lambda at: {"grad_norm": factor if at >= 300 else 1.0}), {"optim.lr": 0.002})
    assert node(found, "Q4.4").answer == answer
    assert (found.overrides == ["optim.lr=0.001"]) == (answer == "yes")


def evaluation(at: int, loss: float) -> EvalRecord:
    return EvalRecord(time=0.0, iteration=at, step=at, loss=loss, tokens=100)


@pytest.mark.parametrize(
    ("last", "finds", "conclusion"),
    [
        (4.039, Finds.plateau, "stop, the run is done"),
        (3.961, Finds.plateau, "stop, the run is done"),
        (4.041, Finds.divergence, "the held-out loss rises too"),
        (3.959, Finds.other, "the held-out loss still falls"),
    ],
)
def test_q44_reads_the_evaluations(last: float, finds: Finds, conclusion: str) -> None:
    found = diagnose(rising(), events=[evaluation(150, 4.0), evaluation(390, last)])
    assert found.finds is finds
    assert conclusion in found.conclusion


def test_q44_without_evaluations_and_with_held_out_rows_only() -> None:
    found = diagnose(rising(), events=[evaluation(10, 9.0)])
    assert found.finds is Finds.plateau
    assert f"{NOT_LOGGED} (1 evaluations in the window; set eval.every_steps)" in render(found)
    rows = [HeldOutMeasured(time=0.0, iteration=at, step=at, loss=4.0) for at in (200, 399)]
    assert "stop, the run is done" in diagnose(rising(), events=rows).conclusion
