"""Communication and step time against hand calculations: groups, bytes sent, and waiting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from harness.analysis.plan.memory import offloaded_bytes, padded_size
from harness.analysis.plan.plan import plan, planned_ranks
from harness.analysis.plan.plan_text import render
from harness.analysis.plan.predicted_time import step_time
from harness.analysis.plan.traffic import (
    FAR_HOP_S,
    LINK_EFFICIENCY,
    NEAR_HOP_S,
    START_S,
    Collective,
    CollectiveKind,
    RankGroup,
    collectives,
    rank_groups,
    seconds,
)
from harness.config.schema import Config
from harness.model.size import block_shapes, num_parameters, root_shapes
from tests.composed import load

BASE = ["model=tiny", "precision=bf16", "cluster=h100", "launch.nproc=8", "train.batch_size=64"]


@cache
def config(*overrides: str) -> Config:
    return load([*BASE, *overrides])


def sent(overrides: list[str], world_size: int) -> dict[str, tuple[int, int]]:
    """Kind -> (bytes sent, bytes sent to other machines) by a rank in a step."""
    totals: dict[str, tuple[int, int]] = {}
    for call in collectives(config(*overrides), world_size=world_size):
        near, far = totals.get(call.kind, (0, 0))
        totals[call.kind] = near + call.num_calls * call.sent_bytes, far + call.num_calls * call.sent_far_bytes
    return totals


def test_one_machine_sends_each_parameter_once() -> None:
    model = config().model
    count = num_parameters(model)
    assert count == model.num_layers * padded_size(block_shapes(model), 8) + padded_size(root_shapes(model), 8), (
        "no padding"
    )
    in_root = padded_size(root_shapes(model), 8)
    once = sent([], 8)
    assert once["all_gather"] == (2 * count * 7 // 8, 0)
    assert once["reduce_scatter"] == (4 * count * 7 // 8, 0)
    assert sent(["parallel.reshard_after_forward=false"], 8) == once, "so small a model stays gathered by itself"
    twice = sent(["parallel.reshard_after_forward=true"], 8)
    assert twice["all_gather"] == (2 * (2 * count - in_root) * 7 // 8, 0), "embedding and head stay"
    by_two = sent(["parallel.reshard_after_forward=true", "train.micro_batch_size=4"], 8)
    assert by_two == {kind: (2 * near, 0) for kind, (near, _) in twice.items()}


def test_ring_uses_the_ports_of_all_devices() -> None:
    near, far = sent([], 32)["reduce_scatter"]
    assert near == pytest.approx(4 * num_parameters(config().model) * 31 / 32, rel=1e-3)
    assert far == pytest.approx(near / 8, rel=1e-3)


def test_replicas_are_on_different_machines() -> None:
    cfg = config("parallel.replicate=4")
    shards, replicas = rank_groups(cfg, 32)
    assert (shards.num_ranks, shards.num_nodes, shards.per_node) == (8, 1, 8)
    assert (replicas.num_ranks, replicas.num_nodes, replicas.per_node) == (4, 4, 1)
    totals = sent(["parallel.replicate=4"], 32)
    assert totals["all_gather"][1] == totals["reduce_scatter"][1] == 0
    near, far = totals["all_reduce"]
    assert near == far == pytest.approx(2 * 3 / 4 * 4 * num_parameters(cfg.model) / 8, rel=1e-3)
    crowded = rank_groups(config("parallel.replicate=16"), 32)
    assert [group.per_node for group in crowded] == [2, 4], "four copies on each machine"


def test_replicas_all_reduce_once_per_step() -> None:
    once, thrice = ["parallel.replicate=4"], ["parallel.replicate=4", "train.batch_size=96", "train.micro_batch_size=1"]
    assert sent(thrice, 32)["all_reduce"] == sent(once, 32)["all_reduce"]
    assert sent(thrice, 32)["reduce_scatter"] == (3 * sent(once, 32)["reduce_scatter"][0], 0)


def test_padding_takes_compute_time() -> None:
    cfg = config("train.batch_size=64")
    even, uneven = (step_time(cfg, world_size=ranks, mfu=0.5) for ranks in (32, 33))
    assert even is not None
    assert uneven is not None
    assert uneven.work_s == pytest.approx(even.work_s), "the largest share is two sequences on both"
    assert uneven.mfu < even.mfu


def test_seconds_of_a_ring() -> None:
    cluster = config().cluster
    group = RankGroup(num_ranks=16, num_nodes=2, per_node=8)
    call = Collective(kind=CollectiveKind.all_gather, of="block", num_calls=1, num_bytes=16 * 10**9, group=group)
    wire_s = 15 / (8 * 50 * LINK_EFFICIENCY)
    assert seconds(call, cluster) == pytest.approx(START_S + 14 * NEAR_HOP_S + FAR_HOP_S + wire_s)
    assert seconds(call, replace(cluster, inter_node_gb_s=None)) is None


def test_one_rank_does_not_communicate() -> None:
    cfg = load(["+experiment=1b_bf16"])
    single = step_time(cfg, world_size=1)
    assert single is not None
    assert (single.traffic_s, single.waiting_s) == (0.0, 0.0)
    assert single.step_time_s == single.work_s == single.parts.total_s
    assert single.mfu == single.device_mfu


def test_given_mfu_replaces_the_kernel_time() -> None:
    cfg = load(["+experiment=1b_bf16"])
    given = step_time(cfg, world_size=1, mfu=0.4)
    assert given is not None
    assert given.mfu == pytest.approx(0.4)
    assert given.tokens_per_s == pytest.approx(0.4 * 989e12 / 9.604e9, rel=1e-3)


def test_only_slow_links_cause_waiting() -> None:
    cfg = load(["+experiment=1b_bf16", "train.batch_size=64", "launch.nproc=8"])
    fast, slow, unknown = (
        step_time(replace(cfg, cluster=replace(cfg.cluster, inter_node_gb_s=rate)), world_size=32, mfu=0.5)
        for rate in (50.0, 0.5, None)
    )
    assert fast is not None
    assert slow is not None
    assert unknown is not None
    assert fast.work_s == slow.work_s == unknown.work_s == unknown.step_time_s
    assert fast.traffic_s is not None
    assert slow.traffic_s is not None
    assert fast.waiting_s < 0.25 * fast.traffic_s, "hidden behind the work"
    assert slow.waiting_s > slow.traffic_s - slow.work_s, "no more than the work can hide"
    assert slow.mfu < 0.1 < fast.mfu < 0.5
    assert unknown.traffic_s is None


def test_price_of_a_run() -> None:
    read = plan(config("cluster.price_per_gpu_hour=3.6", "train.num_steps=500"), world_size=8)
    assert read.step_time_s is not None
    assert read.price is not None
    a_step = 8 * 0.001 * read.step_time_s
    assert read.price.run == pytest.approx(500 * a_step)
    assert read.price.thousand_steps == pytest.approx(1000 * a_step)
    assert read.price.rewind_at_most == pytest.approx(12 * a_step)
    assert read.price.rollback_at_most == pytest.approx(121 * a_step)
    assert plan(config(), world_size=8).price is None


def test_spare_machines_are_paid_and_ranks_that_share_a_gpu_pay_for_one() -> None:
    def price(*overrides: str, world_size: int) -> float:
        read = plan(config("cluster.price_per_gpu_hour=3.6", *overrides), world_size=world_size)
        assert read.price is not None
        assert read.pace is not None
        return read.price.run / read.pace.step_time_s

    nodes = ("launch.nodes=2", "launch.nproc=8")
    assert price(*nodes, "launch.spares=1", world_size=16) == pytest.approx(1.5 * price(*nodes, world_size=16))
    shared = ("launch.ranks_per_gpu=4", "launch.nproc=8")
    assert price(*shared, world_size=8) == pytest.approx(price("launch.nproc=8", world_size=8) / 4)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        (["launch.nproc=4"], 4),
        (["launch.nodes=2", "launch.nproc=4"], 8),
        (["launch.nodes=2", "cluster=h100"], 16),
        (["launch=slurm", "cluster=h100"], 8),
        (["launch=slurm", "launch.slurm.gpus_per_node=4", "cluster=h100", "launch.nodes=3"], 12),
    ],
)
def test_number_of_ranks_of_a_configuration(overrides: list[str], ranks: int) -> None:
    assert planned_ranks(load(overrides)) == ranks


@pytest.mark.parametrize("mfu", [None, 0.4])
def test_ranks_that_share_a_gpu_share_its_rate(mfu: float | None) -> None:
    alone, shared = (step_time(config(f"launch.ranks_per_gpu={ranks}"), world_size=8, mfu=mfu) for ranks in (1, 4))
    assert alone is not None
    assert shared is not None
    assert shared.work_s == pytest.approx(4 * alone.work_s)
    assert shared.device_mfu == pytest.approx(alone.device_mfu)


def test_copies_of_activations_take_the_time_that_no_block_hides() -> None:
    offload = ("parallel.activation_offload=true", "parallel.device=cuda", "train.micro_batch_size=2")
    plain, slow = config(*offload[1:]), config(*offload, "cluster.host_gb_s=1e-3")
    unhindered, held_up = step_time(plain, world_size=8), step_time(slow, world_size=8)
    assert unhindered is not None
    assert held_up is not None
    one_way_s = 4 * offloaded_bytes(slow, world_size=8) / 1e6  # 64 sequences of 8 ranks in micro-batches of 2
    assert held_up.copies_s == pytest.approx(2 * one_way_s)
    num_layers = slow.model.num_layers
    hidden_s = held_up.parts.blocks_s * (num_layers - 1) / num_layers
    assert held_up.step_time_s == pytest.approx(unhindered.step_time_s + 2 * one_way_s - hidden_s)
    (line,) = [line for line in render(plan(slow, world_size=8)).splitlines() if line.startswith("  copied ")]
    assert line.endswith("do not overlap with compute")
    fast = step_time(config(*offload, "cluster.host_gb_s=1e9"), world_size=8)
    assert fast is not None
    assert fast.step_time_s == pytest.approx(unhindered.step_time_s)
    assert unhindered.copies_s == 0


def test_no_time_is_planned_for_copies_over_a_link_of_unknown_rate() -> None:
    planned = plan(
        config("parallel.activation_offload=true", "parallel.device=cuda", "cluster.host_gb_s=null"), world_size=8
    )
    assert planned.pace is not None
    assert planned.pace.copies_s is None
    assert planned.pace.copy_waiting_s == 0
    assert "cluster.host_gb_s is not set: no waiting is planned" in render(planned)
