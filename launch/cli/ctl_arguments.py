"""The arguments of `harness ctl`: the parser of each command, and the order that a command line means."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from harness.config.errors import ConfigError, require
from harness.control.commands import LONGEST_REASON, Order, one_line, parse_order
from harness.control.order_effect import incident_batches, parse_batches
from harness.core.rundir import RunDir
from launch.cli.parser import CommandParser

HELP = """\
usage: harness ctl RUN COMMAND [ARGUMENTS] --reason TEXT [--wait]

RUN is a run directory, such as runs/first. Commands:
  skip --batches A..B      exclude these batches; or --batch N, or --next K
  unskip --batches A..B    re-include excluded batches; or --batch N
  rollback --to STEP       restore the newest untainted checkpoint at or before STEP; --exclude A..B or --incident N
                           also excludes batches
  lr FACTOR                multiply the scheduled learning rate; 1 restores it
  exclude SOURCE           stop reading a data source
  reweight SOURCE=WEIGHT   change the weights of data sources
  precision KIND           bf16: run an fp8 run in bf16; fp8: switch back to fp8
  checkpoint               save a checkpoint now
  profile --steps N        profile the next N steps on all ranks, or on --ranks 0,3, into RUN/profiles/; needs no reason
  pause, resume            pause with everything in memory; continue
  stop                     save a checkpoint and exit with 75, or with 0 after the last step
  list                     list pending commands and recent interventions

Commands about data first print what they would exclude or change; --dry-run sends nothing and
needs no reason. A..B includes both ends.
RUN/interventions.jsonl records who sent a command, when, why, and its result. Examples:
  harness ctl runs/first skip --batches 12140..12160 --reason "repeated boilerplate from shard 17"
  harness ctl runs/first rollback --to 12000 --exclude 12090..12110 --reason "loss floor moved up after 12100" --wait
  harness ctl runs/first lr 0.5 --reason "third spike today"
  harness ctl runs/first exclude web --reason "the dump of March is broken"
  harness ctl runs/first reweight web=0.5 code=2 --reason "more code for the last phase"

See `harness ctl RUN COMMAND --help` for its arguments.
"""

DESCRIPTIONS = {
    "skip": (
        "Exclude batches that the run has not read yet, also after a rollback past them. Batches that were read are\n"
        "excluded by `rollback --exclude`. --next does not count batches that are given back."
    ),
    "unskip": (
        "Re-include batches that an operator or the sentinel excluded. Batches that the run has passed are read next,\n"
        "the others in their place."
    ),
    "rollback": (
        "Restore the newest untainted checkpoint at or before a step, without a restart of the processes.\n"
        "No batch is excluded unless --exclude or --incident says so. The checkpoints that it lists, also with\n"
        "--dry-run, stay on disk for ten minutes."
    ),
    "lr": "Multiply the scheduled learning rate by a factor, until the next lr command.",
    "exclude": "Stop reading a data source; its share goes to the others by their weights.",
    "reweight": (
        "Change the weights of data sources from the next batch on. Weights are relative to those of the other\n"
        "sources, which keep theirs. From then on data.phases does not change the weights of the named sources."
    ),
    "precision": "Run an fp8 run in bf16, or switch it back to fp8.",
    "checkpoint": "Save a checkpoint now.",
    "profile": (
        "Profile the next steps with torch's profiler, without a restart: a trace, a table of kernels and, on GPUs, a\n"
        "snapshot of memory for each rank, in RUN/profiles/. The profiled steps are slower."
    ),
    "pause": "Finish the step and wait, with everything in memory, until resume or stop.",
    "resume": "Continue after a pause.",
    "stop": (
        "Save a checkpoint and exit. All ranks exit after the same step, with 75, or with 0 after the last step.\n"
        "Rerun the same `harness train` command to resume the run."
    ),
    "list": "List pending commands and recent interventions.",
}
ABOUT_DATA = ("skip", "unskip", "rollback", "reweight")
"""Commands whose effect on the data is printed before they are sent."""
COMMANDS = ", ".join(DESCRIPTIONS)


def parse_arguments(name: str, arguments: Sequence[str]) -> Namespace:
    """The arguments of a command. A dry run records nothing, so it needs no reason."""
    is_dry_run = name in ABOUT_DATA and "--dry-run" in arguments
    return parser_of_command(name).parse_args([*(["--reason", "dry run"] if is_dry_run else []), *arguments])


def parser_of_command(name: str) -> ArgumentParser:
    description = DESCRIPTIONS[name]
    parser = CommandParser(
        prog=f"harness ctl RUN {name}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    match name:
        case "skip" | "unskip":
            parser.add_argument("number", nargs="*", help=SUPPRESS)
            which = parser.add_mutually_exclusive_group()
            which.add_argument("--batch", metavar="N", type=int, help="the batch with this index")
            which.add_argument("--batches", metavar="A..B", help="the batches A to B, both included")
            if name == "skip":
                which.add_argument("--next", metavar="K", type=int, help="the next K batches")
        case "rollback":
            parser.add_argument(
                "--to",
                dest="to_step",
                metavar="STEP",
                type=int,
                required=True,
                help="restore a checkpoint at or before this step",
            )
            which = parser.add_mutually_exclusive_group()
            which.add_argument("--exclude", metavar="A..B", help="also exclude the batches A to B, both included")
            which.add_argument("--incident", metavar="N", type=int, help="also exclude the batches of this incident")
        case "reweight":
            parser.add_argument("weights", metavar="SOURCE=WEIGHT", nargs="+", help="0 or more; 0 turns a source off")
        case "lr":
            parser.add_argument(
                "factor", metavar="FACTOR", type=float, help="above 0, at most 10; 1 restores the schedule"
            )
        case "exclude":
            parser.add_argument("source", metavar="SOURCE", help="name of the source under data.sources")
        case "precision":
            parser.add_argument("kind", metavar="KIND", help="bf16 or fp8")
        case "profile":
            parser.add_argument("--steps", metavar="N", type=int, default=3, help="steps to profile (default: 3)")
            parser.add_argument("--ranks", metavar="R,...", default="", help="ranks to profile (default: all)")
        case "list":
            return parser
    if name in ABOUT_DATA:
        parser.add_argument("--dry-run", action="store_true", help="print what it would do, and send nothing")
    until = "the run has ended; exit with its exit code" if name == "stop" else "the command is done; print the result"
    changes_nothing = {"default": "profile"} if name == "profile" else {"required": True}
    parser.add_argument("--reason", metavar="TEXT", help="reason, recorded in the log of the run", **changes_nothing)
    parser.add_argument("--wait", action="store_true", help=f"wait until {until}")
    return parser


def build_order(run: RunDir, name: str, args: Namespace) -> Order:
    """The order of a command line."""
    match name:
        case "skip" | "unskip":
            return build_skip(name, args)
        case "rollback":
            exclude: tuple[int, ...] = ()
            if args.incident is not None:
                exclude = incident_batches(run, args.incident)
            elif args.exclude is not None:
                exclude = parse_option("--exclude", args.exclude)
            return parse_order(name, {"to_step": args.to_step, "exclude": exclude})
        case "reweight":
            return parse_order(name, {"weights": dict(map(parse_weight, args.weights))})
        case "profile":
            return parse_order(name, {"num_steps": args.steps, "ranks": parse_ranks(args.ranks)})
        case _:
            given = {key: value for key, value in vars(args).items() if key not in ("reason", "wait")}
            return parse_order(name, given)


def parse_ranks(text: str) -> list[int]:
    """The ranks of `--ranks 0,3`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    require(all(part.isdecimal() for part in parts), "--ranks", f"must be ranks like 0,3, got {text!r}")
    return [int(part) for part in parts]


def build_skip(name: str, args: Namespace) -> Order:
    """The order of a skip or unskip. A bare number is an error: it could mean an index or a count."""
    options = "--batch N (one batch) or --batches A..B (a range)"
    if name == "skip":
        options = "--batch N (one batch), --batches A..B (a range) or --next K (the next K)"
    require(not args.number, name, f"{' '.join(args.number)!r} is not clear: use {options}")
    if name == "skip" and args.next is not None:
        return parse_order(name, {"num_batches": args.next})
    require(args.batch is not None or args.batches is not None, name, f"missing batches: use {options}")
    span = (args.batch, args.batch) if args.batch is not None else parse_option("--batches", args.batches)
    return parse_order("skip_batches" if name == "skip" else name, {"first": span[0], "last": span[1]})


def parse_option(option: str, text: str) -> tuple[int, int]:
    try:
        return parse_batches(text)
    except ConfigError as error:
        raise ConfigError(option, str(error)) from None


def parse_weight(text: str) -> tuple[str, float]:
    name, equals, weight = text.rpartition("=")
    try:
        require(bool(name and equals), "reweight", f"must be SOURCE=WEIGHT, got {text!r}")
        return name, float(weight)
    except ValueError:
        raise ConfigError("reweight", f"the weight of {name!r} must be a number, got {weight!r}") from None


def parse_reason(args: Namespace) -> str:
    """The reason, in one line that is not empty."""
    reason = one_line(str(args.reason))
    require(bool(reason), "--reason", "must not be empty")
    message = f"must have at most {LONGEST_REASON} characters, got {len(reason)}"
    require(len(reason) <= LONGEST_REASON, "--reason", message)
    return reason
