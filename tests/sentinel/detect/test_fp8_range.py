"""fp8 usage: sums over ranks become fields of a record; and the parts of the signal vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.precision.fp8.quantize_meters import SCALE_EXPONENTS, TensorRole
from harness.sentinel.device.fp8_usage import summarize_fp8_usage
from harness.sentinel.device.signals import PARTS, SignalLayout

GROUPS = ("embedding", "blocks.0", "blocks.1")
LAYOUT = SignalLayout(groups=GROUPS, layers=("blocks.0",), sources=("web",), num_ranks=2)
FP8_PARTS = [name for name in PARTS if name.startswith("fp8_")]


def sums(**changes: Any) -> dict[str, list[float]]:
    """Of two ranks: activations and weights were seen in blocks.0, activations and gradients in blocks.1."""
    scales = torch.zeros(len(TensorRole), len(SCALE_EXPONENTS))
    scales[TensorRole.activations, 16] = scales[TensorRole.activations, 20] = scales[TensorRole.weights, 0] = 2.0
    scales[TensorRole.gradients, -1] = 1.0
    found: dict[str, list[float]] = {
        "fp8_zeros": [0, 0, 0, 10, 0, 0, 30, 0, 5],
        "fp8_nonzeros": [0, 0, 0, 100, 50, 0, 300, 0, 10],
        "fp8_saturated": [1, 0, 0],
        "fp8_tensors": [4, 2, 1],
        "fp8_scales": scales.flatten().tolist(),
    }
    return found | changes


def test_sums_become_shares_by_role_and_by_group() -> None:
    health, underflow = summarize_fp8_usage(GROUPS, sums())
    assert health == {
        "activations": {"underflow": 0.1, "saturated": 0.25, "scale_log2": [0, 10]},
        "weights": {"underflow": 0.0, "saturated": 0.0, "scale_log2": [-32, -30]},
        "gradients": {"underflow": 0.5, "saturated": 0.0, "scale_log2": [94, 96]},
    }
    assert underflow == {"blocks.0": 0.1, "blocks.1": 0.5}, "the worst role of each group that was seen"


def test_roles_and_groups_without_values_are_left_out() -> None:
    nothing = {name: [0.0] * len(values) for name, values in sums().items()}
    assert summarize_fp8_usage(GROUPS, nothing) == ({}, {})
    without = sums(fp8_nonzeros=[0, 0, 0, 100, 50, 0, 300, 0, 0], fp8_zeros=[0, 0, 0, 10, 0, 0, 30, 0, 0])
    health, underflow = summarize_fp8_usage(GROUPS, without)
    assert list(health) == ["activations", "weights"]
    assert underflow == {"blocks.0": 0.1, "blocks.1": 0.1}


def test_a_run_without_fp8_has_no_fp8_parts() -> None:
    watched = replace(LAYOUT, has_fp8=True)
    lengths = {name: place.stop - place.start for name, place in watched.parts.items()}
    assert [lengths[name] for name in FP8_PARTS] == [9, 9, 3, 3, 3 * len(SCALE_EXPONENTS)]
    assert {name: length for name, length in lengths.items() if name not in FP8_PARTS} == {
        name: place.stop - place.start for name, place in LAYOUT.parts.items() if name not in FP8_PARTS
    }
    assert all(place.start == place.stop for name, place in LAYOUT.parts.items() if name in FP8_PARTS)
    assert watched.size - LAYOUT.size == sum(lengths[name] for name in FP8_PARTS)


@pytest.mark.parametrize("layout", [LAYOUT, replace(LAYOUT, has_fp8=True)], ids=["without", "with"])
def test_parts_follow_each_other_without_a_gap(layout: SignalLayout) -> None:
    places = list(layout.parts.values())
    assert [places[0].start, *(place.stop for place in places)] == [
        0,
        *(place.start for place in places[1:]),
        layout.size,
    ]
