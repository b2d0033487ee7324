"""What to replay: the step, the checkpoint to start from, and the log between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from harness.analysis.replay import history
from harness.analysis.replay.history import AcceptedLevel, History, ReplayPath
from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.compose import plain
from harness.config.errors import require
from harness.config.explain import explain
from harness.config.optim import SCHEDULE_KEYS
from harness.config.schema import Config
from harness.control.inbox import config_changes
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.manifest_file import read_run_manifest

if TYPE_CHECKING:
    from harness.build import Parts

KEYS_OF_DATA = ("data.", "train.batch_size")
"""How the keys begin of which a resume keeps the batches up to where it starts."""
KEYS_NOT_REPLAYED = (*SCHEDULE_KEYS, "eval.", "sentinel.policy.")
"""How the keys begin that change no replayed step. The learning rate of a step is in the log."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What to replay, and where to write the result."""

    run: Path
    report: Path
    """File of the result."""
    checkpoint: str | None
    """None: the initial state."""
    steps: list[StepRecord]
    """Steps from the checkpoint to the guilty one, which is last."""
    earlier: list[StepRecord] = field(default_factory=list)
    """Applied steps right before the guilty one, which say what is usual."""
    older: str | None
    """An older checkpoint for comparison; None: the initial state."""
    has_older: bool = True
    """False: there is no state before `checkpoint` to compare with."""
    exactly: bool
    """Whether results must be bit-identical to the log."""
    with_samples: bool
    accepted: list[AcceptedLevel] = field(default_factory=list)
    """Levels of the loss that were accepted between these steps."""
    logits_clipped_after: int | None = None
    """The last iteration before the policy began to clip attention logits; None: it never did."""
    in_fp32: bool = False
    """Compute the guilty step once more in fp32."""
    tamper: Callable[[Parts], None] | None = None
    """Corrupts the data again, in a drill."""


def choose_path(run: RunDir, log: History, iteration: int) -> ReplayPath:
    """The path to one iteration from the newest usable checkpoint before it."""
    good = [
        checkpoint.name
        for checkpoint in catalog.list_checkpoints(run.checkpoints)
        if checkpoint.health in (Health.good, Health.candidate)
    ]
    return history.find_path(log, iteration, good)


def config_of_path(run: RunDir, cfg: Config, log: History, path: ReplayPath) -> Config:
    """The configuration that the steps of a path were trained with: `cfg` without what later resumes have changed.

    `ConfigError` if a change lies between the steps, or if a resume has put other data into their batches.
    """
    tree, first = plain(cfg), path.stretches[0].start
    later = [event for event in config_changes(run) if event.iteration >= first]
    for event in reversed(later):
        is_behind = event.iteration >= path.iteration
        for key, (old, new) in event.changes.items():
            if key.startswith(KEYS_OF_DATA):
                is_possible = not (is_behind and is_undone(log, path.iteration, event.iteration))
            else:
                is_possible = is_behind or key.startswith(KEYS_NOT_REPLAYED)
            message = f"iteration {path.iteration} cannot be replayed: the resume after iteration {event.iteration}"
            require(is_possible, str(run.path), f"{message} changed {key} from {old} to {new}")
            if is_behind and not key.startswith(KEYS_OF_DATA):
                set_value(tree, key, old)
    try:
        return compose.validate(tree) if later else cfg
    except Exception as error:
        raise explain(error) from None


def is_undone(log: History, iteration: int, resumed_after: int) -> bool:
    """Whether the resume after an iteration restored a state from before a step."""
    restore = next((each for each in log.restores if each.after >= resumed_after), None)
    return restore is not None and restore.target is not None and restore.target < iteration


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in a nested tree."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def plan_replay(run: RunDir, cfg: Config, log: History, path: ReplayPath, *, ranks: int, report: Path) -> ReplayRequest:
    """The replay of a path; reads its steps from the log."""
    world_size = log.world_size(path.iteration)
    return ReplayRequest(
        run=run.path.resolve(),
        report=report,
        checkpoint=path.checkpoint,
        steps=history.read_path(log, path),
        accepted=history.accepted_on_path(log, path),
        logits_clipped_after=log.logits_clipped_after,
        earlier=history.applied_before(log, path),
        older=path.older,
        has_older=path.has_older,
        exactly=log.is_on_ranks(path, ranks) and can_reproduce(run, cfg),
        with_samples=False,
        tamper=partial(repeat_data_fault, run.path.resolve(), world_size, cfg.parallel.context)
        if run.drill.exists()
        else None,
    )


def can_reproduce(run: RunDir, cfg: Config) -> bool:
    """Whether a replay on as many ranks gives the same bits as the run."""
    if cfg.run.deterministic:
        return True
    hardware = read_run_manifest(run.manifest).get("hardware") or {}
    return not cfg.parallel.compile and hardware.get("device", "cpu") == "cpu"


def repeat_data_fault(run: Path, world_size: int, context: int, parts: Parts) -> None:
    """In a drill, inject the same bad data again."""
    from harness.faults.bad_batches import corrupt_planned_batches

    corrupt_planned_batches(RunDir(run), parts.batches, world_size, context=context)
