"""`python -m launch.local.node RUN`: runs the ranks of this node for an existing run directory.

Why: a Slurm job, a sweep or a drill needs one command that reads everything from the run directory and returns the exit
code of the run.
How: on one node, or the same command once on each of several nodes that share the run directory: --nodes and
--rendezvous equal on all, --node-rank 0, 1, ... Node K has the ranks K * nproc, K * nproc + 1, ...
With launch.spares, the last numbers are spares, and --nodes counts them. A launcher that died may be started again with
its number while the run goes on; it waits as a spare.
If HARNESS_RENDEZVOUS is set, Slurm's variables replace the options that are not given.
"""

from __future__ import annotations

import os
import socket
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.schema import Config
from harness.control.stop_requests import clear_stop_file, holds_for_this_start
from harness.core.fast_imports import loading
from harness.core.locking.run_lease import require_free
from harness.core.rundir import RunDir, check_resume
from harness.core.safe_stream import safe_output
from launch.cli.parser import CommandParser
from launch.local.exit_file import write_exit_file
from launch.local.node_group import SINGLE_NODE, RendezvousSpec
from launch.local.thread_count import count_expected_ranks, rank_thread_environment
from launch.local.worker import select_worker

RENDEZVOUS = "HARNESS_RENDEZVOUS"
"""Environment variable of Slurm jobs: host:port of node 0."""
CONNECT_S = 2.0

DESCRIPTION = """\
Start the ranks of this node for a run whose directory already has a config.yaml, and wait for their end. For several
nodes, which must share the directory, run the same command on each with its own --node-rank.
"""


@safe_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks of this node; returns the exit code of the run."""
    try:
        args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        spec = parse_rendezvous(args.nodes, args.node_rank, args.rendezvous, os.environ)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    code = run_node(args.run, spec)
    if spec.node_rank == 0:
        write_exit_file(code)
    return code


def run_node(directory: str, spec: RendezvousSpec) -> int:
    """Run the ranks of this node, or wait as a spare; returns the exit code of the run."""
    try:
        run = RunDir(Path(directory))
        cfg = compose.read(run.config)
        cfg.run.dir, cfg.run.name = str(run.path.parent), run.path.name
        check_resume(cfg, run)
        check_min_nodes(cfg, spec)
        comes_back = joins_running(cfg, run, spec)
        with rank_thread_environment(cfg, count_expected_ranks(cfg)), loading():
            from launch.local import start, this_machine

            worker = select_worker(run)
        for warning in this_machine.check_machine(cfg, num_nodes=start.count_active_nodes(cfg, spec.num_nodes)):
            print(f"harness: warning: {warning}", file=sys.stderr)
        # Of the last start: with it no rank that dies early would be restarted. A Slurm job has removed it already. The
        # run is not in progress: joins_running has checked it.
        if spec.node_rank == 0 and not holds_for_this_start():
            clear_stop_file(run)
        return start.launch(cfg, worker, spec, comes_back=comes_back)
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="launch.local.node", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory with its config.yaml")
    parser.add_argument("--nodes", metavar="N", type=int, help="number of nodes, spares included; default: 1")
    parser.add_argument("--node-rank", metavar="K", type=int, help="number of this node, from 0; default: 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="address at which the other nodes reach node 0")
    return parser


def parse_rendezvous(
    num_nodes: int | None, node_rank: int | None, rendezvous: str | None, environ: Mapping[str, str]
) -> RendezvousSpec:
    """Node rank, number of nodes and address of node 0, from the options or from Slurm."""
    if rendezvous is None and RENDEZVOUS in environ:
        rendezvous = environ[RENDEZVOUS]
        num_nodes = num_nodes or read_slurm_variable(environ, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        node_rank = read_slurm_variable(environ, "SLURM_NODEID") if node_rank is None else node_rank
    num_nodes, node_rank = 1 if num_nodes is None else num_nodes, node_rank or 0
    require(num_nodes >= 1, "--nodes", f"must be at least 1, got {num_nodes}")
    require(0 <= node_rank < num_nodes, "--node-rank", f"must be from 0 to {num_nodes - 1}, got {node_rank}")
    if rendezvous is None:
        require(num_nodes == 1, "--rendezvous", f"{num_nodes} nodes need the HOST:PORT of node 0")
        return SINGLE_NODE
    host, _, port = rendezvous.rpartition(":")
    valid = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    require(valid, "--rendezvous", f"must be HOST:PORT, got {rendezvous!r}")
    return RendezvousSpec(num_nodes=num_nodes, node_rank=node_rank, host=host, port=int(port))


def read_slurm_variable(environ: Mapping[str, str], *names: str) -> int:
    """The number in the first of these variables that is set."""
    text = next((environ[name] for name in names if name in environ), "")
    require(text.isdigit(), " or ".join(names), f"must be a number if {RENDEZVOUS} is set, got {text!r}")
    return int(text)


def check_min_nodes(cfg: Config, spec: RendezvousSpec) -> None:
    """Reject a start on fewer nodes than the run allows."""
    min_nodes = cfg.launch.min_nodes or cfg.launch.nodes
    message = f"{spec.num_nodes} of {cfg.launch.nodes} nodes are available, and the run needs at least {min_nodes}"
    require(spec.num_nodes >= min_nodes, "launch.min_nodes", message)
    most = cfg.launch.nodes + cfg.launch.spares
    message = (
        f"{spec.num_nodes} nodes are more than launch.nodes={cfg.launch.nodes} and launch.spares={cfg.launch.spares}"
    )
    require(cfg.launch.spares == 0 or spec.num_nodes <= most, "--nodes", message)


def joins_running(cfg: Config, run: RunDir, spec: RendezvousSpec) -> bool:
    """Whether this launcher joins a run in progress; raises ConfigError if another process writes this run."""
    try:
        require_free(run.path, wait=spec.node_rank == 0)
    except ConfigError:
        if not (cfg.launch.is_elastic and spec.node_rank > 0 and is_listening(spec)):
            raise
        return True
    return False


def is_listening(spec: RendezvousSpec) -> bool:
    """Whether node 0 accepts connections at the address that its name has now; it drops one that says nothing."""
    try:
        socket.create_connection((spec.host, spec.port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
