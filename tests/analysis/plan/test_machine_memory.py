"""Runs that cannot fit into this machine are rejected before they start, with a change that does fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harness.analysis.plan.fit import memory_text
from harness.analysis.plan.machine_memory import (
    MachineMemory,
    check_memory,
    largest_preset,
    model_presets,
    smallest_change,
)
from harness.analysis.plan.memory import memory
from harness.config.errors import ConfigError
from harness.config.model import InitKind
from harness.config.schema import Config
from harness.model.size import num_parameters
from tests.composed import load

GB = 10**9


def host(total_gb: float, free_gb: float | None = None) -> MachineMemory:
    free = total_gb if free_gb is None else free_gb
    return MachineMemory(total_bytes=round(total_gb * GB), free_bytes=round(free * GB), num_ranks=2, is_gpu=False)


def gpus(total_gb: float) -> MachineMemory:
    return replace(host(total_gb), is_gpu=True)


def long_batches(*overrides: str) -> Config:
    """A model whose activations are many times its state."""
    return load(["train.batch_size=64", "train.sequence_length=2048", "checkpoint.ring.slots=0", *overrides])


def test_a_large_model_on_a_laptop_is_rejected_with_numbers_and_a_smaller_model() -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(load(["model=7b"]), host(16), world_size=2)
    line = str(caught.value)
    assert "\n" not in line
    assert re.match(r"model: 2 ranks with 6\.74B parameters need \d+ GB of memory \(weights, moments, gradients", line)
    assert "and this machine has 16 GB; " in line
    name = re.search(r"the largest model that fits is model=(\w+)$", line)
    assert name is not None, line
    assert check_memory(load([f"model={name[1]}"]), host(16), world_size=2) == []


@pytest.mark.parametrize(("key", "value"), [("train.batch_size", 10**10), ("train.batch_tokens", 128 * 10**10)])
def test_a_batch_that_no_model_could_read_is_rejected_by_its_key(key: str, value: int) -> None:
    cfg = load([f"{key}={value}", "train.sequence_length=128", "train.micro_batch_size=1"])
    with pytest.raises(ConfigError) as caught:
        check_memory(cfg, host(16), world_size=2)
    needed = r"need 20,48\d GB of memory \(20,480 GB of it for the tokens of a batch\)"
    line = rf"{key}: 2 ranks with 804k parameters {needed}, and this machine has 16 GB; choose a smaller batch"
    assert re.fullmatch(line, str(caught.value)), caught.value


def test_snapshots_count_in_the_memory_of_the_host_only() -> None:
    cfg, without = load(["model=1b"]), load(["model=1b", "checkpoint.ring.slots=0"])
    assert check_memory(without, host(40), world_size=2) == []
    with pytest.raises(ConfigError, match=r"^checkpoint\.ring\.slots: .* and snapshots\).* choose fewer, or 0$"):
        check_memory(cfg, host(40), world_size=2)
    with pytest.raises(ConfigError, match=r"^model: .* gradients and snapshots\)"):
        check_memory(cfg, host(10), world_size=2)
    assert check_memory(cfg, gpus(30), world_size=2) == []


def test_memory_that_is_only_taken_now_is_a_warning() -> None:
    """A process that died a second ago may still hold it; a rejected start would not be requeued."""
    cfg = load(["model=1b", "checkpoint.ring.slots=0"])
    (line,) = check_memory(cfg, host(40, free_gb=10), world_size=2)
    assert "10 GB is free on this machine; the largest model that fits is model=" in line
    with pytest.raises(ConfigError, match="this machine has 10 GB"):
        check_memory(cfg, host(10), world_size=2)


def test_the_default_run_fits_almost_everywhere() -> None:
    assert check_memory(load(), host(1), world_size=2) == []


def test_a_run_that_only_the_estimate_excludes_gets_a_warning_and_a_change() -> None:
    cfg = long_batches()
    state, peak = (getattr(memory(cfg, world_size=2), name) for name in ("update_peak_bytes", "peak_bytes"))
    assert 2 * state < 3 * GB < 2 * peak
    (line,) = check_memory(cfg, host(3), world_size=2)
    assert line.startswith("train.micro_batch_size: 2 ranks with 804k parameters need ")
    assert "estimated peak of a step" in line
    overrides = re.findall(r"(?:parallel|train)\.\w+=\w+", line.partition("; ")[2])
    assert overrides, line
    assert check_memory(long_batches(*overrides), host(3), world_size=2) == []


def test_each_gpu_has_its_own_memory_and_more_of_them_help() -> None:
    cfg = load(["model=7b", "train.batch_size=64", "checkpoint.ring.slots=0"])
    with pytest.raises(
        ConfigError, match=r"each rank with 6\.74B parameters needs 54 GB of GPU memory .* 4 ranks and "
    ):
        check_memory(cfg, gpus(40), world_size=2)


def test_ranks_that_share_a_gpu_have_their_part_of_what_is_free() -> None:
    cfg = load(["model=1b", "checkpoint.ring.slots=0", "launch.ranks_per_gpu=2"])
    machine = replace(gpus(100), ranks_per_gpu=2)
    assert (machine.num_sharing, machine.rank_bytes) == (2, 50 * GB)
    assert check_memory(cfg, machine, world_size=2) == []
    with pytest.raises(ConfigError, match=r"model: 2 ranks with 1\.26B parameters need .* this machine has 15 GB"):
        check_memory(cfg, replace(gpus(15), ranks_per_gpu=2), world_size=2)


def test_a_run_that_should_have_fitted_is_told_a_change_that_needs_less() -> None:
    cfg = long_batches()
    change = smallest_change(cfg, host(1000), 2)
    assert " saves " in change
    overrides = re.findall(r"(?:parallel|train)\.\w+=\w+", change)
    assert memory(long_batches(*overrides), world_size=2).peak_bytes < memory(cfg, world_size=2).peak_bytes


def test_without_any_preset_that_fits_the_line_says_so() -> None:
    assert largest_preset(load(["model=7b"]), host(0.01), 2) == ""
    assert smallest_change(load(["model=7b"]), host(0.01), 2) == "no model preset fits"


def test_presets_are_those_of_hydra() -> None:
    presets = model_presets()
    assert replace(presets["7b"], init=InitKind.hidden) == load(["model=7b"]).model
    assert presets["tiny"] == load().model
    assert {"125m", "1b", "13b", "70b"} <= presets.keys()
    assert round(num_parameters(presets["7b"]) / 1e9, 2) == 6.74
    assert round(num_parameters(presets["13b"]) / 1e9, 1) == 13.0


def test_sizes_have_three_digits() -> None:
    sizes = [memory_text(size * GB) for size in (0.0168, 0.123, 5.55, 54.31, 1234.5)]
    assert sizes == ["16.8 MB", "0.123 GB", "5.55 GB", "54.3 GB", "1,234 GB"]
