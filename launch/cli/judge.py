"""`harness judge`: what the sentinel would have found in a log, ours or anyone's, and what it would have done.

Why: before a lab trusts detectors with its runs, it tries them on the runs it has had.
How: rows stream through the same detectors that watch a run, and their findings into incidents; a million rows take
seconds and no memory. The policy is asked while something is the matter. A file that cannot be read is one line on
stderr and exit code 2.
Left out: what would have come of an action. Each counts as done, and the log goes on as it went.
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

from harness.analysis.judge.foreign_logs import NAMES, records
from harness.analysis.judge.incident_groups import Incident, Incidents
from harness.analysis.judge.picture import Trace, draw
from harness.config.compose import conf_dir
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.config.sentinel import BudgetConfig, BudgetsConfig, DetectConfig, PolicyConfig
from harness.core.events import Action, ActionKind, Finding, Outcome, StepRecord
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.policy.policy import Policy
from launch.cli.parser import Parser

DESCRIPTION = f"""\
Run the sentinel over a log: CSV or JSON lines with a step, a loss and whatever else there is of
{", ".join(list(NAMES)[2:])}. Exports of W&B, MLflow and TensorBoard and our own events.jsonl are recognised.
With --json the last line on stdout is {{"incidents": [...]}}.
"""
COLUMNS = ("kind", "severity", "type", "onset", "detected", "peak", "end", "loss", "action", "what was seen")


def main(argv: Sequence[str]) -> int:
    """Print the incidents of a log; returns the exit code."""
    try:
        words = parser().parse_args(argv)
        trace, policy = Trace(), Policy.start(policy_config(), lag=0)
        rows = records(Path(words.file), named_columns(words.column))
        incidents = judge(rows, Detectors(detect_config(words.set)), policy, trace)
        require(trace.num_rows > 0, words.file, "has no row with a loss")
        if words.plot:
            draw(trace, incidents, Path(words.plot), title=Path(words.file).name)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(table(incidents, trace))
    if words.json:
        print(json.dumps({"incidents": [as_json(incident) for incident in incidents]}, allow_nan=False))
    return EXIT_DONE


def judge(rows: Iterable[StepRecord], detectors: Detectors, policy: Policy, trace: Trace) -> list[Incident]:
    """All incidents of a log in order; what is needed to draw it goes into `trace`."""
    incidents = Incidents(detectors.cfg)
    ended: list[Incident] = []
    for record in rows:
        findings = detectors.observe(record)
        ended += incidents.observe(record, findings)
        trace.add(record.step, record.loss)
        if findings or policy.policy_state.open_incidents:
            concerned = incidents.open or (ended[-1] if ended else None)
            for action in answers(policy, record, findings):
                if concerned is not None and action.kind not in concerned.actions:
                    concerned.actions.append(action.kind)
    return ended + list(incidents.finish())


def answers(policy: Policy, record: StepRecord, findings: Sequence[Finding]) -> Iterator[Action]:
    """What the policy decides on a row, one action after the other until it is content."""
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
    values = defaults()["policy"]
    budgets = {name: BudgetConfig(**budget) for name, budget in values["budgets"].items()}
    return PolicyConfig(**values | {"budgets": BudgetsConfig(**budgets)})


def defaults() -> dict[str, Any]:
    """The section `sentinel` of `conf/`, without Hydra, which takes longer than most logs."""
    sections = yaml.safe_load((conf_dir() / "sentinel" / "default.yaml").read_text(encoding="utf-8"))
    assert isinstance(sections, dict)
    return sections


def detect_config(words: Sequence[str]) -> DetectConfig:
    """The defaults of `sentinel.detect` with `name=value` applied."""
    values = defaults()["detect"]
    for word in words:
        name, _, value = word.partition("=")
        require(name in values, "--set", f"must be NAME=VALUE with a name of {', '.join(values)}, got {name!r}")
        try:
            values[name] = type(values[name])(value)
        except ValueError:
            raise ConfigError(f"--set {name}", f"must be a number, got {value!r}") from None
    return DetectConfig(**values)


def named_columns(words: Sequence[str]) -> dict[str, str]:
    """`loss=my column` and its like, as a table."""
    named = dict(word.partition("=")[::2] for word in words)
    for name, column in named.items():
        allowed = f"must be NAME=COLUMN with a name of {', '.join(NAMES)}, got {name!r}"
        require(name in NAMES and bool(column), "--column", allowed)
    return named


def as_json(incident: Incident) -> dict[str, Any]:
    """Plain data; a number that is not finite is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(incident).items()
    }


def table(incidents: Sequence[Incident], trace: Trace) -> str:
    """The incidents as text."""
    steps = f"{trace.num_rows:,} rows, steps {trace.first_step:,} to {trace.last_step:,}"
    if not incidents:
        return f"{steps}: nothing found"
    rows = [COLUMNS, *map(cells, incidents)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{steps}: {len(incidents)} incident{'s' if len(incidents) > 1 else ''}", *lines])


def cells(incident: Incident) -> tuple[str, ...]:
    """One line of the table."""
    end = "never" if incident.end_step is None else str(incident.end_step)
    kind, spike_type = str(incident.kind), "-" if incident.spike_type is None else str(incident.spike_type)
    steps = (str(incident.onset_step), str(incident.detected_step), str(incident.peak_step), end)
    losses = f"{incident.base_loss:.4g} -> {incident.peak_loss:.4g}"
    actions = ", ".join(incident.actions) or "-"
    return kind, str(incident.severity), spike_type, *steps, losses, actions, incident.message


def parser() -> ArgumentParser:
    parser = Parser(prog="harness judge", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="CSV or JSON lines")
    parser.add_argument("--json", action="store_true", help="also print all incidents as one line of JSON")
    parser.add_argument("--plot", metavar="OUT.png", help="draw the loss with the incidents marked")
    parser.add_argument(
        "--column", metavar="NAME=COLUMN", action="append", default=[], help="where a column is not recognised"
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of sentinel.detect, as spike_sigmas=6",
    )
    return parser
