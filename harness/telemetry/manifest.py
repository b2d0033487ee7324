"""Writes `manifest.json`: code, versions, hardware, seeds and dtypes of every start of a run.

The file holds the first start; each later start (a resume may use other code or another machine) is appended to its
list `starts`. The diff against the commit is stored up to a limit, with the size and hash of the whole diff. Only an
allow-list of environment variables is written, and credentials are removed from command lines, because manifests are
shared.
Left out: contents of untracked files (their names are listed) and the machines of other ranks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import harness
from harness.config.precision import PrecisionConfig, PrecisionKind
from harness.config.schema import Config
from harness.core.credentials import without_credentials
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.manifest_file import read_run_manifest
from harness.telemetry.provenance import code

PACKAGES = {
    "torch": "torch",
    "mlflow": "mlflow",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "numpy": "numpy",
    "transformer_engine": "transformer-engine",
    "harness": "pretraining-harness",
}
ENVIRONMENT = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG|(OMP|MKL)_NUM_THREADS|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|SLURM_(JOB_ID|JOB_NODELIST|NNODES|NTASKS|CLUSTER_NAME|RESTART_COUNT)|NCCL_\w+|TORCH_\w+|NVTE_\w+"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)


def build_manifest(
    cfg: Config, *, world_size: int, device: torch.device, corpus_fingerprint: str, num_parameters: int
) -> dict[str, Any]:
    """Describe this start of the run, as plain data."""
    return {
        "time": time.time(),
        "run": cfg.run.name,
        "argv": [without_credentials(argument) for argument in sys.argv],
        **code(Path(harness.__file__).parent),
        "versions": versions(),
        "hardware": hardware(device)
        | {
            "world_size": world_size,
            "ranks_per_gpu": cfg.launch.ranks_per_gpu,
            "ranks_per_sequence": cfg.parallel.context,
        },
        "seeds": {"run": cfg.run.seed},
        "dtype": dtypes(cfg.precision),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "num_parameters": num_parameters,
        "corpus_fingerprint": corpus_fingerprint,
        "environment": recorded_environment(),
    }


def dtypes(cfg: PrecisionConfig) -> dict[str, Any]:
    """Dtypes of GEMMs, master weights and gradient reduction; for fp8 also recipe and engine, which change results."""
    formats: dict[str, Any] = {
        "compute": str(cfg.kind),
        "master_weights": "fp32",
        "gradient_reduction": "fp32",
        "fp32_matmul": torch.get_float32_matmul_precision(),
    }
    if cfg.kind is PrecisionKind.fp8:
        formats["fp8"] = {"recipe": str(cfg.fp8.recipe), "engine": str(cfg.fp8.engine)}
    if cfg.phases:
        formats["phases"] = [{"from_batch": phase.from_batch, "compute": str(phase.kind)} for phase in cfg.phases]
    return formats


def write_manifest(run: RunDir, manifest: dict[str, Any]) -> None:
    """Write the first start, or append this start to it. A damaged manifest is a `ConfigError`."""
    first = read_run_manifest(run.manifest)
    later = [*(first.get("starts") or []), manifest] if first else []
    write_atomically(run.manifest, json.dumps((first or manifest) | {"starts": later}, indent=2) + "\n")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a result."""
    return {"python": platform.python_version()} | {name: _version(package) for name, package in PACKAGES.items()}


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine of this rank."""
    machine: dict[str, Any] = {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _after_colon(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": device.type,
        "gpus": [],
    }
    if device.type == "cuda":
        machine["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
        machine["cuda"] = torch.version.cuda
        machine["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        machine["driver"] = _after_colon(Path("/proc/driver/nvidia/version"), "NVRM version")
    return machine


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory_bytes": properties.total_memory}


def _after_colon(path: Path, label: str) -> str | None:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(label)), None)


def recorded_environment() -> dict[str, str]:
    """Environment variables that affect a run, without any that may hold a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if ENVIRONMENT.fullmatch(name) and not SECRET.search(name)
    }
