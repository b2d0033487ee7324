"""A launcher that runs no ranks: it checks its machine, waits, and takes over a node when node 0 says so.

Why: a machine that has joined, imported torch and passed its health check replaces a lost one in seconds; a job that
goes through the queue takes minutes to days.
How: it holds its connection to node 0 and its process template (`launch.local.worker_pool`), and runs nothing else. A
machine that a restart left out waits in the same way; it is used again when it is no longer out
(`launch.slurm.node_exclusion`) and its last health check found nothing. The check is that of Slurm jobs, without the
part that needs all machines. The GEMMs of the check take seconds, and only a machine that comes back or was left out
computes them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from harness.config.errors import EXIT_CRASHED, EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core.node_name import machine_name
from harness.core.rundir import locate
from launch.health.node_check import check_facts_here, check_in_process
from launch.local.node_group import NodeGroup

POLL_S = 0.5
CHECKS = 3
"""How often a machine is checked before it counts as unhealthy: killed ranks free their memory a moment later."""
CHECK_PAUSE_S = 2.0


def check_this_machine(cfg: Config, *, computes: bool) -> list[str]:
    """The faults of this machine; empty if it is healthy, or with `launch.slurm.health=false`.

    computes: also multiply known matrices, in a process of its own.
    """
    if not cfg.launch.slurm.health:
        return []
    run, faults = locate(cfg), list[str]()
    for attempt in range(CHECKS):
        time.sleep(CHECK_PAUSE_S if attempt else 0.0)
        problems = check_in_process(cfg, run) if computes else check_facts_here(cfg, run)
        faults = [problem.text for problem in problems if problem.blames]
        if not faults:
            break
    return faults


def wait_as_spare(group: NodeGroup, stop_signals: Sequence[int]) -> int | None:
    """Wait until this launcher runs a node or the coordinator is lost, then return None; returns the exit code of the
    run once it has ended."""
    name, waits = machine_name(), "it waits to replace a lost node"
    why = f"is out: {group.out[name]}; {waits} if no other can" if name in group.out else f"is a spare: {waits}"
    print(f"harness: {name} {why}", file=sys.stderr, flush=True)
    with group.changed:
        while group.is_spare:
            group.changed.wait(POLL_S)
            decision = group.decision
            if stop_signals:
                return EXIT_INTERRUPTED
            if group.end_code is not None:
                return group.end_code
            if decision is not None and not decision["again"]:
                return int(decision["exit_code"])
            if group.has_lost_coordinator:
                line = group.lost[group.coordinator].line
                if group.succeed is not None:
                    print(f"harness: the spare on {machine_name()}: {line}", file=sys.stderr, flush=True)
                    return None
                print(f"harness: the spare on {machine_name()} stops: {line}", file=sys.stderr, flush=True)
                return EXIT_CRASHED
    print(
        f"harness: node {group.node_rank} ({machine_name()}): no longer a spare, its ranks start",
        file=sys.stderr,
        flush=True,
    )
    return None
