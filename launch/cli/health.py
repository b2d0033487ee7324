"""`harness health`: checks this node, before it joins a run or goes back to work."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.config.parallel import DeviceKind
from launch.cli.parser import CommandParser
from launch.health.node_check import NodeReport, check_this_node
from launch.slurm.requeue import EXIT_UNHEALTHY

DESCRIPTION = """\
Check this node: GPUs, errors of the driver, memory and disk, then GEMMs with a known result on every GPU, or on the CPU
if there is none. CUDA_VISIBLE_DEVICES selects GPUs. Every element is compared bit for bit, and the speed of a GPU with
that of the node's others. Links to other nodes are checked by the job (launch.slurm.health). Takes a few seconds; do
not run it on a node that trains. Exit code 0: healthy; 69: problems, one line each.
"""


def main(argv: Sequence[str]) -> int:
    """Check this node; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        directory = Path(args.directory)
        require(directory.is_dir(), "--directory", f"{directory} is not a directory")
        require(args.gpus is None or args.gpus >= 1, "--gpus", f"must be at least 1, got {args.gpus}")
        report = check_this_node(directory, device=DeviceKind(args.device), num_devices=args.gpus)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        print(render(report), end="")
    for problem in () if args.json else report.problems:
        print(problem.render(), file=sys.stderr)
    return EXIT_UNHEALTHY if report.problems else EXIT_DONE


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness health", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--directory", metavar="DIR", default=".", help="where runs write; default: the current one")
    kinds = [str(kind) for kind in DeviceKind]
    parser.add_argument("--device", choices=kinds, default="auto", help="what to check; default: auto, GPUs if any")
    parser.add_argument("--gpus", metavar="N", type=int, help="number of GPUs that the node must have at least")
    parser.add_argument("--json", action="store_true", help="print everything as one line of JSON")
    return parser


def render(report: NodeReport) -> str:
    """A line for each device, and one for the node."""
    lines = [
        f"{gemm.device}: {gemm.num_products} GEMMs with a known result, bf16 at {gemm.tflops:.4g} TFLOP/s"
        for gemm in report.gemms
        if not gemm.failure
    ]
    count = len(report.problems)
    result = "healthy" if not count else "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([*lines, f"node {report.node}: {result}", ""])


def as_json(report: NodeReport) -> dict[str, object]:
    return {
        "node": report.node,
        "problems": [problem._asdict() for problem in report.problems],
        "gemms": [asdict(gemm) for gemm in report.gemms],
    }
