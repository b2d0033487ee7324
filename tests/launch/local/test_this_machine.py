"""How many ranks a machine gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.config.errors import ConfigError
from harness.config.parallel import DeviceKind
from launch.local import this_machine
from tests.launch import workers


def test_number_of_ranks_depends_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = workers.config(tmp_path, "ranks")
    cfg.launch.nproc = None
    monkeypatch.setattr(this_machine, "num_gpus", lambda: 4)
    assert this_machine.ranks_to_start(cfg) == 2
    cfg.parallel.device = DeviceKind.auto
    assert this_machine.ranks_to_start(cfg) == 4
    cfg.launch.nproc = 8
    with pytest.raises(ConfigError, match=r"^launch\.nproc: must not exceed the 4 GPUs"):
        this_machine.ranks_to_start(cfg)
    cfg.launch.ranks_per_gpu = 2
    assert this_machine.ranks_to_start(cfg) == 8
    cfg.launch.nproc = None
    assert this_machine.ranks_to_start(cfg) == 8
    cfg.launch.nproc = 9
    with pytest.raises(ConfigError, match=r"^launch\.nproc: must not exceed 2 ranks on each of 4 GPUs, got 9"):
        this_machine.ranks_to_start(cfg)
    cfg.parallel.device = DeviceKind.cpu
    with pytest.raises(ConfigError, match=r"^launch\.ranks_per_gpu: must be 1 on CPU, got 2"):
        this_machine.ranks_to_start(cfg)
    cfg.launch.ranks_per_gpu = 1
    monkeypatch.setattr(this_machine, "num_gpus", lambda: 0)
    cfg.parallel.device = DeviceKind.cuda
    with pytest.raises(ConfigError, match=r"^parallel\.device: must be cpu or auto: this machine has no CUDA device"):
        this_machine.ranks_to_start(cfg)


def die() -> int:
    """As torch does in a process whose driver is broken."""
    os._exit(1)


def test_gpus_that_cannot_be_counted_are_an_error_and_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, the run would start on 2 ranks."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", die)
    this_machine.num_gpus.cache_clear()
    with pytest.raises(ConfigError, match=r"^parallel\.device: the GPUs of this machine cannot be counted"):
        this_machine.num_gpus()
