"""RUN/nodes.json: the faults of the machines of a run, and which of them are out.

Why: a machine that died, hung or computed wrong numbers must not be used again by the next start, and an operator must
see which one is out, why, and until when.
How: the launcher that coordinates the run is the only writer and replaces the file atomically. It stores every fault,
with its time and evidence; which machines are out follows from the faults (`launch.slurm.node_exclusion`) and is stored
too, for readers without this code. Restarts inside the job, `harness status` and the exclusions of a requeued Slurm job
read it. Findings of the sentinel count if they name ranks of one machine only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import final

from harness.core.events import Event, Finding, FindingKind, RunRestarted, RunStarted
from harness.core.rundir import RunDir, write_atomically
from harness.core.stderr_lines import print_warning
from harness.core.transient_io import retry_transient
from launch.slurm.node_exclusion import (
    NodeExclusion,
    NodeFault,
    NodeFaultKind,
    exclusions_from_json,
    faults_from_json,
    find_out_nodes,
)

MAX_FAULTS = 1000
BLAMING = {
    FindingKind.weights_changed: NodeFaultKind.corrupting,
    FindingKind.replica_mismatch: NodeFaultKind.corrupting,
    FindingKind.corrupting_rank: NodeFaultKind.corrupting,
    FindingKind.rank_outlier: NodeFaultKind.outlier,
    FindingKind.slow: NodeFaultKind.slow,
}
"""Findings whose ranks point to a machine. Others that name ranks, such as `nonfinite`, come from the data as well."""


def node_record_path(run: RunDir) -> Path:
    return run.path / "nodes.json"


class DamagedRecordError(Exception):
    """The file is not what a launcher writes; it may still hold faults that a person can read."""


def read_node_faults(run: RunDir) -> list[NodeFault]:
    """All recorded faults, oldest first; none, with a warning, if the file is damaged or cannot be read."""
    return read_node_record(run)[0]


def read_out_nodes(run: RunDir) -> list[NodeExclusion]:
    """The machines that were out at the last write; none, with a warning, if the file is damaged or cannot be read."""
    return read_node_record(run)[1]


def read_node_record(run: RunDir) -> tuple[list[NodeFault], list[NodeExclusion]]:
    try:
        return load_record(run)
    except (OSError, DamagedRecordError) as error:
        print_warning(f"{node_record_path(run)} is left out, because it {describe_problem(error)}")
        return [], []


def load_record(run: RunDir) -> tuple[list[NodeFault], list[NodeExclusion]]:
    """All recorded faults, oldest first, and the machines that are out; none of both if the file is missing. Raises
    OSError if storage fails, and DamagedRecordError."""
    path = node_record_path(run)
    try:
        content = json.loads(retry_transient(lambda: path.read_text(encoding="utf-8")))
        if not isinstance(content, dict):
            raise TypeError("it is not a mapping")
        return faults_from_json(content["faults"]), list(exclusions_from_json(content["out"]))
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except KeyError as error:
        raise DamagedRecordError(f"{error} is missing") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedRecordError(str(error)) from None


def describe_problem(error: OSError | DamagedRecordError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return f"is damaged: {error}; repair or remove it"


def faults_of_findings(events: Iterable[Event], hosts: Sequence[str], *, nproc: int) -> list[NodeFault]:
    """The faults that the findings of the last start in the log attribute to a machine.

    A start names the machines of its ranks. `hosts` has that of each node, for a log whose end has no start. No times
    are compared: the clock of rank 0's machine may differ from that of this one. A machine whose speed recovered after
    it was slow is not blamed for that.
    """
    if len(hosts) < 2:
        return []
    faults: list[NodeFault] = []
    machine_of = {node * nproc + local: host for node, host in enumerate(hosts) for local in range(nproc)}
    for event in events:
        if isinstance(event, RunStarted | RunRestarted):
            faults = []
        if isinstance(event, RunStarted):
            machine_of = {rank: machine for machine, ranks in event.machines.items() for rank in ranks}
        if not isinstance(event, Finding):
            continue
        if event.kind is FindingKind.speed_recovered:
            faults = [fault for fault in faults if fault.kind is not NodeFaultKind.slow]
        kind, machines = BLAMING.get(event.kind), {machine_of.get(rank, "") for rank in event.ranks}
        if kind is not None and len(machines) == 1 and (machine := machines.pop()):
            ranks = ", ".join(map(str, event.ranks))
            evidence = f"{event.kind} at iteration {event.iteration}, rank {ranks}"
            faults.append(NodeFault(event.time, machine, event.message, kind, evidence))
    return faults


@final
class NodeRecord:
    """The faults of the machines of a run; only the coordinator writes them. Safe to use from several threads.

    The file is read before it is first used or written. If storage fails or the file is damaged, it is read the next
    time, and not written before: it may hold faults that this launcher does not know.
    """

    def __init__(self, run: RunDir, *, hours: float) -> None:
        self.run, self._hours = run, hours
        self._lock = Lock()
        self._faults: list[NodeFault] = []
        self._is_read = False
        self._read()

    def read_again(self) -> None:
        """Read what another launcher has written, before this one becomes the writer."""
        with self._lock:
            self._is_read = False
            self._read()

    def add(self, faults: Iterable[NodeFault]) -> None:
        """Add faults that are not recorded yet, and write the file."""
        with self._lock:
            self._read()
            new = [fault for fault in faults if fault not in self._faults]
            self._faults = [*self._faults, *new][-MAX_FAULTS:]
            if new:
                self._write()

    def mark_returned(self, host: str) -> None:
        """A lost machine has joined again and passed its health check."""
        now = time.time()
        with self._lock:
            self._read()
            returned = [
                fault._replace(returned=now)
                if fault.node == host and fault.kind is NodeFaultKind.lost and fault.returned is None
                else fault
                for fault in self._faults
            ]
            if returned != self._faults:
                self._faults = returned
                self._write()

    def find_out(self) -> dict[str, NodeExclusion]:
        """The machines that are out now, by name."""
        with self._lock:
            self._read()
            found = find_out_nodes(self._faults, now=time.time(), hours=self._hours)
        return {exclusion.node: exclusion for exclusion in found}

    def _read(self) -> None:
        """Read the file, unless this launcher has; faults that only this launcher knows are kept."""
        if self._is_read:
            return
        try:
            stored, _ = load_record(self.run)
        except (OSError, DamagedRecordError) as error:
            line = f"{node_record_path(self.run)} {describe_problem(error)}"
            print(f"harness: warning: {line}; no fault is recorded now", file=sys.stderr, flush=True)
            return
        known = {fault._replace(returned=None) for fault in stored}
        self._faults = [*stored, *(fault for fault in self._faults if fault._replace(returned=None) not in known)]
        self._is_read = True

    def _write(self) -> None:
        if not self._is_read:
            return
        out = find_out_nodes(self._faults, now=time.time(), hours=self._hours)
        content = {
            "out": [asdict(exclusion) for exclusion in out],
            "faults": [fault._asdict() for fault in self._faults],
        }
        path = node_record_path(self.run)
        try:
            write_atomically(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"harness: warning: cannot write {path}: {error.strerror}", file=sys.stderr, flush=True)
