"""Maps an event to metric names and values, the same for every sink; a pure function.

NaN and Inf cannot be plotted (MLflow stores Inf as 1.8e308), so `loss = nan` becomes `loss_nonfinite = 1`.
"""

from __future__ import annotations

import math
import re

from harness.core.events import (
    CheckpointSaved,
    DrillScored,
    EvalRecord,
    Event,
    StepRecord,
    SystemSampled,
    TaskEvaluated,
)

BYTES_PER_GB = 1e9
_NOT_IN_A_NAME = re.compile(r"[^\w\-./: ]")


def metrics_of(event: Event) -> dict[str, float]:
    """Metric name -> finite value; empty for an event without metrics."""
    match event:
        case StepRecord():
            values = _step_values(event)
        case EvalRecord():
            values = {"eval/loss": event.loss, "eval/tokens": event.tokens}
        case TaskEvaluated():
            values = {f"task/{_clean(event.task)}/{_clean(name)}": value for name, value in event.metrics.items()}
        case CheckpointSaved():
            values = {
                "checkpoint/seconds": event.seconds,
                "checkpoint/blocked_s": event.blocked_s,
                "checkpoint/gb": event.bytes / BYTES_PER_GB,
            }
        case DrillScored():
            values = {"drill/passed": float(event.passed)}
            values |= {f"drill/{name}": value for name, value in event.scores.items()}
        case SystemSampled():
            values = _system_values(event)
        case _:
            values = {}
    return dict(_finite(name, value) for name, value in values.items() if value is not None)


def _step_values(record: StepRecord) -> dict[str, float | None]:
    values = {} if record.is_empty else _loss_values(record)
    values |= {
        "lr": record.lr,
        "step": record.step,
        "tokens": record.tokens,
        "refused": float(record.refused),
        "tokens_per_s": record.tokens_per_s,
        "step_time_s": record.step_time_s,
        "flops_per_s": record.flops_per_s,
        "mfu": record.mfu,
        "memory_gb": _gigabytes(record.memory_bytes),
        "loader_wait_s": record.loader_wait_s,
        "loss_scale": record.loss_scale,
        "param_norm": record.param_norm,
        "v_norm": record.v_norm,
        "in_fp8": None if record.in_fp8 is None else float(record.in_fp8),
    }
    values |= {f"activation_rms/{_clean(layer)}": rms for layer, rms in record.activation_rms.items()}
    values |= {f"fp8_underflow/{_clean(group)}": share for group, share in record.fp8_underflow.items()}
    values |= {f"fp8_saturated/{role}": float(health["saturated"]) for role, health in record.fp8.items()}
    return values


def _loss_values(record: StepRecord) -> dict[str, float | None]:
    """Losses and gradient norms; a batch without a token to predict has none."""
    values: dict[str, float | None] = {"loss": record.loss, "grad_norm": record.grad_norm, "z_loss": record.z_loss}
    values |= {f"grad_norm/{_clean(group)}": norm for group, norm in record.group_grad_norms.items()}
    if len(record.source_losses) > 1:
        values |= {f"loss/{_clean(source)}": loss for source, loss in record.source_losses.items()}
    return values


def _system_values(sample: SystemSampled) -> dict[str, float | None]:
    """Load of the machine of a rank, `system/rank-R/...`, and of each of its GPUs, `system/rank-R/gpu-G/...`."""
    machine = f"system/rank-{sample.rank}"
    values: dict[str, float | None] = {
        f"{machine}/cpu_load": sample.cpu_load,
        f"{machine}/host_memory_gb": _gigabytes(sample.host_memory_bytes),
        f"{machine}/process_memory_gb": _gigabytes(sample.process_memory_bytes),
    }
    by_gpu: dict[str, list[float | None]] = {
        "utilization": sample.gpu_utilization,
        "memory_gb": [_gigabytes(num_bytes) for num_bytes in sample.gpu_memory_bytes],
        "power_w": sample.gpu_power_w,
        "temperature_c": sample.gpu_temperature_c,
    }
    for name, readings in by_gpu.items():
        values |= {f"{machine}/gpu-{gpu}/{name}": reading for gpu, reading in enumerate(readings)}
    return values


def _gigabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / BYTES_PER_GB


def _finite(name: str, value: float) -> tuple[str, float]:
    return (name, float(value)) if math.isfinite(value) else (f"{name}_nonfinite", 1.0)


def _clean(name: str) -> str:
    return _NOT_IN_A_NAME.sub("_", name)
