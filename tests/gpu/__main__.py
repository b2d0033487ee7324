"""Runs all tests that need CUDA and prints a Markdown summary.

    python -m tests.gpu [pytest arguments]
    python -m tests.gpu -n 6 --dist loadgroup        on many cores; tests that share ranks stay together

Exit code 2 without a CUDA device, otherwise pytest's.
"""

from __future__ import annotations

import datetime
import importlib.util
import platform
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

DIRECTORY = Path(__file__).parent


@dataclass
class Summary:
    """Outcomes and seconds of each test file."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.split("::")[0]
        self.seconds[file] += report.duration  # type: ignore[assignment]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[file][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def table(self) -> str:
        kinds = ("passed", "failed", "skipped")
        lines = [f"| file | {' | '.join(kinds)} | seconds |", "|---|---|---|---|---|"]
        for file, counts in sorted(self.outcomes.items()):
            cells = " | ".join(str(counts[kind]) for kind in kinds)
            lines.append(f"| {file} | {cells} | {self.seconds[file]:.0f} |")
        total = sum(self.outcomes.values(), Counter())
        lines.append(f"| all | {' | '.join(str(total[kind]) for kind in kinds)} | {sum(self.seconds.values()):.0f} |")
        lines += [f"\n{count} skipped: {reason}" for reason, count in self.reasons.items()]
        return "\n".join(lines)


def versions() -> str:
    """Date, hardware and versions, in one line."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    parts = [
        datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"NCCL {nccl}",
    ]
    if importlib.util.find_spec("transformer_engine") is None:
        parts.append("no Transformer Engine")
    return ", ".join(parts)


def main() -> int:
    if not torch.cuda.is_available():
        print("tests.gpu: torch finds no CUDA device", file=sys.stderr)
        return 2
    summary = Summary()
    arguments = sys.argv[1:]
    selected = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    code = pytest.main(arguments if selected else [str(DIRECTORY), *arguments], plugins=[summary])
    print(f"\n{versions()}\n\n{summary.table()}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
