"""The checkpoint benchmark: its error bars, its rendered table, and all contenders on a tiny model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.build import build
from harness.core.rundir import RunDir
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from tests.bench import savers
from tests.bench.checkpoint import SNAPSHOT, Cost, Measurements, check_restores, measure, measure_save, render
from tests.bench.intervals import estimate
from tests.bench.savers import CONTROL, OURS, Contender, Loop, Save, begin_torch, contenders, control, restore_torch
from tests.composed import load
from tests.forks import Launched
from tests.slow_steps import slow_steps

TINY = [
    "model=tiny",
    "model.dim=32",
    "model.num_layers=1",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=48",
    "data=synthetic",
    "train.batch_size=2",
    "train.sequence_length=32",
    "parallel.device=cpu",
]


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    found = [estimate([draw.gauss(3, 1) for _ in range(15)]) for _ in range(100)]
    assert 82 <= sum(each.low <= 3 <= each.high for each in found) <= 97
    assert all(each.low < each.median < each.high for each in found)
    assert estimate([2.0] * 6) == (2.0, 2.0, 2.0, 6)


def test_too_few_samples_have_no_interval() -> None:
    few = estimate([1.0, 4.0, 2.0])
    assert few == (2.0, 1.0, 4.0, 3)
    assert not few.has_interval
    assert estimate([1.0, 2.0, 3.0, 4.0, 5.0]).has_interval


def test_rendered_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.11.0")
    measurements = Measurements(
        {
            SNAPSHOT: [Cost(0.5, 0.004, 0.005, restored_s=0.25)] * 6,
            "`dcp.save`": [],
            "`torch.save`": [Cost(0.5, *costs) for costs in ((2.0, 2.5, 2.0, 3.0), (2.0, 1.5, 2.0), (3.0, 3.5, 3.0))],
        },
        num_bytes=15_200_000_000,
        failures={"`dcp.save`": "OSError: no room"},
    )
    assert render(measurements, rounds=3, restores=1) == (
        "state 15.20 GB, a plain step 500.0 ms, torch 2.11.0; "
        "3 rounds, each contender once a round in alternating order; restores in 1 of them\n"
        "\n"
        "| | saves | called, ms | stolen from training, ms (90% interval) | safe after, s | restored after, s |\n"
        "|---|---:|---:|---:|---:|---:|\n"
        "| this harness: snapshot in memory | 6 | 4.0 | 5.0 (5.0 to 5.0) | - | 0.250 |\n"
        "| `dcp.save` | 0 | - | - | - | - |\n"
        "| `torch.save` | 3 | 2000.0 | 2500.0 (no interval) | 2.00 | 3.000 |\n"
        "\n"
        "`dcp.save` failed: OSError: no room"
    )


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    cfg = load([*TINY, "checkpoint.every_steps=0", "checkpoint.ring.slots=2"])
    world = connect(cfg.parallel)
    try:
        with closing(build(cfg, world, RunDir(tmp_path / "run"))) as parts:
            yield Loop(cfg, parts, tmp_path)
    finally:
        disconnect()


@pytest.mark.full
def test_a_failing_rival_does_not_stop_the_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_and_fail(*_: object) -> Save:
        raise OSError("no room")

    @contextmanager
    def sides(device: torch.device) -> Iterator[list[Contender]]:
        with contenders(device) as (own, *_):
            yield [own, Contender("bad", begin_and_fail, restore_torch), Contender("good", begin_torch, restore_torch)]

    monkeypatch.setattr("tests.bench.checkpoint.contenders", sides)
    reported: list[Measurements] = []
    measurements = measure(loop, rounds=2, restores=0, snapshots=1, num_steps=1, on_round=reported.append)
    assert measurements.failures == {"bad": "OSError: no room"}
    assert {name: len(costs) for name, costs in measurements.costs.items()} == {
        SNAPSHOT: 2,
        OURS: 2,
        "bad": 0,
        "good": 2,
        CONTROL: 2,
    }
    assert [len(each.costs["good"]) for each in reported] == [1, 2]


@pytest.mark.full
def test_a_contender_that_saves_a_different_state_ends_the_run(loop: Loop) -> None:
    """A contender that copies after the next update, like a stager that the loop does not wait for."""

    def begin_late(loop: Loop, path: Path) -> Save:
        loop.step()
        return begin_torch(loop, path)

    check_restores(loop, Contender("right", begin_torch, restore_torch))
    with pytest.raises(SystemExit, match=r"late: .* tensors differ after a restore, such as model"):
        check_restores(loop, Contender("late", begin_late, restore_torch))


def test_control_trains_and_saves_nothing(loop: Loop) -> None:
    before = local(next(iter(loop.parts.tensors().values())).detach()).clone()
    cost = measure_save(loop, control(0.05), plain_steps=1)
    assert loop.index >= 3, "plain steps before and after, and steps until the save completes"
    assert cost.safe_s >= 0.05
    assert math.isnan(cost.restored_s)
    assert not local(next(iter(loop.parts.tensors().values()))).equal(before)
    assert not (loop.directory / "checkpoint").exists()


@pytest.mark.full
def test_all_contenders_on_a_tiny_model(tmp_path: Path) -> None:
    """In a process of its own: torch keeps the process that writes checkpoints alive until its parent exits. The loop
    trains until that process has started, slowly."""
    arguments = [*TINY, "--rounds", "1", "--restores", "0", "--steps", "1", "--snapshots", "1"]
    out = tmp_path / "costs.json"
    slow = partial(slow_steps, 0.05, savers.__name__)
    with Launched(
        "tests.bench.checkpoint", *arguments, "--json", str(out), output=tmp_path / "printed", first=slow
    ) as ended:
        assert ended.wait(timeout=280) == 0, ended.stderr
        printed = ended.stdout
    costs = json.loads(out.read_text())["costs"]
    assert list(costs) == [
        SNAPSHOT,
        OURS,
        "`dcp.async_save`, thread",
        "`dcp.async_save`, thread, asynchronous staging",
        "`dcp.async_save`, process",
        "`dcp.async_save`, process, asynchronous staging in shared memory",
        "`dcp.save`",
        "`torch.save`",
        CONTROL,
    ]
    for name, (cost,) in costs.items():
        assert cost["called_s"] > 0
        assert math.isnan(cost["restored_s"]) == (name != SNAPSHOT)
        assert f"| {name} | 1 |" in printed
