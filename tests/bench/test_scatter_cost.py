"""The cost of the sentinel with two ranks: shortest launches, the summary, the tables, and the three sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.build import build
from harness.core.rundir import RunDir
from harness.distributed.world import connect
from tests.bench.gpu.kernels import Kernel, StepKernels
from tests.bench.gpu.scatter_cost import (
    SIDES,
    CopyTimes,
    SideTimes,
    main,
    mean_of_ranks,
    profile_sides,
    read_results,
    render_copies,
    render_sides,
    shortest_launches,
    summarize,
)
from tests.distributed.cases import tiny
from tests.distributed.pool import Pool


def event(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_each_launch_counts_with_its_shortest_time() -> None:
    events = [
        *(event("gemm", start, end) for start, end in ((0, 1000), (2000, 2500), (5000, 5800), (7000, 9000))),
        event("odd", 100, 300),
        event("ncclDevKernel_ReduceScatter", 0, 9000),
    ]
    found = shortest_launches(events[::-1], 2)
    assert found.kernels == {"gemm": Kernel("gemm", 0.8 + 0.5, 2.0), "odd": Kernel("odd", 0.1, 0.5)}
    assert found.span_ms == 4.5


def side(*kernels: Kernel) -> StepKernels:
    return StepKernels({kernel.name: kernel for kernel in kernels}, 0.0)


def test_the_cost_is_the_time_of_kernels_whose_number_differs() -> None:
    product = Kernel("gemm", 90.0, 10)
    found = summarize(
        {
            "on": side(product, Kernel("_chunk_cat_and_square", 2.25, 25), Kernel("tiny", 0.125, 40)),
            "separate": side(product, Kernel("_chunk_cat", 2.0, 25), Kernel("reduce", 1.5, 50)),
            "off": side(product._replace(ms=91.0), Kernel("_chunk_cat", 2.0, 25)),
        }
    )
    assert found["on"] == SideTimes(92.375, 0.375, 40, 2.25)
    assert found["separate"] == SideTimes(93.5, 1.5, 50, 2.0)
    assert found["off"] == SideTimes(93.0, 0.0, 0, 2.0)
    assert found["on"].share == pytest.approx(0.375 / 92.375)


def test_results_are_means_over_the_ranks(tmp_path: Path) -> None:
    for rank, ms in enumerate((10.0, 20.0)):
        lines = (json.dumps({name: [factor * ms, 1.0, 3.0, 0.5] for name in SIDES}) for factor in (1, 10))
        (tmp_path / f"{rank}.jsonl").write_text("\n".join(lines))
    found = read_results(tmp_path, [4096, 32768])
    assert {tokens: sides["on"] for tokens, sides in found.items()} == {
        4096: SideTimes(15.0, 1.0, 3.0, 0.5),
        32768: SideTimes(150.0, 1.0, 3.0, 0.5),
    }
    assert mean_of_ranks([found[4096], found[32768]])["off"].ms == 82.5


def test_rendered_tables() -> None:
    assert render_copies([CopyTimes("one block", 52_000_000, 80.0, 84.5, 55.25)]) == (
        "| gradients of | values | copy, us | copy with squares, us | added, us | norm in its own pass, us |\n"
        "|---|---:|---:|---:|---:|---:|\n"
        "| one block | 52.0M | 80.0 | 84.5 | +4.5 | 55.2 |"
    )
    sides = {
        "on": SideTimes(70.0, 0.21, 58.0, 2.1),
        "separate": SideTimes(71.0, 1.42, 80.0, 2.0),
        "off": SideTimes(69.0, 0.0, 0.0, 2.0),
    }
    assert render_sides({4096: sides}).splitlines()[-1] == "| 4,096 | 70.00 | 0.210 | 0.100 | 58 | 0.30 % | 2.00 % |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_without_a_gpu_and_with_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "scatter_cost: needs a GPU\n"
    assert main(["--model", "2b"]) == 2
    assert capsys.readouterr().err.startswith("scatter_cost: ")
    with pytest.raises(SystemExit):
        main(["--tokens", "5000"])
    assert "--tokens: must be multiples of 4096" in capsys.readouterr().err


def count_operators(run: Callable[[int], object], num_steps: int) -> StepKernels:
    """Operators on the CPU in place of kernels."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run(num_steps)
    events: list[Any] = list(profiler.events() or ())
    return shortest_launches(events, num_steps)


def count_norms() -> dict[str, tuple[float, float]]:
    """Calls of torch's norm, and of the update, in a step of each side."""
    cfg = tiny("train.num_steps=40", "sentinel.probe_every=10")
    run = RunDir(Path("/nonexistent"))
    with closing(build(cfg, connect(cfg.parallel), run)) as parts:
        found = profile_sides(cfg, parts, run, count_operators)
    none = Kernel("", 0.0, 0.0)
    names = ("aten::linalg_vector_norm", "aten::_fused_adamw_")
    return {name: tuple(each.kernels.get(name, none).times for name in names) for name, each in found.items()}  # type: ignore[misc]


@pytest.mark.full
def test_two_ranks_run_all_sides(ranks: Pool) -> None:
    """Without a GPU the copy does not measure, so `on` has a pass for each of the two blocks and for the rest, too."""
    for found in ranks.run(2, count_norms):
        norms, updates = zip(*(found[name] for name in SIDES), strict=True)
        assert [each - norms[-1] for each in norms] == [3, 3, 0]
        assert updates[0] == updates[1] == updates[2] >= 1
