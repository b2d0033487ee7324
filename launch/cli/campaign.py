"""`harness drill campaign`: injects random faults until the time is over and reports which runs survived.

How: one clean twin, then one run per round, each a drill with several faults (`harness.drills.campaign` draws and
scores them). Everything is in `runs/campaign-SEED`; the report is rewritten after every round, so that an interrupted
campaign has one too. With --infrastructure it is one long run instead (`launch.drills.infrastructure_run`), in
`runs/campaign-SEED-infrastructure`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.config.command_line import shell_command
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core.events import RunStarted
from harness.core.locking.run_lease import io_error
from harness.core.rundir import RunDir, write_atomically
from harness.drills import campaign as campaigns
from harness.drills import directories
from harness.drills import infrastructure_campaign as infrastructure
from harness.drills.campaign import Campaign, DrawnFault, Round
from harness.drills.drill_record import DrillEvidence, DrillRecord, gather
from harness.drills.infrastructure_campaign import InfrastructureCampaign
from launch.cli.parser import CommandParser
from launch.drills.fault_environment import FaultEnvironment
from launch.drills.infrastructure_run import (
    available_scenarios,
    measure_num_steps,
    num_ranks_of,
    run_schedule,
    score_campaign,
    train_reference,
)
from launch.drills.local_nodes import on_one_node
from launch.drills.runner import RejectedStartError, configure_drill, train_twin, train_victim

EXIT_LOST = 1
REPORT = "campaign.json"
TWIN_LIMIT_S = 600.0

DESCRIPTION = """\
Draw faults, iterations and ranks at random, one round after another until the time is over, and report which runs
survived. Everything is drawn from the seed: --round repeats a single round. Writes runs/campaign-SEED with a directory
for each round, campaign.json and campaign.md. Exit code 0 only if all runs survived: each ended as expected, met its
faults, and kept the promised weights or held-out loss of the twin.

With --infrastructure: one run of about M minutes that meets a fault of processes, disk or network every S seconds, and
a twin without faults. --fault repeats a single fault. Writes runs/campaign-SEED-infrastructure. Exit code 0 only if no
fault was lost, the weights are those of the twin, and the effective training time reaches the goal.
"""


def main(argv: Sequence[str]) -> int:
    """Run a campaign; returns its exit code."""
    args = build_parser().parse_intermixed_args(argv)
    require(args.minutes > 0, "--minutes", f"must be positive, got {args.minutes:g}")
    require(args.round is None or args.round >= 0, "--round", f"must be 0 or more, got {args.round}")
    require(args.every > 0, "--every", f"must be positive, got {args.every:g}")
    require(0 <= args.goal <= 1, "--goal", f"must be from 0 to 1, got {args.goal:g}")
    if args.infrastructure:
        require(args.round is None, "--round", "is for a campaign without --infrastructure; use --fault")
        try:
            return run_infrastructure(args)
        except RejectedStartError as error:
            print(error, file=sys.stderr)
            return EXIT_BAD_CONFIG
    require(args.fault is None, "--fault", "needs --infrastructure; use --round")
    known = campaigns.mixable_scenarios()
    cfg = configure_drill(campaigns.training_overrides(known), args.overrides)
    campaigns.check_length(cfg.train.num_steps)
    campaigns.check_evaluation(cfg.eval.every_steps)
    root = Path(cfg.run.dir) / f"campaign-{args.seed}"
    clear_rounds(root, keep_rounds=args.round is not None)
    twin_run = RunDir(root / "twin")
    train_twin(on_one_node(cfg), twin_run, report=print_to_stderr, limit_s=TWIN_LIMIT_S)
    twin = gather(twin_run)
    num_ranks = next((event.world_size for event in twin.of(RunStarted)), 0)
    require(twin.exit_code == EXIT_DONE and num_ranks > 0, str(twin_run.path), "the twin did not finish")

    started_s, done = time.monotonic(), list[Round]()
    number = args.round or 0
    while True:
        drawn = campaigns.draw_faults(
            known, seed=args.seed, number=number, num_steps=cfg.train.num_steps, num_ranks=num_ranks
        )
        done.append(run_round(cfg, root, drawn, twin, seed=args.seed, number=number))
        print_to_stderr(campaigns.round_line(done[-1]))
        minutes = (time.monotonic() - started_s) / 60
        campaign = Campaign(seed=args.seed, minutes=minutes, words=list(args.overrides), rounds=done)
        if args.round is None:
            write_atomically(root / REPORT, json.dumps(campaign.as_dict(), indent=2) + "\n")
            write_atomically(root / "campaign.md", campaigns.as_markdown(campaign))
        if args.round is not None or minutes >= args.minutes:
            print(campaigns.as_text(campaign), end="")
            return EXIT_DONE if campaign.survived else EXIT_LOST
        number += 1


def run_infrastructure(args: Namespace) -> int:
    """One run through all faults of the schedule; returns the exit code."""
    cfg = configure_drill(infrastructure.long_training_overrides(args.every), args.overrides)
    require(
        cfg.launch.kind is LaunchKind.local, "launch", f"must be local with --infrastructure, got {cfg.launch.kind}"
    )
    known, skipped = available_scenarios(infrastructure.infrastructure_scenarios(), cfg)

    def draw(num_ranks: int) -> list[DrawnFault]:
        options = {"seed": args.seed, "every_s": args.every, "minutes": args.minutes, "num_ranks": num_ranks}
        schedule = infrastructure.draw_schedule(known, **options)
        return schedule if args.fault is None else infrastructure.only_fault(schedule, args.fault, every_s=args.every)

    draw(1)  # rejects a bad --fault before anything is trained
    minutes = args.minutes if args.fault is None else infrastructure.minutes_for_one(args.every)
    root = Path(cfg.run.dir) / f"campaign-{args.seed}-infrastructure"
    clear_rounds(root, keep_rounds=True)
    for reason in skipped:
        print_to_stderr(f"skipped {reason}")
    if not any(override.startswith("train.num_steps=") for override in args.overrides):
        num_steps = measure_num_steps(cfg, RunDir(root / "calibration"), minutes=minutes, report=print_to_stderr)
        cfg = replace(cfg, train=replace(cfg.train, num_steps=num_steps))
    twin = RunDir(root / "twin")
    schedule = draw(num_ranks_of(train_reference(cfg, twin, minutes=minutes, report=print_to_stderr)))
    victim = run_schedule(cfg, root, schedule, seed=args.seed, twin=twin, minutes=minutes, report=print_to_stderr)
    campaign = score_campaign(
        victim,
        twin,
        schedule,
        first=args.fault or 0,
        campaign=InfrastructureCampaign(
            seed=args.seed,
            every_s=args.every,
            minutes=args.minutes,
            words=list(args.overrides),
            skipped=skipped,
            goal=args.goal,
        ),
    )
    write_atomically(root / REPORT, json.dumps(campaign.as_dict(), indent=2) + "\n")
    write_atomically(root / "campaign.md", infrastructure.campaign_markdown(campaign))
    print(infrastructure.campaign_text(campaign), end="")
    print_to_stderr(f"the whole run: {shell_command('harness', 'dashboard', victim.path)}")
    return EXIT_DONE if campaign.passed else EXIT_LOST


def clear_rounds(root: Path, *, keep_rounds: bool) -> None:
    """Create the directory of the campaign, without the rounds of an earlier one; rejects any other directory."""
    is_ours = not root.exists() or (root / REPORT).is_file() or not any(root.iterdir())
    if not is_ours:
        raise ConfigError("run.dir", f"{root} exists and is not a campaign; move it, or choose another run.dir")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(root, "cannot create", error) from None
    if not keep_rounds:
        for path in root.glob("round-*"):
            shutil.rmtree(path, ignore_errors=True)
    if not (root / REPORT).exists():
        write_atomically(root / REPORT, "{}\n")


def run_round(
    cfg: Config, root: Path, drawn: Sequence[DrawnFault], twin: DrillEvidence, *, seed: int, number: int
) -> Round:
    """One run with its faults, restarted as often as they require."""
    victim = RunDir(root / f"round-{number:03d}")
    directories.create_directory(cfg, victim)
    scenario = campaigns.merge_scenarios(drawn, f"round {number} of campaign {seed}: {', '.join(map(str, drawn))}")
    plan = campaigns.make_plan(drawn, seed=seed, number=number)
    DrillRecord(name=victim.path.name, scenario=scenario, plan=plan, twin="twin").write(victim)
    train_victim(
        FaultEnvironment(cfg=cfg),
        victim,
        max_starts=scenario.expected.starts + 1,
        limit_s=scenario.limit_s,
        report=lambda _: None,
    )
    return campaigns.score_round(drawn, gather(victim), twin, number=number)


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness drill campaign", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="group=option or key=value of the training")
    parser.add_argument(
        "--minutes", metavar="M", type=float, default=10.0, help="start no round after M minutes; default: 10"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of all random draws; default: 0")
    parser.add_argument("--round", metavar="N", type=int, help="repeat only this round")
    parser.add_argument("--infrastructure", action="store_true", help="one run with faults of processes, disk, network")
    parser.add_argument(
        "--every", metavar="S", type=float, default=120.0, help="with --infrastructure: seconds between faults; 120"
    )
    parser.add_argument(
        "--goal",
        metavar="G",
        type=float,
        default=infrastructure.GOAL,
        help=f"with --infrastructure: least effective training time, from 0 to 1; {infrastructure.GOAL:g}",
    )
    parser.add_argument("--fault", metavar="N", type=int, help="with --infrastructure: repeat only this fault")
    return parser
