"""Runs a drill: creates twin and victim, starts them as an operator would, and scores them.

Each start is a process `python -m launch.local.node RUN` in its own session, with its output in `logs/start-N.*`. A
victim that ends with 75, with 1 or by a signal is started again, as a scheduler would requeue it, at most once more
than the scenario expects. With launch=slurm the two directories are submitted as jobs, and Slurm requeues them.
With launch=local and several nodes, the nodes are rehearsed on this machine (`launch.drills.local_nodes`), and the twin
has as many ranks on one node.
No process outlives its start: the rest of its session is killed when the launcher is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core import processes
from harness.core.event_json import to_json
from harness.core.rundir import RunDir, append_line, write_atomically
from harness.core.stderr_lines import print_warning
from harness.drills import directories
from harness.drills import score_card as cards
from harness.drills.drill_record import DrillRecord, Start, gather, read_drill_record
from harness.drills.scenario import Scenario
from harness.drills.score import Card, score_run
from harness.telemetry.event_log import last_iteration
from harness.telemetry.sinks.sink_process import SINK_LOG, send_rest
from launch.drills.fault_environment import (
    FaultEnvironment,
    UnavailableError,
    open_environment,
    require_environment,
)
from launch.drills.local_nodes import local_node_overrides, on_one_node, rehearses_nodes, start_nodes
from launch.local.thread_count import count_expected_ranks

POLL_S = 0.1
ORPHANS_MAY_TAKE_S = 5.0
STOP_WITHIN_S = 60.0
FINAL = (EXIT_DONE, EXIT_BAD_CONFIG, EXIT_HALTED)
"""Exit codes after which a run is not started again."""

Report = Callable[[str], None]


def print_nothing(_line: str) -> None:
    """Ignore a progress line."""


@final
class RejectedStartError(Exception):
    """A start rejected its configuration; holds the output of the launcher."""


def run_drill(
    name: str, scenario: Scenario, overrides: Sequence[str], *, report: Report = print_nothing, to_mlflow: bool = True
) -> Card:
    """Train twin and victim and score them, in `runs/drill-NAME` and `runs/drill-NAME-twin`."""
    cfg = check_drill(name, scenario, overrides)
    victim, twin = drill_directories(name, cfg)
    train_twin(on_one_node(cfg), twin, report=report, limit_s=scenario.limit_s)
    with open_environment([scenario.fault.kind], cfg, victim, twin=gather(twin)) as environment:
        directories.create_directory(environment.cfg, victim)
        environment.set_up()
        DrillRecord(name=name, scenario=scenario, plan=scenario.plan, twin=twin.path.name).write(victim)
        train_victim(
            environment, victim, max_starts=scenario.expected.starts + 1, limit_s=scenario.limit_s, report=report
        )
        if notes := environment.clean_up():
            record = read_drill_record(victim)
            record.notes += notes
            record.write(victim)
        return finish_drill(victim, to_mlflow=to_mlflow)


def check_drill(name: str, scenario: Scenario, overrides: Sequence[str]) -> Config:
    """The training config of a drill. Raises ConfigError if the drill cannot run or cannot have the expected reaction,
    and UnavailableError if another drill could: `harness drill all` skips this one."""
    cfg = configure_drill(scenario.train, overrides)
    for run in drill_directories(name, cfg):
        directories.check_replaceable(run)
    require_environment(scenario.fault.kind, cfg)
    if (unmet := scenario.find_unmet(cfg)) is not None:
        raise UnavailableError(unmet[0], f"{unmet[1]}: the drill {name} needs it")
    check_drill_ranks(name, scenario, cfg)
    num_steps, fault = cfg.train.num_steps, scenario.fault
    if fault.at_s is None and fault.at > num_steps:
        raise UnavailableError("drill.fault.at", f"must be at most train.num_steps={num_steps}, got {fault.at}")
    return cfg


def drill_directories(name: str, cfg: Config) -> tuple[RunDir, RunDir]:
    """The run directories of the victim and of its twin."""
    runs = Path(cfg.run.dir)
    return RunDir(runs / f"drill-{name}"), RunDir(runs / f"drill-{name}-twin")


def configure_drill(train: Sequence[str], overrides: Sequence[str]) -> Config:
    """The training config of a drill; nodes that are rehearsed on this machine share its cores."""
    cfg = directories.configure(train, overrides)
    if not rehearses_nodes(cfg):
        return cfg
    return directories.configure(train, [*overrides, *local_node_overrides(cfg)])


def check_drill_ranks(name: str, scenario: Scenario, cfg: Config) -> None:
    """Reject a fault of a rank that the run will not have, and a run with too few ranks, before the twin is trained.

    Without `launch.nproc`, a Slurm job counts the GPUs of its own nodes; then the victim rejects it.
    """
    if cfg.launch.kind is LaunchKind.local or cfg.launch.nproc:
        twin = on_one_node(cfg)
        num_ranks = twin.launch.nodes * count_expected_ranks(twin)
        if num_ranks < scenario.min_ranks:
            message = f"the drill {name} needs at least {scenario.min_ranks} ranks, got {num_ranks}"
            raise UnavailableError("launch.nproc", message)
        scenario.fault.rank_of(num_ranks)


def train_twin(cfg: Config, twin: RunDir, *, report: Report, limit_s: float) -> None:
    """Train the run without faults, unless an equal twin exists."""
    if directories.prepare_twin(cfg, twin):
        report(f"{twin.path.name}: reused an equal twin, not trained again")
        return
    start = run_once(cfg, twin, limit_s=limit_s)
    report(start_line(twin, start))
    if start.exit_code == EXIT_BAD_CONFIG:
        raise RejectedStartError("\n".join(start.said))


def train_victim(
    environment: FaultEnvironment,
    victim: RunDir,
    *,
    max_starts: int,
    limit_s: float,
    report: Report,
    reboot_after_s: float | None = None,
) -> None:
    """Start the run until it is done, as a scheduler would; every start is added to the drill record."""
    record = read_drill_record(victim)
    for _ in range(max_starts):
        start = run_once(environment.cfg, victim, limit_s=limit_s, wrap=environment.wrap, reboot_after_s=reboot_after_s)
        record.starts.append(start)
        record.write(victim)
        report(start_line(victim, start))
        if start.exit_code == EXIT_BAD_CONFIG:
            raise RejectedStartError("\n".join(start.said))
        if start.exit_code in FINAL or environment.cfg.launch.kind is LaunchKind.slurm:
            return


def start_line(run: RunDir, start: Start) -> str:
    """Progress line of a finished start."""
    why = f": {start.said[0].removeprefix('harness: ')}" if start.said else ""
    return f"{run.path.name}: exit code {start.exit_code} after {start.seconds:.1f} s{why}"


def run_once(
    cfg: Config, run: RunDir, *, limit_s: float, wrap: Sequence[str] = (), reboot_after_s: float | None = None
) -> Start:
    """Run one start to its end, here or as a Slurm job.

    reboot_after_s: of several nodes on this machine, one that was killed comes back after this time; None: never.
    """
    if cfg.launch.kind is LaunchKind.slurm:
        return start_job(run)
    if rehearses_nodes(cfg):
        return start_nodes(run, cfg, limit_s=limit_s, reboot_after_s=reboot_after_s)
    return start_here(run, limit_s=limit_s, wrap=wrap)


def start_here(run: RunDir, *, limit_s: float, wrap: Sequence[str] = ()) -> Start:
    """Run `python -m launch.local.node RUN`; it is killed after `limit_s` seconds."""
    number = len(list(run.logs.glob("start-*.stderr")))
    paths = [run.logs / f"start-{number}.{stream}" for stream in ("stdout", "stderr")]
    begun_s = time.monotonic()
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        command = [*wrap, *processes.command("launch.local.node", str(run.path.resolve()))]
        process = subprocess.Popen(
            command,
            env=processes.child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        output = []
        try:
            process.wait(timeout=limit_s)
            ended = time.time()
        except subprocess.TimeoutExpired:
            ended = time.time()
            output.append(f"harness: did not end within {limit_s:g} s and was killed")
        except KeyboardInterrupt:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=STOP_WITHIN_S)
            raise
        finally:
            end_session(process)
    lines = paths[1].read_text(encoding="utf-8", errors="replace").splitlines()
    output += [line for line in lines if line.startswith("harness: ")]
    seconds = round(time.monotonic() - begun_s, 3)
    return Start(exit_code=process.returncode, said=output, seconds=seconds, ended=ended)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Wait for the rest of the launcher's session, then kill it: two starts of one run must not overlap."""
    deadline_s = time.monotonic() + (ORPHANS_MAY_TAKE_S if process.poll() is not None else 0)
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(process.pid, 0)
            time.sleep(POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_job(run: RunDir) -> Start:
    """Run a Slurm job with all its requeues; the time limit is that of the job."""
    from launch.slurm import submit

    begun_s = time.monotonic()
    cfg = compose.read(run.config)
    cfg.run.dir, cfg.run.name = str(run.path.parent), run.path.name
    job = submit.submit_run(cfg)
    code = submit.wait_for_job(job).exit_code
    log = run.logs / f"slurm-{job}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    output = [line for line in lines if line.startswith("harness: ")]
    return Start(exit_code=code, said=output, seconds=round(time.monotonic() - begun_s, 3))


def finish_drill(victim: RunDir, *, to_mlflow: bool) -> Card:
    """Score a drill that has ended; writes the score card, its event and MLflow."""
    card = write_card(victim)
    event = card.as_event(time=time.time(), iteration=max(last_iteration(victim.events), 0))
    append_line(victim.events, to_json(event))
    if to_mlflow:
        send_to_mlflow(victim)
    return card


def write_card(victim: RunDir) -> Card:
    """Score a drill from its directory and write the score card into it."""
    card = score_run(victim)
    write_atomically(victim.path / "score.json", cards.as_json(card))
    write_atomically(victim.score_card, cards.as_markdown(card))
    return card


def send_to_mlflow(run: RunDir) -> None:
    """Send the unsent events to MLflow; prints a warning if the store does not answer."""
    log = run.logs / SINK_LOG
    if send_rest([str(run.path), "--only", "mlflow"], log=log, within_s=None):
        print_warning(f"{run.path.name} was not sent to MLflow; see {log}")
