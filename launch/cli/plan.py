"""`harness plan`: estimates memory, traffic, step time and price of a run without starting it.

Why: it is called many times while a config takes shape, so it answers at once and needs neither torch nor a GPU.
How: the overrides are those of `harness train`; `harness.analysis.plan` does the arithmetic. An invalid config is one
line on stderr and exit code 2. So is a job that does not fit into device memory, after all the numbers.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from harness.analysis.plan.fit import refusal
from harness.analysis.plan.plan import plan, planned_ranks
from harness.analysis.plan.plan_text import plan_as_dict, render, render_table
from harness.analysis.plan.preflight import preflight
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.config.schema import Config
from launch.cli.parser import CommandParser

DESCRIPTION = """\
Print what a run needs: parameters, FLOPs, device memory by part, communication, time and price of a step, checkpoints
on disk and in host memory, and the cost of a restore. Nothing is started. The overrides are those of `harness train`;
the number of ranks is launch.nodes times launch.nproc. Step times need cluster.peak_tflops, communication times need
link bandwidths, and the memory check needs cluster.memory_gb: cluster=h100 and cluster=h200 set all of them. A time
without a measurement is marked as an estimate, with the reason.
"""
EPILOG = """\
examples:
  harness plan +experiment=1b_bf16 launch.nproc=8
  harness plan model=70b precision=bf16 cluster=h100 parallel.compile=true parallel.activation_checkpointing=full
      train.sequence_length=8192 train.batch_size=1024 --ranks 256,512,1024
"""


def main(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    try:
        args = build_parser().parse_intermixed_args(argv)
        require(args.mfu is None or 0 < args.mfu <= 1, "--mfu", f"must be above 0 and at most 1, got {args.mfu}")
        cfg = compose.load(args.overrides)
        sizes = [planned_ranks(cfg)] if args.ranks is None else world_sizes(args.ranks)
        text = render_plans(cfg, sizes, mfu=args.mfu, as_json=args.json, in_table=args.ranks is not None)
        problems = preflight(cfg)
        refusals = [refusal(cfg, world_size=size) for size in sizes]
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(text, end="", flush=True)
    for problem in problems:
        print(f"harness: warning: {problem}", file=sys.stderr)
    if all(refusals):
        print(f"harness: {refusals[-1]}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


def render_plans(cfg: Config, sizes: list[int], *, mfu: float | None, as_json: bool, in_table: bool) -> str:
    """The plans for some numbers of ranks, as text or as one line of JSON."""
    plans = [plan(cfg, world_size=size, mfu=mfu) for size in sizes]
    if as_json:
        numbers = [
            plan_as_dict(item) | {"refusal": refusal(cfg, world_size=item.num_ranks), "warnings": preflight(cfg)}
            for item in plans
        ]
        return json.dumps(numbers if in_table else numbers[0]) + "\n"
    return render_table(plans) if in_table else render(plans[0])


def world_sizes(text: str) -> list[int]:
    """Parse a list like 8,64,1024."""
    numbers = text.split(",")
    valid = all(number.isdecimal() and int(number) >= 1 for number in numbers)
    require(valid, "--ranks", f"must be numbers of ranks like 8,64,1024, got {text!r}")
    return [int(number) for number in numbers]


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness plan", description=DESCRIPTION, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="group=option or key=value")
    mfu_help = "measured fraction of the bf16 peak of one device; default: from measured kernel rates"
    parser.add_argument("--mfu", metavar="FRACTION", type=float, help=mfu_help)
    parser.add_argument("--ranks", metavar="N,N,...", help="print a table with a row for each number of ranks")
    parser.add_argument("--json", action="store_true", help="print all numbers as one line of JSON")
    return parser
