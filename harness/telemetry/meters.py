"""Measures throughput, FLOP/s, MFU and peak memory from host clocks and counters, without a host sync.

The loop calls `tick` once per iteration with the host clock. The host runs at most `lag` steps ahead of the device, so
over a few steps both have the same rate. Rates are means over the last steps. They exclude the first step, which
compiles and warms up, and time spent on evaluation and checkpoints (`resume`).
Left out: device timers, which need a sync or an event pool, and rates of other ranks: every step is as slow as the
slowest rank.
"""

from __future__ import annotations

import re
import resource
import sys
from collections import deque
from dataclasses import dataclass
from typing import final

import torch

WINDOW_STEPS = 20

PEAK_FLOPS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"GB200"}), 2500e12),
    (frozenset({"B200"}), 2250e12),
    (frozenset({"H200"}), 989e12),
    (frozenset({"GH200"}), 989e12),
    (frozenset({"H100", "PCIE"}), 756e12),
    (frozenset({"H100", "NVL"}), 835e12),
    (frozenset({"H100"}), 989e12),
    (frozenset({"H800"}), 989e12),
    (frozenset({"H20"}), 148e12),
    (frozenset({"A100"}), 312e12),
    (frozenset({"A800"}), 312e12),
    (frozenset({"A40"}), 149.7e12),
    (frozenset({"L40S"}), 362e12),
    (frozenset({"L4"}), 121e12),
    (frozenset({"MI300X"}), 1307e12),
)
"""Words in a device name -> dense bf16 FLOP/s of one device. The first row whose words all occur is used."""


def peak_flops(device_name: str | None, override_tflops: float | None) -> float | None:
    """Peak FLOP/s of one device; None without an override and with an unknown device name."""
    if override_tflops is not None:
        return override_tflops * 1e12
    words = set(re.split(r"[^A-Z0-9]+", (device_name or "").upper()))
    return next((flops for needed, flops in PEAK_FLOPS if needed <= words), None)


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this process on `device`, from the allocator or the kernel, without a host sync."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of the whole run."""

    step_time_s: float
    """Duration of this step."""
    tokens_per_s: float
    flops_per_s: float
    mfu: float | None
    """Model FLOP/s divided by the peak; None: the peak is unknown."""


@final
class Meter:
    """Computes rates of the whole run from the host clock, read once per iteration.

    `flops_per_step` and `peak_flops` are those of all ranks together.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_step: float,
        peak_flops: float | None,
        started_s: float,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_step / tokens_per_step
        self._peak_flops = peak_flops
        self._last_s = started_s
        self._resumed_s = started_s
        self._warm = False
        self._recent: deque[tuple[float, int]] = deque(maxlen=window_steps)
        """Seconds and tokens of the last steps."""

    def tick(self, now_s: float, *, num_tokens: int | None = None) -> Rates:
        """Count one issued iteration; returns the current rates. `num_tokens`: of its batch, if its size differs."""
        num_tokens = self._tokens_per_step if num_tokens is None else num_tokens
        begun_s = max(self._last_s, self._resumed_s) if now_s >= self._resumed_s else self._last_s
        step_time_s = max(now_s - begun_s, 1e-9)
        self._last_s = now_s
        if self._warm:
            self._recent.append((step_time_s, num_tokens))
        self._warm = True
        recent = self._recent or [(step_time_s, num_tokens)]
        tokens_per_s = sum(tokens for _, tokens in recent) / sum(seconds for seconds, _ in recent)
        flops_per_s = self._flops_per_token * tokens_per_s
        return Rates(
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            flops_per_s=flops_per_s,
            mfu=None if self._peak_flops is None else flops_per_s / self._peak_flops,
        )

    def resume(self, now_s: float) -> None:
        """Exclude the time since the last tick. Iterations issued before it may still be ticked."""
        self._resumed_s = now_s
