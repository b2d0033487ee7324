"""Tests of numerical faults on two real ranks: each changes its rank, iteration and tensor, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.distributed import drill_cases
from tests.distributed.drill_cases import LAYER
from tests.distributed.pool import Pool


def test_one_bit_of_one_weight_of_one_rank_is_flipped_once(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, drill_cases.inspect_run, str(tmp_path), drill_cases.flipped_weights)
    assert first["counts"] == [{}, {}, {}]
    assert second["counts"] == [{}, {f"{LAYER}.weight": 1}, {}]
    assert (first["logged"], second["logged"]) == ([], [(2, 0)]), "logged for the iteration whose update it follows"
    _, again = ranks.run(2, drill_cases.inspect_run, str(tmp_path), drill_cases.flipped_weights)
    assert again["counts"] == [{}, {}, {}], "the fault is not injected again after a resume"
    assert again["logged"] == [(2, 0)]


@pytest.mark.parametrize(
    ("kind", "replicate"), [("nan_grad", 1), ("inf_grad", 1), ("bit_flip_grad", 1), ("nan_grad", 2)]
)
def test_a_gradient_is_corrupted_before_it_is_measured(ranks: Pool, tmp_path: Path, kind: str, replicate: int) -> None:
    """The last slot belongs to the affected rank; after the reduction all ranks read the same value."""
    overrides = [f"parallel.replicate={replicate}"]
    before, faulty, after = ranks.run(
        2, drill_cases.inspect_run_with, str(tmp_path), overrides, drill_cases.faulty_rank_grad_squares, [kind]
    )[0]
    assert before == after > 0
    assert not faulty < math.inf


@pytest.mark.parametrize("kind", ["nan_grad", "big_grad"])
def test_gradient_faults_strike_with_world_size_1(ranks: Pool, tmp_path: Path, kind: str) -> None:
    ((before, faulty, after),) = ranks.run(
        1, drill_cases.inspect_run, str(tmp_path), drill_cases.faulty_rank_grad_squares, [kind]
    )
    assert before == after > 0
    assert not faulty <= 100 * before


def test_several_faults_of_one_layer_all_strike(ranks: Pool, tmp_path: Path) -> None:
    before, once, _ = ranks.run(
        2, drill_cases.inspect_run, str(tmp_path / "once"), drill_cases.faulty_rank_grad_squares, ["big_grad"]
    )[0]
    _, twice, after = ranks.run(
        2,
        drill_cases.inspect_run,
        str(tmp_path / "twice"),
        drill_cases.faulty_rank_grad_squares,
        ["big_grad", "big_grad"],
    )[0]
    assert before == after
    assert before < once < twice / 1000


def test_update_faults_change_rates_moments_and_weights(ranks: Pool, tmp_path: Path) -> None:
    for rank, seen in enumerate(ranks.run(2, drill_cases.inspect_run, str(tmp_path), drill_cases.optimizer_faults)):
        assert seen["untouched"]
        assert seen["spiked"] == pytest.approx([8.0] * len(seen["spiked"]))
        assert seen["restored"]
        peak = max(seen["scheduled"])
        assert seen["cut"] == [peak] * 4 + seen["scheduled"][4:]
        assert seen["reset"] == (True, True)
        attention = "blocks.0.attention"
        assert seen["grown"] == ([f"{attention}.key.weight", f"{attention}.query.weight"], True)
        assert sorted(seen["logged"]) == [(1, number) for number in range(4)], rank


def test_an_outlier_changes_bits_only_in_fp8(ranks: Pool, tmp_path: Path) -> None:
    """Loss and gradient of a step before, during and after the fault."""
    in_bf16, in_fp8 = (
        ranks.run(2, drill_cases.inspect_run_with, str(tmp_path / name), [f"precision={name}"], drill_cases.outlier)[0]
        for name in ("bf16", "fp8_emulated")
    )
    assert in_bf16["steps"][0] == in_bf16["steps"][1] == in_bf16["steps"][2]
    assert in_fp8["steps"][0] == in_fp8["steps"][2] != in_fp8["steps"][1]
    assert in_bf16["logged"] == [(2, 0)]


def test_forward_faults_change_only_their_step(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, drill_cases.inspect_run, str(tmp_path), drill_cases.forward_faults)
    for seen in (first, second):
        assert seen["in_place"], "an installed fault changes no bit before it strikes"
        assert seen["evaluated"], "evaluations are not affected"
        assert seen["second"], "one value of one micro-batch"
        assert not seen["overflown"]
        assert seen["restored"]
    assert (first["num_nan"], second["num_nan"]) == (0, 1)
