"""Anomaly rules of other trainers, reimplemented from their sources: same windows, same order, same treatment of NaN.

Each rule takes a log and yields the rows at which that trainer would skip the update, clip, warn or stop. The docstring
of each rule names repository, file and commit. All rules run open loop: the log does not change with the decisions of
a rule. A rule that needs gradient norms raises `MissingGradNormsError` on a log without them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tests.bench.training_logs import TrainingLog

Rule = Callable[[TrainingLog], Iterator[int]]


class MissingGradNormsError(ValueError):
    """The rule cannot run on this log."""


def require_norms(log: TrainingLog) -> tuple[float, ...]:
    if not log.grad_norms:
        raise MissingGradNormsError(log.name)
    return log.grad_norms


def past_mean_std(
    values: Sequence[float], *, window: int, ddof: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of the `window` values before each value; of fewer values at the start."""
    array = np.asarray(values, dtype=np.float64)
    means, stds = np.full(len(array), np.nan), np.full(len(array), np.nan)
    for row in range(ddof + 1, min(window, len(array))):
        with np.errstate(invalid="ignore"):
            means[row], stds[row] = array[:row].mean(), array[:row].std(ddof=ddof)
    if len(array) > window:
        past = sliding_window_view(array, window)[:-1]
        with np.errstate(invalid="ignore"):  # of Inf
            means[window:], stds[window:] = past.mean(axis=1), past.std(axis=1, ddof=ddof)
    return means, stds


def olmo_core(log: TrainingLog) -> Iterator[int]:
    """OLMo-core's `SkipStepOptimizer` with its defaults, and its trainer's check for a loss that is not finite.

    allenai/OLMo-core at fa6c5014 (2026-06-22), src/olmo_core/optim/skip_step_optimizer.py and adamw.py, and
    src/olmo_core/train/trainer.py. MaxText's `skip_step_on_spikes` is the same rule.
    - A step is skipped unless loss and gradient norm are both at most 6 standard deviations (n - 1) above the mean of
      the 128 values before; from the 64th step on. Skipped values enter the window. Without gradient clipping there are
      no norms, and the loss alone decides.
    - NaN compares false, so it is skipped, and so are the 128 steps after it while it is in the window. The update is
      multiplied by zero, which leaves NaN in the weights.
    - The trainer raises on a loss that is not finite when it collects metrics: at the first step and every fifth.
    """
    window, sigmas, first_row, collect_every = 128, 6.0, 63, 5
    excess = []
    for values in (log.losses, log.grad_norms) if log.grad_norms else (log.losses,):
        means, stds = past_mean_std(values, window=window, ddof=1)
        excess.append(~(np.asarray(values) - means <= sigmas * stds))
    skipped = np.any(excess, axis=0)
    is_broken = False
    for row, loss in enumerate(log.losses):
        is_broken = is_broken or not math.isfinite(loss)
        collects = row == 0 or (row + 1) % collect_every == 0
        if (row >= first_row and skipped[row]) or (is_broken and collects):
            yield row
        is_broken = is_broken and not collects


def levanter(log: TrainingLog) -> Iterator[int]:
    """Levanter's `skip_bad_steps` with its defaults.

    marin-community/levanter at 9263f81e (2025-09-26), src/levanter/optim/skipstep.py.
    As OLMo-core's rule, with the standard deviation of n, at least 1e-6, once 64 values are in the window. It always
    measures the gradient norm. NaN is skipped and keeps every step skipped until it leaves the window.
    """
    window, sigmas, first_row, least_std = 128, 6.0, 64, 1e-6
    skipped = np.full(len(log.losses), False)
    for values in (log.losses, require_norms(log)):
        means, stds = past_mean_std(values, window=window, ddof=0)
        skipped |= ~(np.asarray(values) <= means + sigmas * np.maximum(stds, least_std))
    yield from (row for row in np.flatnonzero(skipped).tolist() if row >= first_row)


class OutlierDetector:
    """llm.c's z-score within a window of 128 that holds the value itself; NaN until the window was full once."""

    window = 128

    def __init__(self) -> None:
        self.values: deque[float] = deque()
        self.sum = self.sum_of_squares = 0.0

    def update(self, value: float) -> float:
        is_full = len(self.values) == self.window
        if is_full:
            oldest = self.values.popleft()
            self.sum -= oldest
            self.sum_of_squares -= oldest * oldest
        self.values.append(value)
        self.sum += value
        self.sum_of_squares += value * value
        if not is_full:
            return math.nan
        mean = self.sum / self.window
        variance = self.sum_of_squares / self.window - mean * mean
        std = math.sqrt(variance) if variance >= 0 else math.nan
        return 0.0 if std == 0.0 else (value - mean) / std


def llm_c(log: TrainingLog) -> Iterator[int]:
    """llm.c with `-sl 7.0 -sg 7.0`, as its scripts/run_gpt3_125M.sh sets them; both are off by default.

    karpathy/llm.c at f1e2ace6 (2025-05-10), llmc/outlier_detector.h, train_gpt2.cu.
    - The update is skipped where the z-score of loss or gradient norm is finite and above 7.
    - The sums are kept by adding and subtracting, so one NaN or Inf turns the detector off for the rest of the run.
    """
    loss_z, norm_z = OutlierDetector(), OutlierDetector()
    norms = log.grad_norms or (0.0,) * len(log.losses)
    for row, (loss, norm) in enumerate(zip(log.losses, norms, strict=True)):
        scores = loss_z.update(loss), norm_z.update(norm)
        if any(math.isfinite(score) and score > 7.0 for score in scores):
            yield row


def llm_foundry(log: TrainingLog) -> Iterator[int]:
    """llm-foundry's `KillLossSpike` with its defaults.

    mosaicml/llm-foundry at 8c8dd48f (2025-07-21), llmfoundry/callbacks/kill_loss_spike_callback.py; mosaicml/composer
    at 64051888 (2026-04-29), composer/trainer/trainer.py, calls it after it has counted the batch.
    - The window is 5 % of the planned steps, at least 100; the length of the log is taken as planned.
    - A spike is the fifth loss in a row at twice the mean of the window or more. High loss is half of the window above
      the cap, from two windows on. Every loss enters the window.
    - The cap is to become the largest loss of the first window where the batch count equals the window. When the window
      is full the count is one higher, so the cap stays at 10.
    - NaN compares false: it never counts, and while it is in the window nothing else does.
    """
    size = max(100, round(len(log.losses) * 0.05))
    if len(log.losses) <= size:
        return
    losses = np.asarray(log.losses, dtype=np.float64)
    windows = sliding_window_view(losses, size)[:-1]
    is_outlier = losses[size:] >= 2 * windows.mean(axis=1)
    is_high = (windows > 10).sum(axis=1) >= size / 2
    in_row = 0
    for row in range(size, len(losses)):
        in_row = in_row + 1 if is_outlier[row - size] else 0
        if in_row > 4 or (row + 1 >= 2 * size and is_high[row - size]):
            yield row


def megatron(log: TrainingLog) -> Iterator[int]:
    """Megatron-LM's checks of the loss in pretrain_gpt.py, with `--check-for-spiky-loss`, which is off by default.

    NVIDIA/Megatron-LM at d98e8a64 (2026-08-22), pretrain_gpt.py, megatron/core/rerun_state_machine.py.
    - NaN and Inf are checked by themselves, and on by default. The first iteration is not validated.
    - Spiky: at least 10 times the largest absolute value of the first 100 finite samples, which are never spiky. A
      sample is one micro-batch of one rank there; here it is the loss of a step, which is all that a log has.
    """
    num_samples, factor = 100, 10.0
    num, largest = 0, 0.0
    for row, loss in enumerate(log.losses[1:], start=1):
        if not math.isfinite(loss):
            yield row
        elif num < num_samples:
            num, largest = num + 1, max(largest, abs(loss))
        elif abs(loss) >= largest * factor:
            yield row


def torchtitan(log: TrainingLog) -> Iterator[int]:
    """torchtitan stops before the update where loss or gradient norm is not finite; it has no rule for spikes.

    pytorch/torchtitan at b5bcd76c (2026-08-21), torchtitan/trainer.py.
    """
    norms = log.grad_norms or (0.0,) * len(log.losses)
    for row, (loss, norm) in enumerate(zip(log.losses, norms, strict=True)):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            yield row


def zclip(log: TrainingLog) -> Iterator[int]:
    """ZClip with its defaults: mode zscore, adaptive scaling; a clip by the z-score counts as an alarm.

    bluorion-com/ZClip at 584ce4f5 (2025-10-15), zclip/zclip.py.
    - The first 25 norms give mean and variance (of n). Then a norm is clipped where (norm - mean) / (std + 1e-6) is
      above 2.5.
    - Mean, then variance about the new mean, are averaged with weight 0.97 on the past; a clipped norm enters as what
      it was clipped to. One NaN makes both NaN for good, and nothing is clipped any more.
    """
    norms = require_norms(log)
    warmup, alpha, threshold = 25, 0.97, 2.5
    if len(norms) < warmup:
        return
    mean = sum(norms[:warmup]) / warmup
    variance = sum((norm - mean) ** 2 for norm in norms[:warmup]) / warmup
    for row, norm in enumerate(norms[warmup:], start=warmup):
        std = variance**0.5
        z = (norm - mean) / (std + 1e-6)
        if z > threshold:
            yield row
            norm = mean + threshold * std / (z / threshold)
        mean = alpha * mean + (1 - alpha) * norm
        variance = alpha * variance + (1 - alpha) * (norm - mean) ** 2


PEERS: dict[str, Rule] = {
    "OLMo-core": olmo_core,
    "Levanter": levanter,
    "llm.c, -sl 7 -sg 7": llm_c,
    "llm-foundry": llm_foundry,
    "Megatron-LM, spiky-loss check on": megatron,
    "torchtitan": torchtitan,
    "ZClip": zclip,
}
