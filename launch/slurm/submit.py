"""Hands a run to Slurm: one job, or an array of jobs for a sweep; and waits for one where somebody wants to.

Why: a job that is submitted must need nothing but its run directory, and must be understood before it waits for days.
How: what cannot work is refused first, by the plan, by the division of the batch and by Slurm itself, with one line and
nothing on disk. Then the run directory is laid out with a copy of the code, the script is kept there and submitted.
An array reads its run directories from a list that is named by its content and never changes: a task that waits for
days finds the line it was submitted with, whatever was submitted since.
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
from harness.config.errors import EXIT_DONE, ConfigError, require
from harness.config.parallel import DeviceKind
from harness.config.schema import Config, check_world
from harness.core.rundir import RunDir, locate, write_atomically
from launch.slurm import code_snapshot, requeue
from launch.slurm.controller import WAITING, ask, ask_sbatch, queue_state
from launch.slurm.job_directory import Job, code_root, folder, lay_out, recall, remember
from launch.slurm.node_exclusion import Exclusion, bearable, excluded
from launch.slurm.render import directives, exclude_option, render

SCRIPT = "train.sbatch"
DIGEST_LENGTH = 12
POLL_S = 2.0
LOST_AFTER_S = 120.0
"""How long a controller may be silent."""
CPU_RANKS = 2


def start(cfg: Config) -> int:
    """Submit a run, or show what would be submitted; returns the exit code of the command."""
    if cfg.launch.dry_run:
        check(cfg)
        print(script_of(cfg), end="")
        return EXIT_DONE
    job = submit(cfg)
    run = locate(cfg)
    path, log = shlex.quote(str(run.path)), shlex.quote(str(run.logs / f"slurm-{job}.log"))
    print(f"job {job}: {run.path}")
    print(f"  log     tail -F {log}")
    print(f"  look    harness status {path}")
    print(f"  stop    harness ctl {path} stop --reason ...    (saves; does not begin again)")
    print(f"  cancel  scancel {job}")
    return EXIT_DONE


def submit(cfg: Config) -> str:
    """Lay out one run and queue it; returns the number of the job."""
    check(cfg)
    check_free(locate(cfg))
    script = accepted([cfg], lambda without: script_of(cfg, without))
    run = lay_out(cfg)
    code = code_snapshot.take(code_root(run).resolve())
    write_atomically(folder(run) / SCRIPT, script)
    job = ask_sbatch(script, "--parsable")
    remember(run, Job(job=job, code=str(code)))
    return job


def submit_array(cfgs: Sequence[Config], directory: Path) -> str:
    """Queue several runs as one array: its task i is the i-th run.

    They share the launch settings of the first, one copy of the code, and the folder `slurm` of `directory`.
    """
    check_apart(cfgs)
    for cfg in cfgs:
        check(cfg)
        check_free(locate(cfg))
    script = accepted(cfgs, lambda without: array_script_of(cfgs, directory, without))
    runs = [lay_out(cfg) for cfg in cfgs]
    shared = folder(RunDir(directory.resolve()))
    shared.mkdir(exist_ok=True)
    code = code_snapshot.take(code_root(RunDir(directory.resolve())))
    listed = list_of(cfgs, directory)
    if not listed.exists():  # its name says what it holds
        write_atomically(listed, run_list(cfgs))
    write_atomically(shared / SCRIPT, script)
    job = ask_sbatch(script, "--parsable")
    for index, run in enumerate(runs):
        remember(run, Job(job=f"{job}_{index}", code=str(code)))
    return job


def accepted(cfgs: Sequence[Config], script_without: Callable[[Sequence[str]], str]) -> str:
    """The script that Slurm would take: without the nodes that failed the health checks of these runs, as far as enough
    others are left."""
    ends = [end for cfg in cfgs for end in requeue.read(locate(cfg))]
    found = excluded(requeue.failures(ends), now=time.time(), limits=cfgs[0].launch.slurm)
    kept = bearable(found, lambda nodes: takes(script_without(nodes)))
    script = script_without([exclusion.node for exclusion in kept])
    if not kept:
        ask_sbatch(script, "--test-only")
    tell(kept)
    return script


def takes(script: str) -> bool:
    try:
        ask_sbatch(script, "--test-only")
    except ConfigError:
        return False
    return True


def tell(exclusions: Sequence[Exclusion]) -> None:
    for exclusion in exclusions:
        print(f"harness: {exclusion.render()}", file=sys.stderr)


def script_of(cfg: Config, without: Sequence[str] = ()) -> str:
    """The script of one run; pure but for where things lie."""
    run = RunDir(locate(cfg).path.resolve())
    asked = directives(cfg.launch, name=run.path.name, log=run.logs / "slurm-%j.log", working_directory=Path.cwd())
    code = code_snapshot.place(code_root(run))
    words = settings(cfg, code, run=str(run.path))
    return render(template(), directives=[*asked, *exclude_option(cfg.launch.slurm, without)], settings=words)


def array_script_of(cfgs: Sequence[Config], directory: Path, without: Sequence[str] = ()) -> str:
    """The script of several runs."""
    shared, (first, *_) = RunDir(directory.resolve()), cfgs
    at_once = f"%{first.launch.at_once}" if first.launch.at_once else ""
    asked = directives(
        first.launch,
        name=shared.path.name,
        log=folder(shared) / "slurm-%A_%a.log",
        working_directory=Path.cwd(),
        array=f"0-{len(cfgs) - 1}{at_once}",
    )
    words = settings(first, code_snapshot.place(code_root(shared)), run_list=str(list_of(cfgs, directory)))
    return render(template(), directives=[*asked, *exclude_option(first.launch.slurm, without)], settings=words)


def run_list(cfgs: Sequence[Config]) -> str:
    """What the tasks of an array read: line i is the run directory of task i."""
    return "".join(f"{locate(cfg).path.resolve()}\n" for cfg in cfgs)


def list_of(cfgs: Sequence[Config], directory: Path) -> Path:
    """Where the list of an array lies; other runs make another file, so that no list is ever overwritten."""
    digest = hashlib.sha256(run_list(cfgs).encode()).hexdigest()[:DIGEST_LENGTH]
    return folder(RunDir(directory.resolve())) / f"runs-{digest}.txt"


def check_apart(cfgs: Sequence[Config]) -> None:
    """Refuse two tasks of an array for one run directory: both would write the same checkpoints."""
    seen: dict[Path, int] = {}
    for index, cfg in enumerate(cfgs):
        path = locate(cfg).path.resolve()
        message = f"tasks {seen.get(path)} and {index} of the array would share {path}; give each run its own name"
        require(path not in seen, "run.name", message)
        seen[path] = index


def template() -> str:
    return (code_snapshot.slurm_dir() / SCRIPT).read_text(encoding="utf-8")


def settings(cfg: Config, code: Path, *, run: str = "", run_list: str = "") -> dict[str, str]:
    """What the script is told."""
    on_gpus = cfg.parallel.device is not DeviceKind.cpu
    checks = (cfg.launch.slurm.gpus_per_node or cfg.launch.nproc or 1) if on_gpus else 1
    return {
        "python": sys.executable,
        "code": str(code),
        "run": run,
        "run_list": run_list,
        "health": "true" if cfg.launch.slurm.health else "false",
        "checks_per_node": str(checks),
    }


def check(cfg: Config) -> None:
    """Refuse what could not run on any number of nodes that the job may get."""
    path = str(locate(cfg).path.resolve())
    message = f"a job finds its code there and cannot do with a colon, a backslash or a line break, got {path!r}"
    require(not set(":\\\n") & set(path), "run.dir", message)
    for num_nodes in range(cfg.launch.min_nodes or cfg.launch.nodes, cfg.launch.nodes + 1):
        if nproc := ranks_of_a_node(cfg):
            check_nodes(cfg, num_nodes, nproc)


def check_nodes(cfg: Config, num_nodes: int, nproc: int) -> None:
    """Refuse what cannot run on so many nodes; names `launch.min_nodes` where they are fewer than asked for."""
    try:
        check_world(cfg, num_nodes * nproc)
        if line := refusal(cfg, world_size=num_nodes * nproc):
            raise ConfigError("", line)
    except ConfigError as error:
        if num_nodes == cfg.launch.nodes:
            raise
        message = f"allows {num_nodes} of {cfg.launch.nodes} nodes, which cannot run this: {error}"
        raise ConfigError("launch.min_nodes", message) from error


def ranks_of_a_node(cfg: Config) -> int | None:
    """None where only the node knows how many devices it has."""
    on_cpu = CPU_RANKS if cfg.parallel.device is DeviceKind.cpu else None
    return cfg.launch.nproc or (None if on_cpu else cfg.launch.slurm.gpus_per_node) or on_cpu


def check_free(run: RunDir) -> None:
    """Refuse a second job for a run that has one: both would write the same checkpoints."""
    known = recall(run)
    if known is not None and (state := queue_state(known.job)):
        message = f"job {known.job} of this run is {state}; scancel {known.job} first, or choose another name"
        raise ConfigError("run.name", message)


class Finished(NamedTuple):
    """How a job ended for good."""

    state: str
    """COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, ..."""
    exit_code: int
    """The one of the contract; 1 where the job did not live to say it."""


def wait(job: str, *, poll_s: float = POLL_S) -> Finished:
    """Until a job, or every task of an array, has ended and will not begin again; of several the worst."""
    heard_s = time.monotonic()
    while True:
        lines = ask("scontrol", "show", "job", "--oneliner", job, complain=False).splitlines()
        finished = [ended for line in lines if (ended := finished_in(line))]
        if finished and len(finished) == len(lines):
            return max(finished, key=lambda each: each.exit_code)
        heard_s = time.monotonic() if lines else heard_s
        lost = time.monotonic() - heard_s > LOST_AFTER_S
        require(not lost, f"job {job}", f"Slurm has not known of it for {LOST_AFTER_S:.0f} s")
        time.sleep(poll_s)


def finished_in(line: str) -> Finished | None:
    """How the job of a line of `scontrol show job` ended; None where it has not."""
    words = dict(re.findall(r"(JobState|ExitCode)=(\S+)", line))
    state = words.get("JobState", "PENDING")
    if state in WAITING:
        return None
    code = int(words.get("ExitCode", "1:0").partition(":")[0])
    return Finished(state, code or (0 if state == "COMPLETED" else 1))
