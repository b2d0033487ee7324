"""`harness drill`: breaks a run on purpose and says how it answered.

How: the words name scenarios of `conf/drill`; overrides that begin with `drill.` change the scenario, all others the
training. Each drill is two real runs and a card (`launch.drills.runner`, `harness.drills`). Progress goes to stderr,
the card to stdout. Exit code 0: every bound of every drill held; 1: one did not; 2: bad words, one clear line.
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
from launch.cli.parser import Parser

EXIT_BROKEN = 1
ALL = "all"

HELP = """\
usage: harness drill NAME... [OVERRIDE...]
       harness drill all [OVERRIDE...]
       harness drill list
       harness drill score RUN
       harness drill campaign --minutes M --seed S [OVERRIDE...]
       harness drill mechanism [--seeds N] [OVERRIDE...]

Break a run on purpose, train its clean twin, and hold what came of it against what is expected. Leaves
runs/drill-NAME and runs/drill-NAME-twin; the card is printed, lies in runs/drill-NAME as score.md and score.json, and
goes to MLflow. Exit code 0 only if every bound holds.

Overrides that begin with drill. change the scenario, all others the training:
  harness drill nan_grad kill_rank
  harness drill nan_grad drill.fault.at=40 drill.fault.rank=0 model=tiny precision=bf16
  harness drill all launch=slurm launch.nodes=2 launch.slurm.partition=gpu

options:
  --no-mlflow   leave the scores in the run directory alone
"""


def main(argv: Sequence[str]) -> int:
    """One command; returns its exit code."""
    try:
        match list(argv):
            case [] | ["-h" | "--help", *_]:
                print(HELP, end="")
                return EXIT_DONE if argv else EXIT_BAD_CONFIG
            case ["list"]:
                print("\n".join(cards.aligned([(name, scenarios.load(name).summary) for name in scenarios.names()])))
                return EXIT_DONE
            case ["score", *arguments]:
                return score(arguments)
            case ["campaign", *arguments]:
                from launch.cli import campaign

                with EndedBySigterm():
                    return campaign.main(arguments)
            case ["mechanism", *arguments]:
                from launch.cli import mechanism

                return mechanism.main(arguments)
            case arguments:
                with EndedBySigterm():
                    return drill(arguments)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print("harness: interrupted; the same words again begin the drill anew", file=sys.stderr)
        return EXIT_INTERRUPTED


class EndedBySigterm:
    """SIGTERM ends a drill as Ctrl-C does: what was started is taken down first."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def drill(arguments: Sequence[str]) -> int:
    """`harness drill NAME...` and `harness drill all`."""
    words = parser().parse_intermixed_args(arguments)
    names = [word for word in words.word if "=" not in word]
    overrides = [word for word in words.word if "=" in word]
    chosen = list(scenarios.names()) if names == [ALL] else names
    require(bool(chosen), "drill", f"which? choose among {', '.join(scenarios.names())}, or {ALL}")
    loaded = {name: scenarios.load(name, overrides) for name in chosen}
    training = [word for word in overrides if not scenarios.changes_scenario(word)]

    from launch.drills.fault_environment import UnavailableError
    from launch.drills.runner import RejectedStartError, run_drill

    scored: list[Card] = []
    left_out: list[tuple[str, str]] = []
    for name, scenario in loaded.items():
        try:
            scored.append(run_drill(name, scenario, training, report=say, to_mlflow=words.mlflow))
        except RejectedStartError as refused:
            print(refused, file=sys.stderr)
            return EXIT_BAD_CONFIG
        except UnavailableError as error:
            if names != [ALL]:
                raise
            left_out.append((name, str(error)))
            continue
        print(cards.as_text(scored[-1]), flush=True)
    if len(loaded) > 1:
        print(cards.summary(scored, left_out), end="")
    return EXIT_DONE if all(card.passed for card in scored) else EXIT_BROKEN


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def score(arguments: Sequence[str]) -> int:
    """`harness drill score RUN`: the card of a drill that lies on disk."""
    require(len(arguments) == 1, "drill score", "which drill? give its run directory, such as runs/drill-nan_grad")
    from launch.drills.runner import write_card

    card = write_card(RunDir(Path(arguments[0])))
    print(cards.as_text(card), end="")
    return EXIT_DONE if card.passed else EXIT_BROKEN


def parser() -> ArgumentParser:
    parser = Parser(prog="harness drill", description=HELP, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="*", metavar="NAME or OVERRIDE")
    parser.add_argument("--no-mlflow", dest="mlflow", action="store_false")
    return parser
