"""Checks a config for settings that are known to make training unstable or that contradict each other, before anything
starts.

Why: a weight decay of 0.9 or a learning rate of 5 is valid and trains; it costs a night to find out that it should not
have been started.
How: each rule returns one line with the key, its value and what is usual. `harness plan` and every start print them;
`run.preflight=strict` rejects the start instead.
Left out: settings that only experience with the data can judge, such as batch size or sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.config.run import PreflightPolicy
from harness.config.schema import Config
from harness.core.object_store import is_url
from harness.model.size import num_parameters

LEAST_WEIGHT_DECAY, MOST_WEIGHT_DECAY = 0.01, 0.5
MOST_BETA2 = 0.99
USUAL_LR, USUAL_LR_SIZE, LR_EXPONENT = 3e-4, 7e9, -0.2
"""A power law through the published peak rates of AdamW: 3e-4 at 7B, 6e-4 at 125M, 1.5e-4 at 70B."""
LONG_RUN_STEPS = 1000
"""A shorter run is started again rather than rolled back."""
LR_RANGE = (1 / 6, 4.0)
"""Factors on the usual rate between which published runs lie."""


def preflight(cfg: Config) -> list[str]:
    """One line for each setting that is known to do harm; none if there is none."""
    return [*_optimizer(cfg), *_learning_rate(cfg), *_loss_scale(cfg), *_checkpoints(cfg), *_time_limits(cfg)]


def check_preflight(cfg: Config) -> list[str]:
    """The lines of `preflight`, to be printed as warnings. Raises `ConfigError` if `run.preflight` is strict."""
    problems = preflight(cfg)
    if problems and cfg.run.preflight is PreflightPolicy.strict:
        key, _, message = problems[0].partition(": ")
        others = f" ({len(problems) - 1} more; `harness plan` lists them)" if len(problems) > 1 else ""
        raise ConfigError(key, f"{message}{others}; run.preflight=warn starts the run all the same")
    return problems


def usual_lr(num_parameters: int) -> float:
    """The usual peak learning rate of AdamW for a model of this size."""
    return float(USUAL_LR * (num_parameters / USUAL_LR_SIZE) ** LR_EXPONENT)


def _optimizer(cfg: Config) -> Iterator[str]:
    optim = cfg.optim
    if optim.weight_decay < LEAST_WEIGHT_DECAY:
        why = f"below {LEAST_WEIGHT_DECAY} weights drift to large norms; usual is 0.1"
        yield f"optim.weight_decay: is {optim.weight_decay:g}; {why}"
    if optim.weight_decay > MOST_WEIGHT_DECAY:
        why = f"above {MOST_WEIGHT_DECAY} the model cannot fit the data; usual is 0.1"
        yield f"optim.weight_decay: is {optim.weight_decay:g}; {why}"
    if optim.beta2 > MOST_BETA2:
        num_steps = round(1 / (1 - optim.beta2))
        why = f"the second moment needs {num_steps:,} steps to adapt to a larger gradient; usual is 0.95"
        yield f"optim.beta2: is {optim.beta2:g}; {why}"
    if optim.clip_norm is None:
        yield "optim.clip_norm: is null; one bad batch can ruin the weights; usual is 1.0"


def _learning_rate(cfg: Config) -> Iterator[str]:
    optim = cfg.optim
    if cfg.model.mup_base_width is None:
        size = num_parameters(cfg.model)
        usual = usual_lr(size)
        low, high = (usual * factor for factor in LR_RANGE)
        if not low <= optim.lr <= high:
            direction = "above" if optim.lr > high else "below"
            yield (
                f"optim.lr: is {optim.lr:g}, {direction} the usual range of {low:.1g} to {high:.1g} for "
                f"{parameters_text(size)} parameters"
            )
    if optim.warmup_steps == 0:
        usual_steps = "2,000 or 2 % of the run"
        yield f"optim.warmup_steps: is 0; the first updates have the full learning rate; usual is {usual_steps}"


def _loss_scale(cfg: Config) -> Iterator[str]:
    precision = cfg.precision
    never_grows = precision.loss_scale_growth_interval >= cfg.train.num_steps
    if precision.kind is PrecisionKind.fp16 and precision.initial_loss_scale <= 1 and never_grows:
        why = "fp16 without loss scaling loses small gradients; usual is 65536, or precision=bf16"
        yield f"precision.initial_loss_scale: is {precision.initial_loss_scale:g} and does not grow in this run; {why}"


def _checkpoints(cfg: Config) -> Iterator[str]:
    checkpoint, num_steps = cfg.checkpoint, cfg.train.num_steps
    if checkpoint.every_minutes is not None or num_steps < LONG_RUN_STEPS:
        return
    if checkpoint.every_steps == 0:
        yield "checkpoint.every_steps: is 0, and checkpoint.every_minutes is null; a rollback has no state to restore"
        return
    first_good = checkpoint.every_steps + checkpoint.good_after_steps
    if first_good > num_steps:
        yield (
            f"checkpoint.every_steps: is {checkpoint.every_steps:,}; the first good checkpoint is at step "
            f"{first_good:,}, after the end of the run ({num_steps:,})"
        )
    margin = cfg.sentinel.policy.rollback_margin_steps
    reach = max(checkpoint.keep * checkpoint.every_steps, checkpoint.keep_behind_steps)
    if not checkpoint.keep_every_steps and reach < margin:
        yield (
            f"checkpoint.keep: is {checkpoint.keep}; checkpoints {checkpoint.every_steps:,} steps apart reach back "
            f"{reach:,} steps, but sentinel.policy.rollback_margin_steps is {margin:,}; set "
            f"checkpoint.keep_behind_steps={margin}"
        )


def _time_limits(cfg: Config) -> Iterator[str]:
    launch, timeout_s = cfg.launch, cfg.parallel.timeout_s
    if launch.hang_after_s >= timeout_s:
        why = f"collectives fail after parallel.timeout_s={timeout_s:g}, before the rank that hangs is named"
        yield f"launch.hang_after_s: is {launch.hang_after_s:g}; {why}"
    is_remote = any(is_url(path) for source in cfg.data.sources.values() for path in source.paths)
    if is_remote and cfg.data.remote.retry_s >= launch.hang_after_s:
        why = f"ranks that wait for data count as hung after launch.hang_after_s={launch.hang_after_s:g}"
        yield f"data.remote.retry_s: is {cfg.data.remote.retry_s:g}; {why}"
    if cfg.checkpoint.retry_s >= launch.start_within_s:
        why = f"a start that waits for storage counts as hung after launch.start_within_s={launch.start_within_s:g}"
        yield f"checkpoint.retry_s: is {cfg.checkpoint.retry_s:g}; {why}"


def parameters_text(size: int) -> str:
    """A number of parameters in three digits: 6.74B, 134M, 31.9k."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= factor:
            return f"{size / factor:.3g}{unit}"
    return str(size)
