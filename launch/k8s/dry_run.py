"""`harness train launch=k8s launch.dry_run=true`: checks a run and prints its Kubernetes manifest.

The harness does not talk to a cluster: `kubectl apply` does. The run directory of the cluster cannot be seen from here,
so whether a run resumes is decided by its first pod.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from harness.config.compose import to_yaml
from harness.config.errors import EXIT_DONE, require
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from launch.k8s.k8s_manifest import render_manifest
from launch.slurm.submit import check_world_size, ranks_per_node

APPLY = "harness train ... launch.dry_run=true | kubectl apply -f -"


def print_manifest(cfg: Config) -> int:
    """Print the manifest of a run that has a name; returns the exit code of the command."""
    check_k8s(cfg)
    assert cfg.run.name is not None
    print(render_manifest(cfg.launch, run_name=cfg.run.name, config_text=to_yaml(cfg)), end="")
    return EXIT_DONE


def check_k8s(cfg: Config) -> None:
    """Reject a config that has no manifest, or that cannot run on its number of ranks."""
    launch, k8s = cfg.launch, cfg.launch.k8s
    message = f"must be true for launch=k8s: the manifest is applied with kubectl, for example `{APPLY}`"
    require(launch.dry_run, "launch.dry_run", message)
    require(bool(k8s.image), "launch.k8s.image", "must name a container image with the harness in it for launch=k8s")
    require(bool(k8s.claim), "launch.k8s.claim", "must name a volume claim that all pods can write to for launch=k8s")
    is_whole = launch.min_nodes in (None, launch.nodes)
    require(is_whole, "launch.min_nodes", "must be null for launch=k8s: the pods of a run start together")
    require(launch.spares == 0, "launch.spares", "must be 0 for launch=k8s: a pod that fails is replaced by its Job")
    on_gpus = cfg.parallel.device is not DeviceKind.cpu
    message = "must be set for launch=k8s, or parallel.device=cpu"
    require(not on_gpus or launch.slurm.gpus_per_node is not None, "launch.slurm.gpus_per_node", message)
    inside = (PurePosixPath(k8s.mount) / cfg.run.dir).is_relative_to(k8s.mount) and ".." not in cfg.run.dir
    message = f"must be relative or below launch.k8s.mount={k8s.mount}, the volume of the pods, got {cfg.run.dir}"
    require(inside, "run.dir", message)
    if nproc := ranks_per_node(cfg):
        check_world_size(cfg, launch.nodes, nproc)
