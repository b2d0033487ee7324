"""Runs a drill: lays out the twin and the victim, starts them as an operator would, and has them scored.

How: each start is `python -m launch.local.node RUN`, a process of its own in a session of its own, whose output goes to
`logs/start-N.*`. A victim that ends with 75, with 1 or by a signal is started again, as a scheduler would requeue it,
once more than the scenario expects at most. The same two directories are submitted as jobs with launch=slurm, and
there the scheduler starts again.
Nothing of a start outlives it: what is left of its session when the launcher is gone is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
from harness.core.events import to_json
from harness.core.rundir import RunDir, append_line, write_atomically
from harness.drills import directories
from harness.drills import score_card as cards
from harness.drills.drill_record import DrillRecord, Start, gather, read_drill_record
from harness.drills.scenario import Scenario
from harness.drills.score import Card, score_run
from harness.telemetry.event_log import last_iteration
from harness.telemetry.tracking.sink_process import SINK_MODULE
from launch.drills.fault_environment import Stage, check_stage, stage_for

POLL_S = 0.1
ORPHANS_MAY_TAKE_S = 5.0
STOP_WITHIN_S = 60.0
FINAL = (EXIT_DONE, EXIT_BAD_CONFIG, EXIT_HALTED)
"""Exit codes after which nobody starts a run again."""

Say = Callable[[str], None]


def silent(_line: str) -> None:
    """For those who do not want to hear how far it is."""


@final
class RefusedError(Exception):
    """A start that refused its configuration, in its own words."""


def run_drill(
    name: str, scenario: Scenario, overrides: Sequence[str], *, say: Say = silent, to_mlflow: bool = True
) -> Card:
    """Train twin and victim, score them, and leave everything in `runs/drill-NAME` and `runs/drill-NAME-twin`."""
    cfg = directories.configure(scenario.train, overrides)
    runs = Path(cfg.run.dir)
    victim, twin = RunDir(runs / f"drill-{name}"), RunDir(runs / f"drill-{name}-twin")
    for run in (victim, twin):
        directories.check_replaceable(run)
    check_stage(scenario.fault.kind, cfg)
    train_twin(cfg, twin, say=say, limit_s=scenario.limit_s)
    with stage_for(scenario.fault.kind, cfg, victim, twin=gather(twin)) as stage:
        directories.lay_out(stage.cfg, victim)
        DrillRecord(name=name, scenario=scenario, plan=scenario.plan, twin=twin.path.name).write(victim)
        stage.set_up()
        train_victim(stage, victim, max_starts=scenario.expected.starts + 1, limit_s=scenario.limit_s, say=say)
        if notes := stage.look_after():
            record = read_drill_record(victim)
            record.notes += notes
            record.write(victim)
        return finish(victim, to_mlflow=to_mlflow)


def train_twin(cfg: Config, twin: RunDir, *, say: Say, limit_s: float) -> None:
    """The run with nothing broken, unless it lies there already."""
    if directories.lay_out_twin(cfg, twin):
        say(f"{twin.path.name}: taken over from an equal one, not trained again")
        return
    start = start_run(cfg, twin, limit_s=limit_s)
    say(in_words(twin, start))
    if start.exit_code == EXIT_BAD_CONFIG:
        raise RefusedError("\n".join(start.said))


def train_victim(stage: Stage, victim: RunDir, *, max_starts: int, limit_s: float, say: Say) -> None:
    """Start the run until it is done, as whoever requeues it would; every start goes into the drill record."""
    record = read_drill_record(victim)
    for _ in range(max_starts):
        start = start_run(stage.cfg, victim, limit_s=limit_s, wrap=stage.wrap)
        record.starts.append(start)
        record.write(victim)
        say(in_words(victim, start))
        if start.exit_code == EXIT_BAD_CONFIG:
            raise RefusedError("\n".join(start.said))
        if start.exit_code in FINAL or stage.cfg.launch.kind is LaunchKind.slurm:
            return


def in_words(run: RunDir, start: Start) -> str:
    why = f": {start.said[0].removeprefix('harness: ')}" if start.said else ""
    return f"{run.path.name}: exit code {start.exit_code} after {start.seconds:.1f} s{why}"


def start_run(cfg: Config, run: RunDir, *, limit_s: float, wrap: Sequence[str] = ()) -> Start:
    """One start, here or as a job, from its beginning to its exit code."""
    if cfg.launch.kind is LaunchKind.slurm:
        return start_job(run)
    return start_here(run, limit_s=limit_s, wrap=wrap)


def start_here(run: RunDir, *, limit_s: float, wrap: Sequence[str] = ()) -> Start:
    """`python -m launch.local.node RUN`, watched; after `limit_s` seconds it is killed."""
    number = len(list(run.logs.glob("start-*.stderr")))
    paths = [run.logs / f"start-{number}.{stream}" for stream in ("stdout", "stderr")]
    begun_s = time.monotonic()
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        command = [*wrap, *processes.command("launch.local.node", str(run.path.resolve()))]
        process = subprocess.Popen(
            command,
            env=processes.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        said = []
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            said.append(f"harness: did not end within {limit_s:g} s and was killed")
        except KeyboardInterrupt:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=STOP_WITHIN_S)
            raise
        finally:
            end_session(process)
    lines = paths[1].read_text(encoding="utf-8", errors="replace").splitlines()
    said += [line for line in lines if line.startswith("harness: ")]
    return Start(exit_code=process.returncode, said=said, seconds=round(time.monotonic() - begun_s, 3))


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Wait for whatever the launcher left behind, then kill it: two starts of one run must not overlap."""
    deadline_s = time.monotonic() + (ORPHANS_MAY_TAKE_S if process.poll() is not None else 0)
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(process.pid, 0)
            time.sleep(POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_job(run: RunDir) -> Start:
    """A job of Slurm and all its requeues; its own time limit holds."""
    from launch.slurm import submit

    begun_s = time.monotonic()
    cfg = compose.read(run.config)
    cfg.run.dir, cfg.run.name = str(run.path.parent), run.path.name
    job = submit.submit(cfg)
    code = submit.wait(job).exit_code
    log = run.logs / f"slurm-{job}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    said = [line for line in lines if line.startswith("harness: ")]
    return Start(exit_code=code, said=said, seconds=round(time.monotonic() - begun_s, 3))


def finish(victim: RunDir, *, to_mlflow: bool) -> Card:
    """Score a drill that has ended; the card goes into its directory, its log and MLflow."""
    card = write_card(victim)
    event = card.as_event(time=time.time(), iteration=max(last_iteration(victim.events), 0))
    append_line(victim.events, to_json(event))
    if to_mlflow:
        send(victim)
    return card


def write_card(victim: RunDir) -> Card:
    """Score a drill that lies on disk, and leave the card there."""
    card = score_run(victim)
    write_atomically(victim.path / "score.json", cards.as_json(card))
    write_atomically(victim.score_card, cards.as_markdown(card))
    return card


def send(run: RunDir) -> None:
    """What MLflow has not got yet; a store that does not answer costs a warning."""
    with (run.logs / "mlflow.log").open("ab") as log:
        command = processes.command(SINK_MODULE, str(run.path))
        sent = subprocess.run(
            command, env=processes.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    if sent.returncode != EXIT_DONE:
        print(f"warning: {run.path.name} did not reach MLflow; {log.name} says why", file=sys.stderr)
