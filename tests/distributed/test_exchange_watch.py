"""The watch over the exchanges of a context group: which one was bad first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.distributed.bit_digests import Computation
from harness.distributed.exchange_watch import ExchangeWatch
from tests.no_sync import no_sync


def sent(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_exchange_that_is_not_finite_is_numbered(bad: float, dtype: torch.dtype) -> None:
    watch = ExchangeWatch()
    with no_sync():
        watch.start()
        for values in ((0.0, -2.0), (1.0, 3.0), (bad, 1.0), (bad, bad)):
            watch.observe(sent(*values, dtype=dtype))
        first = watch.take_first_nonfinite()
    assert first is not None
    assert (first.dtype, float(first)) == (torch.float32, 3.0)


def test_a_step_counts_its_own_exchanges_only() -> None:
    watch = ExchangeWatch()
    watch.observe(sent(math.nan))
    assert watch.take_first_nonfinite() is None, "an evaluation is no step"
    watch.start()
    assert watch.take_first_nonfinite() is None, "without context parallelism nothing is exchanged"
    watch.start()
    watch.observe(sent(1.0))
    watch.observe(sent(2.0))
    first = watch.take_first_nonfinite()
    assert first is not None
    assert float(first) == 0.0
    watch.observe(sent(math.nan))
    watch.start()
    watch.observe(sent(1.0))
    first = watch.take_first_nonfinite()
    assert first is not None
    assert float(first) == 0.0


@pytest.mark.parametrize(("again", "expected"), [((1.0, 2.0, 3.0), 0.0), ((1.0, 2.0000002, 4.0), 2.0)])
def test_the_first_exchange_whose_bits_differ_is_numbered(again: tuple[float, ...], expected: float) -> None:
    watch = ExchangeWatch()
    for computation, values in ((Computation.again, again), (Computation.step, (1.0, 2.0, 3.0))):
        with watch.recording(computation):
            for value in values:
                watch.observe(sent(value))
        watch.observe(sent(7.0))
    first = watch.first_difference(0)
    assert first is not None
    assert float(first) == expected
    with watch.recording(Computation.step):
        pass
    assert watch.first_difference(0) is None
