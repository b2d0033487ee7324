"""From device numbers to a record, and through the mailbox."""

from __future__ import annotations

import math

import pytest
import torch

from harness.compose import load
from harness.parallel import connect, disconnect
from harness.sentinel.gate import refuse_nonfinite
from harness.sentinel.mailbox import Mailbox
from harness.sentinel.report import DECIDED, HostFacts, pack, totals, unpack
from harness.sentinel.signals import SCALARS, Layout, Signals, group_of

LAYOUT = Layout(groups=("embedding", "blocks.0"), layers=("blocks.0",), sources=("web", "code", "books"))
FACTS = HostFacts(
    iteration=7, cursor=9, tokens=700, probed=True, posted_s=0.0, memory_bytes=1, batch={"fingerprint": "f"}
)


def reduced(**values: float) -> torch.Tensor:
    vector = torch.zeros(LAYOUT.size)
    for name, value in values.items():
        vector[SCALARS.index(name)] = value
    LAYOUT.group_squares(vector).copy_(torch.tensor([9.0, 16.0]))
    LAYOUT.layer_squares(vector).copy_(torch.tensor([400.0]))
    LAYOUT.source_losses(vector).copy_(torch.tensor([30.0, 0.0, 170.0]))
    LAYOUT.source_tokens(vector).copy_(torch.tensor([10.0, 0.0, 40.0]))
    return vector


def test_numbers_come_back_as_they_were_meant() -> None:
    vector = reduced(loss=200.0, z_loss=10.0, tokens=50.0, param=4.0, v=9.0)
    total = totals(LAYOUT, vector, scale=torch.tensor(8.0), expected_tokens=100)
    assert float(total.divisor) == 4.0, "the scale, and half of the expected tokens"
    assert float(total.loss) == 4.0
    assert float(total.grad_norm) == 5.0 / 4.0
    report = pack(
        vector,
        total,
        refused=torch.tensor(0.0),
        lr=torch.tensor(0.5),
        step=torch.tensor(6),
        scale=torch.tensor(8.0),
    )
    assert len(report) == LAYOUT.size + DECIDED
    record = unpack(LAYOUT, FACTS, report.tolist(), dim=2, dynamic_scale=True)
    assert (record.iteration, record.cursor, record.tokens, record.step) == (7, 9, 700, 6)
    assert (record.loss, record.z_loss, record.grad_norm, record.lr) == (4.0, 0.2, 1.25, 0.5)
    assert record.group_grad_norms == {"embedding": 0.75, "blocks.0": 1.0}
    assert (record.param_norm, record.v_norm, record.loss_scale) == (2.0, 3.0, 8.0)
    assert record.activation_rms == {"blocks.0": 2.0}
    assert record.source_losses == {"web": 3.0, "books": 4.25}, "a source that gave no token has no loss"
    assert record.batch == {"fingerprint": "f"}
    assert not record.refused
    assert not record.stop_requested


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_group_is_named_and_poisons_no_other(bad: float) -> None:
    vector = reduced(loss=200.0, tokens=50.0, stop=2.0)
    LAYOUT.group_squares(vector)[1] = bad
    total = totals(LAYOUT, vector, scale=torch.tensor(1.0), expected_tokens=50)
    refuse = refuse_nonfinite(loss=total.loss, grad_norm=total.grad_norm)
    assert float(refuse) == 1.0
    report = pack(
        vector, total, refused=refuse, lr=torch.tensor(0.5), step=torch.tensor(6), scale=torch.tensor(1.0)
    ).tolist()
    record = unpack(LAYOUT, FACTS, report, dim=2, dynamic_scale=False)
    assert record.refused
    assert record.stop_requested
    assert record.loss == 4.0
    assert record.group_grad_norms["embedding"] == 3.0
    assert not math.isfinite(record.group_grad_norms["blocks.0"])
    assert record.loss_scale is None


@pytest.mark.parametrize(
    ("loss", "grad_norm", "expected"),
    [(1.0, 1.0, 0.0), (math.nan, 1.0, 1.0), (1.0, math.nan, 1.0), (math.inf, 1.0, 1.0), (math.nan, math.nan, 1.0)],
)
def test_the_gate_says_zero_or_one(loss: float, grad_norm: float, expected: float) -> None:
    assert float(refuse_nonfinite(loss=torch.tensor(loss), grad_norm=torch.tensor(grad_norm))) == expected


def test_a_batch_without_tokens_is_refused() -> None:
    total = totals(LAYOUT, reduced(), scale=torch.tensor(1.0), expected_tokens=50)
    assert float(refuse_nonfinite(loss=total.loss, grad_norm=total.grad_norm)) == 1.0


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_mail_comes_in_order_and_late_by_the_lag(lag: int) -> None:
    mailbox: Mailbox[int] = Mailbox(size=1, lag=lag, device=torch.device("cpu"))
    seen: list[tuple[int, float]] = []
    for number in range(6):
        mailbox.post(number, torch.tensor([number * 1.5]))
        seen += [(facts, values[0]) for facts, values in mailbox.take()]
        assert len(seen) == max(0, number + 1 - lag)
    seen += [(facts, values[0]) for facts, values in mailbox.take(everything=True)]
    assert seen == [(number, number * 1.5) for number in range(6)]


def test_parameters_belong_to_their_block_or_module() -> None:
    assert group_of("blocks.11.attention.query.weight") == "blocks.11"
    assert group_of("embedding.weight") == "embedding"
    assert group_of("norm.weight") == "norm"


def test_a_gradient_counts_for_its_group_alone_and_a_row_for_its_source() -> None:
    world = connect(load(["parallel.device=cpu"]).parallel)
    try:
        names = ("embedding.weight", "blocks.0.a.weight", "blocks.0.b.weight", "blocks.0.c.weight")
        parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in names}
        for number, parameter in enumerate(parameters.values(), start=1):
            parameter.grad = torch.full((3,), float(number))
        signals = Signals(LAYOUT, parameters=parameters, world=world)
        signals.add_gradients()
        signals.add_forward(
            row_losses=torch.tensor([1.0, math.nan, 4.0]),
            row_tokens=torch.tensor([10.0, 20.0, 30.0]),
            sources=torch.tensor([0, 2, 0]),
            z_loss=torch.tensor(0.0),
            layers=None,
        )
        vector = signals.reduce()
    finally:
        disconnect()
    assert LAYOUT.group_squares(vector).tolist() == pytest.approx([3.0, 3 * (4 + 9 + 16)])
    assert LAYOUT.source_tokens(vector).tolist() == [40.0, 0.0, 20.0]
    losses = LAYOUT.source_losses(vector).tolist()
    assert losses[:2] == [5.0, 0.0], "a NaN stays with its source"
    assert math.isnan(losses[2])
