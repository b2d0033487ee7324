"""Synthetic event logs for dashboard tests."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.core.event_json import to_json
from harness.core.events import (
    Action,
    ActionKind,
    CheckpointSaved,
    EvalRecord,
    Event,
    FaultInjected,
    Finding,
    FindingKind,
    Incident,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
    SystemSampled,
)
from harness.core.rundir import RunDir
from harness.telemetry.system_sampler import system_file

BEGUN = 1_750_000_000.0
STEP_S = 0.5
BATCH_TOKENS = 1024
LAYERS = [f"blocks.{index}" for index in range(0, 24, 3)]
NUM_BINS = 16
NUM_NOISES = 9973


def record(iteration: int, *, step: int | None = None, time: float, loss: float = 3.0, **more: Any) -> str:
    """The log line of one step, with ordinary values by default."""
    data: dict[str, Any] = {
        "event": "step",
        "time": time,
        "iteration": iteration,
        "step": iteration if step is None else step,
        "cursor": iteration - 1,
        "tokens": iteration * BATCH_TOKENS,
        "loss": loss,
        "grad_norm": 1.0,
        "lr": 3e-4,
        "tokens_per_s": BATCH_TOKENS / STEP_S,
        "refused": False,
        "stop_requested": False,
        "step_time_s": STEP_S,
        "flops_per_s": 1e12,
    }
    return json.dumps(data | more, separators=(",", ":"))


def write(path: Path, lines: Iterable[str | Event]) -> None:
    """A log of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (line if isinstance(line, str) else to_json(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def long_run(directory: Path, num_steps: int, *, seed: int = 0) -> Path:
    """A run of many steps with three incidents, a restart, evaluations, checkpoints and a fault."""
    write(directory / "events.jsonl", _long_lines(num_steps, random.Random(seed)))
    fault = FaultInjected(
        time=BEGUN, iteration=num_steps // 2, number=0, kind="bit_flip", rank=3, message="one bit of a gradient"
    )
    write(directory / "faults.jsonl", [fault])
    return directory


def _long_lines(num_steps: int, rng: random.Random) -> Iterable[str | Event]:
    spikes = {num_steps // 4: "loss_spike", num_steps // 2: "grad_spike", 3 * num_steps // 4: "nonfinite"}
    noise = [rng.gauss(0, 1) for _ in range(NUM_NOISES)]
    yield RunStarted(time=BEGUN, iteration=0, world_size=8, num_steps=num_steps, step=0)
    for iteration in range(1, num_steps + 1):
        time = BEGUN + iteration * STEP_S
        if iteration == num_steps // 3:
            yield RunStarted(
                time=time, iteration=iteration, world_size=8, num_steps=num_steps, step=iteration, resumed_from="step-1"
            )
        loss = 2.0 + 9.0 / math.sqrt(1 + iteration / 40) + 0.04 * noise[iteration % NUM_NOISES]
        norm = 0.4 + 2.0 / math.sqrt(1 + iteration / 100) + 0.05 * noise[iteration * 7 % NUM_NOISES]
        if iteration in spikes:
            loss, norm = loss + 4.0, norm * 50
        luck = noise[iteration * 11 % NUM_NOISES]
        yield _long_step(iteration, time, loss, norm, luck, refused=spikes.get(iteration) == "nonfinite")
        if iteration in spikes:
            yield from _incident(list(spikes).index(iteration) + 1, FindingKind(spikes[iteration]), iteration, time)
        if iteration % max(1, num_steps // 20) == 0:
            yield EvalRecord(time=time + 0.1, iteration=iteration, step=iteration, loss=loss + 0.05, tokens=8192)
            yield CheckpointSaved(
                time=time + 0.1,
                iteration=iteration,
                step=iteration,
                directory=f"step-{iteration:08d}-gen-0",
                seconds=2.0,
                blocked_s=0.02,
                bytes=1 << 30,
            )
    order = {"command": "lr 0.5", "lr_factor": 0.5}
    time = BEGUN + (num_steps + 1) * STEP_S
    yield Intervention(time=time, iteration=num_steps, who="ada", reason="too noisy", changes=order)
    yield RunEnded(time=time, iteration=num_steps, step=num_steps, exit_code=0, reason="all steps done")


def _long_step(iteration: int, time: float, loss: float, norm: float, luck: float, *, refused: bool) -> str:
    probe = ""
    if iteration % 10 == 1:
        rms = ",".join(f'"{layer}":{1 + index * 0.2 + iteration * 1e-5:.4f}' for index, layer in enumerate(LAYERS))
        counts = [int(1000 * math.exp(-(((index - loss * 2) / 3) ** 2))) for index in range(NUM_BINS)]
        probe = (
            f'"param_norm":{80 + iteration * 1e-4:.4f},"v_norm":{0.01 / (1 + iteration * 1e-4):.6f},'
            f'"update_ratio":0.0012,"square_ratio":{1 + 0.2 * luck:.4f},"activation_rms":{{{rms}}},'
            f'"token_loss_counts":{counts},'
        )
    slow = 0.45 + 0.01 * luck
    return (
        f'{{"event":"step","time":{time},"iteration":{iteration},"step":{iteration},"cursor":{iteration - 1},'
        f'"tokens":{iteration * BATCH_TOKENS},"loss":{loss:.6f},"grad_norm":{norm:.6f},'
        f'"lr":{3e-4 * min(1, iteration / 2000):.8f},"tokens_per_s":{2048 + 10 * luck:.2f},'
        f'"refused":{"true" if refused else "false"},"stop_requested":false,'
        f'"step_time_s":{STEP_S},"flops_per_s":1e12,"mfu":0.41,"loss_scale":null,'
        f'"memory_bytes":68719476736,"loader_wait_s":{0.0004 + 0.0001 * luck:.6f},{probe}'
        f'"bounds":{{"loss":{loss + 3:.4f},"grad_norm":{norm + 5:.4f}}},'
        f'"ranks":{{"grad_norm":{{"median":{norm:.4f},"spread":0.1,"worst":[[{iteration % 8},{norm * 1.3:.4f}]]}},'
        f'"step_time_s":{{"median":0.4,"spread":0.01,"worst":[[5,{slow:.4f}]]}}}},'
        '"batch":{"fingerprint":"17945c081437cd43","entropy_nats":3.18,"rarest":[[147,1,12],[156,2,105],[157,2,107]],'
        '"rows":{"main":8}}}'
    )


def _incident(number: int, kind: FindingKind, iteration: int, time: float) -> Iterable[Event]:
    refused = kind is FindingKind.nonfinite
    answer, cursor, lost = ActionKind.skip if refused else ActionKind.rewind, iteration - 1, 0 if refused else 10
    yield Finding(
        time=time,
        iteration=iteration,
        kind=kind,
        step=iteration,
        onset=cursor,
        value=9.0,
        bound=4.0,
        message="9.00 against a bound of 4.00",
        ranks=[3],
        groups=["blocks.3"],
        cursors=[cursor],
    )
    yield Action(
        time=time,
        iteration=iteration,
        kind=answer,
        step=iteration,
        incident=number,
        reason=f"{kind} of batch {cursor}",
        onset=cursor,
        exclude=[cursor, cursor],
    )
    yield Outcome(
        time=time + 0.2,
        iteration=iteration,
        kind=answer,
        incident=number,
        succeeded=True,
        step=iteration - lost,
        target=f"snapshot of iteration {iteration - lost}" if lost else "",
        steps_lost=lost,
        tokens_lost=lost * BATCH_TOKENS,
        seconds=0.2,
    )
    yield Incident(
        time=time + 0.2,
        iteration=iteration,
        number=number,
        kinds=[str(kind)],
        onset=cursor,
        onset_step=cursor,
        last=iteration + 40,
        last_step=iteration + 40,
        verdict="cured",
        ranks=[3],
        groups=["blocks.3"],
        actions=[str(answer)],
    )


def write_setup(directory: Path, *, num_parameters: int = 124_000_000, **config: Any) -> None:
    """A configuration and a manifest, as a start leaves them; `config` replaces whole sections."""
    run = RunDir(directory)
    sections: dict[str, Any] = {
        "run": {"name": directory.name, "dir": str(directory.parent), "seed": 7},
        "train": {"num_steps": 400, "batch_size": 16, "sequence_length": 1024},
        "model": {
            "name": "125m",
            "dim": 768,
            "num_layers": 12,
            "num_heads": 12,
            "num_kv_heads": 4,
            "vocab_size": 50257,
        },
        "data": {"sources": {"web": {"kind": "files", "weight": 2.0, "paths": ["web-*.bin"]}}},
        "optim": {"lr": 3e-4, "beta2": 0.95},
    }
    run.config.write_text(json.dumps(sections | config), encoding="utf-8")
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_000_000_000}
    hardware = {
        "hostname": "node1", "cpu": "EPYC", "num_cores": 96, "memory_bytes": 1_000_000_000_000, "device": "cuda",
        "gpus": [gpu] * 8, "cuda": "12.8", "nccl": "2.27.3", "driver": "570.1", "world_size": 8, "platform": "Linux",
    }  # fmt: skip
    manifest = {
        "time": BEGUN,
        "commit": "0123456789abcdef0123",
        "diff": {"size_bytes": 1234, "sha256": "fedcba9876543210", "truncated": False, "text": "..."},
        "untracked": ["notes.txt"],
        "versions": {"python": "3.11.7", "torch": "2.13.0", "harness": "0.1.0", "transformer_engine": None},
        "hardware": hardware,
        "dtype": {"compute": "bf16", "master_weights": "fp32"},
        "num_parameters": num_parameters,
        "corpus_fingerprint": "09d3d726b636b4ed",
        "environment": {"NCCL_DEBUG": "WARN"},
    }
    run.manifest.write_text(json.dumps(manifest | {"starts": []}), encoding="utf-8")


def write_load(directory: Path, num_samples: int, *, last: int, rank: int = 0, num_gpus: int = 8) -> None:
    """Samples of one machine's load, evenly spaced up to iteration `last`."""
    samples = [
        SystemSampled(
            time=BEGUN + index * last * STEP_S / num_samples,
            iteration=index * last // num_samples,
            rank=rank,
            host=f"node{rank // 8}",
            every_s=last * STEP_S / num_samples,
            cpu_load=0.5 + 0.1 * math.sin(index / 9),
            host_memory_bytes=200 * 10**9 + index * 10**8,
            host_memory_total_bytes=10**12,
            process_memory_bytes=9 * 10**9,
            gpu_utilization=[round(0.9 + 0.01 * gpu, 2) for gpu in range(num_gpus)],
            gpu_memory_bytes=[(60 + gpu) * 10**9 for gpu in range(num_gpus)],
            gpu_power_w=[600.0 + 10 * gpu for gpu in range(num_gpus)],
            gpu_temperature_c=[58.0 + gpu + 4 * math.sin(index / 20) for gpu in range(num_gpus)],
        )
        for index in range(num_samples)
    ]
    write(system_file(RunDir(directory), rank), samples)
