"""Remedy for each cause: one sentence, the smallest configuration change, and commands that verify it.

Why: a lesson without a configuration change is forgotten, and a change that was not tested may not help.
How: the change is given as overrides of `harness train`. The check trains the same run again from the same seed, with
the change, past the incident, and then runs `harness diagnose`, which exits with 0 if it finds nothing. For causes that
no config key can change (a faulty machine, a bug in the loader) the check is `harness replay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import final

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures, measure, off_schedule, weight_jump
from harness.analysis.postmortem.overrides import shell_command
from harness.analysis.postmortem.rules.causes import Cause

STEPS_PAST = 50
"""Steps that a check trains past the incident: the time a spike has to recover."""
LEAST_TOLERANCE = 0.05
"""Nats."""
OFF_SCHEDULE = 0.2
"""Tolerated difference between learning rate and schedule, as the logarithm of their ratio."""
KEPT_SHARE = 4
"""At most one block in this many stays in bf16; beyond that another fp8 recipe is the smaller change."""
REPLAY_CAUSES = (Cause.corrupted_rank, Cause.scrambled_data)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The test that confirms the fix."""

    commands: list[str]
    """Shell commands, in order."""
    seed: int | None
    steps: int | None
    expect: list[str]
    """Conditions that must hold afterwards, with numbers."""


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
        overrides=["launch.slurm.options=[--exclude=NODE]"] if is_job else [],
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
    before, at = measures.usual_lr, measures.onset_lr
    jump = "" if before is None or at is None else f" from {before:.3g} to {at:.3g}"
    farthest = off_schedule(evidence, measures)
    off = ", against its schedule" if farthest and abs(math.log(farthest[1])) > OFF_SCHEDULE else ""
    warmup = int(_setting(evidence, "optim.warmup_steps", 0))
    in_warmup = evidence.incident.onset_step <= warmup + 1
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
    batch = next((batch for batch in evidence.batches if batch.rarest), None)
    tokens = "" if batch is None else ", ".join(rare.text or str(rare.token) for rare in batch.rarest[:3])
    named = f" ({tokens})" if tokens else ""
    index = "A batch" if batch is None else f"Batch {batch.index}"
    clip = evidence.run.settings.get("optim.clip_norm")
    half = 0.5 if not isinstance(clip, int | float) else min(0.5, clip / 2)
    return Remedy(
        sentence=f"{index} held far more rare tokens{named} than usual, and their gradient dominated the update.",
        change="halve the clip threshold, which limits the effect of one batch; "
        "with a single source, data.stratify.rare_below=10 spreads rare tokens over batches",
        overrides=[f"optim.clip_norm={half:g}"],
        lesson="Many rare tokens in one batch can dominate the gradient of all ranks: spread them, and clip lower.",
    )


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
    rate = _setting(evidence, "optim.lr", 0.0)
    return Remedy(
        sentence=f"The learning rate (peak {rate:g}) is too high for this phase of training.",
        change="halve the learning rate",
        overrides=[f"optim.lr={rate / 2:g}"] if rate else [],
        lesson="Spikes that recur across restarts and batches call for a lower learning rate.",
    )


REMEDIES: dict[Cause, Callable[[Evidence], Remedy]] = {
    Cause.corrupted_rank: _corrupted_rank,
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


def check_of(cause: Cause | None, remedy: Remedy | None, evidence: Evidence, measures: Measures) -> Check:
    """The check that confirms a remedy: train the run again with the change, past the incident."""
    run, incident = evidence.run, evidence.incident
    steps = verify_steps(evidence)
    tolerance = max(LEAST_TOLERANCE, 3 * measures.sigma)
    expect = ["exit code 0 of both commands: training finishes, and diagnose finds nothing"]
    if measures.level is not None:
        expect.append(f"loss at step {incident.onset_step} within {tolerance:.2g} nats of {measures.level:.3f}")
    if measures.usual_grad is not None:
        high = 5 * measures.usual_grad
        expect.append(f"no gradient norm above {high:.3g} in steps {incident.onset_step} to {steps}")
    commands = []
    if run.overrides and steps:
        folder, name = str(PurePath(run.path).parent), f"verify-{run.name}-{evidence.folder}"
        changes = remedy.overrides if remedy is not None else []
        changed_keys = {override.partition("=")[0] for override in changes} | {"train.num_steps"}
        kept = [override for override in run.overrides if override.partition("=")[0] not in changed_keys]
        place = [f"train.num_steps={steps}", f"run.dir={folder}", f"run.name={name}"]
        commands = [
            shell_command("harness", "train", *kept, *changes, *place),
            shell_command("harness", "diagnose", f"{folder}/{name}"),
        ]
    if cause in REPLAY_CAUSES or not commands:
        commands.append(shell_command("harness", "replay", run.path, "--incident", str(incident.number)))
    seed = run.settings.get("run.seed")
    return Check(commands=commands, seed=seed if isinstance(seed, int) else None, steps=steps, expect=expect)


def verify_steps(evidence: Evidence) -> int | None:
    """Steps of a check: `STEPS_PAST` after the incident, at least one more than warmup and decay, at most the run's."""
    num_steps = evidence.run.settings.get("train.num_steps")
    if not isinstance(num_steps, int):
        return None
    schedule = _setting(evidence, "optim.warmup_steps", 0)
    if evidence.run.settings.get("optim.schedule") == "wsd":
        schedule += _setting(evidence, "optim.decay_steps", 0)
    wanted = max(evidence.incident.last_step + STEPS_PAST, int(schedule) + 1)
    return min(wanted, num_steps)
