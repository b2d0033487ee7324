"""The mailbox: reports are read `lag` steps later, and those of a trial that were put back are read like others."""

from __future__ import annotations

import pytest
import torch

from harness.sentinel.device.mailbox import Mailbox


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_reports_are_read_in_order_and_lag_steps_later(lag: int) -> None:
    mailbox: Mailbox[int] = Mailbox(size=1, lag=lag, device=torch.device("cpu"))
    seen: list[tuple[int, float]] = []
    for number in range(6):
        mailbox.post(number, torch.tensor([number * 1.5]))
        seen += [(facts, float(values[0])) for facts, values in mailbox.read()]
        assert len(seen) == max(0, number + 1 - lag)
    seen += [(facts, float(values[0])) for facts, values in mailbox.read(everything=True)]
    assert seen == [(number, number * 1.5) for number in range(6)]


def test_reports_that_are_put_back_go_to_whoever_reads_first() -> None:
    """A restore while they are processed reads the rest: it undoes these steps."""
    mailbox: Mailbox[int] = Mailbox(size=1, lag=1, device=torch.device("cpu"))
    for step in range(3):
        mailbox.put_back(step, torch.tensor([float(step)]))
    processed, undone = [], []
    for facts, _ in mailbox.read(everything=True):
        processed.append(facts)
        if facts == 1:
            undone = [each for each, _ in mailbox.read(everything=True)]
    assert (processed, undone) == ([0, 1], [2])
    mailbox.post(3, torch.tensor([3.0]))
    assert list(mailbox.read()) == []
    assert [facts for facts, _ in mailbox.read(everything=True)] == [3]
