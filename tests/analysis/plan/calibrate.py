"""Fit the plan's rates to the measured steps, and predict each configuration with rates fitted to the others.

    python -m tests.analysis.plan.calibrate      the fitted rates, then one line for each measured step

Least squares on the logarithm of planned over measured time. Only the rates in `FITTED` are free; the others have their
own sources (`harness.analysis.plan.work.KernelRates`). If a configuration was measured in several runs, all of them are
left out together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

import numpy as np

from harness.analysis.plan.work import RATES, KernelRates, work
from harness.config.schema import Config
from tests.analysis.plan.measured import ROWS, Measured

FITTED = ("gemm", "gemm_overhead", "fp8_gemm", "eager_passes")
NUM_ITERATIONS, DELTA = 4, 1e-4


class Step(NamedTuple):
    """A measured step, with its configuration composed."""

    row: Measured
    cfg: Config
    step_s: float

    def error(self, rates: KernelRates) -> float:
        """Planned over measured, less 1."""
        return planned_s(self.cfg, rates) / self.step_s - 1


def measured_steps() -> list[Step]:
    return [Step(row, row.config(), row.step_s) for row in ROWS if row.step_s is not None]


def planned_s(cfg: Config, rates: KernelRates) -> float:
    kernels = work(cfg, world_size=1, rates=rates)
    assert kernels is not None
    return kernels.total_s


def fit(steps: Sequence[Step]) -> KernelRates:
    """The rates that suit these steps best, by Gauss-Newton on their logarithms."""
    rates = RATES
    for _ in range(NUM_ITERATIONS):
        residuals = _residuals(steps, rates)
        nudged = [_residuals(steps, _scaled(rates, name, 1 + DELTA)) for name in FITTED]
        jacobian = np.stack([(each - residuals) / log(1 + DELTA) for each in nudged], axis=1)
        change = np.linalg.lstsq(jacobian, -residuals, rcond=None)[0]
        for name, factor in zip(FITTED, np.exp(change), strict=True):
            rates = _scaled(rates, name, float(factor))
    return rates


def left_out_errors(steps: Sequence[Step]) -> list[float]:
    """The error of each step with rates that were fitted without its configuration."""
    shapes = {step.row.overrides for step in steps}
    rates = {shape: fit([step for step in steps if step.row.overrides != shape]) for shape in shapes}
    return [step.error(rates[step.row.overrides]) for step in steps]


def _residuals(steps: Sequence[Step], rates: KernelRates) -> np.ndarray:
    return np.array([log(1 + step.error(rates)) for step in steps])


def _scaled(rates: KernelRates, name: str, factor: float) -> KernelRates:
    return replace(rates, **{name: getattr(rates, name) * factor})


def main() -> None:
    steps = measured_steps()
    fitted = fit(steps)
    print(", ".join(f"{name} {getattr(fitted, name):.4g} (in use: {getattr(RATES, name):g})" for name in FITTED))
    print("\n| | measured | plan | error | left out |\n|---|---:|---:|---:|---:|")
    for step, left_out in zip(steps, left_out_errors(steps), strict=True):
        measured_ms, planned_ms = 1e3 * step.step_s, 1e3 * planned_s(step.cfg, RATES)
        errors = f"{100 * step.error(RATES):+.1f} % | {100 * left_out:+.1f} %"
        print(f"| {step.row.name} | {measured_ms:,.0f} ms | {planned_ms:,.0f} ms | {errors} |")


if __name__ == "__main__":
    main()
