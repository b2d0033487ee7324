"""`harness plan`: the numbers of a run, without starting it.

Why: it is asked many times while a configuration takes shape, so it answers at once and needs neither torch nor a GPU.
How: the words are those of `harness train`; `harness.plan` does the arithmetic. A complaint is one line on stderr and
exit code 2.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict

from harness import compose
from harness.config import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.plan import plan, render
from launch.parser import Parser

DESCRIPTION = """\
Say what a run will take: parameters, FLOPs, memory of a rank, checkpoints on disk and in host memory, and what going
back costs at this cadence. Nothing is started. The overrides are those of `harness train`; launch.nproc is the number
of ranks (1 where it is not set), and seconds need cluster.peak_tflops (cluster=h100).
"""
MFU = 0.4


def main(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    try:
        words = parser().parse_intermixed_args(argv)
        require(0 < words.mfu <= 1, "--mfu", f"must be above 0 and at most 1, got {words.mfu}")
        numbers = plan(compose.load(words.override), mfu=words.mfu)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(json.dumps(asdict(numbers)) if words.json else render(numbers), end="\n" if words.json else "")
    return EXIT_DONE


def parser() -> ArgumentParser:
    parser = Parser(prog="harness plan", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", metavar="OVERRIDE", help="group=option or key=value")
    parser.add_argument("--mfu", metavar="SHARE", type=float, default=MFU, help=f"of the peak rate; default: {MFU}")
    parser.add_argument("--json", action="store_true", help="all numbers, as one line of JSON")
    return parser
