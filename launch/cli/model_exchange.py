"""`harness checkpoint export` and `import`: a model out of a run, and into one.

Why: neither touches a run that is training; both take words, hand them on, and say what came of it.
How: torch is loaded once the words are understood. A complaint is one line on stderr and exit code 2.
"""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.config.precision import PrecisionKind
from harness.core.rundir import RunDir
from launch.cli.parser import Parser

EXPORT = """\
Write the model of a checkpoint as safetensors in Hugging Face's layout, which `transformers` and all that read its
models load: Llama's, or Qwen3's where the model has q/k norms. What those models do not have (muP's multipliers, the
norm after the embedding) is folded into the weights, so that logits are equal. The tokenizer that lies beside the data
of the run comes along. The checkpoint is verified first, and DIR is there whole or not at all.
"""

IMPORT = """\
Make a model in Hugging Face's layout (LlamaForCausalLM or Qwen3ForCausalLM, safetensors) the first checkpoint of a new
run, and print the words that train it further: weights are kept in fp32, moments and counters start at zero. Loss
scaling starts at 1, so choose bf16 or fp32 rather than fp16.
"""


def export_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint export`."""
    return in_one_line(lambda: export(arguments))


def import_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint import`."""
    return in_one_line(lambda: import_model(arguments))


def in_one_line(command: Callable[[], None]) -> int:
    """Run a command; what the user can mend is said in one line."""
    try:
        command()
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"harness: {named}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print("harness: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def export(arguments: Sequence[str]) -> None:
    words = export_parser().parse_args(arguments)
    run, output = RunDir(Path(words.run)), Path(words.output)
    require(run.path.is_dir(), words.run, "is no run directory")
    require(bool(output.name), "--output", f"must be the name of a new directory, got {words.output!r}")
    from harness.huggingface import convert

    checkpoint = convert.choose_checkpoint(run, step=words.step, name=words.checkpoint)
    exported = convert.export_model(run, checkpoint, output, dtype=PrecisionKind(words.dtype))
    count = "1 file" if len(exported.files) == 1 else f"{len(exported.files)} files"
    print(f"checkpoint  {checkpoint.name}, {checkpoint.health}")
    print(f"weights     {sum(exported.files.values()) / 1e9:,.3f} GB of {words.dtype} in {count}")
    print(f"tokenizer   {'beside them' if exported.has_tokenizer else 'none: none lies beside the data of the run'}")
    print(f"output      {output}")


def import_model(arguments: Sequence[str]) -> None:
    words = import_parser().parse_args(arguments)
    run, source = RunDir(Path(words.run).absolute()), Path(words.source)
    require(source.is_dir(), words.source, "is no directory")
    require(bool(run.path.name), "RUN", f"must be the path of a run directory, got {words.run!r}")
    from harness.huggingface import convert

    checkpoint, options = convert.import_model(source, run)
    print(f"checkpoint  {Path(words.run) / checkpoint.relative_to(run.path)}")
    print("train it with")
    place = [f"run.dir={Path(words.run).parent}", f"run.name={run.path.name}"]
    print(f"  harness train {shlex.join([*place, *overrides(options)])}")


def overrides(options: Mapping[str, Any]) -> list[str]:
    """Options of the model as words of the command line."""
    return [f"model.{key}={str(value).lower()}" for key, value in options.items()]


def export_parser() -> ArgumentParser:
    parser = Parser(prog="harness checkpoint export", description=EXPORT, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="path of the run directory")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the model goes; must not exist")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--step", metavar="N", type=int, help="the checkpoint of this step; default: the newest good")
    choice.add_argument("--checkpoint", metavar="NAME", help="the checkpoint of this name")
    allowed = [str(kind) for kind in PrecisionKind if kind is not PrecisionKind.fp8]  # no weight is ever kept in fp8
    parser.add_argument("--dtype", choices=allowed, default="fp32", help="of the weights; default: fp32, as trained")
    return parser


def import_parser() -> ArgumentParser:
    parser = Parser(prog="harness checkpoint import", description=IMPORT, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="HF_DIR", help="directory with config.json and safetensors")
    parser.add_argument("run", metavar="RUN", help="path of the run directory to begin; must hold no checkpoints")
    return parser
