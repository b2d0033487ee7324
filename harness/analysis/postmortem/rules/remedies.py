"""What to do about a cause, in one sentence, as few keys as possible, and a command that proves it.

Why: a lesson that is not a change of a key is forgotten, and a change that nobody tried again is a hope.
How: for each cause the smallest change of the configuration, as overrides of `harness train`, and the check: the same
run again from the same seed, with the change, as far as it takes to be past the incident, then `harness diagnose`,
whose exit code is 0 where nothing was found. What no key can change (a broken machine, a loader) is looked at with the
tool for it instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import final

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures, measure, off_schedule, weight_jump
from harness.analysis.postmortem.overrides import command
from harness.analysis.postmortem.rules.causes import Cause

STEPS_PAST = 50
"""Steps past the incident that a check trains: what seed 004 gives a spike to recover."""
LEAST_TOLERANCE = 0.05
"""Nats, of seed 002."""
OFF_SCHEDULE = 0.2
"""Logarithm of a factor by which a rate may differ from its schedule and still be called the same."""
KEPT_SHARE = 4
"""One block in so many may stay bf16 before another recipe is the smaller change."""
LOOK_CAUSES = (Cause.corrupted_rank, Cause.scrambled_data)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The test that confirms the fix."""

    commands: list[str]
    """For a shell, one after the other; empty: the words of the run are not known."""
    seed: int | None
    steps: int | None
    expect: list[str]
    """What must hold then, with numbers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    sentence: str
    """The root cause."""
    change: str
    """The smallest change, in words."""
    overrides: list[str] = field(default_factory=list)
    """The same for `harness train`; empty: no key can do it."""
    lesson: str


def remedy_of(cause: Cause, evidence: Evidence) -> Remedy:
    """What to do about it."""
    return REMEDIES[cause](evidence)


def _setting(evidence: Evidence, key: str, default: float) -> float:
    value = evidence.run.settings.get(key)
    return float(value) if isinstance(value, int | float) else default


def _corrupted_rank(evidence: Evidence) -> Remedy:
    named = {*evidence.incident.ranks, *(rank for record in evidence.records for rank in record.nonfinite_ranks)}
    ranks = f"Rank {', '.join(map(str, sorted(named)))}" if named else "One rank, not known which,"
    jump = weight_jump(evidence)
    groups = evidence.incident.groups[:3] or ([] if jump is None or named else [jump[0]])
    where = f" in {', '.join(groups)}" if groups else ""
    is_job = evidence.run.settings.get("launch.kind") == "slurm"
    return Remedy(
        sentence=f"{ranks} computed or held wrong numbers{where}, which no other rank had before the reduction.",
        change="take the machine of that rank out of the run until it has passed a memory and a compute test",
        overrides=["launch.slurm.options=[--exclude=NODE]"] if is_job else [],
        lesson="A number that only one rank has is a machine's fault until a replay of the same step says otherwise.",
    )


def _fp16_overflow(evidence: Evidence) -> Remedy:
    precision = evidence.run.precision
    return Remedy(
        sentence=f"Activations or gradients exceeded the range of {precision}, which the loss scale could not prevent.",
        change=f"compute in bf16, whose exponent is that of fp32, instead of {precision}",
        overrides=["precision=bf16"],
        lesson=f"{precision} needs a reserve of range; a loss scale that keeps falling is the last warning.",
    )


def _fp8_range(evidence: Evidence) -> Remedy:
    groups = evidence.incident.groups
    change, words = _out_of_fp8(evidence)
    where = f" of {', '.join(groups[:3])}{' and others' if len(groups) > 3 else ''}" if groups else ""
    return Remedy(
        sentence=f"Numbers out of all proportion made the scale{where} in fp8, and most of the others became zero.",
        change=change,
        overrides=[words],
        lesson="fp8 gives all numbers of a tensor one scale: an outlier costs the others, and the loss shows it last.",
    )


def _out_of_fp8(evidence: Evidence) -> tuple[str, str]:
    """The smallest change: a few blocks at either end stay bf16, or a scale for every block of numbers, or no fp8."""
    groups, num_layers = evidence.incident.groups, int(_setting(evidence, "model.num_layers", 0))
    places = [int(group.removeprefix("blocks.")) for group in groups if group.startswith("blocks.")]
    if places and len(places) == len(groups):
        first, last = max(places) + 1, num_layers - min(places)
        name, num = ("keep_first_blocks", first) if first < last else ("keep_last_blocks", last)
        if num <= max(1, num_layers // KEPT_SHARE) < num_layers:
            kept = _setting(evidence, f"precision.fp8.{name}", 0)
            return "keep the named blocks in bf16", f"precision.fp8.{name}={max(num, int(kept))}"
    if evidence.run.settings.get("precision.fp8.recipe") != "block":
        return "give every 128 numbers a scale of their own", "precision.fp8.recipe=block"
    return "compute in bf16", "precision=bf16"


def _optimizer_reset(_evidence: Evidence) -> Remedy:
    return Remedy(
        sentence="Adam's moments were lost while training went on, so the first updates after it were not calibrated.",
        change="go back to a checkpoint whose moments are whole, and load moments with weights or not at all",
        lesson="Weights without their moments are half a checkpoint: the first steps after such a reload are blind.",
    )


def _lr_discontinuity(evidence: Evidence) -> Remedy:
    measures = measure(evidence)
    before, at = measures.usual_lr, measures.onset_lr
    told = "" if before is None or at is None else f" from {before:.3g} to {at:.3g}"
    farthest = off_schedule(evidence, measures)
    off = ", which its schedule does not say" if farthest and abs(math.log(farthest[1])) > OFF_SCHEDULE else ""
    warmup = int(_setting(evidence, "optim.warmup_steps", 0))
    in_warmup = evidence.incident.onset_step <= warmup + 1
    change = "let the rate rise over the whole warm-up" if in_warmup else "give the rate back to its schedule"
    return Remedy(
        sentence=f"The learning rate jumped{told} within one step{off}.",
        change=f"{change}; find who wrote it at iteration {evidence.onset}",
        overrides=[f"optim.warmup_steps={max(warmup, 1)}"] if in_warmup else [],
        lesson="The learning rate is a function of configuration and step; anything else that writes it is a bug.",
    )


def _beta2_stale(evidence: Evidence) -> Remedy:
    beta2 = _setting(evidence, "optim.beta2", 0.999)
    return Remedy(
        sentence=f"Adam's second moment (beta2 {beta2:g}) was too slow to damp a large gradient: steps grew too long.",
        change="let the second moment forget faster",
        overrides=["optim.beta2=0.95"],
        lesson="A second moment must forget faster than the data surprises: 0.95 remembers 20 steps, 0.999 a thousand.",
    )


def _long_tail_token(evidence: Evidence) -> Remedy:
    batch = next((batch for batch in evidence.batches if batch.rarest), None)
    tokens = "" if batch is None else ", ".join(rare.text or str(rare.token) for rare in batch.rarest[:3])
    named = f" ({tokens})" if tokens else ""
    index = "A batch" if batch is None else f"Batch {batch.index}"
    clip = evidence.run.settings.get("optim.clip_norm")
    half = 0.5 if not isinstance(clip, int | float) else min(0.5, clip / 2)
    return Remedy(
        sentence=f"{index} held far more rare tokens{named} than any before, and their gradient dominated the update.",
        change="halve the clip threshold, which bounds what one batch can do; "
        "data.stratify.rare_below=10 spreads rare tokens where there is one source",
        overrides=[f"optim.clip_norm={half:g}"],
        lesson="One crowd of rare tokens can dominate the gradient of a whole cluster: spread them, and clip lower.",
    )


def _scrambled_data(evidence: Evidence) -> Remedy:
    batch = next((batch for batch in evidence.batches if batch.is_changed), None) or next(iter(evidence.batches), None)
    index = "A batch" if batch is None else f"Batch {batch.index}"
    rows = {} if batch is None else {name: count for name, count in batch.rows.items() if count}
    source = f" of source {next(iter(rows))}" if len(rows) == 1 else ""
    return Remedy(
        sentence=f"{index}{source} held tokens that are no text: scrambled, wrongly tokenized or damaged on the way.",
        change="read the file of these rows again from where it came, and compare its hash",
        lesson="Hash every shard when it is written and when it is read; entropy finds what was never hashed.",
    )


def _data_duplicate(evidence: Evidence) -> Remedy:
    found = [batch.index for batch in evidence.batches]
    listed = ", ".join(map(str, sorted(found)[:4])) or "not known"
    return Remedy(
        sentence=f"The loader gave the same tokens under several indices (batches {listed}).",
        change="repair the order of the samples or remove the duplicates from the corpus; until then skip the indices",
        lesson="Fingerprint every batch: a loader that repeats itself is cheap to see and expensive to miss.",
    )


def _other_data(evidence: Evidence) -> Remedy:
    batch = next(iter(evidence.batches), None)
    since = "" if batch is None else f" from about batch {min(each.index for each in evidence.batches)} on"
    return Remedy(
        sentence=f"The data changed{since}: the held-out loss is as before, and the new data is harder.",
        change="nothing is broken; announce such a change as a phase of data.phases, and the gate expects it",
        lesson="A higher training loss is damage only where the held-out loss rose too.",
    )


def _structural(evidence: Evidence) -> Remedy:
    settings, decay = evidence.run.settings, _setting(evidence, "optim.weight_decay", 0.1)
    if settings.get("model.qk_norm") is False:
        change, word = "normalise queries and keys, which bounds the attention logits", "model.qk_norm=true"
    elif not settings.get("model.z_loss"):
        change, word = "penalise the log-partition of the logits", "model.z_loss=0.0001"
    else:
        change, word = "double the weight decay", f"optim.weight_decay={2 * decay:g}"
    return Remedy(
        sentence="The model itself is unstable here: weights or logits grow whatever batch is shown.",
        change=change,
        overrides=[word],
        lesson="A cure that keeps failing is a diagnosis: change the architecture, not the data (Marin 32B, QK-norm).",
    )


def _lr_too_high(evidence: Evidence) -> Remedy:
    rate = _setting(evidence, "optim.lr", 0.0)
    return Remedy(
        sentence=f"The learning rate (peak {rate:g}) is too high for this phase of training.",
        change="halve the learning rate",
        overrides=[f"optim.lr={rate / 2:g}"] if rate else [],
        lesson="Spikes that recur across restarts and batches ask for a lower learning rate.",
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
    """How to see that it is gone: the run again, with the change, past the place where it happened."""
    run, incident = evidence.run, evidence.incident
    steps = verify_steps(evidence)
    tolerance = max(LEAST_TOLERANCE, 3 * measures.sigma)
    expect = ["exit code 0 of both commands: all steps done, and nothing found"]
    if measures.level is not None:
        expect.append(f"loss at step {incident.onset_step} within {tolerance:.2g} nats of {measures.level:.3f}")
    if measures.usual_grad is not None:
        high = 5 * measures.usual_grad
        expect.append(f"no gradient norm above {high:.3g} in steps {incident.onset_step} to {steps}")
    commands = []
    if run.overrides and steps:
        folder, name = str(PurePath(run.path).parent), f"verify-{run.name}-{evidence.folder}"
        changed = {word.partition("=")[0] for word in (remedy.overrides if remedy is not None else ())}
        kept = [word for word in run.overrides if word.partition("=")[0] not in {*changed, "train.num_steps"}]
        words = [*kept, *(remedy.overrides if remedy is not None else ())]
        place = [f"train.num_steps={steps}", f"run.dir={folder}", f"run.name={name}"]
        commands = [
            command("harness", "train", *words, *place),
            command("harness", "diagnose", f"{folder}/{name}"),
        ]
    if cause in LOOK_CAUSES or not commands:
        commands.append(command("harness", "replay", run.path, "--incident", str(incident.number)))
    seed = run.settings.get("run.seed")
    return Check(commands=commands, seed=seed if isinstance(seed, int) else None, steps=steps, expect=expect)


def verify_steps(evidence: Evidence) -> int | None:
    """Past the incident by what a spike may take to recover; no shorter than its schedule allows, no longer than the
    run."""
    num_steps = evidence.run.settings.get("train.num_steps")
    if not isinstance(num_steps, int):
        return None
    schedule = _setting(evidence, "optim.warmup_steps", 0)
    if evidence.run.settings.get("optim.schedule") == "wsd":
        schedule += _setting(evidence, "optim.decay_steps", 0)
    wanted = max(evidence.incident.last_step + STEPS_PAST, int(schedule) + 1)
    return min(wanted, num_steps)
