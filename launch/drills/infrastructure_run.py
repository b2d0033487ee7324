"""Runs an infrastructure campaign: a short run for the speed, a twin without faults, and the run that meets the faults.

The runner plays the scheduler and the operators: it starts a run whose launcher was killed or that was preempted, a
tracking server that was killed, and the launcher of a node that was killed.
`harness.drills.infrastructure_campaign` draws and scores.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

from harness.analysis.dashboard.goodput import Goodput
from harness.analysis.dashboard.story import Story
from harness.config.errors import EXIT_DONE, require
from harness.config.schema import Config
from harness.core import event_json
from harness.core.events import FaultInjected, RunStarted
from harness.core.rundir import RunDir
from harness.drills import directories
from harness.drills import infrastructure_campaign as campaigns
from harness.drills.campaign import DrawnFault, merge_scenarios
from harness.drills.drill_record import DrillEvidence, DrillRecord, gather, read_drill_record
from harness.drills.infrastructure_campaign import InfrastructureCampaign
from harness.drills.scenario import Scenario
from harness.faults.fault_plan import FaultPlan
from launch.drills.fault_environment import FaultEnvironment, UnavailableError, open_environment, require_environment
from launch.drills.local_nodes import on_one_node
from launch.drills.runner import RejectedStartError, Report, run_once, train_twin, train_victim

CALIBRATION_STEPS = 60
ATTEND_EVERY_S = 0.5
SERVER_DOWN_S = 5.0
"""How long a killed tracking server stays down."""
NODE_DOWN_S = 5.0
"""How long a killed node stays down, if several nodes are rehearsed; it then joins as a spare."""
SPARE_S = 600.0
"""Added to the longest time of a start, for slow machines."""


def available_scenarios(known: Mapping[str, Scenario], cfg: Config) -> tuple[dict[str, Scenario], list[str]]:
    """The scenarios whose faults this machine can inject, and why the others are skipped."""
    found, skipped = {}, []
    for name, scenario in known.items():
        try:
            require_environment(scenario.fault.kind, cfg)
            found[name] = scenario
        except UnavailableError as error:
            skipped.append(f"{name}: {error}")
    return found, skipped


def measure_num_steps(cfg: Config, run: RunDir, *, minutes: float, report: Report) -> int:
    """Train a few steps, and return how many fill the time."""
    shutil.rmtree(run.path, ignore_errors=True)
    directories.write_config(replace(cfg, train=replace(cfg.train, num_steps=CALIBRATION_STEPS)), run)
    start = run_once(cfg, run, limit_s=SPARE_S)
    require(start.exit_code == EXIT_DONE, str(run.path), f"ended with exit code {start.exit_code}; see its logs")
    num_steps = campaigns.choose_num_steps(goodput_of(run), minutes=minutes)
    report(f"{run.path.name}: {num_steps} steps fill {minutes:g} minutes")
    return num_steps


def goodput_of(run: RunDir) -> Goodput:
    """The goodput of a run, from its log; the number that the dashboard shows."""
    story = Story()
    story.read_more(run)
    return story.accounts.total()


def train_reference(cfg: Config, twin: RunDir, *, minutes: float, report: Report) -> DrillEvidence:
    """Train the run without faults, or reuse an equal one."""
    train_twin(on_one_node(cfg), twin, report=report, limit_s=campaigns.LONGEST * 60 * minutes + SPARE_S)
    evidence = gather(twin)
    require(evidence.exit_code == EXIT_DONE, str(twin.path), "the twin did not finish")
    return evidence


def run_schedule(
    cfg: Config, root: Path, schedule: Sequence[DrawnFault], *, seed: int, twin: RunDir, minutes: float, report: Report
) -> RunDir:
    """Train the run that meets the faults of the schedule; returns its directory."""
    victim = RunDir(root / "run")
    kinds = {drawn.fault.kind for drawn in schedule}
    with open_environment(kinds, cfg, victim, twin=gather(twin)) as environment:
        directories.create_directory(environment.cfg, victim)
        environment.set_up()
        scenario = merge_scenarios(schedule, f"infrastructure campaign {seed}")
        plan = FaultPlan(seed=seed, faults=[drawn.fault for drawn in schedule])
        DrillRecord(name=victim.path.name, scenario=scenario, plan=plan, twin=twin.path.name).write(victim)
        with attending(environment, victim, schedule, report):
            limit_s = campaigns.LONGEST * 60 * minutes + SPARE_S
            try:
                train_victim(
                    environment,
                    victim,
                    max_starts=len(schedule) + 2,
                    limit_s=limit_s,
                    report=report,
                    reboot_after_s=NODE_DOWN_S,
                )
            except RejectedStartError as error:  # the twin was accepted, so a fault made the run unusable
                report(str(error))
        if notes := environment.clean_up():
            record = read_drill_record(victim)
            record.notes += notes
            record.write(victim)
    return victim


@contextmanager
def attending(
    environment: FaultEnvironment, victim: RunDir, schedule: Sequence[DrawnFault], report: Report
) -> Iterator[None]:
    """Context in which a thread reports each fault that strikes, and restarts a tracking server that was killed."""
    is_over = Event()
    server = environment.server

    def attend() -> None:
        seen: set[int] = set()
        down_since: float | None = None
        while not is_over.wait(ATTEND_EVERY_S):
            for strike in read_strikes(victim):
                if strike.number not in seen:
                    seen.add(strike.number)
                    report(f"{schedule[strike.number].name}: rank {strike.rank} {strike.message}")
            is_down = server is not None and server.process is not None and server.process.poll() is not None
            down_since = None if not is_down else down_since or time.monotonic()
            if server is not None and down_since is not None and time.monotonic() - down_since >= SERVER_DOWN_S:
                server.restart_if_dead()

    thread = Thread(target=attend, name="attendant", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def read_strikes(victim: RunDir) -> list[FaultInjected]:
    """All strikes so far."""
    found = event_json.read(victim.faults) if victim.faults.exists() else ()
    return [event for event in found if isinstance(event, FaultInjected)]


def num_ranks_of(evidence: DrillEvidence) -> int:
    """Ranks of a run that has started."""
    return next((event.world_size for event in evidence.of(RunStarted)), 1)


def score_campaign(
    victim: RunDir, twin: RunDir, schedule: Sequence[DrawnFault], *, first: int, campaign: InfrastructureCampaign
) -> InfrastructureCampaign:
    """Fill in what the run directories show; `first` is the number of the first fault of the schedule."""
    evidence, goodput = gather(victim), goodput_of(victim)
    return replace(
        campaign,
        cards=campaigns.make_cards(schedule, evidence, first=first),
        wall_s=goodput.wall_s,
        effective=goodput.of_time,
        twin_effective=goodput_of(twin).of_time,
        lost_s={str(cause): round(cost.seconds, 3) for cause, cost in goodput.lost.items()},
        starts=evidence.num_starts,
        exit_code=evidence.exit_code,
        step=evidence.step,
        num_steps=evidence.num_steps,
        identical=campaigns.are_identical(victim, twin),
        notes=evidence.notes,
    )
