"""`python -m launch.k8s.pod CONFIG`: the command of a pod. Runs the ranks of one node of a run.

Why: nobody has created the run directory when the pods start, and they start in any order. Names of pods become known
to DNS some time after the pods start, and the name of a replaced pod points to its old address for a while.
How: node 0 creates the run directory from CONFIG. The others wait until the directory has the same config and node 0
accepts connections; each attempt resolves its name again. Then `launch.local.node` runs the ranks. The number of the
node is the completion index of its Job. A run that a person stopped ends with 0, so that the pod is not replaced.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.config import compose
from harness.config.errors import (
    EXIT_BAD_CONFIG,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    ConfigError,
    StorageError,
    require,
)
from harness.config.schema import Config
from harness.core.locking.run_lease import require_free
from harness.core.rundir import RunDir, locate
from harness.core.safe_stream import safe_output
from launch.changed_config import prepare_fitting_run
from launch.cli.parser import CommandParser
from launch.local import node
from launch.local.node_address import RendezvousError
from launch.local.node_group import RendezvousSpec
from launch.slurm.code_snapshot import slurm_dir

INDEX = "JOB_COMPLETION_INDEX"
"""Environment variable of a pod of an Indexed Job."""
POLL_S = 1.0


@safe_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks of this pod; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))  # until the ranks run and save
    try:
        args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        spec = node.parse_rendezvous(args.nodes, read_node_rank(os.environ), args.rendezvous, {})
        cfg = compose.read(Path(args.config))
        require(cfg.run.name is not None, "run.name", f"{args.config} has no name for the run")
        os.environ |= cluster_environment(os.environ)
        prepare_node(cfg, spec)
        run = locate(cfg)
        options = ["--nodes", str(spec.num_nodes), "--node-rank", str(spec.node_rank)]
        options += [] if args.rendezvous is None else ["--rendezvous", args.rendezvous]
        return pod_exit_code(node.main([str(run.path), *options]), run)
    except RendezvousError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_CRASHED
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog=__spec__.name, description="Run the ranks of one node of a run, in a pod.")
    parser.add_argument("config", metavar="CONFIG", help="the resolved config of the run")
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="number of nodes; default: 1")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="address at which the other nodes reach node 0")
    return parser


def read_node_rank(environ: Mapping[str, str]) -> int:
    """The number of this node: the completion index of its Job."""
    text = environ.get(INDEX, "")
    require(text.isdigit(), INDEX, f"must be a number, as in a pod of an Indexed Job, got {text!r}")
    return int(text)


def cluster_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `slurm/environment.sh`, which Kubernetes needs alike; values that are set take precedence."""
    script = 'source "$0" && env -0'
    path = slurm_dir() / "environment.sh"
    done = subprocess.run(["bash", "-c", script, str(path)], env=dict(environ), capture_output=True, check=False)
    require(done.returncode == 0, str(path), f"bash cannot read it: {done.stderr.decode(errors='replace').strip()}")
    variables = dict(item.partition("=")[::2] for item in done.stdout.decode(errors="replace").split("\0") if item)
    return {name: value for name, value in variables.items() if name not in environ and name not in ("_", "SHLVL")}


def prepare_node(cfg: Config, spec: RendezvousSpec) -> None:
    """Create the run directory on node 0; on the others, wait until it exists and node 0 accepts connections."""
    run, within_s = locate(cfg), cfg.launch.start_within_s
    if spec.node_rank == 0:
        require_free(run.path, wait=True)
        prepare_fitting_run(cfg)
        wait_until(lambda: resolves(spec.host), within_s, f"no address for {spec.host}, the name of this pod")
    else:
        wait_until(lambda: is_stored(cfg, run), within_s, f"node 0 did not write this config to {run.config}")
        wait_until(lambda: node.is_listening(spec), within_s, f"node 0 does not answer at {spec.host}:{spec.port}")


def wait_until(condition: Callable[[], bool], within_s: float, problem: str) -> None:
    """Poll until the condition holds; raises RendezvousError after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RendezvousError(f"rendezvous: {problem} within {within_s:.0f} s")
        time.sleep(POLL_S)


def resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM))
    except OSError:
        return False


def is_stored(cfg: Config, run: RunDir) -> bool:
    """Whether the run directory has this config: node 0 replaces the one of an earlier start."""
    try:
        return run.config.read_text(encoding="utf-8") == compose.to_yaml(cfg)
    except OSError:
        return False


def pod_exit_code(code: int, run: RunDir) -> int:
    """The exit code of the pod: that of the run, but 0 if a person stopped it."""
    if code == EXIT_INTERRUPTED and run.stop.exists():
        print("harness: stopped on purpose; apply the manifest again to continue", file=sys.stderr)
        return EXIT_DONE
    return code


if __name__ == "__main__":
    sys.exit(main())
