"""`harness plan`: the numbers of a run, without starting it.

Why: it is asked many times while a configuration takes shape, so it answers at once and needs neither torch nor a GPU.
How: the words are those of `harness train`; `harness.plan` does the arithmetic. A complaint is one line on stderr and
exit code 2; so is a job that does not fit into its devices, after all the numbers that say why.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from harness.analysis.plan.fit import refusal
from harness.analysis.plan.plan import num_ranks, plan
from harness.analysis.plan.render import as_dict, render, render_table
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.config.schema import Config
from launch.cli.parser import Parser

DESCRIPTION = """\
Print what a run needs: parameters, FLOPs, memory of a device by part, communication, time and price of a step,
checkpoints on disk and in host memory, and what a restore costs at this cadence. Nothing is started. The overrides are
those of `harness train`; the number of ranks is launch.nodes times launch.nproc. Times need cluster.peak_tflops,
waiting for communication needs the rates of the links, and a check of memory needs cluster.memory_gb: cluster=h100
and cluster=h200 set all of them. A time that no measurement supports is marked as an estimate, with the reason.
"""
EPILOG = """\
for instance:
  harness plan +experiment=1b_bf16 launch.nproc=8
  harness plan model=70b precision=bf16 cluster=h100 parallel.compile=true parallel.activation_checkpointing=full
      train.sequence_length=8192 train.batch_size=1024 --ranks 256,512,1024
"""


def main(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    try:
        words = parser().parse_intermixed_args(argv)
        require(words.mfu is None or 0 < words.mfu <= 1, "--mfu", f"must be above 0 and at most 1, got {words.mfu}")
        cfg = compose.load(words.override)
        sizes = [num_ranks(cfg)] if words.ranks is None else world_sizes(words.ranks)
        text = told(cfg, sizes, mfu=words.mfu, as_json=words.json, in_table=words.ranks is not None)
        refusals = [refusal(cfg, world_size=size) for size in sizes]
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(text, end="", flush=True)
    if all(refusals):
        print(f"harness: {refusals[-1]}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


def told(cfg: Config, sizes: list[int], *, mfu: float | None, as_json: bool, in_table: bool) -> str:
    """The plans of some numbers of ranks, as text or as one line of JSON."""
    plans = [plan(cfg, world_size=size, mfu=mfu) for size in sizes]
    if as_json:
        numbers = [as_dict(each) | {"refusal": refusal(cfg, world_size=each.num_ranks)} for each in plans]
        return json.dumps(numbers if in_table else numbers[0]) + "\n"
    return render_table(plans) if in_table else render(plans[0])


def world_sizes(word: str) -> list[int]:
    """The numbers of a list like 8,64,1024."""
    numbers = word.split(",")
    valid = all(number.isdecimal() and int(number) >= 1 for number in numbers)
    require(valid, "--ranks", f"must be numbers of ranks like 8,64,1024, got {word!r}")
    return [int(number) for number in numbers]


def parser() -> ArgumentParser:
    parser = Parser(
        prog="harness plan", description=DESCRIPTION, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("override", nargs="*", metavar="OVERRIDE", help="group=option or key=value")
    mfu_help = "share of its bf16 rate that one device reaches, measured by you; default: from measured kernel rates"
    parser.add_argument("--mfu", metavar="SHARE", type=float, help=mfu_help)
    parser.add_argument("--ranks", metavar="N,N,...", help="one row for each of several numbers of ranks")
    parser.add_argument("--json", action="store_true", help="all numbers, as one line of JSON")
    return parser
