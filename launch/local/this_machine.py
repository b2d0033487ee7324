"""What this machine offers a run: its GPUs, the ranks to start on them, and the memory that they find.

GPUs are counted and measured in processes of their own: a process that has initialized CUDA cannot be forked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from harness.analysis.plan.machine_memory import MachineMemory, check_memory
from harness.config.errors import ConfigError, require
from harness.config.parallel import DeviceKind
from harness.config.schema import Config, check_world
from harness.core.memory_limits import address_space_left, free_bytes, total_bytes
from harness.precision.fp8.engine import require_engine_installed
from launch.local.shared_memory import snapshot_bytes
from launch.local.worker_pool import (
    WorkerTask,
    can_fork,
    open_worker,
)

COUNT_TIMEOUT_S = 60.0


def ranks_to_start(cfg: Config) -> int:
    """Ranks to start here: `launch.nproc`, or `launch.ranks_per_gpu` for each GPU, or 2 on CPU."""
    gpus = 0 if cfg.parallel.device is DeviceKind.cpu else num_gpus()
    if cfg.parallel.device is DeviceKind.cuda:
        require(gpus > 0, "parallel.device", "must be cpu or auto: this machine has no CUDA device")
    require_engine_installed(cfg.precision, has_gpu=gpus > 0)
    share = cfg.launch.ranks_per_gpu
    require(gpus > 0 or share == 1, "launch.ranks_per_gpu", f"must be 1 on CPU, got {share}; use launch.nproc")
    if gpus and cfg.launch.nproc:
        message = f"must not exceed the {gpus} GPUs of this machine, got {cfg.launch.nproc}"
        if share > 1:
            message = f"must not exceed {share} ranks on each of {gpus} GPUs, got {cfg.launch.nproc}"
        hint = "launch.ranks_per_gpu shares a GPU for a rehearsal, parallel.device=cpu uses none"
        require(cfg.launch.nproc <= gpus * share, "launch.nproc", f"{message}; {hint}")
    return cfg.launch.nproc or gpus * share or 2


@cache
def num_gpus() -> int:
    """Count the GPUs in a separate process; raises ConfigError if it dies or gives no answer.

    Without NVML, counting initializes CUDA, and processes forked from this one could not use it any more.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return 0
    with open_worker(forked=can_fork()) as counter:
        counter.assign(WorkerTask(call=torch.cuda.device_count))
        count = counter.poll_result(COUNT_TIMEOUT_S)
    if count is None:
        problem = "the GPUs of this machine cannot be counted: the driver gives no answer"
        raise ConfigError("parallel.device", f"{problem}; see nvidia-smi, or choose cpu")
    return count


@cache
def smallest_gpu_bytes(num_gpus_used: int) -> tuple[int, int] | None:
    """Free and total memory of the smallest of the first GPUs; None if it cannot be measured.

    Measured in a separate process, like `num_gpus`.
    """
    with open_worker(forked=can_fork()) as process:
        process.assign(WorkerTask(call=measure_gpu_bytes, arguments=(num_gpus_used,)))
        measured: tuple[int, int] | None = process.poll_result(COUNT_TIMEOUT_S)  # type: ignore[assignment]
        return measured


def measure_gpu_bytes(num_gpus_used: int) -> Any:
    """Free and total memory: the least of each."""
    frees, totals = zip(*(torch.cuda.mem_get_info(index) for index in range(num_gpus_used)), strict=True)
    return min(frees), min(totals)


def measure_machine(cfg: Config, nproc: int) -> MachineMemory:
    """The memory that `nproc` ranks find on this machine."""
    is_gpu = cfg.parallel.device is not DeviceKind.cpu and num_gpus() > 0
    share = cfg.launch.ranks_per_gpu
    if is_gpu and (measured := smallest_gpu_bytes(-(-nproc // share))) is not None:
        free, total = measured
        return MachineMemory(
            total_bytes=total,
            free_bytes=free,
            num_ranks=nproc,
            is_gpu=True,
            ranks_per_gpu=min(share, nproc),
            host_bytes=free_bytes(),
        )
    left, free, total = address_space_left(), free_bytes() + snapshot_bytes(cfg), total_bytes()
    if left is not None:
        free, total = min(free, nproc * left), min(total, nproc * left)
    return MachineMemory(total_bytes=total, free_bytes=free, num_ranks=nproc, is_gpu=False)


def check_machine(cfg: Config, *, num_nodes: int = 1) -> list[str]:
    """Reject a run that cannot fit into the memory of this machine; returns warnings."""
    nproc = ranks_to_start(cfg)
    check_world(cfg, num_nodes * nproc)
    return check_memory(cfg, measure_machine(cfg, nproc), world_size=num_nodes * nproc)
