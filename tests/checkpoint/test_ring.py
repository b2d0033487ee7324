"""Snapshots in host memory come back bit for bit, and only those that were judged clean are targets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.build import Parts, build
from harness.checkpoint.memory import Block, free_bytes
from harness.checkpoint.ring import Ring
from harness.compose import load
from harness.config import Config, ConfigError
from harness.parallel import World, connect, local
from harness.rundir import RunDir
from harness.state import RunState
from harness.step import forward_backward, judge_and_update
from tests.distributed.cases import digest, run, tiny
from tests.distributed.pool import Pool

UNEVEN = ("model.dim=24", "model.num_heads=12", "model.num_kv_heads=6", "model.qk_norm=true", "model.ffn_dim=42")
"""Heads of 2: over 4 ranks a QK-norm has two empty shards; the other widths do not divide by 4 either."""


def start(*overrides: str) -> tuple[Parts, Config]:
    cfg = tiny(*overrides)
    return build(cfg, connect(cfg.parallel), RunDir(Path("/nonexistent"))), cfg


def step(parts: Parts, cfg: Config, index: int) -> list[float]:
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    parts.ring.finish_copy()
    return judge_and_update(parts, cfg=cfg, probe=False).tolist()


def rewind(*overrides: str) -> dict[str, Any]:
    """Four steps with a snapshot after the second, back to it, and the last two again."""
    parts, cfg = start(*overrides)
    first = [step(parts, cfg, index) for index in range(2)]
    state = RunState(step=2, iteration=2, cursor=2, tokens=512)
    slot = parts.ring.take(state)
    at_snapshot = digest(parts.tensors())
    second = [step(parts, cfg, index) for index in (2, 3)]
    at_end = digest(parts.tensors())
    slot.settle(step=2, refused_in_row=0)
    parts.ring.trust(3)
    agreed = parts.ring.agree(before=4)
    assert agreed is slot
    returned = parts.ring.restore(agreed)
    return {
        "state": returned == state,
        "restored": digest(parts.tensors()) == at_snapshot,
        "moved": at_end != at_snapshot,
        "replayed": [step(parts, cfg, index) for index in (2, 3)] == second,
        "ended": digest(parts.tensors()) == at_end,
        "fresh": first[0] != second[0],
        "empty": any(local(tensor).numel() == 0 for tensor in parts.tensors().values()),
    }


@pytest.mark.parametrize(
    ("size", "overrides", "has_empty_shards"),
    [
        (1, (), False),
        (2, ("precision=bf16",), False),
        (4, UNEVEN, True),
        (4, ("parallel.replicate=2", "precision=fp16"), False),
    ],
)
def test_a_rewind_is_bit_exact(ranks: Pool, size: int, overrides: tuple[str, ...], has_empty_shards: bool) -> None:
    results = ranks.run(size, rewind, *overrides)
    empty = [result.pop("empty") for result in results]
    assert any(empty) == has_empty_shards
    for result in results:
        assert all(result.values()), result


class Bench:
    """A ring over one tensor of one rank, with numbers in it that tell snapshots apart."""

    def __init__(self, *overrides: str) -> None:
        cfg = load(["parallel.device=cpu", *overrides])
        self.world: World = connect(cfg.parallel)
        self.tensor: Tensor = torch.zeros(3)
        self.ring = Ring({"tensor": self.tensor}, cfg=cfg.checkpoint.ring, world=self.world)

    def take(self, iteration: int, *, settled: bool = True) -> None:
        self.tensor.fill_(iteration)
        self.ring.take(RunState(iteration=iteration, step=iteration))
        if settled:
            self.settle(iteration)

    def settle(self, iteration: int, *, step: int | None = None) -> None:
        slot = self.ring.unsettled(iteration)
        assert slot is not None
        slot.settle(step=iteration if step is None else step, refused_in_row=0)

    def target(self, before: int = 10**9) -> int | None:
        slot = self.ring.agree(before=before)
        return None if slot is None else slot.state.iteration


def targets_follow_the_judgement() -> None:
    bench = Bench("checkpoint.ring.slots=3")
    bench.take(10)
    assert bench.target() is None, "nothing was judged yet"
    bench.ring.trust(10)
    assert bench.target() is None, "no step was computed from it yet"
    bench.ring.trust(11)
    assert bench.target() == 10
    bench.take(20, settled=False)
    bench.ring.trust(21)
    assert bench.target() == 10, "its own step has not reported yet"
    bench.settle(20, step=19)
    bench.ring.trust(22)
    assert bench.target() == 20
    assert bench.target(before=20) == 10
    bench.ring.doubt(15)
    assert bench.target() == 10
    bench.ring.trust(23)
    assert bench.target() == 20, "the suspicion was unfounded"
    bench.ring.forget(15)
    bench.ring.trust(24)
    assert bench.target() == 10
    state = bench.ring.restore(_held(bench, 10))
    assert (state.iteration, bench.tensor.tolist()) == (10, [10.0] * 3)


def _held(bench: Bench, before: int) -> Any:
    slot = bench.ring.agree(before=before + 1)
    assert slot is not None
    return slot


def the_newest_target_survives() -> None:
    bench = Bench("checkpoint.ring.slots=2")
    bench.take(1)
    bench.ring.trust(2)
    for iteration in range(10, 60):
        bench.take(iteration)
        assert bench.target() == 1, "many untried snapshots never push out the one that is known to be good"
    bench.ring.restore(_held(bench, 1))
    assert bench.tensor.tolist() == [1.0] * 3


def a_slot_being_saved_stays_as_it_is() -> None:
    bench = Bench("checkpoint.ring.slots=2")
    bench.tensor.fill_(7)
    slot = bench.ring.take(RunState(iteration=7))
    slot.is_leased = True
    for iteration in range(8, 30):
        bench.take(iteration)
        bench.ring.trust(iteration + 1)
    assert slot.tensors["tensor"].tolist() == [7.0] * 3


def what_is_not_finite_is_no_target() -> None:
    bench = Bench("checkpoint.ring.slots=3")
    bench.take(1)
    for iteration, value in ((2, math.nan), (3, math.inf)):
        bench.tensor[1] = value
        bench.ring.take(RunState(iteration=iteration))
        bench.settle(iteration)
    bench.ring.trust(10)
    assert bench.target() == 1
    bench.take(4)
    bench.ring.trust(10)
    assert bench.target() == 4


def ranks_agree_on_the_oldest_of_their_newest() -> list[int | None]:
    bench = Bench("checkpoint.ring.slots=3")
    seen = []
    bench.take(10)
    bench.take(20)
    bench.ring.trust(11)
    if bench.world.rank == 0:
        bench.ring.trust(21)
    seen.append(bench.target())
    if bench.world.rank == 1:
        bench.ring.forget(10)
    seen.append(bench.target())
    return seen


@pytest.mark.parametrize(
    "case",
    [
        targets_follow_the_judgement,
        the_newest_target_survives,
        a_slot_being_saved_stays_as_it_is,
        what_is_not_finite_is_no_target,
    ],
)
def test_which_slots_are_targets(ranks: Pool, case: Any) -> None:
    ranks.run(1, case)


def test_all_ranks_take_the_slot_that_all_of_them_hold(ranks: Pool) -> None:
    assert ranks.run(2, ranks_agree_on_the_oldest_of_their_newest) == [[10, None], [10, None]]


def complaint(*overrides: str) -> str:
    try:
        start(*overrides)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_ring_that_does_not_fit_is_refused_on_all_ranks_with_its_numbers(ranks: Pool) -> None:
    first, second = ranks.run(2, complaint, "checkpoint.ring.memory_gb=1.6e-3", "checkpoint.ring.slots=9")
    assert first == second
    numbers = "9 snapshots and the one being saved take 10 x 0.000386 GB on a machine with 2 ranks, 0.00386 GB of host"
    assert first.startswith(f"checkpoint.ring.memory_gb: {numbers} memory; allowed are 0.0016 GB, ")
    assert first.endswith("enough for checkpoint.ring.slots=3")
    assert ranks.run(2, complaint, "checkpoint.ring.memory_gb=1.6e-3", "checkpoint.ring.slots=3") == ["", ""]
    (starved, _) = ranks.run(2, complaint, "checkpoint.ring.memory_gb=1e-6")
    assert starved.endswith("not enough for one")


def test_it_is_refused_before_the_first_step(ranks: Pool, tmp_path: Path) -> None:
    (message, _) = ranks.run(2, refused_run, str(tmp_path))
    assert "checkpoint.ring.memory_gb" in message
    assert not (tmp_path / "a" / "events.jsonl").exists()


def refused_run(directory: str) -> str:
    try:
        run(directory, "run.name=a", "checkpoint.ring.memory_gb=1e-6")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_block_hands_out_separate_aligned_pieces() -> None:
    block = Block(64 * 3, pinned=False)
    pieces = [
        block.like(torch.empty(2, 3)),
        block.like(torch.empty(0)),
        block.like(torch.tensor(5)),
        block.like(torch.empty(4)),
    ]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [piece.flatten().tolist() for piece in pieces] == [[0.0] * 6, [], [2], [3.0] * 4]
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [24, 0, 8, 16], (
        "saved without the rest of the block"
    )
    assert all(piece.data_ptr() % 8 == 0 for piece in pieces)


def test_free_memory_is_what_the_machine_can_give() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes() <= total
