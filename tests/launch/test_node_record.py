"""Faults of machines: which findings count, what the file holds, and what a damaged file means."""

from __future__ import annotations

import errno
import io
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core import transient_io
from harness.core.events import Event, Finding, FindingKind, RunEnded, RunRestarted
from harness.core.rundir import RunDir
from launch.node_record import NodeRecord, faults_of_findings, node_record_path, read_node_faults, read_out_nodes
from launch.slurm.node_exclusion import NodeFault, NodeFaultKind
from tests.drills import logs

HOSTS = ["a", "b", "c"]


def finding(kind: FindingKind, *ranks: int) -> Finding:
    return replace(logs.finding(7, kind, ranks=list(ranks)), time=100.0)


def blamed(*events: Event, hosts: list[str] = HOSTS) -> list[tuple[str, NodeFaultKind]]:
    return [(fault.node, fault.kind) for fault in faults_of_findings(events, hosts, nproc=4)]


def test_findings_that_name_ranks_of_one_machine_blame_it() -> None:
    assert blamed(finding(FindingKind.weights_changed, 4, 7)) == [("b", NodeFaultKind.corrupting)]
    assert blamed(finding(FindingKind.replica_mismatch, 11)) == [("c", NodeFaultKind.corrupting)]
    assert blamed(finding(FindingKind.corrupting_rank, 11)) == [("c", NodeFaultKind.corrupting)]
    assert blamed(finding(FindingKind.corruption, 11)) == [], "it may be transient"
    assert blamed(finding(FindingKind.rank_outlier, 0)) == [("a", NodeFaultKind.outlier)]
    assert blamed(finding(FindingKind.slow, 5)) == [("b", NodeFaultKind.slow)]
    (fault,) = faults_of_findings([finding(FindingKind.slow, 5, 6)], HOSTS, nproc=4)
    assert (fault.reason, fault.evidence, fault.time) == ("odd", "slow at iteration 7, rank 5, 6", 100.0)


@pytest.mark.parametrize(
    "found",
    [
        finding(FindingKind.weights_changed, 3, 4),
        finding(FindingKind.weights_changed),
        finding(FindingKind.weights_changed, 12),
        finding(FindingKind.nonfinite, 4),
        finding(FindingKind.loss_spike, 4),
    ],
    ids=["two machines", "no rank", "an unknown rank", "its batch may be bad", "another kind"],
)
def test_other_findings_blame_nobody(found: Finding) -> None:
    assert blamed(found) == []


def test_one_machine_is_never_blamed() -> None:
    assert blamed(finding(FindingKind.slow, 1), hosts=["a"]) == []
    assert blamed(finding(FindingKind.slow, 1), hosts=["a", "b"]) == [("a", NodeFaultKind.slow)]


def test_a_finding_blames_a_machine_of_the_last_start_in_the_log() -> None:
    """Whatever its time, which is that of rank 0's machine."""
    found = finding(FindingKind.weights_changed, 4)
    later = replace(logs.started(time=0.0), machines={"a": [0, 1, 2, 3], "d": [4, 5, 6, 7]})
    restarted = RunRestarted(time=1e6, iteration=7, step=7, number=1, reason="rank 1 was killed")
    assert blamed(found, restarted) == blamed(found, restarted, later) == []
    assert blamed(restarted, later, found) == [("d", NodeFaultKind.corrupting)]
    ended = RunEnded(time=0.0, iteration=7, step=7, exit_code=3, reason="halted")
    assert blamed(later, found, ended) == [("d", NodeFaultKind.corrupting)]
    assert blamed(logs.started(), found) == [], "a log of an earlier version: its machines are unknown"


def test_a_machine_whose_speed_recovered_is_not_blamed() -> None:
    slow, recovered = finding(FindingKind.slow, 5), finding(FindingKind.speed_recovered)
    assert blamed(slow, finding(FindingKind.rank_outlier, 5), recovered) == [("b", NodeFaultKind.outlier)]
    assert blamed(slow, recovered, slow) == [("b", NodeFaultKind.slow)]


def test_faults_are_kept_once_and_a_lost_machine_may_return(tmp_path: Path) -> None:
    run, now = RunDir(tmp_path), time.time()
    record = NodeRecord(run, hours=24.0)
    lost = NodeFault(now, "a", "is gone", NodeFaultKind.lost)
    record.add([lost, NodeFault(now, "b", "hangs", NodeFaultKind.hung)])
    record.add([lost])
    assert len(read_node_faults(run)) == 2
    assert list(record.find_out()) == [exclusion.node for exclusion in read_out_nodes(run)] == ["a"]
    record.mark_returned("b")
    assert read_node_faults(run)[1].returned is None, "only a lost machine returns"
    record.mark_returned("c")
    assert list(record.find_out()) == ["a"], "another machine"
    record.mark_returned("a")
    returned = read_node_faults(run)[0].returned
    assert returned is not None
    record.mark_returned("a")
    assert read_node_faults(run)[0].returned == returned, "the first time counts"
    assert record.find_out() == {}
    assert [fault.returned is not None for fault in NodeRecord(run, hours=24.0)._faults] == [True, False]
    record.add([lost._replace(time=now + 1.0)])
    record.mark_returned("a")
    assert list(record.find_out()) == ["a"], "lost twice"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a mapping"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ('{"faults": []}', "'out' is missing"),
        ('{"faults": 3, "out": []}', "not iterable"),
        ('{"faults": [{"node": "a"}], "out": []}', "time"),
        ('{"faults": [{"time": 1.0, "node": {}, "reason": "", "kind": "lost"}], "out": []}', "node is {}"),
        ('{"faults": [], "out": [{"node": "a", "reason": "", "num_failures": 1, "until": "x"}]}', "until is 'x'"),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_is_one_warning_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    run = RunDir(tmp_path)
    node_record_path(run).write_text(text)
    for read in (read_node_faults, read_out_nodes):
        assert read(run) == []
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"warning: {node_record_path(run)} is left out, because it is damaged: ")
        assert problem in line
    record = NodeRecord(run, hours=24.0)
    record.add([NodeFault(time.time(), "c", "is gone", NodeFaultKind.lost)])
    assert list(record.find_out()) == ["c"]
    assert capsys.readouterr().err.startswith(f"harness: warning: {node_record_path(run)} is damaged: ")
    assert node_record_path(run).read_text() == text


def test_a_file_that_cannot_be_read_for_a_while_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transient_io, "PAUSE_S", 0.0)
    run, now, open_file = RunDir(tmp_path), time.time(), io.open
    corrupting = NodeFault(now, "a", "weights changed", NodeFaultKind.corrupting)
    lost = NodeFault(now, "b", "is gone", NodeFaultKind.lost)
    NodeRecord(run, hours=24.0).add([corrupting, lost])
    num_failures = 1

    def fail_first(path: object, mode: str = "r", *args: object, **options: object) -> object:
        nonlocal num_failures
        if num_failures > 0 and path == node_record_path(run) and "r" in mode:
            num_failures -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_file(path, mode, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", fail_first)
    assert sorted(NodeRecord(run, hours=24.0).find_out()) == ["a", "b"], "one failure is nothing"
    num_failures = 1000
    record = NodeRecord(run, hours=24.0)
    record.add([NodeFault(now, "c", "is gone", NodeFaultKind.lost)])
    assert list(record.find_out()) == ["c"]
    assert capsys.readouterr().err.startswith(f"harness: warning: {node_record_path(run)} cannot be read: Stale file")
    num_failures = 0
    record.mark_returned("b")
    assert list(record.find_out()) == ["a", "c"]
    assert [fault.node for fault in read_node_faults(run)] == ["a", "b", "c"]
    num_failures = 1000
    record.read_again()
    assert list(record.find_out()) == ["a", "c"], "what is known holds until the file can be read"
    num_failures = 0
    record.add([corrupting._replace(node="d")])
    assert len(read_node_faults(run)) == 4, "b once: lost and returned"


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = NodeRecord(RunDir(tmp_path / "none"), hours=24.0)
    record.add([NodeFault(time.time(), "a", "is gone", NodeFaultKind.lost)])
    assert capsys.readouterr().err.startswith("harness: warning: cannot write ")
    assert list(record.find_out()) == ["a"]
