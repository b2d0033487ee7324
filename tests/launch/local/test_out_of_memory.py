"""A rank that runs out of memory ends with one line: what was needed, what there was, and what to change."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.analysis.plan.machine_memory import MachineMemory
from harness.core.events import EndCause, RunEnded
from harness.core.rundir import RunDir
from harness.telemetry.event_log import tail
from launch.cli.main import main
from launch.local import out_of_memory
from launch.local.out_of_memory import MemoryWatch, asked_bytes, describe_shortage, memory_kind
from launch.local.ranks import RankFailure, render_failure
from tests.composed import load
from tests.forks import Launched

GB = 10**9
TOO_MUCH = 1 << 50


def caught(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as error:  # noqa: PT011 -- the type is what the test is about
        call()
    return error.value


def test_real_errors_of_the_allocators_are_recognised() -> None:
    by_torch = caught(lambda: torch.empty(TOO_MUCH, dtype=torch.uint8))
    by_numpy = caught(lambda: np.empty(TOO_MUCH, dtype=np.uint8))
    assert [memory_kind(error) for error in (by_torch, by_numpy)] == ["memory", "memory"]
    assert asked_bytes(str(by_torch)) == TOO_MUCH
    assert asked_bytes(str(by_numpy)) == TOO_MUCH
    shortage = describe_shortage(by_torch)
    assert (shortage["kind"], shortage["asked_bytes"]) == ("memory", TOO_MUCH)
    assert 0 < shortage["free_bytes"] < TOO_MUCH


def test_other_errors_are_not_about_memory() -> None:
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ...")
    assert memory_kind(gpu) == "GPU memory"
    assert asked_bytes(str(gpu)) == 20 * 2**30
    assert memory_kind(RuntimeError("CUDA error: out of memory")) == "GPU memory"
    assert memory_kind(OSError(errno.ENOMEM, "Cannot allocate memory")) == "memory"
    assert memory_kind(OSError(errno.ENOSPC, "No space left on device")) == ""
    assert describe_shortage(ValueError("out of range")) == {}
    assert asked_bytes("tried to allocate 3 parsecs") is None


def test_the_cause_of_an_error_counts() -> None:
    def fail() -> None:
        try:
            torch.empty(TOO_MUCH)
        except RuntimeError as error:
            raise ValueError("the snapshot was not taken") from error

    assert describe_shortage(caught(fail))["kind"] == "memory"


def watch(free_gb: float = 16) -> MemoryWatch:
    cfg = load(["train.batch_size=64", "train.sequence_length=2048"])
    machine = MachineMemory(total_bytes=16 * GB, free_bytes=round(free_gb * GB), num_ranks=2, is_gpu=False)
    return MemoryWatch.start(cfg, machine, world_size=2)


def killed(number: int = signal.SIGKILL) -> RankFailure:
    return RankFailure(rank=1, exit_code=-number, log="rank-1.stderr")


def test_a_failed_allocation_is_one_line_without_a_traceback() -> None:
    shortage = {"kind": "GPU memory", "asked_bytes": 20 * GB, "free_bytes": 3 * GB, "total_bytes": 80 * GB}
    failure = RankFailure(rank=0, exit_code=1, log="", message="CUDA", traceback="Traceback", shortage=shortage)
    text = render_failure(watch().explain(failure), stopping=False)
    assert text.startswith(
        "harness: rank 0 ran out of GPU memory: needed 20 GB more and 3 GB of 80 GB was free; the plan estimates "
    )
    assert "train.micro_batch_size=" in text or "parallel.activation_checkpointing=" in text
    assert text.count("\n") == 0
    assert watch().explain(failure).cause is EndCause.out_of_memory


def test_memory_that_other_processes_hold_is_named_and_not_counted_on() -> None:
    cfg = load(["+experiment=1b_bf16"])
    machine = MachineMemory(total_bytes=150 * GB, free_bytes=150 * GB, num_ranks=1, is_gpu=True)
    seen = MemoryWatch.start(cfg, machine, world_size=1)
    shortage = {"kind": "GPU memory", "asked_bytes": GB, "free_bytes": 0, "total_bytes": 150 * GB, "own_bytes": 12 * GB}

    def explain(**changed: int) -> str:
        failure = RankFailure(rank=0, exit_code=1, log="", shortage=shortage | changed)
        return seen.explain(failure).describe()

    held = "0 MB of 150 GB was free, other processes held 137 GB: end them, or change the run; the plan estimates "
    assert held in explain()
    assert explain().endswith("; 2 ranks and parallel.activation_checkpointing=full train.micro_batch_size=1 would fit")
    assert "other processes" not in explain(own_bytes=148 * GB), "only the rank's own memory and its CUDA context"
    assert explain(own_bytes=148 * GB).endswith("and fits")


def test_a_kill_by_the_kernel_is_told_from_other_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    before = watch()
    assert before.explain(killed()).describe() == "was killed by SIGKILL"
    assert before.explain(killed()).cause is EndCause.killed_rank
    monkeypatch.setattr(out_of_memory, "count_oom_kills", lambda: before.kills_before + 1)
    before.used_bytes, before.free_bytes = 15 * GB, GB // 10
    text = before.explain(killed()).describe()
    assert text.startswith(
        "ran out of memory and was killed by the kernel (SIGKILL); the ranks here used 15 GB and 0.1 GB was free a "
        "second before; the plan estimates "
    )
    assert before.explain(killed(signal.SIGSEGV)).describe() == "was killed by SIGSEGV"


def test_little_free_memory_makes_it_probable_where_the_kernel_shows_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch()
    monkeypatch.setattr(out_of_memory, "count_oom_kills", lambda: seen.kills_before)
    seen.used_bytes, seen.free_bytes = 15 * GB, GB
    assert seen.explain(killed()).describe() == "was killed by SIGKILL", "5 % and more was free"
    seen.free_bytes = GB // 2
    assert seen.explain(killed()).describe().startswith("was killed by SIGKILL, probably by the kernel because memory")


def test_memory_is_observed_once_a_second() -> None:
    seen = watch()
    seen.observe([os.getpid()], now_s=5.0)
    assert seen.used_bytes > 10 * 2**20
    assert seen.free_bytes is not None
    seen.used_bytes = 0
    seen.observe([os.getpid()], now_s=5.9)
    assert seen.used_bytes == 0
    seen.observe([os.getpid()], now_s=6.0)
    assert seen.used_bytes > 0


BIG_BATCH = [
    "data=synthetic",
    "run.name=big",
    "train.num_steps=5",
    "optim.warmup_steps=1",
    "train.batch_size=64",
    "train.sequence_length=512",
    "model.dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.num_layers=1",
    "model.ffn_dim=64",
    "model.vocab_size=65536",
    "model.loss_chunk_tokens=65536",
    "checkpoint.ring.slots=0",
    "launch.nproc=1",
    "launch.threads=1",
    "launch.max_restarts=0",
    "telemetry=plain",
    "telemetry.picture=no",
    "parallel.device=cpu",
]
"""A small state with logits of 8.6 GB, which are one allocation."""


def train(cwd: Path, limit: Callable[[], None]) -> str:
    """A run in a process that has called `limit` first; returns what it printed as errors."""
    output = cwd / "printed"
    with Launched("launch.cli.main", "train", *BIG_BATCH, output=output, first=limit, cwd=cwd) as launcher:
        assert launcher.wait(timeout=300) == 1, launcher.stdout + launcher.stderr
        return launcher.stderr


def limit_address_space() -> None:
    """3 GB more than this process has, which has imported torch."""
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + 3 * GB,) * 2)


def enter_cgroup(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def end_of_run(directory: Path) -> RunEnded:
    (ended,) = [event for event in tail(RunDir(directory / "runs/big").events) if isinstance(event, RunEnded)]
    assert (ended.exit_code, ended.cause) == (1, EndCause.out_of_memory)
    return ended


@pytest.mark.full
def test_a_run_under_an_address_space_limit_says_what_it_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real allocation fails in the first step; all readers of the run agree."""
    stderr = train(tmp_path, limit_address_space)
    assert stderr.splitlines()[-1].startswith("harness: rank 0 ran out of memory: needed "), stderr
    assert "Traceback" not in stderr
    ended = end_of_run(tmp_path)

    monkeypatch.chdir(tmp_path)
    main(["status", "runs/big", "--json"])
    status = json.loads(capsys.readouterr().out)
    assert (status["exit_code"], status["state"]) == (1, "ended")
    assert "memory" in status["reason"]
    main(["watch", "runs/big", "--once"])
    watched = capsys.readouterr().out.splitlines()
    assert watched[0] == "big: crashed · exit code 1"
    assert watched[1].startswith("rank 0 on ")
    assert "ran out of memory" in watched[1]
    main(["postmortem", "runs/big"])
    assert capsys.readouterr().out.startswith(
        f"runs/big: no incidents; ended at step {ended.step} with exit code 1; cause: out of memory"
    )
    assert main(["report", "runs"]) == 0
    assert "crashed" in (tmp_path / "runs/index.html").read_text()


def memory_cgroup(name: str, limit_bytes: int) -> Path | None:
    """A new memory cgroup with a limit; None if this machine allows none."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = top / name
        try:
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
        except OSError:
            continue
        return group
    return None


@pytest.mark.full
def test_the_kernels_kill_is_recognised(tmp_path: Path) -> None:
    """A real kill by the out-of-memory killer, in a cgroup with too little memory."""
    group = memory_cgroup(f"harness-test-{os.getpid()}", 1_200_000_000)
    if group is None:
        pytest.skip("needs root and a memory cgroup")
    assert group is not None
    try:
        line = train(tmp_path, partial(enter_cgroup, group)).splitlines()[-1]
        assert line.startswith("harness: rank 0 ran out of memory and was killed by the kernel (SIGKILL)"), line
        end_of_run(tmp_path)
    finally:
        group.rmdir()
    shutil.rmtree(tmp_path, ignore_errors=True)
