"""Outcome and seconds (without the teardown) of each test, as JSON lines, and a Markdown table of them.

A whole run takes longer than some machines are lent for. So each call appends to the file, one line when a test has
ended: calls can be added up, and one that was cut off counts as far as it came. The newest line of a test counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

NUM_ERROR_LINES = 10
OUTCOMES = ("passed", "failed", "skipped")
GROUP = re.compile(r"@[\w-]+$")
"""What xdist appends to the name of a test that shares its worker with others."""


class Recorder:
    """A pytest plugin that appends what it is told to a file."""

    def __init__(self, file: Path, versions: str) -> None:
        self._file, self._versions = file, versions
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for the set-up, the call and the teardown of each test; with xdist, in the main process."""
        test = report.nodeid
        self._seconds[test] += report.duration
        if report.when != "call" and report.outcome == "passed":
            return
        line = {
            "test": GROUP.sub("", test),
            "outcome": report.outcome,
            "seconds": round(self._seconds[test], 3),
            "reason": _reason(report),
            "versions": self._versions,
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped; the whole text of a failure, which some tests show only once in many runs."""
    match report.longrepr:
        case (_, _, str(reason)) if report.skipped:
            return reason.removeprefix("Skipped: ")
    if not report.failed:
        return ""
    return "\n".join([report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)])


def read_newest(file: Path) -> dict[str, dict[str, Any]]:
    """The newest record of each test."""
    if not file.exists():
        return {}
    return {record["test"]: record for record in map(json.loads, file.read_text().splitlines())}


def passed_tests(file: Path) -> list[str]:
    return [test for test, record in read_newest(file).items() if record["outcome"] == "passed"]


def render(file: Path) -> str:
    """The versions, a table with a row for each test file, the reasons for skipped tests, and the ends of failures."""
    newest = read_newest(file)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: defaultdict[str, float] = defaultdict(float)
    for test, record in newest.items():
        outcomes[test.split("::")[0]][record["outcome"]] += 1
        seconds[test.split("::")[0]] += record["seconds"]
    lines = [*dict.fromkeys(record["versions"] for record in newest.values()), ""]
    lines += [f"| file | {' | '.join(OUTCOMES)} | seconds |", "|---|---|---|---|---|"]
    lines += [_row(name, outcomes[name], seconds[name]) for name in sorted(outcomes)]
    lines.append(_row("all", sum(outcomes.values(), Counter()), sum(seconds.values())))
    reasons = Counter(record["reason"] for record in newest.values() if record["outcome"] == "skipped")
    lines += [f"\n{count} skipped: {reason}" for reason, count in reasons.items()]
    failures = {test: record["reason"] for test, record in newest.items() if record["outcome"] == "failed"}
    lines += [f"\nfailed: {test}\n{indent(_error_lines(text), '    ')}" for test, text in failures.items()]
    return "\n".join(lines)


def _error_lines(failure: str) -> str:
    """The lines that pytest marks as the error, or the last ones if there are none."""
    lines = failure.split("\n--- ", maxsplit=1)[0].splitlines()
    return "\n".join(([line for line in lines if line.startswith("E ")] or lines)[-NUM_ERROR_LINES:])


def _row(name: str, counts: Counter[str], seconds: float) -> str:
    return f"| {name} | {' | '.join(str(counts[kind]) for kind in OUTCOMES)} | {seconds:.0f} |"
