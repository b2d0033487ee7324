"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from harness.core.fast_imports import loading
from harness.distributed.compile_cache import VARIABLES
from launch.local.thread_count import num_cores
from tests.distributed.pool import Pool

LONGEST_FIRST = (
    "test_drills",
    "test_infrastructure_campaign",
    "test_slurm_scheduling",
    "test_slurm",
    "test_kernels",
    "test_submit",
    "test_hosts",
    "test_context",
    "test_corruption",
    "test_kill",
    "test_operator_commands",
    "test_trials",
    "test_muon",
    "test_node_drills",
    "test_drill",
    "test_parallel",
    "test_layers",
    "test_sentinel",
    "test_batch_size_warmup",
    "test_precision_phases",
    "test_multirun",
    "test_sink_process",
    "test_alert_sink",
    "test_all_sinks",
    "test_signals",
    "test_no_sync",
    "test_one_writer",
    "test_experiment",
    "test_infrastructure",
    "test_stop_and_resume",
    "test_manager",
    "test_slow_writer",
    "test_store",
    "test_start",
    "test_in_a_run",
    "test_rerun",
    "test_other_runs",
    "test_pod",
    "test_ablation",
    "test_shared_memory",
    "test_remote_resume",
    "test_evaluation",
    "test_memory_resume",
    "test_spare",
    "test_rare_burst",
    "test_mutation",
    "test_data_shift",
    "test_moments",
    "test_elastic",
    "test_resume",
    "test_dashboard",
    "test_gpu",
    "test_checkpoint",
    "test_mechanism",
    "test_log_index",
    "test_processes",
    "test_compose",
    "test_main",
    "test_data",
    "test_activations",
    "test_prepare",
    "test_training",
    "test_coordinate_check",
    "test_readers",
    "test_mlflow_sink",
    "test_ring",
    "test_credentials",
    "test_shadow",
    "test_supervisor",
    "test_corpus",
    "test_convert",
    "test_model_exchange",
    "test_agreement",
)
"""Files that take ten seconds or more. They start first: a long file at the end would leave the other worker idle.
Files that mostly wait come second, while the first one computes."""

FULL_MARK = "pytest.mark.full"
"""Every file with full tests holds this text; a collection fails for one that gets its mark from elsewhere."""

for name, directory in VARIABLES.items():
    os.environ.setdefault(name, f"{tempfile.gettempdir()}/harness-tests-{os.getuid()}/{directory}")
"""Tests share compiled kernels, which would otherwise be kept beside the runs of each."""

settings.register_profile("no deadline", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("no deadline")
"""No deadline, because a busy machine is slow; in CI the same examples are tried each time."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep xdist from sorting files by the number of their tests: the longest files have few tests."""
    config.option.loadscopereorder = False


def pytest_xdist_auto_num_workers() -> int:
    """A worker more than cores, because tests of launchers, servers and Slurm mostly wait."""
    return min(num_cores() + 1, 8)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without a full test for the full tests: that is two thirds of them, in every worker."""
    is_left_out = config.option.markexpr == "full" and collection_path.match("test_*.py")
    return True if is_left_out and not has_full_tests(collection_path) else None


def has_full_tests(path: Path) -> bool:
    return FULL_MARK in path.read_text()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import test modules with fast imports; torch computes with one thread, because every core has a worker."""
    with loading():
        collected = yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long files first; the order within a file does not change."""
    full_files = {item.path for item in items if item.get_closest_marker("full")}
    unseen = [str(path) for path in full_files if not has_full_tests(path)]
    if unseen:
        raise pytest.UsageError(f"{FULL_MARK} is not written in {', '.join(unseen)}: -m full would skip its tests")
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compose.load` of this process is that of `tests.composed`, also for the code under test."""
    from harness.config import compose
    from tests import composed

    monkeypatch.setattr(compose, "load", composed.load)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """A pool of processes that run distributed cases."""
    pool = Pool()
    yield pool
    pool.close()
