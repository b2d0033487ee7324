"""Sharded runs equal runs with world_size 1: weights, gradients, training, refused updates, precisions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.core import event_json
from harness.core.events import RunEnded
from tests.distributed import cases
from tests.distributed.pool import Pool

ONE_LAYER = "model.num_layers=1"
"""For tests in which the number of sharded modules does not matter."""


@pytest.mark.full
def test_every_world_size_starts_with_the_same_bits(ranks: Pool) -> None:
    single = ranks.run(1, cases.initial_weights_digest)[0]
    assert ranks.run(2, cases.initial_weights_digest) == [single] * 2
    assert ranks.run(4, cases.initial_weights_digest) == [single] * 4
    assert ranks.run(4, cases.initial_weights_digest, "parallel=hsdp") == [single] * 4
    assert ranks.run(3, cases.initial_weights_digest) == [single] * 3, "uneven shards"
    assert ranks.run(1, cases.initial_weights_digest, "run.seed=1") != [single]


@pytest.fixture(scope="module")
def gradients_of_one_rank() -> dict[tuple[str, ...], dict[str, Tensor]]:
    """By the overrides of the model; filled by the tests."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ()),
        (4, ("parallel.reshard_after_forward=true",)),
        (4, ("parallel=hsdp",)),
        (2, ("train.micro_batch_size=1",)),
        (1, ("train.micro_batch_size=1",)),
        (2, ("parallel=hsdp", "train.micro_batch_size=1")),
        (2, ("parallel.reshard_after_forward=true",)),
        (4, ("parallel=hsdp", "parallel.reshard_after_forward=true")),
        (2, ("parallel.activation_checkpointing=full",)),
        (2, ("parallel.activation_checkpointing=selective",)),
        (2, ("model.tied_head=true",)),
        (2, ("model.loss_chunk_tokens=10",)),
        (2, ("model.norm=layer", "model.norm_placement=post")),
        (2, ("model.norm=layer", "model.norm_placement=post", "parallel.activation_checkpointing=full")),
        (2, ("model.norm=layer", "model.norm_placement=post", "parallel.activation_checkpointing=selective")),
        (3, ()),
        (3, ("train.micro_batch_size=2",)),
        (3, ("train.micro_batch_size=1", "parallel.replicate=3")),
    ],
)
def test_gradients_equal_those_of_one_rank(
    ranks: Pool,
    gradients_of_one_rank: dict[tuple[str, ...], dict[str, Tensor]],
    size: int,
    overrides: tuple[str, ...],
) -> None:
    model = tuple(override for override in overrides if override.startswith(("model.tied", "model.norm")))
    if model not in gradients_of_one_rank:
        gradients_of_one_rank[model] = ranks.run(1, cases.full_gradients, *model)[0]
    expected = gradients_of_one_rank[model]
    for gradients in ranks.run(size, cases.full_gradients, *overrides):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=2e-5, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def losses_of_one_rank(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = losses_of(ranks, 1, tmp_path_factory.mktemp("one"))
    assert losses[-1] < losses[0]
    return losses


def losses_of(ranks: Pool, size: int, directory: Path, *overrides: str) -> list[float]:
    (code, records), *_ = ranks.run(size, cases.run, str(directory), "run.name=a", ONE_LAYER, *overrides)
    assert code == 0
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    return [record.loss for record in records]


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ("train.micro_batch_size=2",)),
        pytest.param(4, (), marks=pytest.mark.full),
        pytest.param(4, ("parallel=hsdp",), marks=pytest.mark.full),
    ],
)
def test_training_equals_one_rank_up_to_rounding(
    ranks: Pool, losses_of_one_rank: list[float], tmp_path: Path, size: int, overrides: tuple[str, ...]
) -> None:
    assert losses_of(ranks, size, tmp_path, *overrides) == pytest.approx(losses_of_one_rank, rel=1e-5)


@pytest.fixture(scope="module")
def muon_losses_of_one_rank(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = losses_of(ranks, 1, tmp_path_factory.mktemp("one"), "optim=muon")
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.full
@pytest.mark.parametrize(("size", "overrides"), [(3, ()), (4, ("parallel=hsdp",))])
def test_training_with_muon_equals_one_rank_up_to_rounding(
    ranks: Pool, muon_losses_of_one_rank: list[float], tmp_path: Path, size: int, overrides: tuple[str, ...]
) -> None:
    losses = losses_of(ranks, size, tmp_path, "optim=muon", *overrides)
    assert losses == pytest.approx(muon_losses_of_one_rank, rel=1e-5)


@pytest.mark.full
def test_the_same_seed_gives_the_same_bits(ranks: Pool, tmp_path: Path) -> None:
    def numbers(name: str, *overrides: str) -> list[tuple[float, float]]:
        overrides = (f"run.name={name}", "train.num_steps=3", ONE_LAYER, *overrides)
        (_, records), *_ = ranks.run(2, cases.run, str(tmp_path), *overrides)
        return [(record.loss, record.grad_norm) for record in records]

    first = numbers("first")
    assert numbers("second") == first
    assert numbers("other", "run.seed=1") != first


@pytest.mark.parametrize(
    ("value", "faulty_rank", "optimizer"),
    [
        (math.nan, 1, "adamw"),
        (math.inf, 0, "adamw"),
        (math.nan, 1, "muon"),
        pytest.param(math.nan, 0, "adamw", marks=pytest.mark.full),
        pytest.param(math.inf, 1, "adamw", marks=pytest.mark.full),
        pytest.param(math.inf, 0, "muon", marks=pytest.mark.full),
    ],
)
def test_a_refused_update_changes_no_tensor(ranks: Pool, value: float, faulty_rank: int, optimizer: str) -> None:
    for outcome in ranks.run(2, cases.run_refused_step, value, faulty_rank, ONE_LAYER, f"optim={optimizer}"):
        assert outcome == {"unchanged": True, "equals_control": True, "moved": True}


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_refused_update_changes_no_tensor_on_four_ranks_and_replicas(ranks: Pool, optimizer: str) -> None:
    overrides = (ONE_LAYER, "parallel=hsdp", f"optim={optimizer}")
    for outcome in ranks.run(4, cases.run_refused_step, math.nan, 2, *overrides):
        assert outcome == {"unchanged": True, "equals_control": True, "moved": True}


def test_a_run_that_only_refuses_halts_with_exit_code_3(ranks: Pool, tmp_path: Path) -> None:
    overrides = (
        "optim.lr=1e30",
        "optim.warmup_steps=0",
        "sentinel.halt_after_refused=5",
        "sentinel.policy.refused_in_row=9",
    )
    outcomes = ranks.run(2, cases.run, str(tmp_path), "run.name=broken", *overrides)
    assert [code for code, _ in outcomes] == [3, 3]
    records = outcomes[0][1]  # rank 0 writes the log; the others may read it before it is complete
    assert [record.refused for record in records][-5:] == [True] * 5
    assert len(records) <= 5 + 2 + 1, "few applied, five refused, one in flight"
    *_, ended = event_json.read(tmp_path / "broken" / "events.jsonl")
    assert isinstance(ended, RunEnded)
    assert (ended.exit_code, ended.step) == (3, records[-1].step)
    assert "rejected in a row" in ended.reason
    assert not (tmp_path / "broken" / "checkpoints").exists(), "a possibly damaged state is not saved"


def test_signals_need_one_collective_per_step(ranks: Pool) -> None:
    blocks_and_root = 3
    for counts in ranks.run(2, cases.count_collectives):
        gathered = sum(count for name, count in counts.items() if "allgather" in name)
        scattered = sum(count for name, count in counts.items() if "reducescatter" in name)
        reduced = sum(count for name, count in counts.items() if "allreduce" in name)
        assert scattered == blocks_and_root
        assert gathered >= blocks_and_root
        assert reduced == 1


@pytest.mark.parametrize(("reshard", "gathers"), [("false", [3, 3]), ("true", [2, 3])])
def test_weights_that_stay_gathered_are_gathered_before_the_first_block(
    ranks: Pool, reshard: str, gathers: list[int]
) -> None:
    """On CPU: the ranks wait for each other once, and not in front of each of the two blocks. The root is the third."""
    found = ranks.run(2, cases.count_gathers_before_blocks, f"parallel.reshard_after_forward={reshard}")
    assert found == [gathers] * 2


@pytest.mark.full
def test_replicas_all_reduce_once_per_step(ranks: Pool) -> None:
    """2 x 2 ranks and 3 micro-batches: two blocks and the root are reduce-scattered in each, and all-reduced between
    replicas in the last one; the other all-reduce is that of the signals."""
    overrides = ("parallel=hsdp", "train.batch_size=12", "train.micro_batch_size=1")
    for counts in ranks.run(4, cases.count_collectives, *overrides):
        assert sum(count for name, count in counts.items() if "reducescatter" in name) == 3 * 3
        assert sum(count for name, count in counts.items() if "allreduce" in name) == 3 + 1


@pytest.mark.full
def test_replicas_and_shards_wait_as_long_as_configured(ranks: Pool) -> None:
    """Also the groups of one mesh axis, which torch creates."""
    overrides = ("parallel.replicate=2", "parallel.timeout_s=123")
    assert ranks.run(4, cases.timeouts_of_groups, *overrides) == [{"shard": 123.0, "replicate": 123.0}] * 4
    overrides = ("parallel.replicate=2", "parallel.timeout_s=10")
    assert ranks.run(4, cases.fails_before_a_late_rank, *overrides)[::2] == [True, True]


@pytest.mark.full
def test_one_all_reduce_of_all_micro_batches_changes_only_the_order_of_sums(ranks: Pool) -> None:
    overrides = (ONE_LAYER, "parallel=hsdp", "train.batch_size=12", "train.micro_batch_size=1")
    for exact, rounded in ranks.run(4, cases.replica_gradients, *overrides):
        for each, once in exact.values():
            assert torch.equal(each, once), "exact sums are bit-equal"
        for name, (each, once) in rounded.items():
            torch.testing.assert_close(once, each, rtol=1e-5, atol=1e-8, msg=name)


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(ranks: Pool) -> None:
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    for seen in ranks.run(2, cases.dtypes, "precision=bf16"):
        assert seen == {"activation": bf16, "gathered": bf16, "master": fp32, "gradient": fp32, "moment": fp32}


@pytest.mark.full
def test_bf16_trains_like_fp32(ranks: Pool, tmp_path: Path) -> None:
    (_, exact), *_ = ranks.run(2, cases.run, str(tmp_path), ONE_LAYER, "run.name=fp32")
    (_, rounded), *_ = ranks.run(2, cases.run, str(tmp_path), ONE_LAYER, "run.name=bf16", "precision=bf16")
    assert [r.loss for r in rounded] == pytest.approx([r.loss for r in exact], rel=5e-3)
    assert [r.loss for r in rounded] != [r.loss for r in exact]


def test_fp16_scale_halves_at_overflow_and_doubles_when_clean(ranks: Pool, tmp_path: Path) -> None:
    overrides = ("precision=fp16", "precision.initial_loss_scale=1e9", "precision.loss_scale_growth_interval=2")
    (code, records), *_ = ranks.run(2, cases.run, str(tmp_path), "run.name=fp16", *overrides)
    assert code == 0
    scales = [record.loss_scale for record in records]
    refused = [record.refused for record in records]
    assert scales[0] == 1e9
    assert refused[0], "fp16 cannot hold gradients at this scale"
    assert refused.count(False) == 6, "the run continues until its steps are done"
    clean = 0
    for now, then, bad in zip(scales, scales[1:], refused, strict=False):
        assert now is not None
        clean = 0 if bad else clean + 1
        grown = clean == 2
        clean = 0 if grown else clean
        assert then == pytest.approx(now * (0.5 if bad else 2.0 if grown else 1.0))
    assert [record.step for record in records if not record.refused] == [1, 2, 3, 4, 5, 6]
    assert max(record.loss for record in records) < 10


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reshard", ["true", "false"])
def test_the_forward_pass_after_a_restore_uses_the_restored_weights(ranks: Pool, size: int, reshard: str) -> None:
    """FSDP2 keeps weights gathered after a forward pass without a backward pass; a restore writes to the shards."""
    for before, after, restored in ranks.run(
        size, cases.losses_around_restore, f"parallel.reshard_after_forward={reshard}"
    ):
        assert after != before
        assert restored == before
