"""Injects a slow device: extra GEMMs in the forward pass, as from throttling or another tenant."""

from __future__ import annotations

import time
from typing import Any, final

import torch
from torch import Tensor

from harness.faults.site import Site

WIDTH = {"cuda": 4096, "cpu": 256}
"""Width of the multiplied matrices: large enough to fill the device."""
NUM_TIMED = 8


@final
class BusyDevice:
    """slow_device: GEMMs queued between the last norm and the head, on the model's stream.

    The host queues them and does not wait: on CUDA the host's step time does not show them.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._is_on = False
        if site.is_here:
            device = site.run.parts.world.device
            width = WIDTH[device.type]
            self._matrix = torch.full((width, width), 1.0 / width, device=device)
            self._num_gemms = max(1, round(site.fault.factor / _gemm_seconds(self._matrix)))
            site.run.parts.model.norm.register_forward_hook(self._queue_gemms)

    def before(self, iteration: int) -> None:
        self._is_on = self._site.strikes(iteration)
        if self._is_on:
            self._site.log_strike(f"queues {self._site.fault.factor:g} s of GEMMs on its device")

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        self._is_on = False

    def _queue_gemms(self, *_inputs: Any) -> None:
        if self._is_on and torch.is_grad_enabled():
            with torch.no_grad():
                for _ in range(self._num_gemms):
                    torch.mm(self._matrix, self._matrix)


def _gemm_seconds(matrix: Tensor) -> float:
    """Seconds per GEMM, after a warm-up."""
    for timed in (False, True):
        _wait(matrix)
        began_s = time.perf_counter()
        for _ in range(NUM_TIMED):
            torch.mm(matrix, matrix)
        _wait(matrix)
        if timed:
            break
    return (time.perf_counter() - began_s) / NUM_TIMED


def _wait(matrix: Tensor) -> None:
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)  # sync: a drill measures its device once, before training
