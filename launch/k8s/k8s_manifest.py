"""Renders the Kubernetes manifest of a run: a JobSet, or a Kubeflow TrainJob with its runtime. Pure; needs no cluster.

Why: a cluster without Slurm starts the same run from the same settings, and the manifest must be readable before it is
applied.
How: one Indexed Job with one pod per node. Pod K is node K of the run. All pods reach node 0 under the name that the
headless service of the JobSet gives it. A ConfigMap carries the resolved config. The run directory is on the volume of
a claim that all pods share, which is also their working directory, so relative paths of runs and data are on it.
Exit codes: 2 and 3 fail the Job and with it the JobSet. A pod that exits with 75, or that the cluster evicts, is
replaced without limit; the other pods of the run exit with 75 too and are replaced with it. Any other failure restarts
all pods, `launch.slurm.max_requeues` times. SIGTERM asks the run to save, within `launch.slurm.warn_s` seconds.
Left out: the health check of nodes, the exclusion of nodes, `launch.min_nodes`, a limit on restarts without progress.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, final

import yaml

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_HALTED, EXIT_INTERRUPTED, require
from harness.config.launch import LaunchConfig, Workload

PORT = 29400
"""Port of the rendezvous on node 0."""
JOB = "node"
"""Name of the Job and of its container; a TrainJob prescribes it."""
CONFIG_DIRECTORY = "/etc/harness"
CONFIG_FILE = "config.yaml"
POD = "launch.k8s.pod"
LONGEST_LABEL = 63
HASH_DIGITS = 6
RANDOM_SUFFIX = "-abcde"
"""Kubernetes appends five characters to the name of a pod."""

Tree = dict[str, Any]


@final
class TextBlock(str):
    """A text that is written as a YAML block, line by line."""

    __slots__ = ()


@final
class ManifestDumper(yaml.SafeDumper):
    """Writes `TextBlock` as a block, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 -- the same object may occur twice
        return True


ManifestDumper.add_representer(
    TextBlock, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def render_manifest(cfg: LaunchConfig, *, run_name: str, config_text: str) -> str:
    """The manifest of a run, as several YAML documents for `kubectl apply`."""
    name = object_name(run_name, num_nodes=cfg.nodes)
    documents = [config_map(cfg, name, config_text)]
    match cfg.k8s.workload:
        case Workload.jobset:
            documents.append(jobset(cfg, name))
        case Workload.trainjob:
            documents += [training_runtime(cfg, name), train_job(cfg, name)]
    return yaml.dump_all(documents, Dumper=ManifestDumper, sort_keys=False, width=1000)


def object_name(run_name: str, *, num_nodes: int) -> str:
    """The name of the objects: the name of the run as a DNS label.

    A name that had to be changed gets a hash of the run's name: `big_v1` and `Big.v1` are different runs.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".rstrip("-")
    if name != run_name:
        name = f"{name}-{hashlib.sha256(run_name.encode()).hexdigest()[:HASH_DIGITS]}"
    longest = LONGEST_LABEL - len(f"-{JOB}-0-{num_nodes - 1}{RANDOM_SUFFIX}")
    message = f"must give a name of at most {longest} characters for the pods of launch=k8s, gives {name!r}"
    require(len(name) <= longest, "run.name", message)
    return name


def config_map(cfg: LaunchConfig, name: str, config_text: str) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(cfg, f"{name}-config", name),
        "data": {CONFIG_FILE: TextBlock(config_text)},
    }


def jobset(cfg: LaunchConfig, name: str) -> Tree:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(cfg, name, name, queued=True),
        "spec": jobset_spec(cfg, name),
    }


def training_runtime(cfg: LaunchConfig, name: str) -> Tree:
    """The runtime of a TrainJob: everything of the JobSet that a TrainJob itself cannot state."""
    spec = jobset_spec(cfg, name)
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(cfg, name, name),
        "spec": {"mlPolicy": {"numNodes": cfg.nodes}, "template": {"spec": spec}},
    }


def train_job(cfg: LaunchConfig, name: str) -> Tree:
    container = node_container(cfg, name)
    asked = {key: container[key] for key in ("image", "command", "env")}
    resources = {"resourcesPerNode": container["resources"]} if "resources" in container else {}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(cfg, name, name, queued=True),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": cfg.nodes, **asked, **resources},
        },
    }


def metadata(cfg: LaunchConfig, name: str, run: str, *, queued: bool = False) -> Tree:
    labels = {"app.kubernetes.io/name": "harness", "app.kubernetes.io/instance": run}
    if queued and cfg.k8s.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = cfg.k8s.queue
    namespace = {} if cfg.k8s.namespace is None else {"namespace": cfg.k8s.namespace}
    return {"name": name, **namespace, "labels": labels}


def jobset_spec(cfg: LaunchConfig, name: str) -> Tree:
    final_failure = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": cfg.slurm.max_requeues, "rules": [final_failure]},
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job_spec(cfg, name)}}],
    }


def job_spec(cfg: LaunchConfig, name: str) -> Tree:
    minutes = cfg.slurm.time_minutes
    return {
        "completionMode": "Indexed",
        "completions": cfg.nodes,
        "parallelism": cfg.nodes,
        "backoffLimit": 0,
        **({} if minutes is None else {"activeDeadlineSeconds": 60 * minutes}),
        "podFailurePolicy": {"rules": pod_failure_rules(cfg)},
        "template": {"spec": pod_spec(cfg, name)},
    }


def pod_failure_rules(cfg: LaunchConfig) -> list[Tree]:
    """What a failed pod does to its Job; the first rule that matches counts."""
    rules: list[Tree] = [{"action": "FailJob", "onExitCodes": exit_codes(EXIT_BAD_CONFIG, EXIT_HALTED)}]
    if cfg.slurm.max_requeues > 0:
        rules += [
            {"action": "Ignore", "onExitCodes": exit_codes(EXIT_INTERRUPTED)},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    return rules


def exit_codes(*codes: int) -> Tree:
    return {"containerName": JOB, "operator": "In", "values": list(codes)}


def pod_spec(cfg: LaunchConfig, name: str) -> Tree:
    selector = {"nodeSelector": split_pairs(cfg.k8s.node_selector)} if cfg.k8s.node_selector else {}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cfg.slurm.warn_s,
        "shareProcessNamespace": True,  # the first process of the pod, not Python, collects ended processes
        **selector,
        "containers": [node_container(cfg, name)],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": cfg.k8s.claim}},
            {"name": "config", "configMap": {"name": f"{name}-config"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def node_container(cfg: LaunchConfig, name: str) -> Tree:
    command = ["python3", "-m", POD, f"{CONFIG_DIRECTORY}/{CONFIG_FILE}", "--nodes", str(cfg.nodes)]
    if cfg.nodes > 1:
        command += ["--rendezvous", f"{name}-{JOB}-0-0.{name}:{PORT}"]
    variables = {"PYTHONSAFEPATH": "1", **split_pairs(cfg.k8s.env)}
    resources = requested_resources(cfg)
    return {
        "name": JOB,
        "image": cfg.k8s.image,
        "command": command,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "workingDir": cfg.k8s.mount,
        **({"resources": resources} if resources else {}),
        "volumeMounts": [
            {"name": "run", "mountPath": cfg.k8s.mount},
            {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def split_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE items as a mapping."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def requested_resources(cfg: LaunchConfig) -> Tree:
    """Requests of a pod; GPUs are a limit too, as Kubernetes demands."""
    slurm = cfg.slurm
    gpus = {} if slurm.gpus_per_node is None else {cfg.k8s.gpu_resource: slurm.gpus_per_node}
    cpus = {} if slurm.cpus_per_node is None else {"cpu": slurm.cpus_per_node}
    memory = {"memory": f"{round(slurm.memory_gb * 1000)}M"} if slurm.memory_gb else {}
    requests = {**cpus, **memory, **gpus}
    return {**({"requests": requests} if requests else {}), **({"limits": gpus} if gpus else {})}
