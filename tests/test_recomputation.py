"""Tests of the schedule of recomputations, and of the ranks and layers that a difference names. Without ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from harness.config.errors import ConfigError
from harness.config.sentinel import AllowedActions
from harness.data.order.ledger import Ledger
from harness.distributed.bit_digests import INTEGERS, BitDigests, Computation, digest_bits, gradient_stage, stage_names
from harness.distributed.world import World
from harness.planned_changes import windows
from harness.recomputation import check_interval, choose_distance, explain_check_off
from harness.sentinel.device.gate import Gate
from harness.sentinel.device.signals import SignalLayout
from harness.sentinel.device.slots import SLOTS, find_corrupted, summarize_slots
from tests.composed import load


def distances(num: int, *, every: int, num_ranks: int, is_repeating: bool = False) -> list[int | None]:
    return [
        choose_distance(iteration, every=every, is_repeating=is_repeating, num_ranks=num_ranks)
        for iteration in range(num)
    ]


def test_checks_alternate_between_own_rows_and_those_of_every_other_rank() -> None:
    assert distances(12, every=3, num_ranks=4) == [None, None, 0, None, None, 1, None, None, 0, None, None, 2]
    for num_ranks in (2, 3, 8):
        seen = distances(4 * num_ranks, every=1, num_ranks=num_ranks)
        assert set(seen) == set(range(num_ranks)), "every pair of ranks is compared"
        assert seen[::2] == [0] * (2 * num_ranks)


def test_a_single_rank_repeats_its_own_rows() -> None:
    assert distances(4, every=2, num_ranks=1) == [None, 0, None, 0]


def test_zero_turns_the_checks_off_and_a_difference_repeats_them_at_once() -> None:
    assert distances(200, every=0, num_ranks=4) == [None] * 200
    assert distances(9, every=0, num_ranks=4, is_repeating=True) == [None] * 9
    repeats = distances(3, every=128, num_ranks=2, is_repeating=True)
    assert repeats == [0, 1, 0], "both kinds within two steps"


@pytest.mark.parametrize(
    ("codes", "distance", "ranks"),
    [
        ([0, 0, 4, 0], 0, [2]),
        ([0, 4, 4, 0], 1, [2]),
        ([0, 4, 0, 0], 1, [1, 2]),
        ([4, 0, 4, 0], 2, [0, 2]),
        ([0, 0, 3, 3], 3, [2]),
        ([5, 5], 1, [0, 1]),
        ([0, 0, 0, 0], 1, []),
    ],
)
def test_the_rank_that_differs_from_two_others_is_named(codes: list[int], distance: int, ranks: list[int]) -> None:
    assert find_corrupted(np.array(codes, dtype=np.float32), distance=distance) == ranks


def test_a_report_names_ranks_and_the_earliest_stage_only_where_rows_were_computed_twice() -> None:
    table = np.ones((len(SLOTS), 3), dtype=np.float32)
    table[SLOTS.index("corruption")] = [0, 6, 4]
    facts = summarize_slots(table, divisor=1.0, replicate=1, recomputed=0)
    assert (facts.corrupted_ranks, facts.corrupted_stage) == ([1, 2], 3)
    facts = summarize_slots(table, divisor=1.0, replicate=1)
    assert (facts.corrupted_ranks, facts.corrupted_stage) == ([], None)
    facts = summarize_slots(table[:, 1:2], divisor=1.0, replicate=1, recomputed=0)
    assert (facts.corrupted_ranks, facts.corrupted_stage) == ([0], 5), "also with one rank"


def test_stages_are_in_the_order_of_computation() -> None:
    names = [name for name, _ in stage_names(2)]
    assert names[:4] == ["output of embedding", "output of blocks.0", "output of blocks.1", "losses"]
    assert names[4:6] == ["gradient of blocks.1", "gradient of blocks.0"]
    assert [gradient_stage(block, 2) for block in (1, 0, 2)] == [4, 5, 6]
    layout = SignalLayout(groups=("embedding", "blocks.0", "blocks.1", "norm"), layers=(), sources=())
    assert layout.describe_stage(5) == ("gradient of blocks.0", ["blocks.0"])
    assert layout.describe_stage(3) == ("losses", ["embedding", "norm"]), "the head is tied"
    assert layout.describe_stage(6)[1] == ["embedding", "norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_sees_every_single_bit(dtype: torch.dtype) -> None:
    values = torch.tensor([2.0, 0.0, -0.0, 1.0, -2.0, 3e-5, -7.5, torch.inf, torch.nan], dtype=dtype)
    size, integer = values.element_size(), INTEGERS[values.element_size()]
    before = digest_bits(values)
    for place in range(len(values)):
        for bit in range(8 * size):
            changed = values.clone()
            changed.view(integer)[place] ^= -(2**bit) if bit == 8 * size - 1 else 1 << bit
            assert digest_bits(changed) != before, (place, bit)


def test_the_first_difference_is_reported_and_nothing_is_digested_outside_of_a_recording() -> None:
    digests = BitDigests(2, device=torch.device("cpu"))
    digests.add_output(1, torch.ones(3))
    assert not digests.tables.any()
    for computation in Computation:
        with digests.recording(computation):
            for stage in range(4):
                digests.add_output(stage, torch.full((5,), float(stage)), torch.ones(2))
            for block in (1, 0, 2):
                digests.add_gradient(block, torch.ones(3) + (computation and block == 0))
    of_step = digests.tables[Computation.step]
    assert digests.first_difference(of_step) == 1 + gradient_stage(0, 2)
    assert digests.first_difference(digests.tables[Computation.again]) == 0
    with digests.recording(Computation.again):
        digests.add_output(0, torch.zeros(5), torch.ones(2))
    assert digests.first_difference(of_step) == 2, "a recording starts from zero"


def test_the_gate_rejects_a_corrupted_update_and_keeps_its_history() -> None:
    gates = [Gate(load().sentinel.detect, device=torch.device("cpu"), rejects_corruption=on) for on in (True, False)]
    loss, norm, warming = torch.tensor(3.0), torch.tensor(1.0), torch.tensor(0.0)
    for gate, expected in zip(gates, (1.0, 0.0), strict=True):
        gate.decide(loss=loss, grad_norm=norm, warming=warming, corruption=torch.tensor(0.0))
        before = gate.history.clone()
        decision = gate.decide(loss=loss, grad_norm=norm, warming=warming, corruption=torch.tensor(6.0))
        assert (float(decision.skip_mask), float(decision.overflow)) == (expected, 0.0)
        assert torch.equal(gate.history, before) == bool(expected), "a rejected value never enters the history"
        assert gate.decide(loss=loss, grad_norm=norm, warming=warming).skip_mask == 0.0


def test_the_presets_reject_or_only_log() -> None:
    actions = {name: load([f"sentinel={name}"]).sentinel.policy.actions for name in ("default", "strict", "observe")}
    assert [name for name, allowed in actions.items() if allowed is AllowedActions.all] == ["default", "strict"]


@pytest.mark.parametrize(
    ("deterministic", "kind", "expected"), [(False, "cpu", 9), (False, "cuda", 0), (True, "cuda", 9)]
)
def test_a_gpu_needs_determinism_and_the_start_says_so(deterministic: bool, kind: str, expected: int) -> None:
    cfg = load(["sentinel.sdc.every=9", f"run.deterministic={str(deterministic).lower()}"])
    world = cast(World, SimpleNamespace(device=torch.device(kind)))
    assert check_interval(cfg, world) == expected
    assert ("run.deterministic=true" in explain_check_off(cfg, world)) == (expected == 0)
    cfg.sentinel.sdc.every = 0
    assert explain_check_off(cfg, world) == "", "nobody asked for it"


def test_a_negative_interval_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"sentinel\.sdc\.every: must be 0 \(never\) or more, got -1"):
        load(["sentinel.sdc.every=-1"])


def test_a_batch_that_is_repeated_is_no_planned_change(tmp_path: Path) -> None:
    """It survives the file, and the gate keeps its bounds."""
    ledger = Ledger.load(tmp_path / "ledger.jsonl")
    ledger.give_back([[5, 5]], 7, "computed wrong", is_repeat=True)
    read = Ledger.load(tmp_path / "ledger.jsonl")
    assert (read.next_batch(7).batch, read.next_batch(7, 1).batch, read.num_excluded) == (5, 7, 0)
    assert windows(load(), read) == []
    read.give_back([[6, 6]], 9, "accepted")
    assert [window.first for window in windows(load(), read)] == [9]
    assert "is_repeat" not in (tmp_path / "ledger.jsonl").read_text().splitlines()[-1], "as in older versions"
