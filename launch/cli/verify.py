"""`harness verify`: checks that the remedy of an incident works, criterion by criterion.

How: the criteria come from the post-mortem. They are checked on the log of the run itself if it continued past the
incident; else, or with --rerun, the run is trained again with the same seed and the remedy, in a directory of its own
(`verify-RUN-NNN`). The repetition keeps `train.num_steps`, on which the learning rate depends; a thread reads its log,
and writes the file STOP once it has the last step of the check. An interrupted repetition is resumed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.gather import find_incident, gather_evidence, settings_of
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.rules.hypotheses import rank_causes, root_cause
from harness.analysis.postmortem.rules.remedies import remedy_of
from harness.analysis.postmortem.verification import (
    CheckedCriterion,
    Verification,
    check_log,
    kept_steps,
    verification_of,
)
from harness.analysis.postmortem.write import complete_evidence
from harness.config.command_line import shell_command
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.control import stop_requests
from harness.core.events import StepRecord
from harness.core.rundir import RunDir, user_name
from harness.telemetry.event_log import log_size, read_non_step_events, read_steps, tail
from launch.cli.parser import CommandParser
from launch.local.stop_signals import block_stop_signals

DESCRIPTION = """\
Check the criteria of an incident's post-mortem: the smoothed loss stays at its pre-spike level, the guilty step has an
ordinary loss, and gradient norms around it are ordinary before and after clipping. Without --rerun and --log the log of
RUN itself is checked if it continued past the incident; else RUN is trained again with its seed and the remedy,
and stopped after the last step of the check. A run of Slurm or Kubernetes is not trained again on this machine: the
command for it is printed.

exit code: 0 all criteria hold, 1 one does not, 2 bad input or a rejected repetition, 75 the repetition was interrupted
(run the command again)
"""
EXIT_FAILED = 1
POLL_S = 0.5
"""How often the log of a repetition is read."""
STEPS_BEFORE, LAST_ITERATION = 100, 1 << 62
"""Steps before the guilty one that the smoothed loss needs, with a margin; above every iteration."""


def main(argv: Sequence[str]) -> int:
    """Print one line for each criterion; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        run = require_run(args.run)
        evidence = gather_evidence(run, find_incident(run, args.incident))
        complete_evidence(run, evidence)
        wanted = plan_verification(evidence)
        checked = choose_run(run, args, wanted)
        if checked is None:
            checked = RunDir(Path(wanted.folder))
            code = train_again(wanted, evidence)
            is_stopped_early = code == EXIT_INTERRUPTED and not has_all_steps(checked, wanted)
            if is_stopped_early or code == EXIT_BAD_CONFIG:  # the training printed why
                return code
        if checked is run:  # without the remedy: its own clip threshold counts, also if a resume has changed it
            wanted = replace(verification_of(evidence, None), clip_norm=clip_norm_of(run))
        lines = check_log_of(checked, wanted)
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    print(f"{checked.path}, incident {args.incident} of {run.path}:")
    for line in lines:
        print(f"  {'pass' if line.passed else 'FAIL'}  {line.text}")
    return EXIT_DONE if all(line.passed for line in lines) else EXIT_FAILED


def require_run(path: Path) -> RunDir:
    """The run directory; `ConfigError` if it is none."""
    run = RunDir(path)
    require(run.events.exists(), str(path), f"is not a run directory: it has no {run.events.name}")
    return run


def plan_verification(evidence: Evidence) -> Verification:
    """The criteria, with the remedy of the root cause if one is known."""
    cause = root_cause(rank_causes(evidence, measure(evidence)))
    return verification_of(evidence, None if cause is None else remedy_of(cause.cause, evidence))


def choose_run(run: RunDir, args: Namespace, wanted: Verification) -> RunDir | None:
    """The run whose log is checked; None: a repetition that must be trained first."""
    if args.log is not None:
        return require_run(args.log)
    return run if not args.rerun and has_all_steps(run, wanted) else None


def has_all_steps(run: RunDir, wanted: Verification) -> bool:
    """Whether the run kept the last step that the criteria need."""
    return run.events.exists() and max(steps_of(run, wanted), default=0) >= wanted.through


def steps_of(run: RunDir, wanted: Verification) -> dict[int, StepRecord]:
    """The steps that the run kept and the criteria need; a step is never in an earlier iteration than its number."""
    records = read_steps(run.events, max(wanted.guilty_step - STEPS_BEFORE, 0), LAST_ITERATION)
    return kept_steps(records, read_non_step_events(run.events))


def train_again(wanted: Verification, evidence: Evidence) -> int:
    """Train the run again with the remedy; returns the exit code of the training."""
    from launch import train

    reason = "its configuration cannot be written as overrides"
    if evidence.first_weights:
        reason = f"it began with {evidence.first_weights}, not with the weights of its seed"
    require(bool(wanted.train), evidence.run.path, f"{reason}; train it again by hand and pass --log")
    kind = evidence.run.settings.get("launch.kind", "local")
    command = shell_command("harness", "train", *wanted.train, f"launch={kind}")
    message = f"it was not trained on this machine; run `{command}` with its other keys of launch"
    require(kind == "local", evidence.run.path, f"{message} through step {wanted.through}, and pass --log")
    with stopping_after(RunDir(Path(wanted.folder)), wanted.through):
        return train.main([*wanted.train, f"launch.nproc={evidence.run.world_size}"])


@contextmanager
def stopping_after(run: RunDir, step: int) -> Iterator[None]:
    """While the body trains a run, ask it to stop once its log has a step."""
    ended, old_bytes = Event(), log_size(run.events)

    def watch() -> None:
        block_stop_signals()  # they are for the launcher in the main thread
        is_asked = False
        while not is_asked and not ended.wait(POLL_S):
            with suppress(OSError):
                has_started = log_size(run.events) != old_bytes  # before it starts, it removes older requests
                steps = [event.step for event in tail(run.events) if isinstance(event, StepRecord)]
                if has_started and steps and steps[-1] >= step:
                    stop_requests.ask(run, who=user_name(), reason=f"harness verify needs no step after {step}")
                    is_asked = True

    watcher = Thread(target=watch, name="stop-after", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def check_log_of(run: RunDir, wanted: Verification) -> list[CheckedCriterion]:
    """The criteria, checked on the log of a run."""
    require(run.events.exists(), str(run.path), "has no log: the training did not start")
    return check_log(wanted, steps_of(run, wanted), clip_norm=clip_norm_of(run))


def clip_norm_of(run: RunDir) -> float | None:
    """The clip threshold of a run now; None: it has none."""
    clip = settings_of(run).get("optim.clip_norm")
    return float(clip) if isinstance(clip, int | float) else None


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness verify", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run with the incident, such as runs/first")
    parser.add_argument("--incident", type=int, required=True, metavar="N", help="number of the incident")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rerun", action="store_true", help="train again with the remedy, even if RUN continued")
    which.add_argument("--log", type=Path, metavar="OTHER", help="check the log of this run instead")
    return parser
