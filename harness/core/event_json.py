"""Writes events as lines of JSON, and reads them back.

NaN and Inf are written as strings, because JSON cannot hold them. Readers skip a line that a crash cut short, lines of
unknown events, and unknown fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.core.events import EVENTS, ActionKind, Event, FindingKind, StepRecord


def to_json(event: Event) -> str:
    """Serialize an event as one line, without the newline. NaN and Inf become strings."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return json.dumps(encode({"event": event.name} | values), separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Event:
    """Parse one line. Unknown keys are ignored."""
    data = json.loads(line)
    kind = EVENTS[data["event"]]
    known = {
        name: data[name] if decode is None else decode(data[name])
        for name, decode in _DECODERS[kind.name].items()
        if name in data
    }
    if kind is StepRecord:
        known = _fields_of_old_logs(known) | known
    return kind(**known)


def _fields_of_old_logs(known: dict[str, Any]) -> dict[str, Any]:
    """Fill reduced fields from the rank 0 fields of old logs, so that detectors can replay those logs."""
    batch = known.get("batch") or {}
    return {"median_step_s": known.get("step_time_s", 0.0), "fingerprint": str(batch.get("fingerprint", ""))}


def read(path: Path) -> Iterator[Event]:
    """Yield all events of a log in order. Skips a last line without a newline, which a crash cut short."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield from parse(line)


def parse(line: str) -> Iterator[Event]:
    """Yield the event of one line, or nothing if the line is damaged or its event unknown."""
    try:
        yield from_json(line)
    except (ValueError, KeyError, TypeError):
        return


def encode(value: Any) -> Any:
    """Replace NaN and Inf by strings, at any depth, so that JSON can hold the value. A dataclass becomes a dict."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: encode(child) for key, child in value.items()}
        case list() | tuple():
            return [encode(child) for child in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return encode(asdict(value))
        case _:
            return value


_NUMBERS = (int, float)
_CHOICES: dict[str, type[StrEnum]] = {"FindingKind": FindingKind, "ActionKind": ActionKind}

Decoder = Callable[[Any], Any]
"""Restores the value of a field from JSON."""


def _decoder(annotation: str) -> Decoder | None:
    """The decoder of a field with this annotation; None: the value stays."""
    if annotation in _CHOICES:
        return _CHOICES[annotation]
    if "RankSpread" in annotation or "Fp8Health" in annotation:
        return parse_numbers
    return _parse_float if "float" in annotation else None


def _parse_float(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: child if type(child) is float else _parse_float(child) for key, child in value.items()}
    return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else value


def parse_numbers(value: Any) -> Any:
    """Convert every string in plain data to a float, at any depth."""
    match value:
        case dict():
            return {key: parse_numbers(child) for key, child in value.items()}
        case list():
            return [child if type(child) in _NUMBERS else parse_numbers(child) for child in value]
        case str():
            return float(value)
        case _:
            return value


_DECODERS: dict[str, dict[str, Decoder | None]] = {
    name: {each.name: _decoder(str(each.type)) for each in fields(kind)} for name, kind in EVENTS.items()
}
"""Event -> its fields with their decoders. A table, because readers parse hundreds of thousands of lines."""
