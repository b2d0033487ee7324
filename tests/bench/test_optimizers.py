"""The table of optimizers from runs that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.optimizers import Result, best_lr, render, steps_to


def result(optimizer: str, lr: float, *, end: float, step_s: float = 0.1, num_refused: int = 0) -> Result:
    """Losses that fall linearly from 5 to `end` in 100 steps."""
    return Result(
        optimizer=optimizer,
        lr=lr,
        losses=np.linspace(5.0, end, 100),
        held_out=end + 0.1,
        step_s=step_s,
        memory_gib=2.0,
        num_refused=num_refused,
    )


RESULTS = [
    *(result("adamw", 1e-3, end=end) for end in (3.0, 3.02)),
    *(result("adamw", 2e-3, end=end) for end in (3.2, 3.4)),
    *(result("muon", 1e-3, end=end, step_s=0.11) for end in (2.0, 2.2)),
    *(result("muon", 2e-3, end=end, step_s=0.11, num_refused=1) for end in (4.0, 4.2)),
]


def test_each_optimizer_is_shown_at_its_best() -> None:
    assert [best_lr(RESULTS, kind) for kind in ("adamw", "muon")] == [1e-3, 1e-3]
    text = render(RESULTS)
    rows = [line for line in text.splitlines() if line.startswith(("| adamw", "| muon"))]
    assert len(rows) == 4
    assert [row for row in rows if "(best)" in row] == [rows[0], rows[2]]
    assert "| 3.1100 (3.1000 to 3.1200) |" in rows[0]
    assert "held-out loss -29.26%, time of a step x 1.100" in text
    assert "updates rejected by the gate: {'muon 0.002': 1}" in text


def test_steps_to_a_loss_count_from_one() -> None:
    muon = RESULTS[4]
    assert len(muon.smoothed) == 81, "20 steps of a run of 100"
    assert steps_to(muon, muon.smoothed[0]) == 20
    assert steps_to(muon, muon.smoothed[-1]) == 100
    assert steps_to(muon, 1.0) is None
    assert muon.smoothed[0] == pytest.approx(muon.losses[:20].mean())
    rows = render(RESULTS).splitlines()[2:6]
    found = [row.split("|")[5].strip() for row in rows]
    assert found[:2] + found[3:] == ["-"] * 3, "not reached by all seeds"
    assert 65 < float(found[2]) < 85
