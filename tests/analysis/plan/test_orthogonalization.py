"""What Muon changes in a plan, against numbers worked out by hand and against what training allocates."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from harness.analysis.plan.memory import checkpoint_bytes, memory
from harness.analysis.plan.orthogonalization import (
    direction_bytes,
    matrix_batches,
    muon_matrices,
    orthogonalize_flops,
    update_bytes,
)
from harness.analysis.plan.plan import plan
from harness.analysis.plan.plan_text import render
from harness.analysis.plan.predicted_time import step_time
from harness.analysis.plan.traffic import Collective, CollectiveKind, collectives
from harness.analysis.plan.work import Work, work
from harness.build import build
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.shards import local
from harness.distributed.world import connect
from harness.model.size import num_parameters
from tests.composed import load
from tests.distributed import cases
from tests.distributed.pool import Pool

BASE = ("model=tiny", "precision=bf16", "cluster=h100", "launch.nproc=8", "train.batch_size=64")
DIM, KV_DIM, WIDE, NUM_BLOCKS = 128, 64, 352, 4
MATRICES = NUM_BLOCKS * (2 * DIM * DIM + 2 * KV_DIM * DIM + 3 * WIDE * DIM)
UNEVEN = ("optim=muon", "model.ffn_dim=50")


@cache
def config(*overrides: str) -> Config:
    return load([*BASE, *overrides])


def exchanges(cfg: Config, world_size: int) -> list[Collective]:
    return [call for call in collectives(cfg, world_size=world_size) if call.kind is CollectiveKind.all_to_all]


def kernels(cfg: Config) -> Work:
    parts = work(cfg, world_size=1)
    assert parts is not None
    return parts


def test_matrices_have_one_moment_and_the_rest_two() -> None:
    adamw, muon = config(), config("optim=muon")
    assert sum(map(math.prod, muon_matrices(muon))) == MATRICES
    assert muon_matrices(adamw) == []
    assert memory(muon, world_size=8).parts.moments == memory(adamw, world_size=8).parts.moments - 4 * MATRICES // 8
    assert checkpoint_bytes(muon) == 12 * num_parameters(muon.model) - 4 * MATRICES
    assert checkpoint_bytes(adamw) == 12 * num_parameters(adamw.model)


def state_bytes() -> tuple[int, int]:
    """Bytes of this rank's weights, and of its moments."""
    cfg = cases.tiny(*UNEVEN)
    parts = build(cfg, connect(cfg.parallel), RunDir(Path("/nonexistent")))
    moments = [value for state in parts.update.state().values() for key, value in state.items() if key != "step"]
    weights = parts.update.parameters.values()
    return sum(4 * local(weight).numel() for weight in weights), sum(4 * local(moment).numel() for moment in moments)


def test_moments_are_those_that_training_allocates(ranks: Pool) -> None:
    planned = memory(cases.tiny(*UNEVEN), world_size=2).parts
    assert ranks.run(2, state_bytes) == [(planned.weights, planned.moments)] * 2


def test_replicas_take_turns_and_broadcast() -> None:
    cfg, alone = config("optim=muon", "parallel.replicate=2"), config("optim=muon")
    batches = matrix_batches(cfg, 4)
    (call,) = exchanges(cfg, 8)
    assert call.num_calls == 2 * -(-len(batches) // 2)
    (sent,) = (call for call in collectives(cfg, world_size=8) if call.kind is CollectiveKind.broadcast)
    assert (sent.num_calls, sent.group.num_ranks) == (len(batches), 2)
    assert sent.num_calls * sent.num_bytes == pytest.approx(direction_bytes(cfg, 4), rel=0.01)
    shared, whole = (orthogonalize_flops(each, 4, overhead=0.0) for each in (cfg, alone))
    assert whole / 2 <= shared < whole
    assert not [call for call in collectives(alone, world_size=8) if call.kind is CollectiveKind.broadcast]


def test_every_rank_sends_its_rows_there_and_back() -> None:
    cfg = config("optim=muon")
    (call,) = exchanges(cfg, 8)
    assert direction_bytes(cfg, 8) == 2 * MATRICES // 8
    assert call.num_calls * call.sent_bytes == pytest.approx(2 * (2 * MATRICES // 8) * 7 / 8, rel=1e-3)
    assert call.sent_far_bytes == 0
    (far,) = exchanges(cfg, 32)
    assert far.sent_far_bytes / far.sent_bytes == pytest.approx(24 / 31, rel=1e-2), "to all ranks but those beside it"
    assert exchanges(cfg, 1) == exchanges(config(), 8) == []


def test_replicas_exchange_within_themselves() -> None:
    (call,) = exchanges(config("optim=muon", "parallel.replicate=4"), 32)
    assert call.group.num_ranks == 8
    assert call.sent_far_bytes == 0


def test_orthogonalization_is_shared_among_the_shards() -> None:
    cfg = config("optim=muon")

    def flops(short: int, long: int) -> int:
        return 5 * (4 * short**2 * long + 2 * short**3)

    whole = NUM_BLOCKS * (2 * flops(DIM, DIM) + 2 * flops(KV_DIM, DIM) + 3 * flops(DIM, WIDE))
    assert orthogonalize_flops(cfg, 1, overhead=0.0) == whole
    assert orthogonalize_flops(cfg, 4, overhead=0.0) == pytest.approx(whole / 4, rel=0.05)
    outputs = 2 * 3 * DIM * DIM + 2 * (2 * KV_DIM**2 + KV_DIM * DIM) + 3 * (2 * DIM**2 + DIM * WIDE)
    assert orthogonalize_flops(cfg, 1, overhead=1.0) - whole == 5 * 2 * NUM_BLOCKS * outputs
    muon, adamw = kernels(cfg), kernels(config())
    assert muon.orthogonalize_s > 0
    assert adamw.orthogonalize_s == 0
    same = adamw.total_s - adamw.optimizer_s
    assert muon.total_s - muon.orthogonalize_s - muon.optimizer_s == pytest.approx(same)
    assert muon.optimizer_s < adamw.optimizer_s


def test_the_update_needs_buffers() -> None:
    muon, adamw = config("optim=muon"), config()
    largest = NUM_BLOCKS * 2 * 2 * (2 * DIM * WIDE + 2 * DIM * DIM)  # gate and up of all blocks
    assert update_bytes(muon, 1) == 2 * MATRICES + largest
    planned, plain = memory(muon, world_size=1), memory(adamw, world_size=1)
    assert planned.update_peak_bytes - plain.update_peak_bytes == update_bytes(muon, 1) - 4 * MATRICES
    assert update_bytes(adamw, 1) == 0


def test_exchanges_that_take_longer_than_the_gemms_are_waited_for() -> None:
    slow_link = "cluster.intra_node_gb_s=0.01"
    fast = step_time(config("optim=muon", "cluster.intra_node_gb_s=1e6"), world_size=8)
    slow = step_time(config("optim=muon", slow_link), world_size=8)
    plain = step_time(config(slow_link), world_size=8)
    assert fast is not None
    assert slow is not None
    assert plain is not None
    exchanged_s = 2 * (2 * MATRICES // 8) * 7 / 8 / (1e-2 * 1e9 * 0.8)
    assert slow.waiting_s - plain.waiting_s == pytest.approx(exchanged_s - slow.parts.orthogonalize_s, rel=0.1)
    assert fast.waiting_s < 0.01 * slow.waiting_s


def test_the_text_names_moments_and_orthogonalization() -> None:
    text = render(plan(config("optim=muon"), world_size=8))
    assert "one of Muon's for matrices" in text
    assert "Newton-Schulz" in text
    assert "all-to-all" in text
    plain = render(plan(config(), world_size=8))
    assert "Newton" not in plain
    assert "both of AdamW's, this rank's shard" in plain
