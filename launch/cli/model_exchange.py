"""`harness checkpoint export` and `import`: converts a model to and from the Hugging Face layout.

Neither touches a run that is training: an import holds the lease of its run. Torch is imported after the arguments are
checked. An error is one line on stderr and exit code 2, or 75 if storage failed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.command_line import override, run_overrides, shell_command
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.precision import PrecisionKind
from harness.core.rundir import RunDir
from launch.cli.parser import CommandParser

EXPORT = """\
Write the model of a checkpoint as safetensors in the Hugging Face layout that `transformers` loads: Llama,
or Qwen3 for a model with q/k norms. Features that those models lack (muP multipliers, the norm after the
embedding) are folded into the weights, so that logits are equal. The tokenizer beside the data of the run is copied
too. The checkpoint is verified first, and DIR is written completely or not at all.
"""

IMPORT = """\
Convert a Hugging Face model (LlamaForCausalLM or Qwen3ForCausalLM, safetensors) to the first checkpoint of a new run,
and print the command that trains it further. Weights are kept in fp32; optimizer moments and counters start at zero.
Loss scaling starts at 1, so choose bf16 or fp32 rather than fp16.
"""


def export_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint export`."""
    return run_and_report_errors(lambda: export_and_print(arguments))


def import_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint import`."""
    return run_and_report_errors(lambda: import_and_print(arguments))


def run_and_report_errors(command: Callable[[], None]) -> int:
    """Run a command; prints an error that the user can fix in one line."""
    try:
        command()
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except StorageError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("harness: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def export_and_print(arguments: Sequence[str]) -> None:
    args = export_parser().parse_args(arguments)
    run, output = RunDir(Path(args.run)), Path(args.output)
    require(run.path.is_dir(), args.run, "is not a run directory")
    require(bool(output.name), "--output", f"must be the name of a new directory, got {args.output!r}")
    from harness.huggingface import convert

    checkpoint = convert.choose_checkpoint(run, step=args.step, name=args.checkpoint)
    exported = convert.export_model(run, checkpoint, output, dtype=PrecisionKind(args.dtype))
    count = "1 file" if len(exported.files) == 1 else f"{len(exported.files)} files"
    print(f"checkpoint  {checkpoint.name}, {checkpoint.health}")
    print(f"weights     {sum(exported.files.values()) / 1e9:,.3f} GB of {args.dtype} in {count}")
    print(f"tokenizer   {'copied' if exported.has_tokenizer else 'none beside the data of the run'}")
    print(f"output      {output}")


def import_and_print(arguments: Sequence[str]) -> None:
    args = import_parser().parse_args(arguments)
    run, source = RunDir(Path(args.run).absolute()), Path(args.source)
    require(source.is_dir(), args.source, "is not a directory")
    require(bool(run.path.name), "RUN", f"must be the path of a run directory, got {args.run!r}")
    from harness.huggingface import convert

    checkpoint, options = convert.import_model(source, run)
    print(f"checkpoint  {Path(args.run) / checkpoint.relative_to(run.path)}")
    print("train it with")
    print(f"  {shell_command('harness', 'train', *run_overrides(args.run), *model_overrides(options))}")


def model_overrides(options: Mapping[str, Any]) -> list[str]:
    """Model options as overrides."""
    return [override(f"model.{key}", value) for key, value in options.items()]


def export_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness checkpoint export", description=EXPORT, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory for the model; must not exist")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--step", metavar="N", type=int, help="checkpoint of this step; default: the newest good one")
    choice.add_argument("--checkpoint", metavar="NAME", help="checkpoint with this name")
    allowed = [str(kind) for kind in PrecisionKind if kind is not PrecisionKind.fp8]  # weights are never stored in fp8
    parser.add_argument(
        "--dtype", choices=allowed, default="fp32", help="dtype of the weights; default: fp32, as trained"
    )
    return parser


def import_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness checkpoint import", description=IMPORT, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="HF_DIR", help="directory with config.json and safetensors")
    parser.add_argument("run", metavar="RUN", help="path of the new run directory; must have no checkpoints")
    return parser
