"""The jobs of a sweep from their composed configurations to one exit code.

Why: a sweep is resumed more often than it is started: machines go down, one job fails, a value is added.
How: `launch.train` lets Hydra compose all jobs and hands them over. Each is checked, laid out in a directory of the
sweep's, and run by `launch.sweeps.scheduler` on this machine or by one array of Slurm. The same words again start what
is missing: a job that is finished stays as it is, one that was interrupted or crashed goes on from its checkpoint, one
that the sentinel halted stays halted unless `run.resume=changed` says that something is different now. A job that is
refused is one line and does not stop the others. `sweep.yaml` says what the sweep consists of.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.sweep_record import Job, Sweep
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED, ConfigError, require
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core import processes
from harness.core.events import EvalRecord, to_json
from harness.core.rundir import RunDir, append_line, locate, make_config_change_event, prepare
from harness.telemetry.event_log import last_iteration, tail
from harness.telemetry.tracking.sink_process import SINK_MODULE, last_line
from launch.local.thread_count import num_cores
from launch.sweeps import scheduler
from launch.sweeps.jobs import Composed, Need, named, need

WORST_LAST = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_HALTED, 1, EXIT_BAD_CONFIG)
NOT_SHARED = ("run.name=", "launch.at_once=", "hydra.", "hydra/")
"""Words that belong to the sweep as a whole, not to any of its jobs."""
ENDINGS = {EXIT_DONE: "done", EXIT_HALTED: "halted", EXIT_INTERRUPTED: "interrupted", EXIT_BAD_CONFIG: "refused"}


def sweep_over(directory: Path, composed: Sequence[Composed], words: Sequence[str]) -> int:
    """Run what is missing of a sweep; returns the worst exit code, or 75 where it was told to stop."""
    jobs = named(directory, composed)
    for number, (job, _) in enumerate(jobs):
        if job.problem:
            print(f"harness: job {number} ({', '.join(job.words)}): {job.problem}", file=sys.stderr)
    accepted = {job.name: cfg for job, cfg in jobs if cfg is not None}
    try:
        if not accepted:
            return EXIT_BAD_CONFIG
        sweep = Sweep(
            name=directory.name,
            created=time.time(),
            words=words_again(words, directory.name),
            fixed=shared_words(words, jobs[0][0]),
            jobs=[job for job, _ in jobs],
        )
        codes = [EXIT_BAD_CONFIG for job, _ in jobs if job.problem]
        return worst([*codes, carry_out(directory, sweep, accepted)])
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    finally:
        leave_no_trace(directory)


def leave_no_trace(directory: Path) -> None:
    """Remove what Hydra wrote, since `sweep.yaml` says more, and a directory in which nothing was begun."""
    (directory / "multirun.yaml").unlink(missing_ok=True)
    if [path.name for path in directory.iterdir()] in ([], [scheduler.LOCK]):
        (directory / scheduler.LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()


def carry_out(directory: Path, sweep: Sweep, cfgs: dict[str, Config]) -> int:
    """Lay out what is left to do and have it done; returns the worst exit code of the jobs that were accepted."""
    first = next(iter(cfgs.values())).launch
    if first.dry_run and (missing := missing_of(cfgs, needs_of(directory, cfgs))):
        print(array_script(missing, directory), end="")
        return EXIT_DONE
    with scheduler.sole_sweeper(directory) as lock:
        needs = needs_of(directory, cfgs)  # after what another launcher submitted while it held the lock
        missing = missing_of(cfgs, needs)
        before = [EXIT_HALTED] if Need.halted in needs.values() else []
        known = sweep_record.extended(sweep_record.read_if_there(directory), sweep)
        if missing and first.kind is LaunchKind.slurm:
            job = slurm_array(missing, directory)
            sweep_record.write(known, directory)
            print(f"{opening(directory, needs)}\n{submitted(directory, job)}")
            return worst(before)
        sweep_record.write(known, directory)
        rooms = scheduler.rooms(missing, num_cores=num_cores(), gpus=scheduler.visible_gpus())
        print(opening(directory, needs, num_at_once=len(rooms)), flush=True)
        runs = [lay_out(cfg) for cfg in missing]
        codes, stopped = scheduler.work_off(runs, rooms, lock, teller([job.name for job in sweep.jobs]))
    if not missing:
        return worst(before)
    end_in_mlflow(directory, missing)
    refused = [EXIT_BAD_CONFIG for job in sweep.jobs if job.problem]
    endings = Counter(ending(code) for code in [*codes.values(), *refused])
    print(closing(directory, endings, len(runs) - len(codes), sweep.words))
    return EXIT_INTERRUPTED if stopped else worst([*before, *codes.values()])


def needs_of(directory: Path, cfgs: dict[str, Config]) -> dict[str, Need]:
    return {name: need(RunDir(directory / name), cfg) for name, cfg in cfgs.items()}


def missing_of(cfgs: dict[str, Config], needs: dict[str, Need]) -> list[Config]:
    return [cfg for name, cfg in cfgs.items() if needs[name] is Need.run]


def lay_out(cfg: Config) -> RunDir:
    """The directory of a job that is to run; what changed since it last did goes into its books."""
    run = locate(cfg)
    seen = max(last_iteration(run.events), 0)
    if changes := prepare(cfg, run, iteration=seen):
        append_line(run.events, to_json(make_config_change_event(changes, iteration=seen)))
    return run


def slurm_array(cfgs: Sequence[Config], directory: Path) -> str:
    """Hand jobs to Slurm as one array; returns its number."""
    from launch.slurm import submit

    return submit.submit_array(cfgs, directory)


def array_script(cfgs: Sequence[Config], directory: Path) -> str:
    """What would be submitted."""
    from launch.slurm import submit

    message = "is for launch=slurm; `harness train --cfg job` shows the configuration of one job"
    require(cfgs[0].launch.kind is LaunchKind.slurm, "launch.dry_run", message)
    return submit.array_script_of(cfgs, directory)


def worst(codes: Sequence[int]) -> int:
    known = [code if code in WORST_LAST else 1 for code in codes]
    return max(known, key=WORST_LAST.index, default=EXIT_DONE)


def words_again(words: Sequence[str], name: str) -> list[str]:
    """The words that resume this sweep: those of now, with its name."""
    return [*words] if any(word.startswith("run.name=") for word in words) else [*words, f"run.name={name}"]


def shared_words(words: Sequence[str], job: Job) -> list[str]:
    """The overrides that every job has."""
    overrides = [word for word in words if "=" in word and not word.startswith(("-", *NOT_SHARED))]
    return [word for word in overrides if word.partition("=")[0] not in job.overrides]


def end_in_mlflow(directory: Path, cfgs: Sequence[Config]) -> None:
    """Have the run of the sweep ended; a server that does not answer costs a bounded time and a line."""
    tracked = [cfg.telemetry for cfg in cfgs if cfg.telemetry.mlflow]
    if not tracked:
        return
    command = processes.command(SINK_MODULE, str(directory))
    log = directory / "mlflow.log"
    try:
        with log.open("ab") as output:
            done = subprocess.run(
                command,
                env=processes.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=max(section.exit_wait_s for section in tracked),
            )
        problem = "" if done.returncode == EXIT_DONE else last_line(log)
    except subprocess.TimeoutExpired:
        problem = "no answer"
    if problem:
        print(f"warning: how the sweep ended did not reach MLflow: {problem}", file=sys.stderr)


def teller(names: Sequence[str]) -> Callable[[RunDir, int | None, float], None]:
    """Prints a line for each job that begins or ends."""
    places = {name: place for place, name in enumerate(names, start=1)}

    def tell(run: RunDir, code: int | None, seconds: float) -> None:
        place = f"[{places[run.path.name]:>{len(str(len(names)))}}/{len(names)}]"
        print(f"{place} {begun(run) if code is None else ended(run, code, seconds)}", flush=True)

    return tell


def begun(run: RunDir) -> str:
    return f"{'resume' if run.events.exists() else 'start'}  {run.path.name}"


def ended(run: RunDir, code: int, seconds: float) -> str:
    """How a job ended: its loss where it has one, and where it did not end well, what it said last."""
    losses = [event.loss for event in tail(run.events) if isinstance(event, EvalRecord)]
    loss = f", held-out loss {losses[-1]:.4f}" if losses else ""
    line = f"{ending(code)} in {seconds:.0f} s{loss}  {run.path.name}"
    if code in (EXIT_DONE, EXIT_INTERRUPTED):
        return line
    console = run.logs / "console.txt"
    return f"{line}\n    {last_line(console)}\n    {console}"


def ending(code: int) -> str:
    return ENDINGS.get(code, "crashed")


def opening(directory: Path, needs: dict[str, Need], *, num_at_once: int = 0) -> str:
    counts = Counter(needs.values())
    before = [f"{counts[left]} {left} before" for left in Need if left is not Need.run and counts[left]]
    at_once = f", {num_at_once} at once" if num_at_once else ""
    return f"sweep {directory}: {', '.join([f'{counts[Need.run]} of {len(needs)} jobs to run', *before])}{at_once}"


def submitted(directory: Path, job: str) -> str:
    """What to know of an array that was queued."""
    return "\n".join(
        [
            f"job {job}: {directory}",
            f"  logs    {directory}/slurm/slurm-{job}_*.log",
            f"  report  harness sweep report {shlex.quote(str(directory))}",
            f"  cancel  scancel {job}",
        ]
    )


def closing(directory: Path, endings: Counter[str], num_not_begun: int, words: Sequence[str]) -> str:
    """What came of the jobs, where to look, and how to go on where something is left."""
    counted = [f"{count} {word}" for word, count in endings.items()]
    counted += [f"{num_not_begun} not begun"] if num_not_begun else []
    lines = [", ".join(counted), f"report  harness sweep report {shlex.quote(str(directory))}"]
    if set(endings) & {"crashed", "interrupted"} or num_not_begun:
        lines.append(f"again   {shlex.join(['harness', 'train', *words])}")
    return "\n".join(lines)
