"""The fix of a diagnosis as shell commands: replay the step, restore a checkpoint, and train on with the change."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.diagnose.diagnosis import Diagnosis
from harness.config.command_line import changed_run_command, directory_and_name, override, run_overrides, shell_command


def fix_commands(
    diagnosis: Diagnosis, *, run: str, is_running: bool, overrides: Sequence[str] | None, is_finished: bool = False
) -> list[str]:
    """Commands in the order in which they are run; `overrides` reproduce the run's configuration; None: not known.

    A running run is rolled back, stopped and started with the change. One that has ended is started first, because only
    a running run can be rolled back. One with all steps done has nothing left to train: the change needs a new run.
    """
    replay = [shell_command("harness", "replay", run, *diagnosis.replay)] if diagnosis.replay else []
    ctl, reason = ["harness", "ctl", run], ["--reason", diagnosis.conclusion.partition(":")[0], "--wait"]
    step = str(diagnosis.restore_step)
    restore = [] if diagnosis.restore_step is None else [shell_command(*ctl, "rollback", "--to", step, *reason)]
    place = [*run_overrides(run), "run.resume=changed"]
    if is_finished:
        directory, name = directory_and_name(run)
        place, restore = [override("run.dir", directory), override("run.name", f"{name}-fixed")], []
    train = [changed_run_command(overrides, *diagnosis.overrides, *place)]
    if not is_running:
        return [*replay, *(train if diagnosis.overrides or restore else []), *restore]
    return [*replay, *restore, *([shell_command(*ctl, "stop", *reason), *train] if diagnosis.overrides else [])]
