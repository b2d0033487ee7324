"""Which tests a mutant must survive, and which mutants are known to be equivalent."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

TESTS = {
    "harness/sentinel/": ("tests/sentinel",),
    "harness/sentinel/curve.py": ("tests/sentinel/test_detectors.py", "tests/sentinel/test_baseline.py"),
    "harness/sentinel/guards.py": ("tests/sentinel/test_detectors.py",),
    "harness/sentinel/detectors.py": ("tests/sentinel/test_detectors.py", "tests/sentinel/test_foreign.py"),
    "harness/checkpoint/": ("tests/checkpoint",),
    "harness/checkpoint/cadence.py": ("tests/checkpoint/test_cadence.py",),
    "harness/checkpoint/catalog.py": ("tests/checkpoint/test_catalog.py",),
    "harness/checkpoint/clerk.py": ("tests/checkpoint/test_clerk.py",),
    "harness/checkpoint/description.py": ("tests/checkpoint/test_description.py",),
    "harness/checkpoint/integrity.py": ("tests/checkpoint/test_integrity.py",),
    "harness/checkpoint/keeper.py": ("tests/checkpoint/test_keeper_in_process.py",),
    "harness/checkpoint/listing.py": ("tests/checkpoint/test_listing.py",),
    "harness/checkpoint/memory.py": ("tests/checkpoint/test_memory.py",),
    "harness/checkpoint/patience.py": ("tests/checkpoint/test_patience.py",),
    "harness/checkpoint/ring.py": ("tests/checkpoint/test_ring_in_process.py",),
    "harness/checkpoint/store.py": ("tests/checkpoint/test_store_in_process.py",),
    "harness/data/order.py": ("tests/data/test_order.py", "tests/data/test_golden_orders.py"),
    "harness/data/mixture.py": ("tests/data/test_mixture.py", "tests/data/test_golden_orders.py"),
    "harness/data/ledger.py": ("tests/data/test_ledger.py",),
    "launch/requeue.py": ("tests/launch/test_requeue.py",),
}
"""File, or folder for all of its other files -> the tests that a mutant of it must fail. The longest entry counts."""

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class Equivalent(NamedTuple):
    """A mutant that no test can tell from the original."""

    file: str
    function: str
    before: str
    after: str


def suite_of(file: str) -> tuple[str, ...]:
    entries = [entry for entry in TESTS if file == entry or (entry.endswith("/") and file.startswith(entry))]
    if not entries:
        raise SystemExit(f"{file}: no tests are named for it; name them with --tests, or in {Path(__file__).name}")
    return TESTS[max(entries, key=len)]


def files(root: Path) -> list[str]:
    """All files of the table."""
    found = [
        path for entry in TESTS for path in ((root / entry).glob("*.py") if entry.endswith("/") else [root / entry])
    ]
    return sorted({path.relative_to(root).as_posix() for path in found if path.name != "__init__.py"})


def equivalents(path: Path = EQUIVALENT) -> dict[Equivalent, str]:
    """Recorded mutants and why each is equivalent."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", []) if path.exists() else []
    return {
        Equivalent(entry["file"], entry["function"], entry["before"], entry["after"]): entry["reason"]
        for entry in entries
    }
