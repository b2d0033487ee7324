"""`python -m launch.slurm.node_health RUN SECONDS`: checks every node of a job before each start.

Why: one bad node among a hundred crashes the whole run, or computes wrong numbers. A check before the start takes a
minute.
How: srun starts one process for each future rank. The first on a node collects what is visible without torch
(`launch.health.node_facts`). Each process computes GEMMs on its device (`launch.health.gemm_check`). Then all processes
join in a small all-reduce over the network, and over NCCL on GPUs, compare clocks and speeds, look for a file that the
first one wrote, and test the links between neighbours (`launch.health.link_check`). A problem is one line that names
the node, and the step ends for all. A node is blamed for its own faults only; one that failed twice is excluded
(`launch.slurm.node_exclusion`).
Left out: a process that misses the all-reduce is not identified.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError
from harness.config.parallel import ParallelConfig
from harness.config.schema import Config
from harness.core.fast_imports import loading
from harness.core.rundir import RunDir
from launch.health.link_check import describe_links, judge_links, merge_reports
from launch.health.node_facts import check_facts, collect_facts, num_required_devices, used_device_names
from launch.slurm.job_directory import slurm_folder
from launch.slurm.node_exclusion import HealthProblem
from launch.slurm.requeue import EXIT_UNHEALTHY

if TYPE_CHECKING:
    from harness.distributed.world import World
    from launch.health.gemm_check import GemmReport

MAX_SKEW_S = 1.0
REDUCED_NUMBERS = 1_000_000


def check_clocks(times_s: Mapping[str, float]) -> list[HealthProblem]:
    """Nodes whose clock differs from the median. Of two clocks that differ, neither is blamed."""
    middle_s = statistics.median_low(times_s.values())
    return [
        HealthProblem(
            node, f"its clock differs by {time_s - middle_s:+.1f} s from the other nodes'", blames=len(times_s) > 2
        )
        for node, time_s in times_s.items()
        if abs(time_s - middle_s) > MAX_SKEW_S
    ]


def check_shared_directory(sees_marker: Mapping[str, bool]) -> list[HealthProblem]:
    """Nodes that do not see the first node's run directory; if most do not, the first may be wrong."""
    lost = [node for node, sees_it in sees_marker.items() if not sees_it]
    blames = 2 * len(lost) < len(sees_marker)
    return [HealthProblem(node, "does not see the run directory of the first node", blames=blames) for node in lost]


def check_speeds(nodes: Sequence[str], gemms: Sequence[GemmReport]) -> list[HealthProblem]:
    """Devices that are slower than the others of their node; both lists are in rank order."""
    from launch.health.gemm_check import find_slow_devices

    problems = []
    for node in dict.fromkeys(nodes):
        own = {gemm.device: gemm.tflops for name, gemm in zip(nodes, gemms, strict=True) if name == node}
        problems += [HealthProblem(node, text) for text in find_slow_devices(own)]
    return problems


def check_own_device(cfg: ParallelConfig, local_rank: int) -> GemmReport:
    """Multiply known matrices on the device of this process."""
    with loading():
        from launch.health.gemm_check import check_devices, list_devices

    devices = list_devices(cfg.device)
    return check_devices([devices[local_rank % len(devices)]])[0]


def check_collectives(
    cfg: ParallelConfig, run: RunDir, node: str, gemm: GemmReport, within_s: float
) -> list[HealthProblem]:
    """Join all processes in an all-reduce; returns the problems between nodes, equal on all processes.

    `within_s` bounds the wait for the last process. It grows with their number, because many import torch slowly.
    """
    with loading():
        import torch

        from harness.distributed.collectives import all_reduce_sum, gather_results
        from harness.distributed.world import connect, disconnect

    world = connect(replace(cfg, replicate=1, context=1, timeout_s=within_s))
    try:
        duration_s = {}
        for device in dict.fromkeys((torch.device("cpu"), world.device)):
            ones = torch.ones(REDUCED_NUMBERS, device=device)
            began_s = time.perf_counter()
            total = float(all_reduce_sum(ones).sum())
            duration_s[device.type] = time.perf_counter() - began_s
            if total != REDUCED_NUMBERS * world.size:
                text = f"an all-reduce of ones gave {total / REDUCED_NUMBERS}, expected {world.size}"
                return [HealthProblem(node, text, blames=False)]
        nodes = gather_results(lambda: node)
        clock_s = gather_results(time.time)  # all leave the previous exchange at nearly the same moment
        times_s = {name: clock_s[nodes.index(name)] for name in dict.fromkeys(nodes)}
        sees_marker = gather_results(lambda: (slurm_folder(run) / f"health-{nodes[0]}").exists())
        problems = check_clocks(times_s) + check_shared_directory(dict(zip(nodes, sees_marker, strict=True)))
        problems += check_speeds(nodes, gather_results(lambda: gemm))
        faults, links = check_links(world, nodes)
        problems += faults
        if world.is_first and not problems:
            reduced = ", ".join(f"{seconds * 1e3:.0f} ms on {device}" for device, seconds in duration_s.items())
            spread_s = max(times_s.values()) - min(times_s.values())
            clocks = f"{len(times_s)} nodes, clocks within {spread_s * 1e3:.0f} ms"
            print(f"health: {clocks}, all-reduce {reduced}, GEMM {gemm.tflops:.4g} TFLOP/s on rank 0{links}")
        return problems
    finally:
        disconnect()


def check_links(world: World, nodes: Sequence[str]) -> tuple[list[HealthProblem], str]:
    """Test the links between neighbours; returns the problems, equal on all processes, and the speed in a few words.

    If they cannot be collected, raises an error with the faults that this process saw itself.
    """
    from harness.distributed.collectives import gather_results
    from launch.health.link_probe import probe_links

    seen = probe_links(world.rank, nodes, world.device, gather=lambda value: gather_results(lambda: value))
    try:
        links = merge_reports(report for reports in gather_results(lambda: seen) for report in reports)
    except RuntimeError as error:
        own = [problem.text for problem in judge_links(merge_reports(seen), nodes).problems]
        raise RuntimeError("; ".join([*own, str(error)])) from error
    judgement = judge_links(links, nodes, is_speed_reliable=world.device.type == "cuda")
    for warning in judgement.warnings if world.is_first else ():
        print(f"harness: health: warning: {warning}", file=sys.stderr)
    return judgement.problems, f", {describe_links(links)}" if links else ""


def main(argv: Sequence[str] | None = None) -> int:
    """RUN and the seconds within which all processes must join; returns the exit code."""
    directory, within_s = sys.argv[1:] if argv is None else argv
    run, slurm = RunDir(Path(directory)), os.environ
    node, local_rank = slurm["SLURMD_NODENAME"], int(slurm["SLURM_LOCALID"])
    slurm["RANK"], slurm["WORLD_SIZE"] = slurm["SLURM_PROCID"], slurm["SLURM_NTASKS"]
    slurm["LOCAL_RANK"] = slurm["SLURM_LOCALID"]
    try:
        cfg = compose.read(run.config)
        problems, is_shared = check_all(cfg, run, node, local_rank, float(within_s))
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    for problem in problems if local_rank == 0 or not is_shared else ():
        print(problem.render(), file=sys.stderr)
    return EXIT_UNHEALTHY if problems else EXIT_DONE


def check_all(
    cfg: Config, run: RunDir, node: str, local_rank: int, within_s: float
) -> tuple[list[HealthProblem], bool]:
    """Check this node, this device, then all nodes together; returns the problems, and whether all processes have them.

    A process with a fault of its own does not join the others; srun ends them.
    """
    try:
        if local_rank == 0:
            facts = collect_facts(run.path, slurm_folder(run) / f"health-{node}", used_device_names(cfg))
            if faults := check_facts(node, facts, num_required_devices(cfg)):
                return faults, False
        gemm = check_own_device(cfg.parallel, local_rank)
        if texts := gemm.list_faults():
            return [HealthProblem(node, text) for text in texts], False
        return check_collectives(cfg.parallel, run, node, gemm, within_s), True
    except ConfigError:
        raise
    except Exception as error:
        text = f"the health check failed: {' '.join(str(error).split())}"
        return [HealthProblem(node, text, blames=False)], False


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # keeps the exit code: threads of torch have aborted the interpreter at exit
