"""A process that computes the first batch with and without filled memory, then steps that must not wait for the device.

`tests/gpu/test_deterministic.py` starts it.
It is a process of its own, because torch reads the setting of cuBLAS once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from harness.build import Parts, build
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.determinism import deterministic_algorithms, fill_memory
from harness.distributed.world import connected
from harness.precision.attention import fast_attention
from harness.start_check import check_determinism, compute_digests
from tests.gpu.one_rank import SMALL, step


def main(result: str, *overrides: str) -> None:
    """Write whether the digests are equal, and how many clock events the check left."""
    cfg = load([*SMALL, "run.deterministic=true", *overrides])
    with (
        deterministic_algorithms(enabled=True),
        fast_attention(),
        connected(cfg.parallel) as world,
    ):
        parts = build(cfg, world, RunDir(Path("/nonexistent")))
        line = check_determinism(parts, RunState(), cfg=cfg)
        plain = compute_digests(parts, parts.batches[0], cfg=cfg)
        fill_memory(True)
        filled = compute_digests(parts, parts.batches[0], cfg=cfg)
        fill_memory(False)
        found = {"line": line, "equal": torch.equal(plain, filled), "pending": len(parts.compute_clock._pending)}
        issue_steps(parts, cfg)
        parts.close()
    Path(result).write_text(json.dumps(found))


def issue_steps(parts: Parts, cfg: Config) -> None:
    """Raise if a deterministic step waits for the device."""
    for index in range(2):
        step(parts, cfg, index, probe=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for index in range(2, 5):
        step(parts, cfg, index, probe=index % 2 == 0)
    torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main(*sys.argv[1:])
