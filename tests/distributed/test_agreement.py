"""All ranks take the same branches, whatever one rank sees; ranks that diverge are named and halt."""

from __future__ import annotations

import pickle
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from harness import train
from harness.config.errors import ConfigError
from harness.core import event_json, events
from harness.core.events import Finding, FindingKind, RunEnded
from harness.core.rundir import RunDir
from harness.distributed.world import connected, disconnect
from tests.distributed import agreement, cases, diverging_ranks
from tests.distributed.agreement import ALL_RANK_FAULTS, FAULTY_RANK, LOCAL_FACTS, ONE_RANK_FAULTS, Trace
from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def traces(ranks: Pool) -> list[dict[str, Trace]]:
    """Every case on four ranks, in one process group."""
    return ranks.run(4, agreement.run_all_cases)


def test_every_finding_has_a_case() -> None:
    assert {*ONE_RANK_FAULTS, *ALL_RANK_FAULTS} == set(FindingKind)


@pytest.mark.parametrize("kind", list(FindingKind))
def test_a_bad_signal_of_one_rank_gives_the_same_findings_on_all_ranks(
    traces: list[dict[str, Trace]], kind: FindingKind
) -> None:
    first = traces[0][kind]
    assert kind in [found for found, _ in first.found]
    for trace in traces:
        assert trace[kind] == first, "the same findings, actions, probes and digests"
        assert trace[kind].diverged == []


@pytest.mark.parametrize("name", list(LOCAL_FACTS))
def test_rank_local_facts_decide_nothing(traces: list[dict[str, Trace]], name: str) -> None:
    for trace in traces:
        assert trace[name] == traces[0][name]
        assert (trace[name].found, trace[name].actions, trace[name].diverged) == ([], [], [])


@pytest.mark.parametrize("name", ["probe", "fp8", "step", "save", "a finding"])
def test_ranks_that_diverge_are_named_by_all(traces: list[dict[str, Trace]], name: str) -> None:
    for trace in traces:
        (digests,) = trace[f"diverged by {name}"].diverged
        assert sorted(digests.values(), key=len) == [[FAULTY_RANK], [0, 1, 3]]
        assert len(trace[f"diverged by {name}"].branches) <= 4, "found in the record of that step or of the next"


def log_of(directory: Path) -> list[events.Event]:
    return list(event_json.read(RunDir(directory / "victim").events))


@pytest.mark.parametrize("change", [diverging_ranks.evaluate_on_rank_1, diverging_ranks.change_digest_on_rank_1])
def test_ranks_that_diverge_in_a_run_halt_together_despite_other_requests(
    ranks: Pool, tmp_path: Path, change: diverging_ranks.Change
) -> None:
    """A collective that only one rank would enter is not entered; a later stop request does not give exit code 75."""
    results = ranks.run(2, diverging_ranks.run_with_change, str(tmp_path), change, "train.num_steps=20")
    assert [(each.code, each.error) for each in results] == [(3, "")] * 2
    assert results[0].iteration == results[1].iteration <= 9
    ended = log_of(tmp_path)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.exit_code == 3
    assert ended.reason.startswith("ranks decided differently: {")
    assert "[0]" in ended.reason
    assert "[1]" in ended.reason


def test_a_rank_that_reads_other_bytes_is_named(ranks: Pool, tmp_path: Path) -> None:
    results = ranks.run(
        4, diverging_ranks.run_with_change, str(tmp_path), diverging_ranks.shift_tokens_on_rank_2, "train.num_steps=20"
    )
    assert [(each.code, each.error) for each in results] == [(3, "")] * 4
    (finding,) = [event for event in log_of(tmp_path) if isinstance(event, Finding)]
    assert (finding.kind, finding.ranks) == (FindingKind.data_mismatch, [2])
    assert finding.message == "ranks 2 read other tokens for the same row"
    assert finding.iteration == 1


@pytest.mark.parametrize(
    ("what", "rank"),
    [("data", 1), ("ledger", 0), ("log", 0), ("manifest", 0), ("directory", 0), ("accepted config", 0), ("engine", 1)],
)
def test_a_failure_on_one_rank_at_start_fails_on_all(ranks: Pool, tmp_path: Path, what: str, rank: int) -> None:
    results = ranks.run(2, diverging_ranks.open_with_failure, str(tmp_path), what, rank)
    assert [each.error for each in results] == ["OSError: [Errno 5] Input/output error"] * 2


def test_a_group_is_not_destroyed_after_a_crash() -> None:
    """Destroying would wait for ranks that may wait for this one; after a user error all ranks leave in order."""
    parallel = cases.tiny().parallel
    with pytest.raises(RuntimeError, match="crash"), connected(parallel):
        raise RuntimeError("crash")
    assert dist.is_initialized()
    disconnect()
    with pytest.raises(ConfigError), connected(parallel):
        raise ConfigError("key", "wrong")
    assert not dist.is_initialized()
    with connected(parallel):
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("size", "is_of_one_rank"), [(2, True), (2, False), (1, True)])
def test_a_rank_leaves_in_order_if_no_other_may_wait_for_it(ranks: Pool, size: int, is_of_one_rank: bool) -> None:
    leaves_in_order = size == 1 or not is_of_one_rank
    left = ranks.run(size, diverging_ranks.leave_with_error, is_of_one_rank)
    assert left == [(leaves_in_order, leaves_in_order)] * size


@pytest.mark.parametrize(
    ("overrides", "environment", "line"),
    [
        (
            ["run.deterministic=true"],
            {"CUBLAS_WORKSPACE_CONFIG": "1", "LOCAL_RANK": "1"},
            "harness: rank 1: run.deterministic: needs CUBLAS_WORKSPACE_CONFIG=",
        ),
        (["model.dims=3"], {"LOCAL_RANK": "0"}, "harness: rank 1: model.dims: "),
        (["model.dims=3"], {"LOCAL_RANK": "1"}, ""),
    ],
)
def test_a_rank_that_fails_before_it_joins_the_others_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    environment: dict[str, str],
    line: str,
) -> None:
    """Rank 0 waits for this one. Of invalid arguments, the first rank of a machine speaks for the others."""
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["harness.train", *cases.TINY, *overrides])
    assert train.main() == 2
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == bool(line)


def main_on_rank(*overrides: str) -> tuple[int, str]:
    """Exit code and errors of `python -m harness.train` on a rank."""
    with patch.object(sys, "argv", ["harness.train", *cases.TINY, *overrides]), redirect_stderr(StringIO()) as printed:
        return train.main(), printed.getvalue()


def test_an_error_of_all_ranks_is_printed_once(ranks: Pool, tmp_path: Path) -> None:
    overrides = (f"run.dir={tmp_path}", "run.name=a", "train.num_steps=2")
    assert ranks.run(2, main_on_rank, *overrides) == [(0, "")] * 2
    (code, line), other = ranks.run(2, main_on_rank, *overrides, "optim.lr=1")
    assert code == 2
    assert line.startswith("harness: ")
    assert "optim.lr" in line
    assert other == (2, "")


def test_a_user_error_can_be_sent_to_other_ranks() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("key", "message")))
    assert isinstance(error, ConfigError)
    assert str(error) == "key: message"
