"""The Kubernetes manifest: golden files, the published schemas, exit codes, names, and errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.faults.fault_plan import FaultKind
from launch import train
from launch.drills.fault_environment import require_environment
from launch.k8s.dry_run import check_k8s
from launch.k8s.k8s_manifest import object_name, render_manifest
from launch.sweeps.jobs import check_launch
from tests import composed
from tests.launch.k8s.schema import SCHEMAS, find_problems

GOLDEN = Path(__file__).parent / "golden"
NEEDED = (
    "launch=k8s",
    "launch.dry_run=true",
    "launch.slurm.gpus_per_node=8",
    "launch.k8s.image=registry.example/harness:1",
    "launch.k8s.claim=shared",
)
MANY_NODES = (
    "launch.nodes=4",
    "launch.slurm.cpus_per_node=96",
    "launch.slurm.memory_gb=900",
    "launch.slurm.time_minutes=1440",
    "launch.slurm.warn_s=300",
    "launch.k8s.namespace=llm",
    "launch.k8s.queue=gpu",
    "launch.k8s.node_selector=['gpu=h100']",
    "launch.k8s.env=['NCCL_DEBUG=INFO']",
    "train.batch_size=64",
)
EXAMPLES = {
    "jobset.yaml": MANY_NODES,
    "trainjob.yaml": (*MANY_NODES, "launch.k8s.workload=trainjob"),
    "one-node.yaml": ("launch.slurm.max_requeues=0",),
}
CONFIG = "run:\n  name: First_Run\n"


def config(*overrides: str) -> Config:
    return composed.load([*NEEDED, *overrides])


def render(*overrides: str) -> str:
    return render_manifest(config(*overrides).launch, run_name="First_Run", config_text=CONFIG)


def objects(*overrides: str) -> dict[str, Any]:
    return {tree["kind"]: tree for tree in yaml.safe_load_all(render(*overrides))}


def pod_of(jobset: Any) -> Any:
    return jobset["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_are_the_golden_ones(name: str) -> None:
    assert render(*EXAMPLES[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_follow_the_published_schemas(name: str) -> None:
    schemas = json.loads(SCHEMAS.read_text())
    kinds = []
    for tree in yaml.safe_load_all(render(*EXAMPLES[name])):
        if tree["kind"] in schemas:
            known = schemas[tree["kind"]]
            assert tree["apiVersion"] == known["version"]
            assert list(find_problems(tree, known["schema"])) == []
            kinds.append(tree["kind"])
    assert kinds == (["TrainingRuntime", "TrainJob"] if "trainjob" in name else ["JobSet"])


@pytest.mark.parametrize(
    ("break_tree", "problem"),
    [
        (lambda spec: spec.update(retries=3), ".spec.retries: no such field"),
        (lambda spec: spec["replicatedJobs"][0].pop("name"), ".spec.replicatedJobs[0]: lacks name"),
        (
            lambda spec: spec["failurePolicy"].update(maxRestarts="3"),
            ".spec.failurePolicy.maxRestarts: must be of type",
        ),
        (lambda spec: spec["failurePolicy"]["rules"][0].update(action="Stop"), ".spec.failurePolicy.rules[0].action:"),
    ],
)
def test_the_schema_check_finds_mistakes(break_tree: Any, problem: str) -> None:
    tree = objects()["JobSet"]
    break_tree(tree["spec"])
    found = list(find_problems(tree, json.loads(SCHEMAS.read_text())["JobSet"]["schema"]))
    assert [line.startswith(problem) for line in found] == [True]


def test_exit_codes_decide_what_happens_to_the_job() -> None:
    job = objects()["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    actions = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {2: "FailJob", 3: "FailJob", 75: "Ignore"}
    assert job["backoffLimit"] == 0, "any other exit code fails the Job, and the JobSet restarts"


def test_a_trainjob_has_the_pods_of_a_jobset() -> None:
    both = objects(*MANY_NODES)["JobSet"]["spec"], objects(*EXAMPLES["trainjob.yaml"])["TrainingRuntime"]["spec"]
    assert pod_of(both[0]) == pod_of(both[1]["template"]["spec"])
    assert both[0]["failurePolicy"] == both[1]["template"]["spec"]["failurePolicy"]


@pytest.mark.parametrize(
    ("run_name", "name"), [("First_Run", "first-run"), ("1b.bf16", "run-1b-bf16"), ("-a--b-", "a-b"), ("7", "run-7")]
)
def test_names_are_dns_labels(run_name: str, name: str) -> None:
    assert re.fullmatch(f"{name}-[0-9a-f]{{6}}", object_name(run_name, num_nodes=4))


def test_different_runs_have_different_objects() -> None:
    names = {object_name(run_name, num_nodes=4) for run_name in ("big_v1", "big-v1", "Big.v1")}
    assert len(names) == 3
    assert "big-v1" in names


def test_a_name_that_is_too_long_for_its_pods_is_rejected() -> None:
    assert object_name("a" * 48, num_nodes=10) == "a" * 48
    for length, num_nodes in ((49, 10), (48, 11)):
        with pytest.raises(ConfigError, match=r"^run\.name: must give a name of at most \d+ characters for the pods"):
            object_name("a" * length, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("launch.dry_run=false", r"launch\.dry_run: must be true for launch=k8s: .* \| kubectl apply -f -"),
        ("launch.k8s.image=null", r"launch\.k8s\.image: must name a container image"),
        ("launch.k8s.claim=null", r"launch\.k8s\.claim: must name a volume claim"),
        ("launch.slurm.gpus_per_node=null", r"launch\.slurm\.gpus_per_node: must be set for launch=k8s"),
        ("run.dir=/data", r"run\.dir: must be relative or below launch\.k8s\.mount=/workspace"),
        ("run.dir=../data", r"run\.dir: must be relative or below launch\.k8s\.mount=/workspace"),
        ("launch.nproc=100", r"train\.batch_size: must be at least the number of ranks \(100\)"),
        ("launch.k8s.mount=runs", r"launch\.k8s\.mount: must be an absolute path"),
        ("launch.k8s.queue=A_b", r"launch\.k8s\.queue: must consist of lower-case letters"),
        ("launch.k8s.env=['A']", r"launch\.k8s\.env: must be a list of 'NAME=VALUE', got 'A'"),
        ("launch.k8s.workload=pod", r"launch\.k8s\.workload: must be one of jobset, trainjob, got 'pod'"),
    ],
)
def test_errors_name_the_key(override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        check_k8s(config(override))
    assert "\n" not in str(caught.value)


def test_fewer_nodes_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^launch\.spares: must be 0 for launch=k8s"):
        check_k8s(config("launch.nodes=2", "launch.spares=1", "train.batch_size=16"))
    with pytest.raises(ConfigError, match=r"^launch\.min_nodes: must be null for launch=k8s"):
        check_k8s(config("launch.nodes=2", "launch.min_nodes=1", "train.batch_size=16"))


def test_the_command_prints_the_manifest_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([*NEEDED, "run.name=first"]) == 0
    config_map, jobset = yaml.safe_load_all(capsys.readouterr().out)
    stored = yaml.safe_load(config_map["data"]["config.yaml"])
    assert stored["run"]["name"] == jobset["metadata"]["name"] == "first"
    assert not list(tmp_path.iterdir())
    assert train.main([*NEEDED, "run.name=first", "launch.dry_run=false"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("harness: launch.dry_run: must be true for launch=k8s")
    assert err.count("\n") == 1


def test_sweeps_and_drills_have_no_manifest() -> None:
    with pytest.raises(ConfigError, match=r"^launch: a sweep runs with launch=local or launch=slurm"):
        check_launch(config(), [])
    with pytest.raises(ConfigError, match=r"^launch: must be local or slurm for a drill, got k8s$"):
        require_environment(FaultKind.nan_grad, config())
