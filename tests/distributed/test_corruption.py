"""A micro-batch computed twice on real ranks: clean steps agree to the bit, a flipped bit names its rank and layer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.diagnose.log_numbers import run_detectors
from harness.core import event_json
from harness.core.events import Action, ActionKind, Finding, FindingKind, RunStarted, StepRecord
from harness.sentinel.policy.policy import replay_actions
from tests.distributed import cases, corruption_cases
from tests.distributed.corruption_cases import CheckedSteps
from tests.distributed.drill_cases import inspect_run_with
from tests.distributed.pool import Pool
from tests.graph_compiler import run_without_kernels

LAYER = "blocks.1.mlp.up"
ONE_LAYER = "model.num_layers=1"


def run_steps(
    ranks: Pool, size: int, tmp_path: Path, fault: dict[str, Any] | None, distances: list[int | None], *overrides: str
) -> CheckedSteps:
    """The steps on `size` ranks; all ranks report the same."""
    arguments = (str(tmp_path), overrides, corruption_cases.checked_steps, fault, distances)
    seen = ranks.run(size, run_without_kernels, inspect_run_with, *arguments)
    assert all(each == seen[0] for each in seen)
    result: CheckedSteps = seen[0]
    return result


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, ("precision=bf16", "train.micro_batch_size=4")),
        (2, ("precision=bf16",)),
        pytest.param(2, ("precision=fp8_emulated", "parallel.activation_checkpointing=full"), marks=pytest.mark.full),
        pytest.param(2, ("precision=fp8_emulated", "precision.fp8.recipe=delayed"), marks=pytest.mark.full),
        pytest.param(2, ("parallel.replicate=2", "train.micro_batch_size=2"), marks=pytest.mark.full),
        pytest.param(4, ("parallel.replicate=2", "data.document_mask=true"), marks=pytest.mark.full),
        pytest.param(1, ("parallel.compile=true",), marks=pytest.mark.full),
        pytest.param(2, ("optim=muon",), marks=pytest.mark.full),
    ],
)
def test_clean_steps_agree_and_leave_no_trace(
    ranks: Pool, tmp_path: Path, size: int, overrides: tuple[str, ...]
) -> None:
    """Weights, moments and losses are those of the same steps computed once."""
    is_delayed = "precision.fp8.recipe=delayed" in overrides
    distances = [0, 0 if is_delayed else 1 % size, 0, (size - 1) * (not is_delayed)]
    checked = run_steps(ranks, size, tmp_path / "checked", None, list(distances), ONE_LAYER, *overrides)
    plain = run_steps(ranks, size, tmp_path / "plain", None, [None] * 4, ONE_LAYER, *overrides)
    assert checked.ranks == [[]] * 4
    assert checked.refused == [False] * 4
    assert (checked.losses, checked.digests) == (plain.losses, plain.digests)
    assert len(set(checked.digests)) == 5, "every step has changed the weights"


@pytest.mark.parametrize(
    ("kind", "layer", "stage"),
    [
        ("bit_flip_activation", "blocks.0.attention", "output of blocks.0"),
        ("bit_flip_activation", "norm", "losses"),
        ("bit_flip_read", LAYER, "output of blocks.1"),
        ("bit_flip_backward", "blocks.0", "gradient of blocks.0"),
        ("bit_flip_backward", "head", "gradients of the weights outside the blocks"),
    ],
)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_transient_flip_names_rank_and_layer_and_the_update_is_rejected(
    ranks: Pool, tmp_path: Path, size: int, kind: str, layer: str, stage: str
) -> None:
    """A low bit, in one pass. Weights and moments stay as they are, bit for bit."""
    fault = {"kind": kind, "rank": -1, "layer": layer, "bit": 12}
    seen = run_steps(ranks, size, tmp_path, fault, [0, 0], "model.tied_head=false")
    assert seen.ranks == [[size - 1], []]
    assert seen.stages == [stage, ""]
    assert seen.refused == [True, False]
    assert seen.digests[0] == seen.digests[1] != seen.digests[2]


def test_a_repeated_error_shows_only_against_another_rank(ranks: Pool, tmp_path: Path) -> None:
    """With three ranks the wrong one is named alone."""
    fault = {"kind": "bit_flip_activation", "rank": 1, "layer": LAYER, "bit": 12, "duration": 9, "is_stuck": True}
    seen = run_steps(ranks, 3, tmp_path, fault, [0, 1, 2, None], "train.batch_size=6")
    assert seen.ranks == [[], [1], [1], []]
    assert seen.stages[1:3] == ["output of blocks.1"] * 2
    assert seen.refused == [False, True, True, False]


def test_a_random_error_shows_against_itself_and_against_others(ranks: Pool, tmp_path: Path) -> None:
    fault = {"kind": "bit_flip_activation", "rank": 1, "layer": LAYER, "bit": 12, "duration": 9}
    seen = run_steps(ranks, 2, tmp_path, fault, [0, 1, None])
    assert seen.ranks == [[1], [0, 1], []]
    assert seen.refused == [True, True, False]


def test_a_run_consumes_the_batch_again_and_its_log_replays(ranks: Pool, tmp_path: Path) -> None:
    """Rank 1 fails one check of a whole run; the batch is consumed two steps later."""
    seen = ranks.run(2, corruption_cases.run_with_flip, str(tmp_path))
    assert seen == [0, 0]
    (log,) = tmp_path.rglob("events.jsonl")
    logged = list(event_json.read(log))
    findings = [event for event in logged if isinstance(event, Finding)]
    assert [(finding.kind, finding.ranks, finding.iteration) for finding in findings] == [
        (FindingKind.corruption, [1], 3),
        (FindingKind.corruption_passed, [1], 6),
    ]
    records = [event for event in logged if isinstance(event, StepRecord)]
    assert [record.cursor for record in records] == [0, 1, 2, 3, 2, 4, 5, 6]
    assert [record.refused for record in records] == [False, False, True] + [False] * 5
    assert [record.recomputed for record in records][:6] == [None, None, 0, None, 0, 1]
    actions = [event for event in logged if isinstance(event, Action)]
    assert [action.kind for action in actions] == [ActionKind.skip]
    cfg = cases.tiny().sentinel
    assert replay_actions(logged, cfg.policy, lag=cfg.lag) == actions


@pytest.fixture(scope="module")
def after_one_error(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of seven steps on the machine `first`, whose rank 1 failed one check."""
    directory = tmp_path_factory.mktemp("one_error")
    ranks.run(2, corruption_cases.run_with_flip, str(directory), 3, 7, "first")
    return directory


@pytest.mark.full
@pytest.mark.parametrize(
    ("machine", "kind"), [("second", FindingKind.corruption_passed), ("first", FindingKind.corrupting_rank)]
)
def test_a_second_transient_error_blames_a_rank_only_on_the_same_machine(
    ranks: Pool, after_one_error: Path, tmp_path: Path, machine: str, kind: FindingKind
) -> None:
    shutil.copytree(after_one_error, tmp_path, dirs_exist_ok=True)
    ranks.run(2, corruption_cases.run_with_flip, str(tmp_path), 9, 13, machine)
    (log,) = tmp_path.rglob("events.jsonl")
    logged = list(event_json.read(log))
    starts = [event for event in logged if isinstance(event, RunStarted)]
    assert [start.machines for start in starts] == [{"first": [0, 1]}, {machine: [0, 1]}]
    findings = [(event.kind, event.ranks) for event in logged if isinstance(event, Finding)]
    passed, failed = (FindingKind.corruption_passed, [1]), (FindingKind.corruption, [1])
    assert findings == [failed, passed, failed, (kind, [1])]
    records = [event for event in logged if isinstance(event, StepRecord)]
    again = run_detectors(records, cases.tiny().sentinel.detect, events=starts)
    assert [(event.kind, event.ranks) for event in again] == findings, "harness diagnose finds the same"
