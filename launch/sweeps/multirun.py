"""Runs the jobs of a sweep, from their composed configs to one exit code.

Why: a sweep is resumed more often than it is started: machines fail, a job crashes, a value is added.
How: `launch.train` lets Hydra compose all jobs. Each is checked, gets a directory in the sweep, and is run by
`launch.sweeps.scheduler` on this machine or as part of one Slurm array. Rerun the same command to run the rest: a
finished job is skipped, an interrupted or crashed one resumes from its checkpoint, one that the sentinel halted stays
halted unless `run.resume=changed`. A rejected job, or one that another process runs, is one line and does not stop the
others. `sweep.yaml` lists the jobs of the sweep.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.sweep_record import Job, Sweep
from harness.config.command_line import override, shell_command
from harness.config.errors import (
    EXIT_BAD_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_INTERRUPTED,
    ConfigError,
    StorageError,
    require,
)
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core.events import EvalRecord
from harness.core.locking.run_lease import naming_full_disk, require_free
from harness.core.processes import last_line
from harness.core.rundir import RunDir, locate
from harness.core.stderr_lines import print_warning
from harness.telemetry.event_log import prepare_run, tail
from harness.telemetry.sinks.sink_process import send_rest
from launch.local.thread_count import num_cores
from launch.sweeps import scheduler
from launch.sweeps.jobs import ComposedJob, JobState, find_job_state, name_jobs

EXIT_CODES_BY_SEVERITY = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_HALTED, 1, EXIT_BAD_CONFIG)
NOT_SHARED = ("run.name=", "launch.at_once=", "hydra.", "hydra/")
"""Overrides of the sweep as a whole, not of its jobs."""
OUTCOMES = {EXIT_DONE: "done", EXIT_HALTED: "halted", EXIT_INTERRUPTED: "interrupted", EXIT_BAD_CONFIG: "rejected"}


def run_sweep(directory: Path, composed: Sequence[ComposedJob], arguments: Sequence[str]) -> int:
    """Run the missing jobs of a sweep; returns the worst exit code, or 75 if it was stopped."""
    try:
        check_directory(directory, composed)
        jobs = name_jobs(directory, composed)
        for number, (job, _) in enumerate(jobs):
            if job.problem:
                print_rejected(number, job, job.problem)
        accepted = {job.name: cfg for job, cfg in jobs if cfg is not None}
        if not accepted:
            return EXIT_BAD_CONFIG
        fixed = shared_overrides(arguments, jobs[0][0])
        sweep = Sweep(
            name=directory.name,
            created=time.time(),
            words=resume_arguments(arguments, directory.name),
            fixed=fixed,
            jobs=[replace(job, fixed=fixed) for job, _ in jobs],
        )
        codes = [EXIT_BAD_CONFIG for job, _ in jobs if job.problem]
        with naming_full_disk(directory):
            return worst_exit_code([*codes, run_missing_jobs(directory, sweep, accepted)])
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    finally:
        remove_hydra_output(directory)


def check_directory(directory: Path, composed: Sequence[ComposedJob]) -> None:
    """Reject a sweep that would not have one directory of its own."""
    for key in ("run.name", "run.dir"):
        message = "cannot be swept: all jobs of a sweep are in one directory; give one value"
        require(all(key not in (name.lstrip("+") for name in job.overrides) for job in composed), key, message)
    kinds = {job.cfg.launch.kind for job in composed if job.cfg is not None}
    require(len(kinds) <= 1, "launch", "cannot be swept: one launcher starts all jobs of a sweep; give one value")
    message = f"{directory} is the directory of a run; choose another name for the sweep"
    require(not RunDir(directory).config.exists(), "run.name", message)


def remove_hydra_output(directory: Path, created: Sequence[Path] = ()) -> None:
    """Remove Hydra's multirun.yaml, which `sweep.yaml` replaces, and an empty sweep directory.

    `created`: further directories to remove if they are empty, innermost first.
    """
    with suppress(OSError):
        (directory / "multirun.yaml").unlink(missing_ok=True)
        if [path.name for path in directory.iterdir()] in ([], [scheduler.LOCK]):
            (directory / scheduler.LOCK).unlink(missing_ok=True)
            directory.rmdir()
    for each in created:
        with suppress(OSError):
            each.rmdir()


def run_missing_jobs(directory: Path, sweep: Sweep, cfgs: dict[str, Config]) -> int:
    """Run the pending jobs; returns the worst exit code of the accepted jobs."""
    first = next(iter(cfgs.values())).launch
    if first.dry_run:
        states = find_job_states(directory, cfgs)
        pending = select_pending(cfgs, states)
        print(render_slurm_array(pending, directory) if pending else f"{render_opening(directory, states)}\n", end="")
        return EXIT_DONE
    with scheduler.lock_sweep(directory) as lock:
        states = find_job_states(directory, cfgs)  # read under the lock: another launcher may have submitted jobs
        pending = select_free(chosen := select_pending(cfgs, states), sweep)
        in_use = [EXIT_BAD_CONFIG] * (len(chosen) - len(pending))
        before = [*in_use, *([EXIT_HALTED] if JobState.halted in states.values() else [])]
        started = {str(cfg.run.name) for cfg in pending}
        record = sweep_record.extend_sweep(sweep_record.read_if_exists(directory), sweep, started=started)
        if pending and first.kind is LaunchKind.slurm:
            job = submit_slurm_array(pending, directory)
            sweep_record.write(record, directory)
            print(f"{render_opening(directory, states)}\n{render_submitted(directory, job)}")
            return worst_exit_code(before)
        sweep_record.write(record, directory)
        slots = scheduler.split_machine(pending, num_cores=num_cores(), gpus=scheduler.visible_gpus())
        print(render_opening(directory, states, num_at_once=len(slots)), flush=True)
        runs = [prepare_run(cfg) for cfg in pending]
        codes, stopped = scheduler.run_jobs(runs, slots, lock, make_job_printer([job.name for job in sweep.jobs]))
    if not pending:
        return worst_exit_code(before)
    finish_in_mlflow(directory, pending)
    rejected = [*in_use, *(EXIT_BAD_CONFIG for job in sweep.jobs if job.problem)]
    outcomes = Counter(describe_outcome(code) for code in [*codes.values(), *rejected])
    print(render_summary(directory, outcomes, len(runs) - len(codes), sweep.words))
    return EXIT_INTERRUPTED if stopped else worst_exit_code([*before, *codes.values()])


def find_job_states(directory: Path, cfgs: dict[str, Config]) -> dict[str, JobState]:
    return {name: find_job_state(RunDir(directory / name), cfg) for name, cfg in cfgs.items()}


def select_pending(cfgs: dict[str, Config], states: dict[str, JobState]) -> list[Config]:
    return [cfg for name, cfg in cfgs.items() if states[name] is JobState.pending]


def select_free(cfgs: Sequence[Config], sweep: Sweep) -> list[Config]:
    """Those jobs that no other process runs; each of the others is a line."""
    free, numbers = [], {job.name: number for number, job in enumerate(sweep.jobs)}
    for cfg in cfgs:
        try:
            require_free(locate(cfg).path, wait=False)
            free.append(cfg)
        except ConfigError as error:
            number = numbers[str(cfg.run.name)]
            print_rejected(number, sweep.jobs[number], str(error))
    return free


def print_rejected(number: int, job: Job, problem: str) -> None:
    print(f"harness: job {number} ({', '.join(job.override_list)}): {problem}", file=sys.stderr)


def submit_slurm_array(cfgs: Sequence[Config], directory: Path) -> str:
    """Submit jobs to Slurm as one array; returns the job id."""
    from launch.slurm import submit

    return submit.submit_array(cfgs, directory)


def render_slurm_array(cfgs: Sequence[Config], directory: Path) -> str:
    """The script that would be submitted."""
    from launch.slurm import submit

    message = "is for launch=slurm; `harness train --cfg job` prints the config of one job"
    require(cfgs[0].launch.kind is LaunchKind.slurm, "launch.dry_run", message)
    submit.check_array(cfgs)
    return submit.render_array_script(cfgs, directory)


def worst_exit_code(codes: Sequence[int]) -> int:
    known = [code if code in EXIT_CODES_BY_SEVERITY else 1 for code in codes]
    return max(known, key=EXIT_CODES_BY_SEVERITY.index, default=EXIT_DONE)


def resume_arguments(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments that resume this sweep: the given ones, with the name of the sweep."""
    return (
        [*arguments]
        if any(argument.startswith("run.name=") for argument in arguments)
        else [*arguments, override("run.name", name)]
    )


def shared_overrides(arguments: Sequence[str], job: Job) -> list[str]:
    """The overrides that all jobs share."""
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith(("-", *NOT_SHARED))]
    return [argument for argument in overrides if argument.partition("=")[0] not in job.overrides]


def finish_in_mlflow(directory: Path, cfgs: Sequence[Config]) -> None:
    """End the MLflow run of the sweep; a server that does not answer costs a bounded time and a warning."""
    tracked = [cfg.telemetry for cfg in cfgs if cfg.telemetry.mlflow]
    if not tracked:
        return
    within_s = max(section.exit_wait_s for section in tracked)
    if problem := send_rest([str(directory)], log=directory / "mlflow.log", within_s=within_s):
        print_warning(f"the end of the sweep was not recorded in MLflow: {problem}")


def make_job_printer(names: Sequence[str]) -> Callable[[RunDir, int | None, float], None]:
    """Returns a callback that prints a line for each job that starts or ends."""
    numbers = {name: number for number, name in enumerate(names, start=1)}

    def print_change(run: RunDir, code: int | None, seconds: float) -> None:
        prefix = f"[{numbers[run.path.name]:>{len(str(len(names)))}}/{len(names)}]"
        print(f"{prefix} {render_start(run) if code is None else render_end(run, code, seconds)}", flush=True)

    return print_change


def render_start(run: RunDir) -> str:
    return f"{'resume' if run.events.exists() else 'start'}  {run.path.name}"


def render_end(run: RunDir, code: int, seconds: float) -> str:
    """How a job ended: its held-out loss if it has one, and after a failure its last line of output."""
    losses = [event.loss for event in tail(run.events) if isinstance(event, EvalRecord)]
    loss = f", held-out loss {losses[-1]:.4f}" if losses else ""
    line = f"{describe_outcome(code)} in {seconds:.0f} s{loss}  {run.path.name}"
    if code in (EXIT_DONE, EXIT_INTERRUPTED):
        return line
    console = run.logs / "console.txt"
    return f"{line}\n    {last_line(console)}\n    {console}"


def describe_outcome(code: int) -> str:
    return OUTCOMES.get(code, "crashed")


def render_opening(directory: Path, states: dict[str, JobState], *, num_at_once: int = 0) -> str:
    counts = Counter(states.values())
    before = [
        f"{counts[state]} {state} before" for state in JobState if state is not JobState.pending and counts[state]
    ]
    at_once = f", {num_at_once} at once" if num_at_once else ""
    to_run = f"{counts[JobState.pending]} of {len(states)} jobs to run"
    return f"sweep {directory}: {', '.join([to_run, *before])}{at_once}"


def render_submitted(directory: Path, job: str) -> str:
    """Where to find the logs and the report of a submitted array."""
    return "\n".join(
        [
            f"job {job}: {directory}",
            f"  logs    {directory}/slurm/slurm-{job}_*.log",
            f"  report  {shell_command('harness', 'sweep', 'report', directory)}",
            f"  cancel  scancel {job}",
        ]
    )


def render_summary(directory: Path, outcomes: Counter[str], num_not_started: int, arguments: Sequence[str]) -> str:
    """How many jobs ended how, the report command, and the command that runs the rest."""
    counts = [f"{count} {name}" for name, count in outcomes.items()]
    counts += [f"{num_not_started} not started"] if num_not_started else []
    lines = [", ".join(counts), f"report  {shell_command('harness', 'sweep', 'report', directory)}"]
    if set(outcomes) & {"crashed", "interrupted"} or num_not_started:
        lines.append(f"resume  {shell_command('harness', 'train', *arguments)}")
    return "\n".join(lines)
