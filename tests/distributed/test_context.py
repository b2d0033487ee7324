"""Context parallelism on real ranks: what a group computes together equals what one rank computes alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core import event_json
from harness.core.events import EvalRecord, Finding, FindingKind, StepRecord
from harness.drills.scenario import load_scenario
from tests.analysis.postmortem.causes import INJECTED, blamed
from tests.distributed import cases, context_cases, faulty_runs, test_drills, test_trials
from tests.distributed.pool import Pool
from tests.graph_compiler import run_without_kernels


@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.full)])
def test_keys_and_values_are_gathered_in_order_and_their_gradients_summed(ranks: Pool, context: int) -> None:
    results = ranks.run(context, context_cases.gathered_and_differentiated, context)
    places = torch.cat([result.pop("positions") for result in results])
    assert sorted(places.tolist()) == list(range(16)), "every token is computed once"
    for result in results:
        for name, difference in result.items():
            torch.testing.assert_close(difference, torch.zeros_like(difference), atol=1e-6, rtol=0, msg=name)


@pytest.fixture(scope="module")
def steps_of_one_rank() -> dict[tuple[str, ...], dict[str, Any]]:
    """By the overrides that change the numbers; filled by the tests."""
    return {}


def step_of_one_rank(
    ranks: Pool, steps: dict[tuple[str, ...], dict[str, Any]], overrides: tuple[str, ...]
) -> dict[str, Any]:
    if overrides not in steps:
        steps[overrides] = ranks.run(1, context_cases.one_step, *overrides)[0]
    return steps[overrides]


DOCUMENTS = ("data.document_mask=true",)
ONE_LAYER = ("model.num_layers=1",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "context", "common", "others"),
    [
        (2, 2, (), ()),
        (2, 2, DOCUMENTS, ()),
        (4, 2, DOCUMENTS, ("train.micro_batch_size=1",)),
        (4, 4, (), ("train.micro_batch_size=2",)),
        (4, 4, DOCUMENTS, ("parallel.activation_checkpointing=full",)),
        (4, 2, (), ("parallel.activation_checkpointing=selective", "parallel.reshard_after_forward=true")),
        (4, 2, (), ("parallel=hsdp",)),
        (2, 2, ("model.qk_norm=true", "model.tied_head=true", "model.attention=fp32"), ()),
        (2, 2, ("model.norm=layer", "model.norm_placement=post"), ("parallel.activation_checkpointing=full",)),
        (4, 2, ("train.batch_size=3",), ()),
        (2, 2, (), ("parallel.activation_offload=true", "parallel.activation_checkpointing=full")),
    ],
)
def test_a_step_equals_that_of_one_rank(
    ranks: Pool,
    steps_of_one_rank: dict[tuple[str, ...], dict[str, Any]],
    size: int,
    context: int,
    common: tuple[str, ...],
    others: tuple[str, ...],
) -> None:
    expected = step_of_one_rank(ranks, steps_of_one_rank, common)
    results = ranks.run(size, context_cases.one_step, *common, *others, f"parallel.context={context}")
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-6)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
        assert result["held_out"] == pytest.approx(expected["held_out"], rel=2e-6)
        has_same_rows = size == context and not any(other.startswith("train.micro") for other in others)
        for name, sums in result["sums"].items():
            if name != "scalars" and (name != "attention_logits" or has_same_rows):
                assert sums == pytest.approx(expected["sums"][name], rel=1e-4), name
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=2e-5, atol=1e-7, msg=name)
    groups = [result["fingerprint"] for result in results]
    assert groups == [groups[rank // context * context] for rank in range(size)], "a group reads the same rows"
    assert sum(groups[::context]) % 2**64 == expected["fingerprint"]


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_plan_knows_what_is_exchanged(ranks: Pool, checkpointing: str) -> None:
    overrides = (f"parallel.activation_checkpointing={checkpointing}", "train.micro_batch_size=1", "parallel.context=2")
    for found, planned in ranks.run(2, context_cases.exchanges_of_a_step, *overrides):
        assert found == planned
        assert found.total() > 0


@pytest.mark.full
def test_a_run_has_the_same_data_and_losses_with_any_context(ranks: Pool, tmp_path: Path) -> None:
    checks = ("sentinel.probe_every=4", "sentinel.sdc.every=3")
    common = (*ONE_LAYER, *DOCUMENTS, "train.num_steps=7", *checks)
    _, alone = ranks.run(1, cases.run, str(tmp_path), "run.name=alone", *common)[0]
    shared = {
        name: ranks.run(4, cases.run, str(tmp_path), f"run.name={name}", *common, f"parallel.context={context}")[0]
        for name, context in (("first", 2), ("again", 2), ("four", 4))
    }
    for code, records in shared.values():
        assert code == 0
        assert [record.fingerprint for record in records] == [record.fingerprint for record in alone]
        assert [record.tokens for record in records] == [record.tokens for record in alone]
        assert [record.loss for record in records] == pytest.approx([record.loss for record in alone], rel=2e-5)
        assert [record.grad_norm for record in records] == pytest.approx([each.grad_norm for each in alone], rel=1e-3)
        for record, expected in zip(records, alone, strict=True):
            assert record.source_losses == pytest.approx(expected.source_losses, rel=2e-5)
            assert not record.other_data
            assert not record.corrupted_ranks
        assert {record.recomputed for record in records} >= {None, 0}
    assert {record.recomputed for record in shared["first"][1]} == {None, 0, 2}, (
        "a group computes the rows of the other"
    )
    first, again = ([repeated_fields(record) for record in shared[name][1]] for name in ("first", "again"))
    assert first == again, "bit-identical"
    found = [event for event in event_json.read(tmp_path / "first" / "events.jsonl") if isinstance(event, Finding)]
    assert not found, "ranks of a group see different positions, and that is no finding"


def repeated_fields(record: StepRecord) -> tuple[Any, ...]:
    return record.loss, record.grad_norm, record.weight_digest, record.fingerprint, record.group_grad_norms


@pytest.mark.full
def test_a_run_resumes_with_another_context(ranks: Pool, tmp_path: Path) -> None:
    common = (*ONE_LAYER, "optim.schedule=constant", "run.resume=changed")
    for size, context, until in ((1, 1, 2), (4, 2, 4), (4, 4, 6), (2, 1, 8)):
        overrides = (*common, f"train.num_steps={until}", f"parallel.context={context}")
        code, records = ranks.run(size, cases.run, str(tmp_path), "run.name=moved", *overrides)[0]
        assert code == 0
    code, expected = ranks.run(1, cases.run, str(tmp_path), "run.name=stayed", *common, "train.num_steps=8")[0]
    assert code == 0
    assert [record.fingerprint for record in records] == [record.fingerprint for record in expected]
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=5e-5)


FEATURES = {
    "Muon, QK-clip, growing batches": (
        "optim=muon",
        "optim.qk_clip=0.02",
        "train.batch_size_warmup=[{until_batch: 3, batch_size: 4}]",
    ),
    "bf16 moments, QK-clip of norms, evaluation": (
        "optim.moment_dtype=bf16",
        "model.qk_norm=true",
        "optim.qk_clip=0.5",
        "eval.every_steps=3",
        "sentinel.held_out_rows=8",
    ),
    "phases of precision": (
        "precision=fp8_emulated",
        "precision.phases=[{from_batch: 2, kind: bf16}, {from_batch: 4, kind: fp8}]",
    ),
}
TOLERANCES = {"phases of precision": 5e-3}


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_works_with_shared_sequences(ranks: Pool, tmp_path: Path, feature: str) -> None:
    """Losses, attention logits and held-out losses equal those of one rank, and clipping changes the weights alike."""
    common = ("model.num_layers=1", "sentinel.probe_every=2", "optim.schedule=constant", "optim.warmup_steps=0")
    overrides = (*FEATURES[feature], *common)
    _, alone = ranks.run(1, cases.run, str(tmp_path), "run.name=alone", *overrides)[0]
    code, records = ranks.run(2, cases.run, str(tmp_path), "run.name=shared", *overrides, "parallel.context=2")[0]
    assert code == 0
    tolerance = TOLERANCES.get(feature, 2e-4)
    assert [record.loss for record in records] == pytest.approx([record.loss for record in alone], rel=tolerance)
    assert [record.tokens for record in records] == [record.tokens for record in alone]
    assert [record.in_fp8 for record in records] == [record.in_fp8 for record in alone]
    norms = [record.weight_norm for record in alone]
    assert [record.weight_norm for record in records] == pytest.approx(norms, rel=1e-4)
    logits = [record.attention_logits for record in records if record.attention_logits]
    assert logits
    for own, expected in zip(logits, (each.attention_logits for each in alone if each.attention_logits), strict=True):
        assert own == pytest.approx(expected, rel=20 * tolerance)
    evaluations = [
        [event.loss for event in event_json.read(tmp_path / name / "events.jsonl") if isinstance(event, EvalRecord)]
        for name in ("alone", "shared")
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=tolerance)
    assert bool(evaluations[0]) == ("eval.every_steps=3" in overrides)


@pytest.mark.full
def test_a_trial_keeps_its_steps_with_shared_sequences(ranks: Pool, tmp_path: Path) -> None:
    """A snapshot is restored, candidates train from it, and the kept steps have the bits of a run without trials."""
    results = {}
    for name, trials in (("victim", test_trials.TRIALS), ("plain", ())):
        overrides = (f"run.name={name}", *test_trials.STEPS, *trials, "parallel.context=2")
        found = ranks.run(2, faulty_runs.run, str(tmp_path), test_trials.damage(0), *overrides)
        assert len({(result.code, result.state) for result in found}) == 1
        results[name] = found[0]
    assert results["victim"].code == results["plain"].code == 0
    assert results["victim"].state == results["plain"].state
    (outcome,) = test_trials.trial_outcomes(results["victim"].log)
    assert (outcome.succeeded, outcome.kept_steps) == (True, 4)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp8_emulated"])
def test_other_precisions_agree_to_their_rounding(ranks: Pool, precision: str) -> None:
    """fp8 scales each tensor by its largest value, and a rank has a part of the tokens."""
    alone = ranks.run(1, context_cases.one_step, f"precision={precision}")[0]
    for result in ranks.run(2, context_cases.one_step, f"precision={precision}", "parallel.context=2"):
        assert result["loss"] == pytest.approx(alone["loss"], rel=2e-3)
        assert result["grad_norm"] == pytest.approx(alone["grad_norm"], rel=3e-2)


DRILLS = ("nan_grad", "nan_activation", "poisoned_batch", "corrupt_activation", "corrupting_rank")
TABLE = replace(test_drills.SHORT, lengths={**test_drills.SHORT.lengths, "corrupting_rank": 75})
"""All drills have one training config and one length, and so one common part and one twin. corrupting_rank halts."""
DRILL_OVERRIDES = (*test_drills.RUN_OVERRIDES, test_drills.CONSTANT, test_drills.SHORT_SEQUENCES, "parallel.context=2")


@pytest.mark.full
@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_passes_with_shared_sequences(ranks: Pool, shared_runs: Path, name: str) -> None:
    """A NaN or a wrong bit in the activations of one rank reaches its group; the score demands that the rank is named,
    and no other."""
    card = test_drills.run_drill(ranks, shared_runs, name, DRILL_OVERRIDES, table=TABLE)
    test_drills.assert_passed(card)
    expected = load_scenario(name).expected
    if expected.names_rank:
        log = event_json.read(shared_runs / f"drill-{name}" / "events.jsonl")
        found = [event for event in log if isinstance(event, Finding) and event.kind in expected.findings]
        assert {tuple(finding.ranks) for finding in found} == {(1,)}
    assert blamed(shared_runs / f"drill-{name}") is INJECTED[name], "the post-mortem blames what was injected"


@pytest.mark.full
def test_bad_tokens_in_the_part_of_one_rank_are_skipped(ranks: Pool, shared_runs: Path) -> None:
    """Half of each row is garbage. The batch is skipped, and no rank is blamed: nobody computed anything wrong."""
    card = test_drills.run_drill(ranks, shared_runs, "poisoned_batch", DRILL_OVERRIDES, rank=1, table=TABLE)
    test_drills.assert_passed(card)
    log = list(event_json.read(shared_runs / "drill-poisoned_batch-on-1" / "events.jsonl"))
    blaming = (FindingKind.rank_outlier, FindingKind.data_mismatch, FindingKind.corruption, FindingKind.nonfinite)
    assert not [event for event in log if isinstance(event, Finding) and event.kind in blaming]


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drills share the part before the fault, and the twin."""
    return tmp_path_factory.mktemp("context-runs")


@pytest.fixture(scope="module")
def replay_of_one_rank(ranks: Pool) -> Any:
    return ranks.run(1, context_cases.replayed_samples, *DOCUMENTS)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides", [("parallel.context=2",), ("parallel.context=4",), ("parallel.context=2", "parallel=hsdp")]
)
def test_a_replay_measures_the_same_samples_and_tokens(
    ranks: Pool, replay_of_one_rank: Any, overrides: tuple[str, ...]
) -> None:
    samples, tokens = replay_of_one_rank
    for own_samples, own_tokens in ranks.run(4, context_cases.replayed_samples, *DOCUMENTS, *overrides):
        for own, expected in zip(own_samples, samples, strict=True):
            assert own == pytest.approx(expected, rel=1e-4)
        assert [token[:3] for token in own_tokens] == [token[:3] for token in tokens]


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_compute_the_same(
    ranks: Pool, steps_of_one_rank: dict[tuple[str, ...], dict[str, Any]], checkpointing: str
) -> None:
    alone = step_of_one_rank(ranks, steps_of_one_rank, ())
    overrides = ("parallel.context=2", "parallel.compile=true", f"parallel.activation_checkpointing={checkpointing}")
    for result in ranks.run(2, run_without_kernels, context_cases.one_step, *overrides):
        assert result["loss"] == pytest.approx(alone["loss"], rel=2e-6)
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, alone["gradients"][name], rtol=1e-4, atol=1e-6, msg=name)
