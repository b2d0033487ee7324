"""Which tests must kill the mutants of a file, and which mutants are recorded as equivalent."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import NamedTuple

SENTINEL = "tests/sentinel"
DETECT, POLICY, DEVICE = (f"{SENTINEL}/{package}" for package in ("detect", "policy", "device"))
GOLDEN_SERIES = f"{SENTINEL}/test_golden.py::test_seeded_series_match_the_golden_files"
DETECTOR_BOUNDS = f"{DETECT}/test_detector_bounds.py"
CURVE_TESTS = tuple(
    f"{GOLDEN_SERIES}[{name}]"
    for name in ("spikes", "gradient_spikes", "starts", "refusals", "accepted_levels", "odd_losses", "slow_changes")
)
POLICY_TESTS = (
    f"{GOLDEN_SERIES}[policy]",
    f"{POLICY}/test_policy_bounds.py",
    f"{POLICY}/test_record_responses.py",
    f"{POLICY}/test_policy.py",
    f"{POLICY}/test_policy_climbing.py",
    f"{POLICY}/test_policy_corruption.py",
    f"{POLICY}/test_precision_fallback.py",
    f"{SENTINEL}/test_spike_types.py",
)

TESTS = {
    "harness/sentinel/detect/baseline.py": (
        f"{GOLDEN_SERIES}[baselines]",
        f"{GOLDEN_SERIES}[accepted_levels]",
        f"{DETECT}/test_baseline.py",
    ),
    "harness/sentinel/detect/loss_curve.py": (
        DETECTOR_BOUNDS,
        *CURVE_TESTS,
        f"{DETECT}/test_loss_curve_episodes.py",
        f"{DETECT}/test_detectors.py",
    ),
    "harness/sentinel/detect/trajectory.py": (f"{DETECT}/test_trajectory.py", f"{POLICY}/test_policy_bounds.py"),
    "harness/sentinel/detect/detectors.py": (
        f"{GOLDEN_SERIES}[guards]",
        DETECTOR_BOUNDS,
        CURVE_TESTS[0],
        f"{DETECT}/test_detectors.py",
    ),
    "harness/sentinel/detect/guards.py": (
        f"{GOLDEN_SERIES}[guards]",
        DETECTOR_BOUNDS,
        f"{DETECT}/test_detectors.py",
    ),
    "harness/sentinel/detect/second_moment.py": (f"{GOLDEN_SERIES}[guards]", DETECTOR_BOUNDS),
    "harness/sentinel/detect/precursor.py": (f"{GOLDEN_SERIES}[precursors]", f"{DETECT}/test_precursor.py"),
    "harness/sentinel/detect/learning.py": (f"{GOLDEN_SERIES}[starts]", f"{DETECT}/test_learning.py"),
    "harness/sentinel/detect/fp8_range.py": (DETECTOR_BOUNDS, f"{DETECT}/test_detectors.py"),
    "harness/sentinel/detect/step_time.py": (f"{GOLDEN_SERIES}[step_times]", f"{DETECT}/test_step_time.py"),
    "harness/sentinel/policy/": POLICY_TESTS,
    "harness/sentinel/policy/incident_log.py": (f"{POLICY}/test_incident_log.py",),
    "harness/analysis/judge/incident_groups.py": (
        f"{GOLDEN_SERIES}[incidents]",
        "tests/analysis/judge/test_incident_groups.py",
    ),
    "harness/analysis/judge/foreign_logs.py": ("tests/analysis/judge/test_foreign_logs.py",),
    "harness/sentinel/device/fp8_usage.py": (f"{DETECT}/test_fp8_range.py", f"{DEVICE}/test_step_report.py"),
    "harness/sentinel/": (SENTINEL,),
    "harness/checkpoint/": ("tests/checkpoint",),
    "harness/checkpoint/ring_cost.py": ("tests/checkpoint/test_ring_cost.py",),
    "harness/checkpoint/catalog.py": ("tests/checkpoint/test_catalog.py",),
    "harness/checkpoint/writer_thread.py": ("tests/checkpoint/test_writer_thread.py",),
    "harness/checkpoint/tensor_index.py": ("tests/checkpoint/test_tensor_index.py",),
    "harness/checkpoint/integrity.py": ("tests/checkpoint/test_integrity.py",),
    "harness/checkpoint/manager.py": ("tests/checkpoint/test_manager_in_process.py",),
    "harness/checkpoint/listing.py": ("tests/checkpoint/test_listing.py",),
    "harness/distributed/host_memory.py": ("tests/distributed/test_host_memory.py",),
    "harness/core/memory_limits.py": ("tests/core/test_memory_limits.py",),
    "harness/checkpoint/io_retry.py": ("tests/checkpoint/test_io_retry.py",),
    "harness/checkpoint/ring.py": ("tests/checkpoint/test_ring_in_process.py",),
    "harness/checkpoint/saver.py": ("tests/checkpoint/test_store_in_process.py",),
    "harness/checkpoint/store.py": ("tests/checkpoint/test_store_in_process.py",),
    "harness/data/order/order.py": ("tests/data/order/test_order.py", "tests/data/order/test_golden_orders.py"),
    "harness/data/order/mixture.py": ("tests/data/order/test_mixture.py", "tests/data/order/test_golden_orders.py"),
    "harness/data/order/ledger.py": ("tests/data/order/test_ledger.py",),
    "launch/slurm/requeue.py": ("tests/launch/slurm/test_requeue.py",),
}
"""File, or folder for all of its other files -> the tests that a mutant of it must fail. The longest entry counts.
These are the quickest tests of a file: what survives them may still fail another one."""

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class Equivalent(NamedTuple):
    """A mutant whose behaviour no test can distinguish from the original."""

    file: str
    function: str
    before: str
    after: str


def suite_for(file: str) -> tuple[str, ...]:
    entries = [entry for entry in TESTS if file == entry or (entry.endswith("/") and file.startswith(entry))]
    if not entries:
        raise SystemExit(f"{file}: no tests are listed for it; pass --tests, or add an entry to {Path(__file__).name}")
    return TESTS[max(entries, key=len)]


def list_files(root: Path) -> list[str]:
    """All files that the table covers."""
    found = [
        path for entry in TESTS for path in ((root / entry).glob("*.py") if entry.endswith("/") else [root / entry])
    ]
    return sorted({path.relative_to(root).as_posix() for path in found if path.name != "__init__.py"})


def load_equivalents(path: Path = EQUIVALENT) -> dict[Equivalent, str]:
    """Recorded mutants and why each is equivalent."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", []) if path.exists() else []
    return {
        Equivalent(
            entry["file"], entry["function"], unparse_again(entry["before"]), unparse_again(entry["after"])
        ): entry["reason"]
        for entry in entries
    }


def unparse_again(statement: str) -> str:
    """The statement as this version of Python writes it: quotes inside f-strings differ. Headers stay as they are."""
    try:
        return ast.unparse(ast.parse(statement))
    except SyntaxError:
        return statement
