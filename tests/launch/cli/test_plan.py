"""`harness plan`: numbers by hand, exact text, errors in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.checkpoint.ring_cost import num_buffers
from harness.model.size import num_parameters
from launch.cli import plan
from tests import composed

pytestmark = pytest.mark.usefixtures("composed_once")

ONE_BILLION = """\
model 1b
  parameters        1,263,634,432
  per token         9.604 GFLOP
  per step          65,536 tokens, 629.4 TFLOP
memory per device (16 ranks, 1 replica of the model), peak in the loss
  weights              0.32 GB  fp32, this rank's shard
  moments              0.63 GB  fp32, both of AdamW's, this rank's shard
  gradients            0.00 GB  fp32, this rank's shard
  gathered             2.53 GB  unsharded weights of the blocks in use, of embedding and head
  in flight            0.09 GB  collective buffers and unsharded gradients
  activations          6.18 GB  kept for backward, and temporary
  logits               0.67 GB  one chunk of the loss, and the head's gradient
  other                0.07 GB  batch and workspaces
  outside              1.21 GB  CUDA context, NCCL, fragmentation
  total                11.7 GB  of 85.0 GB (cluster.memory_gb)
data sent per rank and step
  all-gather           2.37 GB  25 calls among 16 ranks on 2 machines
  reduce-scatter       4.74 GB  25 calls among 16 ranks on 2 machines
  inter-node           0.89 GB  part of it, through the network port of one device
compute per device and step
  GEMM in blocks     46.4 ms  63.3 %
  attention          11.6 ms  15.8 %
  elementwise        7.17 ms   9.8 %
  head and loss      2.88 ms   3.9 %
  casts of weights   4.35 ms   5.9 %
  optimizer          0.87 ms   1.2 %
time
  compute           73.3 ms, 54.2 % of the device's bf16 rate
  communication     25.7 ms, of which 3.41 ms do not overlap with compute
  step              76.7 ms, 854,007 tokens/s, 51.8 % MFU
  run               2.1 h for 100,000 steps
  basis             estimate without measurement: several ranks; not an H200
price
  run               85.27
  1,000 steps       0.85
  rewind            at most 0.01
  rollback          at most 0.87
checkpoints
  on disk           15.16 GB each
  in host memory    30.33 GB per machine: 3 snapshots and the one being saved
  allowed           20 GB (checkpoint.ring.memory_gb); TOO LITTLE, the run will not start
a restore loses at most
  rewind            12 steps (on average 7.5), 786,432 tokens, 0.921 s
  rollback          1,021 steps (on average 521.5), 66,912,256 tokens, 78.4 s
assumptions
  memory            1.00 GB outside torch, and 2 % fragmentation
  compute           GEMM at 70.4 % and attention at 53.9 % of the bf16 rate at most, 86.7 % of the memory's bandwidth
  communication     rings at 80 % of the links' rates with NCCL's latencies, overlapped block by block
"""

SEVERAL = """\
ranks  memory  fits  sent  inter-node  compute  waiting     step     MFU    tokens/s
    8   411.2    no  6.63        0.00   4.25 s  2.73 ms   4.26 s  59.8 %     492,639
   64    55.4   yes  7.46        0.93  0.537 s  4.48 ms  0.542 s  58.8 %   3,872,135
  512    10.8   yes  7.57        0.95  72.5 ms  81.8 ms  0.154 s  25.8 %  13,589,083

memory: GB per device; sent: GB per rank and step; inter-node: part of sent that goes to other machines
time: estimate without measurement: several ranks; not an H200; 262,144 tokens per micro-batch (measured up to 131,072)
memory: 1.00 GB outside torch, and 2 % fragmentation
compute: GEMM at 70.4 % and attention at 53.9 % of the bf16 rate at most, 86.7 % of the memory's bandwidth
communication: rings at 80 % of the links' rates with NCCL's latencies, overlapped block by block
"""

CLOCKS = """\
a restore loses at most
  rewind            no snapshots are kept
  rollback          121 steps (on average 71.5), 247,808 tokens; or 10 minutes and 22 steps, whichever is less
"""


def run_plan(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert plan.main(args) == 0
    return capsys.readouterr().out


def run_plan_json(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    plan_json = json.loads(run_plan("--json", *args, capsys=capsys))
    assert isinstance(plan_json, dict)
    return plan_json


def test_the_text_of_a_large_run(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["+experiment=1b_bf16", "launch.nproc=8", "launch.nodes=2", "train.batch_size=16", "train.num_steps=100000"]
    args += ["checkpoint.ring.memory_gb=20", "checkpoint.every_steps=1000", "checkpoint.ring.slots=3"]
    assert run_plan(*args, "cluster.price_per_gpu_hour=2.5", capsys=capsys) == ONE_BILLION


def test_without_the_rates_of_a_device_the_plan_says_what_sets_them(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = "not known; set cluster=h100, cluster=h200 or cluster.peak_tflops\n"
    assert f"\ntime\n  step              {unknown}" in run_plan("model=tiny", capsys=capsys)
    assert f"\ntime: {unknown}" in run_plan("model=tiny", "--ranks", "1,2", capsys=capsys)
    assert "not known" not in run_plan("model=tiny", "cluster=h100", capsys=capsys)


def test_several_numbers_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["+experiment=1b_bf16", "train.batch_size=512", "launch.nproc=8", "--ranks", "8,64,512"]
    assert run_plan(*args, capsys=capsys) == SEVERAL
    rows = json.loads(run_plan(*args, "--json", capsys=capsys))
    assert [row["num_ranks"] for row in rows] == [8, 64, 512]
    assert [bool(row["refusal"]) for row in rows] == [True, False, False]
    assert rows[1]["memory"]["needed_bytes"] == pytest.approx(55.6e9, rel=0.01)
    assert rows[1]["traffic"]["calls"][0]["kind"] == "all_gather"


def test_a_job_that_does_not_fit_exits_2_after_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["+experiment=1b_bf16", "train.batch_size=16"]) == 2
    output = capsys.readouterr()
    assert "GB  of 85.0 GB (cluster.memory_gb); DOES NOT FIT\n" in output.out
    (line,) = output.err.splitlines()
    assert line.startswith("harness: cluster.memory_gb: the only rank needs ")
    assert line.endswith("; train.micro_batch_size=8 saves 45.4 GB and fits")


def test_the_text_with_checkpoints_by_time_and_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["checkpoint.every_minutes=10", "checkpoint.ring.slots=0", "checkpoint.ring.memory_gb=1"]
    text = run_plan(*args, capsys=capsys)
    assert CLOCKS in text
    assert "  allowed           1 GB (checkpoint.ring.memory_gb)\n" in text
    by_clock = run_plan(*args, "checkpoint.every_steps=0", capsys=capsys)
    assert "  rollback          10 minutes and 22 steps\n" in by_clock


def test_memory_and_checkpoint_sizes_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    count = num_parameters(composed.load().model)
    assert count % 2 == 0
    plan_json = run_plan_json("launch.nproc=4", "parallel.replicate=2", capsys=capsys)
    assert (plan_json["num_ranks"], plan_json["replicate"], plan_json["num_parameters"]) == (4, 2, count)
    share = 4 * count // 2
    assert [plan_json[f"{part}_bytes"] for part in ("weights", "gradients", "moments")] == [share, share, 2 * share]
    assert plan_json["checkpoint_bytes"] == 12 * count, "copies are saved once"
    assert plan_json["ring_bytes"] == 4 * (3 + 1) * 3 * share, "every rank keeps its part"
    assert plan_json["ring_allowed_bytes"] is None


@pytest.mark.parametrize("slots", [0, 2, 5])
def test_the_ring_size_matches_the_run(slots: int, capsys: pytest.CaptureFixture[str]) -> None:
    args = f"checkpoint.ring.slots={slots}"
    plan_json = run_plan_json(args, capsys=capsys)
    assert (
        plan_json["ring_bytes"] == num_buffers(composed.load([args]).checkpoint.ring) * 12 * plan_json["num_parameters"]
    )


@pytest.mark.parametrize(
    ("nodes", "replicate", "replicas", "buffers"), [(2, 1, 1, 2), (1, 1, 1, 0), (2, 2, 1, 0), (2, 1, 0, 0)]
)
def test_snapshots_of_a_partner_take_host_memory(
    nodes: int, replicate: int, replicas: int, buffers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [f"launch.nodes={nodes}", "launch.nproc=2", f"parallel.replicate={replicate}"]
    args.append(f"checkpoint.ring.replicas={replicas}")
    plan_json = run_plan_json(*args, capsys=capsys)
    assert plan_json["ring_replicas"] == buffers
    share = 12 * plan_json["num_parameters"] * replicate // (2 * nodes)
    assert plan_json["ring_bytes"] == (4 + buffers) * 2 * share
    text = run_plan(*args, capsys=capsys)
    assert ("2 buffers for the snapshots of a partner on another machine\n" in text) == bool(buffers)


def test_times_need_a_peak_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan_json(capsys=capsys)["step_time_s"] is None
    plan_json = run_plan_json("cluster.peak_tflops=2", "--mfu", "0.5", "launch.nproc=2", capsys=capsys)
    assert plan_json["step_time_s"] == pytest.approx(plan_json["flops_per_step"] / 2e12)
    assert plan_json["flops_per_step"] == plan_json["flops_per_token"] * 2048
    assert plan_json["rollback"]["steps_at_most"] == 121
    assert plan_json["rewind"] == {
        "steps_at_most": 12,
        "steps_on_average": 7.5,
        "tokens_at_most": 12 * 2048,
        "minutes_at_most": None,
        "steps_besides": 0,
    }


def test_padding_of_uneven_shards_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  padding           1 of 9 sequences (11.1 %): the batch does not divide evenly" in run_plan(
        "launch.nproc=3", capsys=capsys
    )
    assert "  padding" not in run_plan("launch.nproc=4", capsys=capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["optim.lrr=1"], "optim.lrr: no such key; optim has "),
        (["train.num_steps=0"], "train.num_steps: must be at least 1, got 0"),
        (["launch.nproc=9"], "train.batch_size: must be at least the number of ranks (9)"),
        (["--mfu", "0"], "--mfu: must be above 0 and at most 1, got 0.0"),
        (["--mfu", "nan"], "--mfu: must be above 0 and at most 1, got nan"),
        (["--ranks", "8,many"], "--ranks: must be numbers of ranks like 8,64,1024, got '8,many'"),
        (["--ranks", "8,9"], "train.batch_size: must be at least the number of ranks (9)"),
        (["--fast"], "plan: unrecognized arguments: --fast; see --help"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harness: {message}")
