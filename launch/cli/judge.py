"""`harness judge`: runs the sentinel's detectors and policy over a log of this or any other trainer.

Why: a lab can try the detectors on the runs it already has.
How: rows stream through the same detectors as in a run, and findings are grouped into incidents; a million rows take
seconds and constant memory. A log of this harness also says which changes were planned. The policy runs while an
incident is open. A file that cannot be read is one line on stderr and exit code 2.
Left out: the effect of an action. Each counts as done, and the log continues unchanged.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from harness.analysis.judge.foreign_logs import NAMES, read_log
from harness.analysis.judge.incident_groups import IncidentGroup, IncidentGrouper
from harness.analysis.judge.judge_picture import LARGEST_STEP, Trace, draw
from harness.analysis.judge.run_events import tell_detectors
from harness.config.conf_files import conf_dir
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.config.sentinel import BudgetConfig, BudgetsConfig, DetectConfig, PolicyConfig
from harness.core.events import Action, ActionKind, Event, Finding, Outcome, StepRecord
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.policy.policy import Policy
from launch.cli.parser import CommandParser
from launch.cli.write_error import write_error

DESCRIPTION = f"""\
Run the detectors and the policy over a log: CSV or JSON lines with step, loss and any of
{", ".join(list(NAMES)[2:])}. Exports of W&B, MLflow and TensorBoard, trainer_state.json of Hugging Face
and events.jsonl are recognised.
With --json the last line on stdout is {{"incidents": [...]}}.
"""
COLUMNS = ("kind", "severity", "type", "onset", "detected", "peak", "end", "loss", "action", "finding")


def main(argv: Sequence[str]) -> int:
    """Print the incidents of a log; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        if args.plot:  # before the log is read, which may take long
            directory = Path(args.plot).parent
            require(directory.is_dir(), "--plot", f"{directory} is not a directory")
        trace, policy = Trace(), Policy.start(policy_config(), lag=0)
        log = read_log(Path(args.file), parse_columns(args.column))
        incidents = find_incidents(log, Detectors(detect_config(args.set)), policy, trace)
        require(trace.num_rows > 0, args.file, "has no row with a loss")
        if args.plot:
            write_plot(trace, incidents, Path(args.plot), title=Path(args.file).name)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(render_incidents(incidents, trace))
    if args.json:
        print(json.dumps({"incidents": [as_json(incident) for incident in incidents]}, allow_nan=False))
    return EXIT_DONE


def write_plot(trace: Trace, incidents: Sequence[IncidentGroup], out: Path, *, title: str) -> None:
    largest = trace.largest_step
    require(largest <= LARGEST_STEP, "--plot", f"cannot draw steps above {LARGEST_STEP:.3g}, got {largest:.3g}")
    try:
        draw(trace, incidents, out, title=title)
    except OSError as error:
        raise write_error(out, error, key="--plot") from None


def find_incidents(log: Iterable[Event], detectors: Detectors, policy: Policy, trace: Trace) -> list[IncidentGroup]:
    """All incidents of a log in order; the points for the plot go to `trace`."""
    incidents = IncidentGrouper(detectors.cfg)
    ended: list[IncidentGroup] = []
    for record in log:
        if not isinstance(record, StepRecord):
            tell_detectors(detectors, record)
            continue
        findings = detectors.observe(record)
        ended += incidents.observe(record, findings)
        trace.add(record.step, math.nan if record.is_empty else record.loss)
        if findings or policy.policy_state.open_incidents:
            incident = incidents.open or (ended[-1] if ended else None)
            for action in decide_actions(policy, record, findings):
                if incident is not None and action.kind not in incident.actions:
                    incident.actions.append(action.kind)
    return ended + list(incidents.finish())


def decide_actions(policy: Policy, record: StepRecord, findings: Sequence[Finding]) -> Iterator[Action]:
    """The actions that the policy decides on a row, until it has no further one."""
    action = policy.decide(record, findings)
    while action is not None:
        yield action
        if action.kind in (ActionKind.watch, ActionKind.halt):
            return
        done = Outcome(
            time=record.time,
            iteration=record.iteration,
            kind=action.kind,
            incident=action.incident,
            succeeded=True,
            step=record.step,
        )
        action = policy.on_outcome(done)


def policy_config() -> PolicyConfig:
    """The defaults of `sentinel.policy`."""
    values = read_sentinel_defaults()["policy"]
    budgets = {name: BudgetConfig(**budget) for name, budget in values["budgets"].items()}
    return PolicyConfig(**values | {"budgets": BudgetsConfig(**budgets)})


def read_sentinel_defaults() -> dict[str, Any]:
    """The section `sentinel` of `conf/`, read without Hydra, which takes longer than most logs."""
    sections = yaml.safe_load((conf_dir() / "sentinel" / "default.yaml").read_text(encoding="utf-8"))
    assert isinstance(sections, dict)
    return sections


def detect_config(assignments: Sequence[str]) -> DetectConfig:
    """The defaults of `sentinel.detect` with `name=value` assignments applied."""
    values = read_sentinel_defaults()["detect"]
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        require(name in values, "--set", f"must be NAME=VALUE with a name of {', '.join(values)}, got {name!r}")
        try:
            values[name] = type(values[name])(value)
        except ValueError:
            raise ConfigError(f"--set {name}", f"must be a number, got {value!r}") from None
    return DetectConfig(**values)


def parse_columns(assignments: Sequence[str]) -> dict[str, str]:
    """`loss=my column` assignments as a table."""
    columns = dict(assignment.partition("=")[::2] for assignment in assignments)
    for name, column in columns.items():
        allowed = f"must be NAME=COLUMN with a name of {', '.join(NAMES)}, got {name!r}"
        require(name in NAMES and bool(column), "--column", allowed)
    return columns


def as_json(incident: IncidentGroup) -> dict[str, Any]:
    """JSON data; a non-finite number is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(incident).items()
    }


def render_incidents(incidents: Sequence[IncidentGroup], trace: Trace) -> str:
    """The incidents as text."""
    steps = f"{trace.num_rows:,} rows, steps {trace.first_step:,} to {trace.last_step:,}"
    if not incidents:
        return f"{steps}: nothing found"
    rows = [COLUMNS, *map(table_row, incidents)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{steps}: {len(incidents)} incident{'s' if len(incidents) > 1 else ''}", *lines])


def table_row(incident: IncidentGroup) -> tuple[str, ...]:
    """One row of the table."""
    end = "never" if incident.end_step is None else str(incident.end_step)
    kind, spike_type = str(incident.kind), "-" if incident.spike_type is None else str(incident.spike_type)
    steps = (str(incident.onset_step), str(incident.detected_step), str(incident.peak_step), end)
    losses = f"{incident.base_loss:.4g} -> {incident.peak_loss:.4g}"
    actions = ", ".join(incident.actions) or "-"
    return kind, str(incident.severity), spike_type, *steps, losses, actions, incident.message


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness judge", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="CSV or JSON lines")
    parser.add_argument("--json", action="store_true", help="also print all incidents as one line of JSON")
    parser.add_argument("--plot", metavar="OUT.png", help="plot the loss with the incidents marked")
    parser.add_argument(
        "--column", metavar="NAME=COLUMN", action="append", default=[], help="name of a column that is not recognised"
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set an option of sentinel.detect, such as spike_sigmas=6",
    )
    return parser
