"""`run.deterministic` on gloo ranks: settings of every rank; the check at the start finds noise and leaves no trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.errors import ConfigError
from harness.core import event_json
from harness.core.events import StepRecord
from harness.distributed.bit_digests import digest_bits
from harness.distributed.determinism import ENVIRONMENT, deterministic_algorithms
from harness.sentinel.device.signals import SignalLayout
from harness.start_check import name_digests
from tests.distributed import determinism_cases, faulty_runs
from tests.distributed.cases import TINY
from tests.distributed.determinism_cases import NOISY_LAYER
from tests.distributed.drill_cases import inspect_run_with
from tests.distributed.faulty_runs import RankResult
from tests.distributed.pool import Pool
from tests.forks import Launched

ON = "run.deterministic=true"
ONE_LAYER = "model.num_layers=1"
CLOCKS = ("time", "tokens_per_s", "step_time_s", "flops_per_s", "loader_wait_s", "memory_bytes", "median_step_s")
"""Fields of a step record that depend on clocks or on the allocator; `ranks` has others."""


def results(log: list[Any]) -> list[dict[str, Any]]:
    """The step records of a log, without clocks."""
    records = [asdict(event) for event in log if isinstance(event, StepRecord)]
    for record in records:
        for name in CLOCKS:
            record.pop(name)
        record["ranks"] = {name: record["ranks"].get(name) for name in ("loss", "grad_norm", "grad_square")}
    return records


RunWithout = Callable[[tuple[str, ...]], tuple[Path, list[RankResult]]]
NUM_STEPS = 4
ACCUMULATION = ("train.micro_batch_size=2", "sentinel.probe_every=2", f"train.num_steps={NUM_STEPS}")
FP8 = (*ACCUMULATION, "train.batch_size=6", "precision=fp8_emulated", ONE_LAYER)
"""Micro-batches of two rows and of one."""


@pytest.fixture(scope="module")
def run_without(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> RunWithout:
    """The run directory and the results of a run without `run.deterministic`, by its overrides."""

    @cache
    def run(overrides: tuple[str, ...]) -> tuple[Path, list[RankResult]]:
        directory = tmp_path_factory.mktemp("without")
        return directory / "a", ranks.run(2, faulty_runs.run, str(directory), None, "run.name=a", *overrides)

    return run


@pytest.mark.parametrize(
    "overrides", [ACCUMULATION, pytest.param(FP8, marks=pytest.mark.full)], ids=["accumulation", "fp8"]
)
def test_the_check_leaves_no_trace(
    ranks: Pool,
    run_without: RunWithout,
    tmp_path: Path,
    overrides: tuple[str, ...],
) -> None:
    """A run with the check is bit-identical to one without, in every number that it logs."""
    directory, without = run_without(overrides)
    checked = ranks.run(2, faulty_runs.run, str(tmp_path), None, "run.name=a", ON, *overrides)
    assert [result.state for result in checked] == [result.state for result in without]
    assert results(checked[0].log) == results(without[0].log)
    assert len(results(checked[0].log)) == NUM_STEPS
    manifests = [json.loads((run / "manifest.json").read_text()) for run in (directory, tmp_path / "a")]
    assert [manifest["deterministic"]["enabled"] for manifest in manifests] == [False, True]
    assert [manifest["deterministic_algorithms"] for manifest in manifests] == [False, True]
    assert manifests[1]["deterministic"] == {"enabled": True, "environment": ENVIRONMENT, "set_by_user": []}


def test_the_check_restores_the_state(ranks: Pool, tmp_path: Path) -> None:
    overrides = (ON, "precision=fp8_emulated", "parallel.replicate=2", "train.micro_batch_size=2")
    case = (str(tmp_path), overrides, determinism_cases.state_around_check)
    for unchanged in ranks.run(2, inspect_run_with, *case):
        assert len(unchanged) > 30
        assert all(unchanged.values()), [name for name, is_unchanged in unchanged.items() if not is_unchanged]


@pytest.mark.parametrize(
    ("kind", "rank", "part"),
    [
        ("forward", 1, "the output of blocks.1 on rank 1"),
        ("backward", 0, f"the gradient of {NOISY_LAYER}.weight on rank 0"),
    ],
)
def test_noise_is_found_and_named_on_all_ranks(ranks: Pool, tmp_path: Path, kind: str, rank: int, part: str) -> None:
    """The changed bit is in the first row of the weight, which is in the shard of rank 0."""
    first, second = ranks.run(2, determinism_cases.error_of_noisy_run, str(tmp_path), kind, rank)
    assert first == second, "every rank decides alike"
    assert first == (
        "run.deterministic: the first batch, computed twice on the same weights, gives different bits, first in "
        f"{part}; a kernel or a device is not deterministic"
    )
    log = tmp_path / "noisy/events.jsonl"
    assert not log.exists() or not list(event_json.read(log)), "nothing was logged"


def test_every_rank_has_the_settings_and_they_end_with_the_run(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(2, inspect_run_with, str(tmp_path), (ON,), determinism_cases.environment_of_rank)
    expected = {"environment": ENVIRONMENT, "algorithms": True, "fills": False, "deterministic_model": True}
    assert found == [expected, expected]
    assert ranks.run(2, determinism_cases.settings_after_run) == 2 * [[False, None, None, None, None]]


@pytest.mark.full
def test_no_result_depends_on_uninitialized_memory(ranks: Pool, run_without: RunWithout, tmp_path: Path) -> None:
    """So torch need not fill it, which it does by default with deterministic algorithms."""
    _, plain = run_without(FP8)
    filled = ranks.run(2, determinism_cases.run_filled, str(tmp_path), "run.name=filled", ON, *FP8)
    assert [result.state for result in filled] == [result.state for result in plain]
    assert results(filled[0].log) == results(plain[0].log)


def choose_tree() -> None:
    os.environ["NCCL_ALGO"] = "Tree"


def check_start_with_tree(run: Path, output: str) -> None:
    """The run has set the environment of its ranks, except for what `choose_tree` had set, and says so."""
    found = json.loads((run / "manifest.json").read_text())["deterministic"]
    assert found["environment"] == ENVIRONMENT | {"NCCL_ALGO": "Tree"}
    assert found["set_by_user"] == ["NCCL_ALGO"]
    line = "run.deterministic: the first batch, computed twice, gave the same bits"
    assert f"{line}; kept from the environment: NCCL_ALGO=Tree" in output.splitlines()


@pytest.mark.full
def test_the_launcher_sets_the_environment_of_its_ranks(tmp_path: Path) -> None:
    """A setting of the user is kept, and the run says so. tests/distributed/test_corpus.py shows it of torchrun, whose
    ranks import torch themselves."""
    overrides = [*TINY, ON, "train.num_steps=2", f"run.dir={tmp_path}", "run.name=first", "launch.nproc=2"]
    with Launched("launch.cli.main", "train", *overrides, output=tmp_path / "output", first=choose_tree) as done:
        assert done.wait(timeout=200) == 0, done.stderr
    check_start_with_tree(tmp_path / "first", done.stdout)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "CUBLAS_WORKSPACE_CONFIG",
            ":4096:2",
            "needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8, but the environment has",
        ),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, but the environment has"),
    ],
)
def test_an_environment_that_cannot_be_deterministic_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=rf"^run\.deterministic: {line} '{value}'$"),
        deterministic_algorithms(enabled=True),
    ):
        pass
    with deterministic_algorithms(enabled=False) as settings:
        assert not settings.is_on
    assert os.environ[name] == value
    assert not torch.are_deterministic_algorithms_enabled()


def test_errors_of_the_last_bit_do_not_cancel_in_a_digest() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    changed = values.clone()
    changed.view(torch.int32)[3] += 1
    changed.view(torch.int32)[7] -= 1
    assert int(changed.view(torch.int32).sum()) == int(values.view(torch.int32).sum())
    assert digest_bits(changed) != digest_bits(values)
    assert digest_bits(values.clone()) == digest_bits(values)
    assert digest_bits(torch.tensor([0.0])) != digest_bits(torch.tensor([-0.0]))


def test_the_earliest_part_is_named_first() -> None:
    """Forward in the order of the layers, then the loss, then gradients from the head down, then norms."""
    layout = SignalLayout(groups=("embedding", "head"), layers=("blocks.0", "blocks.1"), sources=("main",), num_ranks=2)
    names = name_digests(layout, ["embedding.weight", "blocks.0.mlp.up.weight", "head.weight"])
    assert len(names) == layout.size + 3
    in_order = [name for _, name in sorted(names)]
    expected = ["the output of blocks.0", "the output of blocks.1", "the loss", "the source losses of main"]
    expected += [f"the gradient of {name}" for name in ("head.weight", "blocks.0.mlp.up.weight", "embedding.weight")]
    expected += ["the gradient norm of embedding"]
    places = [in_order.index(name) for name in expected]
    assert places == sorted(places)
