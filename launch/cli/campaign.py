"""`harness drill campaign`: random faults until the time is over, and a report of what survived.

How: one twin, then one run a round, each a drill with several faults (`harness.drills.campaign` draws and judges).
Everything lies in `runs/campaign-SEED`; the report is written anew after every round, so that an interrupted campaign
has one too.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import EXIT_DONE, ConfigError, require
from harness.config.schema import Config
from harness.core.events import RunStarted
from harness.core.rundir import RunDir, write_atomically
from harness.drills import campaign as campaigns
from harness.drills import directories
from harness.drills.campaign import Campaign, DrawnFault, Round
from harness.drills.drill_record import DrillEvidence, DrillRecord, gather
from launch.cli.parser import Parser
from launch.drills.fault_environment import PlainEnvironment
from launch.drills.runner import train_twin, train_victim

EXIT_LOST = 1
REPORT = "campaign.json"
TWIN_LIMIT_S = 600.0

DESCRIPTION = """\
Draw faults, moments and ranks at random, again and again until the time is over, and report which runs survived. All
is drawn from the seed: a round that was lost is done again with --round. Leaves runs/campaign-SEED with a directory for
each round, campaign.json and campaign.md. Exit code 0 only if nothing was lost.
"""


def main(argv: Sequence[str]) -> int:
    """Run a campaign; returns its exit code."""
    words = parser().parse_intermixed_args(argv)
    require(words.minutes > 0, "--minutes", f"must be positive, got {words.minutes:g}")
    require(words.round is None or words.round >= 0, "--round", f"must be 0 or more, got {words.round}")
    known = campaigns.mixable_scenarios()
    cfg = directories.configure(campaigns.training_overrides(known), words.override)
    campaigns.check_length(cfg.train.num_steps)
    root = Path(cfg.run.dir) / f"campaign-{words.seed}"
    make_room(root, keep_rounds=words.round is not None)
    twin_run = RunDir(root / "twin")
    train_twin(cfg, twin_run, report=say, limit_s=TWIN_LIMIT_S)
    twin = gather(twin_run)
    num_ranks = next((event.world_size for event in twin.of(RunStarted)), 0)
    require(twin.exit_code == EXIT_DONE and num_ranks > 0, str(twin_run.path), "the twin did not finish")

    begun_s, done = time.monotonic(), list[Round]()
    number = words.round or 0
    while True:
        drawn = campaigns.draw_faults(
            known, seed=words.seed, number=number, num_steps=cfg.train.num_steps, num_ranks=num_ranks
        )
        done.append(run_round(cfg, root, drawn, twin, seed=words.seed, number=number))
        say(campaigns.round_line(done[-1]))
        minutes = (time.monotonic() - begun_s) / 60
        campaign = Campaign(seed=words.seed, minutes=minutes, words=list(words.override), rounds=done)
        if words.round is None:
            write_atomically(root / REPORT, json.dumps(campaign.as_dict(), indent=2) + "\n")
            write_atomically(root / "campaign.md", campaigns.as_markdown(campaign))
        if words.round is not None or minutes >= words.minutes:
            print(campaigns.as_text(campaign), end="")
            return EXIT_DONE if campaign.survived else EXIT_LOST
        number += 1


def make_room(root: Path, *, keep_rounds: bool) -> None:
    """The directory of the campaign, without the rounds of an earlier one; what is no campaign's is not touched."""
    is_ours = not root.exists() or (root / REPORT).is_file() or not any(root.iterdir())
    if not is_ours:
        raise ConfigError("run.dir", f"{root} is there and is no campaign; move it away, or choose another run.dir")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("run.dir", f"cannot create {root}: {error.strerror}") from None
    if not keep_rounds:
        for path in root.glob("round-*"):
            shutil.rmtree(path, ignore_errors=True)
    if not (root / REPORT).exists():
        write_atomically(root / REPORT, "{}\n")


def run_round(
    cfg: Config, root: Path, drawn: Sequence[DrawnFault], twin: DrillEvidence, *, seed: int, number: int
) -> Round:
    """One run with its faults, started again as often as they make it necessary."""
    victim = RunDir(root / f"round-{number:03d}")
    directories.create_directory(cfg, victim)
    scenario = campaigns.merge_scenarios(drawn, f"round {number} of campaign {seed}: {', '.join(map(str, drawn))}")
    plan = campaigns.make_plan(drawn, seed=seed, number=number)
    DrillRecord(name=victim.path.name, scenario=scenario, plan=plan, twin="twin").write(victim)
    train_victim(
        PlainEnvironment(cfg=cfg),
        victim,
        max_starts=scenario.expected.starts + 1,
        limit_s=scenario.limit_s,
        report=lambda _: None,
    )
    return campaigns.score_round(drawn, gather(victim), twin, number=number)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> ArgumentParser:
    parser = Parser(prog="harness drill campaign", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", metavar="OVERRIDE", help="group=option or key=value of the training")
    parser.add_argument("--minutes", metavar="M", type=float, default=10.0, help="no round begins after; default: 10")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="what everything is drawn from; default: 0")
    parser.add_argument("--round", metavar="N", type=int, help="this one alone, as it was drawn")
    return parser
