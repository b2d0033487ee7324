"""`harness sample`: generates text from a checkpoint of a run.

Why: after hours of training, the first question is what the model writes. This needs no export and no other library.
How: the prompt and the generated text go to stdout, what was sampled from to stderr. An error is one line on stderr and
exit code 2. Torch is imported after the arguments are checked.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import require
from harness.core.rundir import RunDir
from launch.cli.model_exchange import run_and_report_errors
from launch.cli.parser import CommandParser

DESCRIPTION = """\
Generate text from a checkpoint of a run, on the CPU or one GPU. A run that is training is not disturbed. Checkpoints of
any number of ranks can be read.
"""
EPILOG = """\
examples:
  harness sample runs/first --prompt "The value of"
  harness sample runs/first --prompt "The value of" --step 100 --tokens 50 --temperature 0
"""


def main(argv: Sequence[str]) -> int:
    """Print the text; returns the exit code."""
    return run_and_report_errors(lambda: sample_and_print(argv))


def sample_and_print(arguments: Sequence[str]) -> None:
    args = build_parser().parse_args(arguments)
    require(bool(args.prompt), "--prompt", "must not be empty")
    run = RunDir(Path(args.run))
    require(run.config.is_file(), args.run, f"is not a run directory: it has no {run.config.name}")
    require(any(run.checkpoints.glob("step-*")), args.run, "has no checkpoint yet")
    from harness.analysis.sampling import SamplingOptions, choose_device, sample_text
    from harness.huggingface.convert import choose_checkpoint, read_config

    options = SamplingOptions(num_tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    device = choose_device(args.device)
    checkpoint = choose_checkpoint(run, step=args.step)
    print(f"harness: {checkpoint.name}, {checkpoint.health}, on {device.type}", file=sys.stderr)
    text = sample_text(checkpoint, read_config(run), args.prompt, options, device=device)
    print(args.prompt + text)


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness sample", description=DESCRIPTION, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="text to continue")
    parser.add_argument("--step", metavar="N", type=int, help="checkpoint of this step; default: the newest good one")
    parser.add_argument("--tokens", metavar="N", type=int, default=100, help="tokens to generate; default: 100")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="divides the logits; 0: greedy; default: 0.8"
    )
    parser.add_argument("--top-k", metavar="K", type=int, default=50, help="most likely tokens; 0: all; default: 50")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the random draws; default: 0")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    return parser
