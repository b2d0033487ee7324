"""Reads training logs of other programs: CSV, JSON lines or a JSON list, one row per step, with any column names.

Why: users try the detectors on logs of past runs before they install anything else.
How: a column name is reduced to its last part (`run-a - train/loss` becomes `loss`) and looked up in `NAMES`. Exports
of W&B, MLflow (long or wide), TensorBoard and this harness are recognized, and `trainer_state.json` of Hugging Face's
Trainer. Rows are streamed, except MLflow's long format, which lists one metric after another, and a file that is one
JSON value. A row without a loss is skipped; NaN and Inf are valid values.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from harness.config.command_line import shell_command
from harness.config.errors import ConfigError
from harness.core.event_json import parse
from harness.core.events import Event, StepRecord

NAMES: dict[str, tuple[str, ...]] = {
    "step": ("step", "_step", "global_step", "iteration", "iter", "steps", "iterations", "num_steps"),
    "loss": (
        "loss",
        "train_loss",
        "training_loss",
        "lm_loss",
        "reduced_train_loss",
        "crossentropyloss",
        "ce_loss",
        "cross_entropy",
    ),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "global_grad_norm", "total_grad_norm", "gradnorm", "norm"),
    "lr": ("lr", "learning_rate", "lr_adamw"),
    "loss_scale": ("loss_scale",),
}
"""Field that the detectors read -> column names of other programs, best match first."""
HELD_OUT = re.compile(r"(^|[/_. -])(val|valid|validation|eval|test|dev)([/_. -]|$)")
SPREAD = re.compile(r"__(min|max)$")
"""Suffix of the columns in which W&B exports the range of a smoothed column."""


def read_log(path: Path, wanted: Mapping[str, str]) -> Iterator[Event]:
    """The rows of a log, and the other events of a log of this harness, in order; `wanted` names columns that `NAMES`
    does not match. All rows of another program reuse the same record object."""
    if path.is_dir():
        command = shell_command("harness", "diagnose", path)
        message = f"is a directory; give a log such as {path}/events.jsonl, or use {command}"
        raise ConfigError(str(path), message)
    if not path.is_file():
        raise ConfigError(str(path), "no such file")
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:  # spreadsheets write a BOM
            yield from _read_lines(path, lines, wanted)
    except csv.Error as error:
        raise ConfigError(str(path), f"is neither CSV nor JSON lines: {error}") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None


def _read_lines(path: Path, lines: Iterator[str], wanted: Mapping[str, str]) -> Iterator[Event]:
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ConfigError(str(path), "is empty")
    lines = chain([first], lines)
    if first.lstrip().startswith("[{") or first.strip() in ("{", "[") or '"log_history"' in first:
        lines = map(json.dumps, _read_list(path, "".join(lines)))
        first = "{"
    read = _from_json if first.lstrip().startswith("{") else _from_csv
    yield from read(path, lines, wanted)


def _read_list(path: Path, text: str) -> list[Any]:
    """The rows of a file that is one JSON value: a list, or `log_history` of Hugging Face's Trainer."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(str(path), f"is neither JSON lines nor one JSON value: {error}") from None
    rows = value.get("log_history") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise ConfigError(str(path), "is one JSON object without the list log_history; give CSV or JSON lines")
    return rows


def _from_json(path: Path, lines: Iterator[str], wanted: Mapping[str, str]) -> Iterator[Event]:
    columns: dict[str, str] = {}
    keys: list[str] = []
    known: set[str] = set()
    record = empty_record()
    is_own = False
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        if "event" in row and "iteration" in row:
            events = _own_events(line)
            is_own = is_own or bool(events)
            yield from events
        if is_own:
            continue
        if not known.issuperset(row):
            keys = list(dict.fromkeys([*keys, *row]))
            known, columns = set(keys), find_columns(keys, wanted)
        if "loss" in columns and fill_record(record, number, [row.get(columns.get(name)) for name in NAMES]):
            yield record
    if record.cursor == -1 and keys and "loss" not in columns and not is_own:
        raise missing(path, keys)


def _own_events(line: str) -> list[Event]:
    """The event of a line of this harness; empty for a row of another program, which may have keys of the same name."""
    try:
        return list(parse(line))
    except (AttributeError, OverflowError):
        return []


def _from_csv(path: Path, lines: Iterator[str], wanted: Mapping[str, str]) -> Iterator[StepRecord]:
    rows = csv.reader(lines)
    header = [name.strip() for name in next(rows)]
    lowered = [name.lower() for name in header]
    if {"key", "value", "step"} <= set(lowered):
        yield from _from_long(path, rows, lowered, wanted)
        return
    if lowered[:3] == ["wall time", "step", "value"] and "loss" not in wanted:
        wanted = {"loss": header[2], **wanted}
    columns = find_columns(header, wanted)
    if "loss" not in columns:
        raise missing(path, header)
    places = [header.index(columns[name]) if name in columns else -1 for name in NAMES]
    record, width, pick = empty_record(), max(places), itemgetter(*places)
    for number, row in enumerate(rows):
        if len(row) > width:
            row.append("")
            if fill_record(record, number, pick(row)):
                yield record


def _from_long(
    path: Path, rows: Iterator[list[str]], header: Sequence[str], wanted: Mapping[str, str]
) -> Iterator[StepRecord]:
    """MLflow's long table of metrics: one row for each metric and step."""
    key, value, step = (header.index(name) for name in ("key", "value", "step"))
    metrics: dict[str, dict[str, str]] = {}
    for row in rows:
        if len(row) == len(header) and number_of(row[step]) is not None:
            metrics.setdefault(row[key], {})[row[step]] = row[value]
    columns = {name: column for name, column in find_columns(list(metrics), wanted).items() if name != "step"}
    if "loss" not in columns:
        raise missing(path, list(metrics))
    record, others = empty_record(), [name for name in NAMES if name != "step"]
    for number, at in enumerate(sorted(metrics[columns["loss"]], key=float)):
        if fill_record(
            record, number, [at, *(metrics[columns[name]].get(at) if name in columns else None for name in others)]
        ):
            yield record


def find_columns(header: Sequence[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Field -> column. If several columns match the loss equally well, as with several runs, it must be named."""
    columns: dict[str, str] = {}
    for name, aliases in NAMES.items():
        if name in wanted:
            if wanted[name] in header:
                columns[name] = wanted[name]
            continue
        ranked = sorted(
            (aliases.index(alias), column)
            for column in header
            if (alias := plain_name(column)) in aliases and not HELD_OUT.search(column.lower())
        )
        best = [column for rank, column in ranked if rank == ranked[0][0]]
        if name == "loss" and len(best) > 1:
            raise ConfigError("--column", f"loss could be {', '.join(map(repr, best))}; choose one with loss=NAME")
        if best:
            columns[name] = best[0]
    return columns


def plain_name(column: str) -> str:
    """Last part of a column's name, after run name and group, in lower case."""
    lowered = column.lower()
    if SPREAD.search(lowered):
        return ""
    last = lowered.rpartition(" - ")[2].rpartition("/")[2].strip()
    return re.sub(r"[ .-]+", "_", last)


def missing(path: Path, columns: Sequence[str]) -> ConfigError:
    shown = ", ".join(repr(column) for column in columns[:40])
    return ConfigError(str(path), f"no column for the loss; choose one with --column loss=NAME, from {shown}")


def empty_record() -> StepRecord:
    """A record with neutral values, to be filled by `fill_record`."""
    return StepRecord(
        time=0.0,
        iteration=0,
        step=0,
        cursor=-1,
        tokens=0,
        loss=0.0,
        grad_norm=0.0,
        lr=math.nan,
        tokens_per_s=0.0,
        refused=False,
        stop_requested=False,
        step_time_s=0.0,
        flops_per_s=0.0,
    )


def fill_record(record: StepRecord, number: int, values: Sequence[Any]) -> bool:
    """Write a row, in the order of `NAMES`, into the record; returns whether it has a loss."""
    step, loss, grad_norm, rate, scale = values
    value = number_of(loss)
    if value is None:
        return False
    at = number_of(step)
    record.step = record.iteration = number if at is None or not math.isfinite(at) else int(at)
    record.cursor = number
    record.loss = value
    record.grad_norm = (number_of(grad_norm) or 0.0) if grad_norm else 0.0
    record.lr = math.nan if rate is None or rate == "" or (lr := number_of(rate)) is None else lr
    record.loss_scale = number_of(scale) if scale else None
    return True


def number_of(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an integer above the range, which JSON allows
        return math.inf if text > 0 else -math.inf
