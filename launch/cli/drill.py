"""`harness drill`: trains a run with an injected fault and scores how it recovered.

How: arguments without `=` name scenarios of `conf/drill`. Overrides that start with `drill.` change the scenario, all
others the training. Each drill is two real runs and a score card (`launch.drills.runner`, `harness.drills`). Progress
goes to stderr, the card to stdout. Exit code 0: every bound of every drill held; 1: one did not; 2: invalid input, one
line.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.core.rundir import RunDir
from harness.drills import scenario as scenarios
from harness.drills import score_card as cards
from harness.drills.score import Card
from launch.cli.parser import CommandParser

EXIT_FAILED = 1
ALL = "all"

HELP = """\
usage: harness drill NAME... [OVERRIDE...]
       harness drill all [OVERRIDE...]
       harness drill list
       harness drill score RUN
       harness drill campaign [--infrastructure] --minutes M --seed S [OVERRIDE...]

Train a run with an injected fault and its clean twin, and score the run against the expectations of the scenario.
Writes runs/drill-NAME and runs/drill-NAME-twin. The score card is printed, stored in runs/drill-NAME as score.md and
score.json, and logged to MLflow. Exit code 0 only if every bound holds, 1 if one does not.

Overrides that start with drill. change the scenario, all others the training:
  harness drill nan_grad kill_rank
  harness drill nan_grad drill.fault.at=40 drill.fault.rank=0 model=tiny precision=bf16
  harness drill all launch=slurm launch.nodes=2 launch.slurm.partition=gpu

options:
  --no-mlflow   do not log the scores to MLflow
"""


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns its exit code."""
    try:
        match list(argv):
            case [] | ["-h" | "--help", *_]:
                print(HELP, end="")
                return EXIT_DONE if argv else EXIT_BAD_CONFIG
            case ["list"]:
                print("\n".join(list_drills()))
                return EXIT_DONE
            case ["score", *arguments]:
                return score_command(arguments)
            case ["campaign", *arguments]:
                from launch.cli import campaign

                with SigtermAsInterrupt():
                    return campaign.main(arguments)
            case arguments:
                with SigtermAsInterrupt():
                    return drill(arguments)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print("harness: interrupted; rerun the same command to start the drill again", file=sys.stderr)
        return EXIT_INTERRUPTED


def list_drills() -> list[str]:
    """Name and summary of each drill, and below it what is expected of the run."""
    lines = []
    for name in scenarios.names():
        scenario = scenarios.load_scenario(name)
        lines += [f"{name}: {scenario.summary}", f"    expects  {scenario.expected.describe()}"]
        lines += [f"    bounds   {bounds}"] if (bounds := scenario.bounds.describe()) else []
    return lines


class SigtermAsInterrupt:
    """Handle SIGTERM like Ctrl-C: processes that the drill started are stopped first."""

    def __enter__(self) -> None:
        self._previous_handler = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)

    @staticmethod
    def _interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def drill(arguments: Sequence[str]) -> int:
    """`harness drill NAME...` and `harness drill all`."""
    args = build_parser().parse_intermixed_args(arguments)
    names = [argument for argument in args.arguments if "=" not in argument]
    overrides = [argument for argument in args.arguments if "=" in argument]
    scenario_names = list(scenarios.names()) if names == [ALL] else names
    require(bool(scenario_names), "drill", f"missing scenario; choose among {', '.join(scenarios.names())}, or {ALL}")
    loaded = {name: scenarios.load_scenario(name, overrides) for name in scenario_names}
    training = [argument for argument in overrides if not scenarios.changes_scenario(argument)]

    from launch.drills.fault_environment import UnavailableError
    from launch.drills.runner import RejectedStartError, check_drill, run_drill

    for name, scenario in loaded.items() if names != [ALL] else ():
        check_drill(name, scenario, training)
    scored_cards: list[Card] = []
    skipped: list[tuple[str, str]] = []
    for name, scenario in loaded.items():
        try:
            scored_cards.append(run_drill(name, scenario, training, report=print_progress, to_mlflow=args.mlflow))
        except RejectedStartError as refused:
            print(refused, file=sys.stderr)
            return EXIT_BAD_CONFIG
        except UnavailableError as error:
            if names != [ALL]:
                raise
            skipped.append((name, str(error)))
            continue
        print(cards.as_text(scored_cards[-1]), flush=True)
    if len(loaded) > 1:
        print(cards.summary_of_drills(scored_cards, skipped), end="")
    return EXIT_DONE if all(card.passed for card in scored_cards) else EXIT_FAILED


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def score_command(arguments: Sequence[str]) -> int:
    """`harness drill score RUN`: the score card of an existing drill."""
    require(len(arguments) == 1, "drill score", "give one run directory, such as runs/drill-nan_grad")
    from launch.drills.runner import write_card

    card = write_card(RunDir(Path(arguments[0])))
    print(cards.as_text(card), end="")
    return EXIT_DONE if card.passed else EXIT_FAILED


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness drill", description=HELP, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="NAME or OVERRIDE")
    parser.add_argument("--no-mlflow", dest="mlflow", action="store_false")
    return parser
