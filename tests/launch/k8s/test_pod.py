"""The command of a pod: two pods as real processes, in any order; a run that is evicted, resumes, and is stopped."""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest

from harness.config import compose
from harness.config.schema import Config
from harness.control import stop_requests
from harness.core.events import StepRecord
from harness.core.rundir import RunDir, locate
from harness.telemetry.event_log import tail
from launch.k8s import pod
from launch.local.node_address import RendezvousError
from launch.local.node_group import RendezvousSpec
from launch.local.ports import reserved_port
from tests.distributed.cases import tiny
from tests.forks import Launched
from tests.full_disk import fill, may_mount, small_disk

LIMIT_S = 300.0


def k8s(directory: Path, *overrides: str) -> Config:
    fixed = ("launch=k8s", "run.name=first", "launch.nodes=2", "launch.nproc=1", "launch.threads=1")
    return tiny(*fixed, *overrides, directory=str(directory))


def store_config(cfg: Config, directory: Path) -> Path:
    path = directory / "config-map.yaml"
    path.write_text(compose.to_yaml(cfg))
    return path


def test_node_0_creates_the_run_directory_and_the_others_wait_for_it(tmp_path: Path) -> None:
    cfg = k8s(tmp_path, "launch.start_within_s=0.01")
    run = locate(cfg)
    late = RendezvousSpec(num_nodes=2, node_rank=1, host="127.0.0.1", port=1)
    with pytest.raises(RendezvousError, match=r"rendezvous: node 0 did not write this config to .*config\.yaml within"):
        pod.prepare_node(cfg, late)
    pod.prepare_node(cfg, RendezvousSpec(num_nodes=2, node_rank=0, host="localhost", port=1))
    assert compose.read(run.config) == cfg
    with pytest.raises(RendezvousError, match=r"rendezvous: node 0 does not answer at 127\.0\.0\.1:1 within 0 s"):
        pod.prepare_node(cfg, late)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pod.prepare_node(cfg, RendezvousSpec(num_nodes=2, node_rank=1, host="localhost", port=server.getsockname()[1]))


def test_the_others_wait_until_node_0_has_replaced_the_config_of_an_earlier_start(tmp_path: Path) -> None:
    before, now = k8s(tmp_path), k8s(tmp_path, "launch.hang_after_s=99")
    pod.prepare_node(before, RendezvousSpec(num_nodes=2))
    run = locate(now)
    assert not pod.is_stored(now, run)
    pod.prepare_node(now, RendezvousSpec(num_nodes=2))
    assert pod.is_stored(now, run)


def test_a_pod_without_an_index_is_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(pod.INDEX, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert pod.main(["config.yaml"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.startswith("harness: JOB_COMPLETION_INDEX: must be a number, as in a pod")


def test_the_variables_of_the_cluster_keep_what_is_set() -> None:
    found = pod.cluster_environment({"PATH": os.environ["PATH"], "NCCL_DEBUG": "INFO"})
    assert found["TORCH_NCCL_NAN_CHECK"] == "0"
    assert found["PYTHONUNBUFFERED"] == "1"
    assert not {"NCCL_DEBUG", "PATH", "SHLVL", "_"} & found.keys()


def test_only_a_stop_by_a_person_ends_the_pod_with_0(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert [pod.pod_exit_code(code, run) for code in (0, 1, 2, 3, 75)] == [0, 1, 2, 3, 75]
    stop_requests.ask(run, who="ada", reason="")
    assert [pod.pod_exit_code(code, run) for code in (0, 1, 2, 3, 75)] == [0, 1, 2, 3, 0]


def test_a_config_without_a_name_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pod.INDEX, "0")
    cfg = k8s(tmp_path)
    cfg.run.name = None
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert pod.main([str(store_config(cfg, tmp_path))]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_full_disk_is_one_line_and_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(pod.INDEX, "0")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with small_disk(tmp_path / "disk") as disk:
            fill(disk)
            path = store_config(k8s(disk, "launch.nodes=1"), tmp_path)
            assert pod.main([str(path), "--nodes", "1"]) == 75
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == f"harness: {disk}/first: cannot write it: No space left on device\n"


def set_index(node_rank: int) -> None:
    os.environ[pod.INDEX] = str(node_rank)


@pytest.mark.full
def test_two_pods_train_are_evicted_resume_and_are_stopped(tmp_path: Path) -> None:
    cfg = k8s(tmp_path, "train.num_steps=100000", "optim.warmup_steps=2", "checkpoint.every_steps=100000")
    path, run = store_config(cfg, tmp_path), locate(cfg)

    def start(node_rank: int) -> Launched:
        arguments = (str(path), "--nodes", "2", "--rendezvous", f"localhost:{port}")
        output = tmp_path / f"pod-{node_rank}"
        return Launched("launch.k8s.pod", *arguments, output=output, first=partial(set_index, node_rank))

    def last_step() -> int:
        return max((event.step for event in tail(run.events) if isinstance(event, StepRecord)), default=0)

    def wait_for_step(step: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while last_step() < step:
            assert all(process.poll() is None for process in pods), "a pod ended before it trained"
            assert time.monotonic() < deadline_s
            time.sleep(0.2)

    with reserved_port() as port:
        pods = [start(1)]
        time.sleep(0.5)
        pods.append(start(0))
        try:
            wait_for_step(3)
            pods[0].send_signal(signal.SIGTERM)
            assert [process.wait(LIMIT_S) for process in pods] == [75, 75], "one evicted pod stops the whole run"
            reached = last_step()
            pods = [start(0), start(1)]
            wait_for_step(reached + 3)
            stop_requests.ask(run, who="ada", reason="enough")
            assert [process.wait(LIMIT_S) for process in pods] == [0, 0]
        finally:
            for process in pods:
                if process.poll() is None:
                    process.kill_group()
