"""`python -m launch.local.node RUN`: this machine's part of a run that is laid out in its directory.

Why: whoever starts a run on a machine that the user does not sit at (a job of Slurm, a sweep, a drill) needs one
command that takes everything from the run directory and answers with the exit code of the contract.
How: alone, or the same command once on each of several machines, which all see the run directory: --nodes and
--rendezvous alike on all of them, and --node-rank 0, 1, ... The ranks of machine K are K * nproc, K * nproc + 1, ...
Where HARNESS_RENDEZVOUS is set, Slurm's variables stand for what is not given.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.schema import Config, check_world
from harness.core.fast_imports import loading
from harness.core.locking.run_lease import require_free
from harness.core.rundir import RunDir, check_resume
from launch.cli.parser import Parser
from launch.local.node_group import ALONE, Place
from launch.local.thread_count import ranks_expected, threads_of_a_rank
from launch.local.worker import worker_of

RENDEZVOUS = "HARNESS_RENDEZVOUS"
"""Environment variable: host:port of machine 0, for jobs of Slurm."""

DESCRIPTION = """\
Start this machine's part of a run that is laid out in its directory (config.yaml), and wait for its end. On several
machines, which must all see the directory, give the same command to each with its own --node-rank.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of this machine; returns the exit code of the run."""
    try:
        words = parser().parse_args(sys.argv[1:] if argv is None else argv)
        place = place_of(words.nodes, words.node_rank, words.rendezvous, os.environ)
        run = RunDir(Path(words.run))
        cfg = compose.read(run.config)
        cfg.run.dir, cfg.run.name = str(run.path.parent), run.path.name
        check_resume(cfg, run)
        check_nodes(cfg, place)
        require_free(run.path, wait=place.node == 0)
        with threads_of_a_rank(cfg, ranks_expected(cfg)), loading():
            from launch.local import start

            worker = worker_of(run)
        check_world(cfg, place.nodes * start.num_ranks(cfg))
        return start.launch(cfg, worker, place)
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG


def parser() -> ArgumentParser:
    parser = Parser(prog="launch.local.node", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--nodes", metavar="N", type=int, help="machines; default: 1")
    parser.add_argument("--node-rank", metavar="K", type=int, help="this one, from 0; default: 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where the others find machine 0")
    return parser


def place_of(nodes: int | None, node: int | None, rendezvous: str | None, environment: Mapping[str, str]) -> Place:
    """This machine's place, from the words or from Slurm."""
    if rendezvous is None and RENDEZVOUS in environment:
        rendezvous = environment[RENDEZVOUS]
        nodes = nodes or from_slurm(environment, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        node = from_slurm(environment, "SLURM_NODEID") if node is None else node
    nodes, node = 1 if nodes is None else nodes, node or 0
    require(nodes >= 1, "--nodes", f"must be at least 1, got {nodes}")
    require(0 <= node < nodes, "--node-rank", f"must be from 0 to {nodes - 1}, got {node}")
    if rendezvous is None:
        require(nodes == 1, "--rendezvous", f"{nodes} machines need a HOST:PORT at which they meet")
        return ALONE
    host, _, port = rendezvous.rpartition(":")
    valid = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    require(valid, "--rendezvous", f"must be HOST:PORT, got {rendezvous!r}")
    return Place(nodes=nodes, node=node, host=host, port=int(port))


def from_slurm(environment: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is set."""
    text = next((environment[name] for name in names if name in environment), "")
    require(text.isdigit(), " or ".join(names), f"must be a number where {RENDEZVOUS} is set, got {text!r}")
    return int(text)


def check_nodes(cfg: Config, place: Place) -> None:
    """Refuse to go on with fewer machines than the run allows."""
    fewest = cfg.launch.min_nodes or cfg.launch.nodes
    message = f"{place.nodes} of {cfg.launch.nodes} machines are there, and the run asks for at least {fewest}"
    require(place.nodes >= fewest, "launch.min_nodes", message)


if __name__ == "__main__":
    sys.exit(main())
