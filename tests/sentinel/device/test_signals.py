"""Signals of a rank compared with independently computed numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.core.events import TOKEN_LOSS_EDGES
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.world import World, connect, disconnect
from harness.model.loss import IGNORED, count_losses
from harness.sentinel.device import local_sums as module
from harness.sentinel.device.signals import SignalLayout, Signals, group_of
from harness.sentinel.device.slots import SLOTS
from tests.composed import load

BETAS, EPS, RATE = (0.9, 0.95), 1e-8, 0.125
LAYOUT = SignalLayout(groups=("embedding", "blocks.0"), layers=("blocks.0",), sources=("web", "code", "books"))


@pytest.fixture
def world() -> Iterator[World]:
    yield connect(load(["parallel.device=cpu"]).parallel)
    disconnect()


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    names = ("embedding.weight", "blocks.0.a.weight", "blocks.0.b.weight", "blocks.0.c.weight")
    return {name: nn.Parameter(torch.randn(5, 3, generator=generator)) for name in names}


def make_signals(parameters: dict[str, nn.Parameter], world: World) -> Signals:
    comm_stats = CommStats(torch.zeros(()), measures_gradients=False)
    return Signals(LAYOUT, parameters=parameters, world=world, comm_stats=comm_stats)


def trained(parameters: dict[str, nn.Parameter], num_steps: int) -> tuple[dict[str, dict[str, Tensor]], Tensor]:
    """Adam's moments after some steps, and the squared norm of the last update."""
    adam = torch.optim.AdamW(parameters.values(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    for number in range(num_steps):
        before = [parameter.detach().clone() for parameter in parameters.values()]
        for parameter in parameters.values():
            parameter.grad = torch.sin(parameter.detach() * (number + 1))
        adam.step()
    moved = [now.detach() - old for now, old in zip(parameters.values(), before, strict=True)]
    squares = torch.stack([change.square().sum() for change in moved]).sum()
    return {name: adam.state[parameter] for name, parameter in parameters.items()}, squares


def test_parameters_belong_to_their_block_or_module() -> None:
    assert group_of("blocks.11.attention.query.weight") == "blocks.11"
    assert group_of("embedding.weight") == "embedding"
    assert group_of("norm.weight") == "norm"


def test_parts_follow_each_other_without_a_gap() -> None:
    layout = SignalLayout(groups=("a", "b"), layers=("b",), sources=("s",), num_ranks=7)
    places = list(layout.parts.values())
    assert places[0].start == 0
    assert [place.start for place in places[1:]] == [place.stop for place in places[:-1]]
    assert layout.size == places[-1].stop
    assert layout.slots(torch.zeros(layout.size)).shape == (len(SLOTS), 7)


def test_a_gradient_counts_for_its_group_only_and_a_row_for_its_source(world: World) -> None:
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in make_parameters()}
    for number, parameter in enumerate(parameters.values(), start=1):
        parameter.grad = torch.full((3,), float(number))
    signals = make_signals(parameters, world)
    signals.add_gradients()
    signals.add_forward(
        row_losses=torch.tensor([1.0, math.nan, 4.0]),
        row_tokens=torch.tensor([10.0, 20.0, 30.0]),
        sources=torch.tensor([0, 2, 0]),
        z_loss=torch.tensor(0.0),
        layers=None,
    )
    vector = signals.reduce()
    assert LAYOUT.group_squares(vector).tolist() == pytest.approx([3.0, 3 * (4 + 9 + 16)])
    assert LAYOUT.part(vector, "source_tokens").tolist() == [40.0, 0.0, 20.0]
    losses = LAYOUT.part(vector, "source_losses").tolist()
    assert losses[:2] == [5.0, 0.0], "a NaN stays with its source"
    assert math.isnan(losses[2])
    own = dict(zip(SLOTS, LAYOUT.slots(vector)[:, 0].tolist(), strict=True))
    assert own["grad_square"] == pytest.approx(3 * (1 + 4 + 9 + 16)), "with world_size 1 the gradient is its own"
    assert math.isnan(own["loss"])
    assert not signals.vector.any(), "the next step starts from zero"


def test_a_rank_without_a_counted_token_has_no_loss(world: World) -> None:
    vector = make_signals(make_parameters(), world).reduce()
    assert LAYOUT.slots(vector)[SLOTS.index("loss"), 0] == 0.0


@pytest.mark.parametrize("piece", [2**24, 4])
def test_state_is_measured_as_adam_uses_it(world: World, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    parameters = make_parameters()
    moments, last_update = trained(parameters, 7)
    signals = make_signals(parameters, world)
    rates = {name: torch.tensor(RATE) for name in parameters}
    signals.add_state(moments=moments, rates=rates, betas=BETAS, eps=EPS)
    vector = signals.reduce()
    torch.testing.assert_close(LAYOUT.scalar(vector, "update"), last_update, rtol=1e-4, atol=0.0)
    groups: dict[str, list[str]] = {group: [n for n in parameters if group_of(n) == group] for group in LAYOUT.groups}
    for number, names in enumerate(groups.values()):
        weights = sum(parameters[name].detach().square().sum() for name in names)
        seconds = sum(moments[name]["exp_avg_sq"].sum() / (1 - BETAS[1] ** 7) for name in names)
        torch.testing.assert_close(LAYOUT.part(vector, "group_params")[number], weights)
        torch.testing.assert_close(LAYOUT.part(vector, "group_moments")[number], seconds)
    squares = torch.stack([state["exp_avg_sq"].square().sum() for state in moments.values()])
    torch.testing.assert_close(LAYOUT.scalar(vector, "v"), squares.sum())
    assert not vector.requires_grad


def test_before_the_first_update_its_norm_is_zero(world: World) -> None:
    parameters = make_parameters()
    moments = {
        name: {"step": torch.zeros(()), "exp_avg": torch.zeros(5, 3), "exp_avg_sq": torch.zeros(5, 3)}
        for name in parameters
    }
    signals = make_signals(parameters, world)
    rates = {name: torch.tensor(RATE) for name in parameters}
    signals.add_state(moments=moments, rates=rates, betas=BETAS, eps=EPS)
    vector = signals.reduce()
    assert LAYOUT.scalar(vector, "update") == 0.0
    assert not LAYOUT.part(vector, "group_moments").any()


def test_digest_and_norm_of_the_weights_are_stored(world: World) -> None:
    signals = make_signals(make_parameters(), world)
    bits = torch.tensor(0xFEDC_0005)
    signals.add_weights(bits=bits, square=torch.tensor(9.0), changed=torch.tensor(1.0))
    vector = signals.reduce()
    own = dict(zip(SLOTS, LAYOUT.slots(vector)[:, 0].tolist(), strict=True))
    assert (own["weights_low"], own["weights_high"], own["weights_changed"]) == (5.0, 0xFEDC, 1.0)
    assert LAYOUT.scalar(vector, "weights") == 9.0


def test_requests_and_host_facts_are_stored_in_their_slots(world: World) -> None:
    signals = make_signals(make_parameters(), world)
    signals.add_requests(stop=False, save=True, command=True)
    signals.add_host_facts(decision=2**24 - 1, busy_s=0.25, step_s=0.5)
    signals.add_data(fingerprint=2**64 - 3, plan=7, own_row=2**24 - 1, other_row=1)
    vector = signals.reduce()
    assert [LAYOUT.scalar(vector, name) for name in ("stop", "save", "command")] == [0.0, 1.0, 1.0]
    own = dict(zip(SLOTS, LAYOUT.slots(vector)[:, 0].tolist(), strict=True))
    expected = {"busy_s": 0.25, "decision": 2**24 - 1, "step_s": 0.5, "plan": 7, "own_row": 2**24 - 1, "other_row": 1}
    limbs = {"data_low": 2**24 - 3, "data_middle": 2**24 - 1, "data_high": 2**16 - 1}
    assert own == dict.fromkeys(SLOTS, 0.0) | expected | limbs
    with pytest.raises(AssertionError):
        signals.add_host_facts(decision=2**24, busy_s=0.0)
    with pytest.raises(AssertionError):
        signals.add_data(fingerprint=2**64, plan=0)


def test_token_losses_are_counted_between_the_edges() -> None:
    losses = torch.cat([torch.linspace(0, 25, 501), torch.tensor(TOKEN_LOSS_EDGES), torch.tensor([math.nan, math.inf])])
    targets = torch.arange(len(losses)) % 5
    targets[::7] = IGNORED
    counted = losses[targets != IGNORED].numpy()
    expected = np.bincount(np.searchsorted(TOKEN_LOSS_EDGES, counted, side="right"), minlength=16)
    assert count_losses(losses, targets).tolist() == expected.tolist(), "NaN and Inf are among the largest"
