"""Remedy for each cause: one sentence, the smallest configuration change, and how to restore a broken run.

Why: a lesson without a configuration change is forgotten.
How: the change is given as overrides of `harness train`; `harness.analysis.postmortem.verification` tests it. A run
whose loss is not finite needs an older state first: `restore_commands`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import final

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import first_broken_weights, measure, off_schedule, weight_jump
from harness.analysis.postmortem.rare_tokens import flag_tokens
from harness.analysis.postmortem.rules.causes import Cause
from harness.analysis.postmortem.rules.data_rules import find_planned_change
from harness.analysis.postmortem.rules.rate_rules import find_rate_change, rate_range
from harness.config.command_line import changed_run_command, directory_and_name, override, run_overrides, shell_command

OFF_SCHEDULE = 0.2
"""Tolerated difference between learning rate and schedule, as the logarithm of their ratio."""
KEPT_SHARE = 4
"""At most one block in this many stays in bf16; beyond that another fp8 recipe is the smaller change."""
RATE_DIVISOR = 2.0
RARE_BELOW, CLIP_NORM = 10, 0.5
"""Stratified batching spreads tokens with fewer occurrences than this; the clip threshold for rare tokens."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    sentence: str
    """The root cause."""
    change: str
    """The smallest change, in one phrase."""
    overrides: list[str] = field(default_factory=list)
    """The change as overrides of `harness train`; empty: no config key makes it."""
    lesson: str


def remedy_of(cause: Cause, evidence: Evidence) -> Remedy:
    """The remedy for a cause."""
    return REMEDIES[cause](evidence)


def _setting(evidence: Evidence, key: str, default: float) -> float:
    value = evidence.run.settings.get(key)
    return float(value) if isinstance(value, int | float) else default


def is_broken(evidence: Evidence) -> bool:
    """Whether the run did not recover from values that are not finite."""
    numbers = evidence.numbers
    ended = numbers.loss_after_50 is not None and not math.isfinite(numbers.loss_after_50)
    return ended or "nonfinite weights" in evidence.kinds()


def restore_commands(evidence: Evidence) -> tuple[str, list[str]]:
    """What to do about a run that is not finite any more, and the commands: restore the newest checkpoint without NaN,
    else start again with a lower learning rate. Empty if the run is finite."""
    run = evidence.run
    if not is_broken(evidence):
        return "", []
    if evidence.checkpoint:
        step = int(evidence.checkpoint.removeprefix("step-").partition("-")[0])
        text = f"restore {evidence.checkpoint}, the newest checkpoint from before the first value that is not finite"
        if not run.ended:
            reason = f"incident {evidence.incident.number}: not finite"
            return text, [shell_command("harness", "ctl", run.path, "rollback", "--to", str(step), "--reason", reason)]
        return text, [changed_run_command(run.overrides, *run_overrides(run.path))]
    rate = _setting(evidence, "optim.lr", 0.0) / RATE_DIVISOR
    directory, name = directory_and_name(run.path)
    place = [override("run.dir", directory), override("run.name", f"{name}-lower-lr")]
    text = "no checkpoint from before the first value that is not finite: start again with a lower learning rate"
    imports = [import_weights_command(str(PurePath(directory, f"{name}-lower-lr")))] if evidence.first_weights else []
    train = changed_run_command(run.overrides, f"optim.lr={rate:g}", *place)
    return text, [*imports, train] if rate else []


def import_weights_command(folder: str) -> str:
    """The command that gives a new run the weights that this one began with; `MODEL` is not in the log."""
    return shell_command("harness", "checkpoint", "import", "MODEL", folder)


def _planned_change(evidence: Evidence) -> Remedy:
    change = find_planned_change(evidence) or "the data changed as planned"
    return Remedy(
        sentence=f"The data changed as planned: {change}.",
        change="nothing is broken; if the rise matters, blend the new data in over several phases of data.phases",
        lesson="A planned change of the data raises the training loss; judge it by the held-out loss.",
    )


def _destructive_update(evidence: Evidence) -> Remedy:
    broken = first_broken_weights(evidence)
    where = f" of {broken[1]}" if broken is not None else ""
    since = f" (found at iteration {broken[0].iteration})" if broken is not None else ""
    return Remedy(
        sentence=f"An update wrote values that are not finite, or far too large, into the weights{where}{since}, "
        "and every later step computed with them.",
        change="limit single values of the gradient",
        overrides=["optim.clip_value=100"],
        lesson="One applied update with a NaN destroys the weights for good: reject it before the optimizer step.",
    )


def _numerical_cascade(evidence: Evidence) -> Remedy:
    precision = evidence.run.precision
    return Remedy(
        sentence=f"Round-off in {precision} grew from layer to layer until the activations were far above usual.",
        change="compute attention in fp32" if precision == "bf16" else "compute in bf16 with attention in fp32",
        overrides=["model.attention=fp32", *([] if precision == "bf16" else ["precision=bf16"])],
        lesson="Activations that grow from layer to layer lose their low bits first; probe them by depth.",
    )


def _corrupted_rank(evidence: Evidence) -> Remedy:
    named = {*evidence.incident.ranks, *(rank for record in evidence.records for rank in record.nonfinite_ranks)}
    ranks = f"Rank {', '.join(map(str, sorted(named)))}" if named else "One rank (not known which)"
    jump = weight_jump(evidence)
    groups = evidence.incident.groups[:3] or ([] if jump is None or named else [jump[0]])
    where = f" in {', '.join(groups)}" if groups else ""
    is_job = evidence.run.settings.get("launch.kind") == "slurm"
    return Remedy(
        sentence=f"{ranks} computed or held corrupted values{where}; no other rank had them before the reduction.",
        change="exclude the machine of that rank until it has passed a memory test and a compute test",
        overrides=[override("launch.slurm.options", ["--exclude=NODE"])] if is_job else [],
        lesson="Assume a hardware fault if only one rank has a bad value, unless a replay of the step reproduces it.",
    )


def _fp16_overflow(evidence: Evidence) -> Remedy:
    precision = evidence.run.precision
    return Remedy(
        sentence=f"Activations or gradients exceeded the range of {precision}, and the loss scale did not prevent it.",
        change=f"compute in bf16, which has the exponent range of fp32, instead of {precision}",
        overrides=["precision=bf16"],
        lesson=f"{precision} needs headroom; a loss scale that keeps falling is the last warning.",
    )


def _fp8_range(evidence: Evidence) -> Remedy:
    groups = evidence.incident.groups
    change, override = _change_fp8(evidence)
    where = f" of {', '.join(groups[:3])}{' and others' if len(groups) > 3 else ''}" if groups else ""
    return Remedy(
        sentence=f"Outliers set the fp8 scale{where}, and many of the other values underflowed to zero.",
        change=change,
        overrides=[override],
        lesson="With one fp8 scale per tensor an outlier makes the other values underflow; the loss shows it last.",
    )


def _change_fp8(evidence: Evidence) -> tuple[str, str]:
    """The smallest change: keep a few blocks at either end in bf16, or use the block-scaled recipe, or disable fp8."""
    groups, num_layers = evidence.incident.groups, int(_setting(evidence, "model.num_layers", 0))
    places = [int(group.removeprefix("blocks.")) for group in groups if group.startswith("blocks.")]
    if places and len(places) == len(groups):
        first, last = max(places) + 1, num_layers - min(places)
        name, num = ("keep_first_blocks", first) if first < last else ("keep_last_blocks", last)
        if num <= max(1, num_layers // KEPT_SHARE) < num_layers:
            kept = _setting(evidence, f"precision.fp8.{name}", 0)
            return "keep the affected blocks in bf16", f"precision.fp8.{name}={max(num, int(kept))}"
    if evidence.run.settings.get("precision.fp8.recipe") != "block":
        return "use one fp8 scale for every 128 values", "precision.fp8.recipe=block"
    return "compute in bf16", "precision=bf16"


def _optimizer_reset(_evidence: Evidence) -> Remedy:
    return Remedy(
        sentence="Adam's moments were lost during training, so the updates after that were wrongly scaled.",
        change="restore a checkpoint with intact moments; always load the optimizer state together with the weights",
        lesson="A checkpoint without optimizer state is incomplete: the first updates after loading it are too large.",
    )


def _lr_discontinuity(evidence: Evidence) -> Remedy:
    measures = measure(evidence)
    if (moved := find_rate_change(evidence)) is not None:
        return Remedy(
            sentence=f"The learning rate changed by a factor of {moved.factor:.3g}, because {moved.text}.",
            change=f"resume with the old value of {moved.key}, or with a warm-up to the new rate",
            lesson="A longer or shorter schedule moves the learning rate of the step at which a run resumes.",
        )
    before, at = measures.usual_lr, measures.onset_lr
    jump = "" if before is None or at is None else f" from {before:.3g} to {at:.3g}"
    farthest = off_schedule(evidence, measures)
    off = ", against its schedule" if farthest and abs(math.log(farthest[1])) > OFF_SCHEDULE else ""
    warmup = int(_setting(evidence, "optim.warmup_steps", 0))
    in_warmup = evidence.onset_step <= warmup + 1
    change = "raise the learning rate over the whole warmup" if in_warmup else "use the scheduled learning rate again"
    return Remedy(
        sentence=f"The learning rate jumped{jump} within one step{off}.",
        change=f"{change}; find the code that set it at iteration {evidence.onset}",
        overrides=[f"optim.warmup_steps={max(warmup, 1)}"] if in_warmup else [],
        lesson="The learning rate is a function of configuration and step; any other code that sets it is a bug.",
    )


def _beta2_stale(evidence: Evidence) -> Remedy:
    beta2 = _setting(evidence, "optim.beta2", 0.999)
    return Remedy(
        sentence=f"Adam's second moment (beta2 {beta2:g}) adapted too slowly to a large gradient, so updates overshot.",
        change="lower beta2, so that the second moment adapts faster",
        overrides=["optim.beta2=0.95"],
        lesson="The second moment must adapt as fast as the data changes: beta2 0.95 averages 20 steps, 0.999 averages "
        "1000.",
    )


def _long_tail_token(evidence: Evidence) -> Remedy:
    before = measure(evidence).before
    judged = ((batch, flag_tokens(batch, evidence, before)) for batch in evidence.batches)
    batch, flagged = next(((batch, flagged) for batch, flagged in judged if flagged), (None, []))
    named = ", ".join(token.text or str(token.token) for token in flagged[:3])
    index = "A batch" if batch is None else f"Batch {batch.index}"
    clip = evidence.run.settings.get("optim.clip_norm")
    half = CLIP_NORM if not isinstance(clip, int | float) else min(CLIP_NORM, clip / 2)
    in_corpus = [token.num_in_corpus for token in flagged if token.num_in_corpus]
    can_spread = batch is not None and not batch.is_changed and bool(in_corpus) and _num_sources(evidence) == 1
    spread = [f"data.stratify.rare_below={max(RARE_BELOW, *(count + 1 for count in in_corpus))}"] if can_spread else []
    return Remedy(
        sentence=f"{index} held the rare token{'s' if len(flagged) > 1 else ''} {named or 'not known'} far more often "
        "than usual, and the gradient of the embedding dominated the update.",
        change="lower the clip threshold, which limits the effect of one batch"
        + (", and spread rare tokens over the batches" if spread else ""),
        overrides=[f"optim.clip_norm={half:g}", *spread],
        lesson="One rare token several times in a batch can dominate the gradient: spread rare tokens, and clip lower.",
    )


def _num_sources(evidence: Evidence) -> int:
    keys = [key.split(".") for key in evidence.run.settings if key.startswith("data.sources.")]
    return len({key[2] for key in keys if len(key) > 2})


def _scrambled_data(evidence: Evidence) -> Remedy:
    batch = next((batch for batch in evidence.batches if batch.is_changed), None) or next(iter(evidence.batches), None)
    index = "A batch" if batch is None else f"Batch {batch.index}"
    rows = {} if batch is None else {name: count for name, count in batch.rows.items() if count}
    source = f" of source {next(iter(rows))}" if len(rows) == 1 else ""
    return Remedy(
        sentence=f"{index}{source} held tokens that are not text: scrambled, mis-tokenized or corrupted in transit.",
        change="copy the file of these rows again from its origin, and compare its hash",
        lesson="Hash every shard when it is written and when it is read; entropy only finds what was not hashed.",
    )


def _data_duplicate(evidence: Evidence) -> Remedy:
    found = [batch.index for batch in evidence.batches]
    indices = ", ".join(map(str, sorted(found)[:4])) or "not known"
    return Remedy(
        sentence=f"The data loader returned the same tokens for several batch indices (batches {indices}).",
        change="repair the sample order or remove the duplicates from the corpus; until then skip these indices",
        lesson="Fingerprint every batch: a loader that repeats data is cheap to detect and expensive to miss.",
    )


def _other_data(evidence: Evidence) -> Remedy:
    batch = next(iter(evidence.batches), None)
    since = "" if batch is None else f" from about batch {min(other.index for other in evidence.batches)} on"
    return Remedy(
        sentence=f"The data changed{since}: the held-out loss is unchanged, and the new data is harder.",
        change="nothing is broken; configure such a change as a phase in data.phases, so that the gate expects it",
        lesson="A higher training loss is damage only if the held-out loss rises too.",
    )


def _structural(evidence: Evidence) -> Remedy:
    settings, decay = evidence.run.settings, _setting(evidence, "optim.weight_decay", 0.1)
    if settings.get("model.qk_norm") is False:
        change, override = "normalize queries and keys, which bounds the attention logits", "model.qk_norm=true"
    elif not settings.get("model.z_loss"):
        change, override = "penalize the log-partition of the logits (z-loss)", "model.z_loss=0.0001"
    else:
        change, override = "double the weight decay", f"optim.weight_decay={2 * decay:g}"
    return Remedy(
        sentence="The model itself is unstable: weights or logits grow on any batch.",
        change=change,
        overrides=[override],
        lesson="If recovery keeps failing, change the architecture, not the data (Marin 32B, QK-norm).",
    )


def _lr_too_high(evidence: Evidence) -> Remedy:
    rate, span = _setting(evidence, "optim.lr", 0.0), rate_range(evidence.run.settings)
    change = find_rate_change(evidence)
    is_above = span is not None and rate > span[1]
    lower = math.sqrt(span[0] * span[1]) if span is not None and is_above else rate / RATE_DIVISOR
    why = f", since {change.text}" if change is not None and change.key == "optim.lr" else ""
    return Remedy(
        sentence=f"The learning rate (peak {rate:g}) is too high for this model at this point of training{why}.",
        change="use a learning rate within the usual range for the size" if is_above else "halve the learning rate",
        overrides=[f"optim.lr={lower:.1g}" if is_above else f"optim.lr={lower:g}"] if rate else [],
        lesson="A rate far above the usual range for the size diverges; `harness plan` warns about it before the start."
        if is_above
        else "Spikes that recur across restarts and batches call for a lower learning rate.",
    )


REMEDIES: dict[Cause, Callable[[Evidence], Remedy]] = {
    Cause.planned_change: _planned_change,
    Cause.corrupted_rank: _corrupted_rank,
    Cause.destructive_update: _destructive_update,
    Cause.numerical_cascade: _numerical_cascade,
    Cause.fp16_overflow: _fp16_overflow,
    Cause.fp8_range: _fp8_range,
    Cause.optimizer_reset: _optimizer_reset,
    Cause.lr_discontinuity: _lr_discontinuity,
    Cause.beta2_stale: _beta2_stale,
    Cause.long_tail_token: _long_tail_token,
    Cause.scrambled_data: _scrambled_data,
    Cause.data_duplicate: _data_duplicate,
    Cause.other_data: _other_data,
    Cause.structural: _structural,
    Cause.lr_too_high: _lr_too_high,
}
