"""Submits a run to Slurm as one job, or a sweep as an array of jobs; waits for a job on request.

Why: a submitted job must need nothing but its run directory, and must be checked before it waits in the queue for days.
How: the plan, the batch size and Slurm itself (`sbatch --test-only`) are checked first; an error is one line and leaves
nothing on disk. Then the job is submitted and held: some limits are checked only now. The run directory is created with
a copy of the code, the script is stored, and the job is released.
The tasks of an array read their run directories from a list. Its file name is a hash of the content, so it never
changes: a task that waits for days reads the line it was submitted with.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.analysis.plan.fit import refusal
from harness.config.compose import flat_values
from harness.config.errors import EXIT_DONE, ConfigError, require
from harness.config.parallel import DeviceKind
from harness.config.schema import Config, check_world
from harness.core.locking.run_lease import naming_full_disk
from harness.core.rundir import RunDir, locate, write_atomically
from launch.changed_config import require_fitting
from launch.slurm import code_snapshot, requeue
from launch.slurm.controller import ENDED_STATES, hostnames, queue_state, run_sbatch, run_slurm, submit_script
from launch.slurm.job_directory import SlurmJob, code_root, prepare_job_run, read_job, slurm_folder, write_job
from launch.slurm.job_script import build_directives, exclude_option, list_user_excludes, render
from launch.slurm.node_exclusion import NodeExclusion, choose_exclusions, limit_exclusions

SCRIPT = "train.sbatch"
DIGEST_LENGTH = 12
POLL_S = 2.0
LOST_AFTER_S = 120.0
"""How long Slurm may not know a job before `wait_for_job` fails."""
CPU_RANKS = 2
IN_SCRIPT = ("kind", "dry_run", "nodes", "min_nodes", "spares", "at_once", "slurm.")
"""Beginnings of the keys of `launch` that decide about the script of an array."""


def submit_or_print(cfg: Config) -> int:
    """Submit a run, or print the script with `launch.dry_run`; returns the exit code of the command."""
    if cfg.launch.dry_run:
        check_submission(cfg)
        print(render_script(cfg), end="")
        return EXIT_DONE
    job = submit_run(cfg)
    run = locate(cfg)
    path, log = shlex.quote(str(run.path)), shlex.quote(str(run.logs / f"slurm-{job}.log"))
    print(f"job {job}: {run.path}")
    print(f"  log     tail -F {log}")
    print(f"  status  harness status {path}")
    print(f"  stop    harness ctl {path} stop --reason ...    (saves a checkpoint; no requeue)")
    print(f"  cancel  scancel {job}")
    return EXIT_DONE


def submit_run(cfg: Config) -> str:
    """Create the run directory and submit the job; returns the job id."""
    check_submission(cfg)
    require_submittable(cfg, locate(cfg))
    script, excluded = choose_script([cfg], lambda without: render_script(cfg, without))

    def record(job: str) -> None:
        run = prepare_job_run(cfg)
        with naming_full_disk(run.path):
            code = code_snapshot.save_snapshot(code_root(run).resolve())
            write_atomically(slurm_folder(run) / SCRIPT, script)
        write_job(run, SlurmJob(job=job, code=str(code), excluded=excluded))

    return submit_script(script, record)


def submit_array(cfgs: Sequence[Config], directory: Path) -> str:
    """Submit several runs as one array, whose task i is run i; returns the job id.

    They share the settings of the script, one copy of the code, and the folder `slurm` of `directory`.
    """
    check_array(cfgs)
    for cfg in cfgs:
        check_submission(cfg)
        require_submittable(cfg, locate(cfg))
    script, excluded = choose_script(cfgs, lambda without: render_array_script(cfgs, directory, without))

    def record(job: str) -> None:
        runs = [prepare_job_run(cfg) for cfg in cfgs]
        shared = slurm_folder(RunDir(directory.resolve()))
        with naming_full_disk(directory):
            shared.mkdir(exist_ok=True)
            code = code_snapshot.save_snapshot(code_root(RunDir(directory.resolve())))
            list_path = run_list_path(cfgs, directory)
            if not list_path.exists():  # the name is a hash of the content
                write_atomically(list_path, run_list(cfgs))
            write_atomically(shared / SCRIPT, script)
        for index, run in enumerate(runs):
            write_job(run, SlurmJob(job=f"{job}_{index}", code=str(code), excluded=excluded))

    return submit_script(script, record)


def choose_script(
    cfgs: Sequence[Config], script_without: Callable[[Sequence[str]], str]
) -> tuple[str, dict[str, float]]:
    """The script that excludes as many failed nodes of these runs as Slurm accepts, and until when each is excluded;
    without those that the user excludes, for good."""
    runs = [locate(cfg) for cfg in cfgs]
    limits = cfgs[0].launch.slurm
    by_user = {node for expression in list_user_excludes(limits) for node in hostnames(expression)}
    faults = [fault for run in runs for fault in requeue.list_node_faults(run, requeue.read_ends(run))]
    found = choose_exclusions([fault for fault in faults if fault.node not in by_user], now=time.time(), limits=limits)
    kept = limit_exclusions(found, lambda nodes: is_accepted(script_without(nodes)))
    script = script_without([exclusion.node for exclusion in kept])
    if not kept:
        run_sbatch(script, "--test-only")
    print_exclusions(kept)
    return script, {exclusion.node: exclusion.until for exclusion in kept}


def is_accepted(script: str) -> bool:
    try:
        run_sbatch(script, "--test-only")
    except ConfigError:
        return False
    return True


def print_exclusions(exclusions: Sequence[NodeExclusion]) -> None:
    for exclusion in exclusions:
        print(f"harness: {exclusion.render()}", file=sys.stderr)


def render_script(cfg: Config, without: Sequence[str] = ()) -> str:
    """The script of one run."""
    run = RunDir(locate(cfg).path.resolve())
    asked = build_directives(
        cfg.launch, name=run.path.name, log=run.logs / "slurm-%j.log", working_directory=Path.cwd()
    )
    code = code_snapshot.snapshot_path(code_root(run))
    settings = script_settings(cfg, code, run=str(run.path))
    return render(read_template(), directives=[*asked, *exclude_option(cfg.launch.slurm, without)], settings=settings)


def render_array_script(cfgs: Sequence[Config], directory: Path, without: Sequence[str] = ()) -> str:
    """The script of several runs."""
    shared, (first, *_) = RunDir(directory.resolve()), cfgs
    at_once = f"%{first.launch.at_once}" if first.launch.at_once else ""
    asked = build_directives(
        first.launch,
        name=shared.path.name,
        log=slurm_folder(shared) / "slurm-%A_%a.log",
        working_directory=Path.cwd(),
        array=f"0-{len(cfgs) - 1}{at_once}",
    )
    settings = script_settings(
        first, code_snapshot.snapshot_path(code_root(shared)), run_list=str(run_list_path(cfgs, directory))
    )
    return render(read_template(), directives=[*asked, *exclude_option(first.launch.slurm, without)], settings=settings)


def run_list(cfgs: Sequence[Config]) -> str:
    """The list that the tasks of an array read: line i is the run directory of task i."""
    return "".join(f"{locate(cfg).path.resolve()}\n" for cfg in cfgs)


def run_list_path(cfgs: Sequence[Config], directory: Path) -> Path:
    """The file of the list; a different list has a different name, so none is ever overwritten."""
    digest = hashlib.sha256(run_list(cfgs).encode()).hexdigest()[:DIGEST_LENGTH]
    return slurm_folder(RunDir(directory.resolve())) / f"runs-{digest}.txt"


def check_array(cfgs: Sequence[Config]) -> None:
    """Reject tasks that cannot be those of one array, which has one script."""
    check_distinct_runs(cfgs)
    first = flat_values(cfgs[0].launch)
    for index, cfg in enumerate(cfgs):
        for key, value in flat_values(cfg.launch).items():
            message = f"is {first[key]} in job 0 and {value} in job {index}, but the jobs of an array share one script"
            is_same = value == first[key] or not key.startswith(IN_SCRIPT)
            require(is_same, f"launch.{key}", f"{message}; start a sweep for each value")


def check_distinct_runs(cfgs: Sequence[Config]) -> None:
    """Reject two tasks with one run directory: both would write the same checkpoints."""
    seen: dict[Path, int] = {}
    for index, cfg in enumerate(cfgs):
        path = locate(cfg).path.resolve()
        message = f"tasks {seen.get(path)} and {index} of the array would share {path}; give each run its own name"
        require(path not in seen, "run.name", message)
        seen[path] = index


def read_template() -> str:
    return (code_snapshot.slurm_dir() / SCRIPT).read_text(encoding="utf-8")


def script_settings(cfg: Config, code: Path, *, run: str = "", run_list: str = "") -> dict[str, str]:
    """Values for the settings of the script."""
    on_gpus = cfg.parallel.device is not DeviceKind.cpu
    checks = (cfg.launch.slurm.gpus_per_node or cfg.launch.nproc or 1) if on_gpus else 1
    return {
        "python": sys.executable,
        "code": str(code),
        "run": run,
        "run_list": run_list,
        "health": "true" if cfg.launch.slurm.health else "false",
        "checks_per_node": str(checks),
        **({"elastic": "true"} if cfg.launch.is_elastic else {}),
    }


def check_submission(cfg: Config) -> None:
    """Reject a config that cannot run on every number of nodes that the job may get."""
    path = str(locate(cfg).path.resolve())
    message = (
        f"must give a path without colon, backslash and line break, because it is part of PYTHONPATH, got {path!r}"
    )
    require(not set(":\\\n") & set(path), "run.dir", message)
    nproc = ranks_per_node(cfg)
    if nproc is None:
        message = f"must be at least 1 sequence for each of the {cfg.launch.nodes} nodes, got {cfg.train.batch_size}"
        require(cfg.train.batch_size * cfg.parallel.context >= cfg.launch.nodes, "train.batch_size", message)
        return
    for num_nodes in range(cfg.launch.min_nodes or cfg.launch.nodes, cfg.launch.nodes + 1):
        check_world_size(cfg, num_nodes, nproc)


def check_world_size(cfg: Config, num_nodes: int, nproc: int) -> None:
    """Reject a config that cannot run on this many nodes; names `launch.min_nodes` if that allows them."""
    try:
        check_world(cfg, num_nodes * nproc)
        if line := refusal(cfg, world_size=num_nodes * nproc):
            raise ConfigError("", line)
    except ConfigError as error:
        if num_nodes == cfg.launch.nodes:
            raise
        message = f"allows {num_nodes} of {cfg.launch.nodes} nodes, which cannot run this config: {error}"
        raise ConfigError("launch.min_nodes", message) from error


def ranks_per_node(cfg: Config) -> int | None:
    """None if it depends on the devices of the node."""
    on_cpu = CPU_RANKS if cfg.parallel.device is DeviceKind.cpu else None
    return cfg.launch.nproc or (None if on_cpu else cfg.launch.slurm.gpus_per_node) or on_cpu


def require_submittable(cfg: Config, run: RunDir) -> None:
    """Reject a config that the run does not admit, and a second job for it: both would write the same checkpoints."""
    require_fitting(cfg, run)
    known = read_job(run)
    if known is not None and (state := queue_state(known.job)):
        message = f"job {known.job} of this run is {state}; scancel {known.job} first, or choose another name"
        raise ConfigError("run.name", message)


class FinishedJob(NamedTuple):
    """How a job ended for good."""

    state: str
    """COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, ..."""
    exit_code: int
    """Exit code of the run; 1 if the job ended without one."""


def wait_for_job(job: str, *, poll_s: float = POLL_S) -> FinishedJob:
    """Wait until a job, or every task of an array, has ended for good; returns the worst of them."""
    answered_s = time.monotonic()
    while True:
        lines = run_slurm("scontrol", "show", "job", "--oneliner", job, check=False).splitlines()
        finished = [job_end for line in lines if (job_end := parse_finished(line))]
        if finished and len(finished) == len(lines):
            return max(finished, key=lambda job_end: job_end.exit_code)
        answered_s = time.monotonic() if lines else answered_s
        lost = time.monotonic() - answered_s > LOST_AFTER_S
        require(not lost, f"job {job}", f"unknown to Slurm for {LOST_AFTER_S:.0f} s")
        time.sleep(poll_s)


def parse_finished(line: str) -> FinishedJob | None:
    """How a job ended, from a line of `scontrol show job`; None while it is active."""
    fields = dict(re.findall(r"(JobState|ExitCode)=(\S+)", line))
    state = fields.get("JobState", "PENDING")
    if state not in ENDED_STATES:
        return None
    code = int(fields.get("ExitCode", "1:0").partition(":")[0])
    return FinishedJob(state, code or (0 if state == "COMPLETED" else 1))
