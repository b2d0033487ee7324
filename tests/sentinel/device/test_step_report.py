"""Packing and unpacking a report, the gate mask, and the mailbox."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.core.events import TOKEN_LOSS_EDGES, StepRecord
from harness.sentinel.device.gate import Gate, GateDecision
from harness.sentinel.device.signals import SCALARS, SignalLayout
from harness.sentinel.device.slots import SLOTS
from harness.sentinel.device.step_report import DECIDED, HostFacts, pack_report, totals, unpack_report
from tests.composed import load

LAYOUT = SignalLayout(
    groups=("embedding", "blocks.0"), layers=("blocks.0",), sources=("web", "code", "books"), num_ranks=4
)
FACTS = HostFacts(
    iteration=7,
    cursor=9,
    tokens=700,
    probed=True,
    posted_s=0.0,
    memory_bytes=1,
    batch={"fingerprint": "f"},
    loader_wait_s=0.25,
)


def make_reduced(**values: float) -> Tensor:
    vector = torch.zeros(LAYOUT.size)
    for name, value in values.items():
        vector[SCALARS.index(name)] = value
    parts = {
        "group_squares": [9.0, 16.0],
        "group_params": [1.0, 3.0],
        "group_moments": [0.25, 1.0],
        "layer_squares": [400.0],
        "source_losses": [30.0, 0.0, 170.0],
        "source_tokens": [10.0, 0.0, 40.0],
        "token_losses": [1.0, 49.0] + [0.0] * (len(TOKEN_LOSS_EDGES) - 1),
    }
    for name, numbers in parts.items():
        LAYOUT.part(vector, name).copy_(torch.tensor(numbers))
    slots = {
        "loss": [4.0, 4.0, 3.0, 5.0],
        "grad_square": [16.0, 64.0, 16.0, 16.0],
        "busy_s": [1.0, 1.0, 1.0, 2.0],
        "decision": [9.0, 9.0, 9.0, 9.0],
        "weights_low": [0x8001, 2.0, 0x8001, 3.0],
        "weights_high": [1.0, 0xFFFF, 1.0, 0xFFFF],
        "weights_changed": [0.0, 1.0, 0.0, 1.0],
    }
    for name, numbers in slots.items():
        LAYOUT.slots(vector)[SLOTS.index(name)] = torch.tensor(numbers)
    return vector


def make_report(vector: Tensor, *, skip_mask: float = 0.0, scale: float = 1.0, expected_tokens: int = 50) -> Tensor:
    """The report of a step within its bounds."""
    scales = torch.tensor(scale)
    decision = GateDecision(
        skip_mask=torch.tensor(skip_mask), overflow=torch.tensor(skip_mask), bounds=torch.tensor([8.0, math.inf])
    )
    return pack_report(
        vector,
        totals(LAYOUT, vector, scale=scales, expected_tokens=expected_tokens),
        decision=decision,
        lr=torch.tensor(0.5),
        step=torch.tensor(6),
        scale=scales,
    )


def read(report: Tensor, facts: HostFacts = FACTS, *, clip_norm: float | None = None) -> StepRecord:
    return unpack_report(LAYOUT, facts, report, dim=2, dynamic_scale=False, clip_norm=clip_norm, replicate=2)


def test_a_report_unpacks_to_the_packed_numbers() -> None:
    vector = make_reduced(loss=200.0, z_loss=10.0, tokens=50.0, v=9.0, update=0.04)
    total = totals(LAYOUT, vector, scale=torch.tensor(8.0), expected_tokens=100)
    assert float(total.divisor) == 4.0, "the scale, and half of the expected tokens"
    assert float(total.loss) == 4.0
    assert float(total.grad_norm) == 5.0 / 4.0
    report = make_report(vector, scale=8.0, expected_tokens=100)
    assert len(report) == LAYOUT.size + DECIDED
    record = unpack_report(LAYOUT, FACTS, report, dim=2, dynamic_scale=True, clip_norm=None, replicate=2)
    assert (record.iteration, record.cursor, record.tokens, record.step) == (7, 9, 700, 6)
    assert (record.loss, record.z_loss, record.grad_norm, record.lr) == (4.0, 0.2, 1.25, 0.5)
    assert record.group_grad_norms == {"embedding": 0.75, "blocks.0": 1.0}
    assert (record.param_norm, record.v_norm, record.loss_scale) == (2.0, 3.0, 8.0)
    assert record.group_param_norms == {"embedding": 1.0, "blocks.0": math.sqrt(3)}
    assert record.update_ratio == pytest.approx(0.1)
    assert record.square_ratio == 1.5, "the embedding's: 0.75 over the root of 0.25"
    assert record.activation_rms == {"blocks.0": 2.0}
    assert record.source_losses == {"web": 3.0, "books": 4.25}, "a source that gave no token has no loss"
    assert record.token_loss_counts[:3] == [1, 49, 0]
    assert record.bounds == {"loss": 8.0, "grad_norm": math.inf}
    assert record.batch == {"fingerprint": "f"}
    flags = (record.refused, record.stop_requested, record.save_requested, record.command_waits)
    assert flags == (False,) * 4


def test_a_batch_without_a_token_to_predict_is_rejected_and_finite() -> None:
    vector = make_reduced()
    for name in ("group_squares", "source_losses", "source_tokens", "layer_squares"):
        LAYOUT.part(vector, name).zero_()
    LAYOUT.slot(vector, "grad_square").zero_()
    total = totals(LAYOUT, vector, scale=torch.tensor(8.0), expected_tokens=50)
    gate = Gate(load().sentinel.detect, device=torch.device("cpu"))
    before = gate.history.clone()
    decision = gate.decide(loss=total.loss, grad_norm=total.grad_norm, warming=torch.tensor(0.0))
    assert (float(decision.skip_mask), float(decision.overflow)) == (1.0, 0.0)
    assert torch.equal(gate.history, before)
    record = read(make_report(vector, skip_mask=1.0, scale=8.0))
    assert record.is_empty
    assert (record.loss, record.grad_norm, record.z_loss, record.source_losses) == (0.0, 0.0, 0.0, {})
    assert set(record.group_grad_norms.values()) == {0.0}
    assert record.activation_rms == {"blocks.0": 0.0}
    LAYOUT.part(vector, "group_squares")[0] = math.nan
    broken = read(make_report(vector, skip_mask=1.0))
    assert not broken.is_empty, "a gradient that is not finite has another cause"
    assert math.isnan(broken.loss)


def test_gradient_norms_of_ranks_are_unscaled() -> None:
    record = read(make_report(make_reduced(loss=200.0, tokens=50.0), scale=2.0))
    assert record.ranks["loss"]["median"] == 4.0
    assert record.ranks["grad_norm"]["worst"][0] == [1, 4.0], "stored twice as large"
    assert record.ranks["step_time_s"]["worst"][0] == [3, 2.0]
    assert record.mismatched_ranks == [1, 3]
    assert (record.digests, record.nonfinite_ranks) == ({}, [])


def test_a_step_without_probe_has_no_probe_fields() -> None:
    record = read(make_report(make_reduced(loss=200.0, tokens=50.0)), replace(FACTS, probed=False))
    assert (record.param_norm, record.v_norm, record.update_ratio, record.square_ratio) == (None,) * 4
    assert (record.group_param_norms, record.activation_rms, record.token_loss_counts) == ({}, {}, [])


@pytest.mark.parametrize("probed", [True, False])
def test_digests_and_the_norm_of_the_weights_are_in_every_record(probed: bool) -> None:
    record = read(make_report(make_reduced(loss=200.0, tokens=50.0, weights=9.0)), replace(FACTS, probed=probed))
    assert (record.mismatched_ranks, record.changed_ranks) == ([1, 3], [1, 3])
    assert (record.weight_digest, record.weight_norm) == ("00008003", 3.0), "the sum over the first replica"


def test_the_ratio_to_the_second_moment_is_that_of_the_clipped_gradient() -> None:
    report = make_report(make_reduced(loss=200.0, tokens=50.0))
    assert read(report).square_ratio == 6.0
    assert read(report, clip_norm=10.0).square_ratio == 6.0, "a norm of 5 is not clipped"
    assert read(report, clip_norm=1.0).square_ratio == pytest.approx(1.2)


def test_before_the_first_update_there_is_no_ratio() -> None:
    vector = make_reduced(loss=200.0, tokens=50.0)
    LAYOUT.part(vector, "group_moments").zero_()
    assert read(make_report(vector)).square_ratio is None


@pytest.mark.parametrize("name", ["stop", "save", "command"])
def test_a_request_of_one_or_many_ranks_is_one_request(name: str) -> None:
    for num_requests in (1.0, 3.0):
        record = read(make_report(make_reduced(loss=200.0, tokens=50.0, **{name: num_requests})))
        heard = {
            "stop": record.stop_requested,
            "save": record.save_requested,
            "command": record.command_waits,
        }
        assert heard == {each: each == name for each in heard}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_group_or_rank_does_not_affect_others(bad: float) -> None:
    vector = make_reduced(loss=200.0, tokens=50.0)
    LAYOUT.group_squares(vector)[1] = bad
    LAYOUT.slots(vector)[SLOTS.index("grad_square"), 2] = bad
    record = read(make_report(vector, skip_mask=1.0))
    assert record.refused
    assert record.loss == 4.0
    assert record.group_grad_norms["embedding"] == 3.0
    assert not math.isfinite(record.group_grad_norms["blocks.0"])
    assert record.nonfinite_ranks == [2]
    assert record.ranks["grad_norm"]["worst"][0] == [1, 8.0]
    assert record.square_ratio is None
    assert record.loss_scale is None


@pytest.mark.parametrize(
    ("loss", "grad_norm", "expected", "overflow"),
    [
        (1.0, 1.0, 0.0, 0.0),
        (math.nan, 1.0, 1.0, 0.0),
        (1.0, math.nan, 1.0, 1.0),
        (1.0, math.inf, 1.0, 1.0),
        (math.inf, 1.0, 1.0, 0.0),
        (math.nan, math.nan, 1.0, 0.0),
    ],
)
def test_the_gate_mask_is_zero_or_one(loss: float, grad_norm: float, expected: float, overflow: float) -> None:
    """A loss that is not finite is no overflow: the batch is skipped, and a skip does not change the loss scale."""
    gate = Gate(load([]).sentinel.detect, device=torch.device("cpu"))
    warming = torch.zeros((), dtype=torch.float64)
    decision = gate.decide(loss=torch.tensor(loss), grad_norm=torch.tensor(grad_norm), warming=warming)
    assert float(decision.skip_mask) == expected
    assert float(decision.overflow) == overflow


def test_the_first_finite_step_sets_the_level_of_the_gate() -> None:
    """Wide initial weights give a loss and a gradient norm far above 1. A rejected step does not change the weights, so
    a gate that rejects the first step rejects the next ones too."""
    gate = Gate(load([]).sentinel.detect, device=torch.device("cpu"))
    warming = torch.zeros((), dtype=torch.float64)

    def skip_mask(loss: float, grad_norm: float) -> float:
        decided = gate.decide(loss=torch.tensor(loss), grad_norm=torch.tensor(grad_norm), warming=warming)
        return float(decided.skip_mask)

    assert skip_mask(30.5, 900.0) == 0.0
    assert skip_mask(30.4, 890.0) == 0.0
    assert skip_mask(30.4, 1e6) == 1.0


def test_a_batch_without_tokens_is_rejected_and_recorded() -> None:
    vector = make_reduced()
    total = totals(LAYOUT, vector, scale=torch.tensor(1.0), expected_tokens=50)
    gate = Gate(load([]).sentinel.detect, device=torch.device("cpu"))
    decision = gate.decide(loss=total.loss, grad_norm=total.grad_norm, warming=torch.zeros((), dtype=torch.float64))
    assert float(decision.skip_mask) == 1.0
    assert math.isnan(read(make_report(vector)).loss)


def test_facts_of_this_rank_are_logged() -> None:
    record = read(make_report(make_reduced(loss=200.0, tokens=50.0)))
    assert (record.memory_bytes, record.loader_wait_s) == (1, 0.25)
