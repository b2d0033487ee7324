"""The process of a contender: builds its row, warms up, and then serves requests from a pipe.

    python -m tests.bench.gpu.contender SPEC REQUESTS REPLIES      started by tests.bench.gpu.process

Why: this harness replaces an operator of FSDP on CUDA, Transformer Engine loads its own cuDNN, and peers set options of
torch. In one process each row would run with what earlier rows changed.
How: one JSON object per line, over two pipes that nothing else writes to. A waiting contender has freed the memory of
its activations and keeps weights and moments. For a block, it first runs a step that is not timed, which allocates that
memory again, and then the run-up and the block. It exits on request, when the pipe closes, or on an error, which it
sends as one line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, final

import torch

from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.core.rundir import RunDir
from harness.distributed.world import World, connect, disconnect
from harness.precision.attention import fast_attention
from harness.precision.mixed_precision import emulate_half_matmul
from tests.bench.clock import WARMUP_STEPS, heat_device, matmul_flops_per_s, time_block
from tests.bench.gpu.rows import ROWS, Entry, start_row
from tests.bench.gpu.setting import REALLOCATION_STEPS, Setting

PACKAGES = ("torchtitan", "torchao", "transformers", "lightning", "accelerate", "transformer_engine", "triton")
NUM_LINES = 12
"""Printed lines of a traceback."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    row: str
    setting: Setting
    root: str
    """Directory of the row."""
    paths: tuple[str, ...] = ()
    """Directories that hold packages."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        fields = json.loads(text)
        return cls(**fields | {"setting": Setting(**fields["setting"]), "paths": tuple(fields["paths"])})


@contextmanager
def warm_entry(spec: Spec) -> Iterator[tuple[Entry, World]]:
    """Build a row and warm it up. A compiled row that reaches torch's recompile limit fails."""
    row = ROWS[spec.row]
    sys.path[:0] = spec.paths
    if not row.is_as_shipped:
        torch.set_float32_matmul_precision("high")
    world = connect(spec.setting.config().parallel)
    try:
        with (
            nullcontext() if row.is_as_shipped else fast_attention(),
            emulate_half_matmul(PrecisionKind.bf16, world.device),
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
            start_row(spec.row, world, spec.setting, RunDir(Path(spec.root))) as entry,
        ):
            for _ in range(WARMUP_STEPS):
                for side in entry.sides.values():
                    side(1)
            yield entry, world
    finally:
        disconnect()


def describe_contender(entry: Entry, world: World) -> dict[str, Any]:
    """The first reply, sent after the warm-up."""
    return {
        "sides": list(entry.sides),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else None,
        "versions": versions(),
        "modules": sorted(name for name in sys.modules if name.startswith("harness.")),
    }


def versions() -> dict[str, str]:
    """Versions of torch, CUDA, cuDNN and the packages that this process has imported."""
    found = {"torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        try:
            found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        except RuntimeError:  # Transformer Engine loaded a version that torch was not built with
            found["cuDNN"] = "of Transformer Engine"
    return found | {name: version_of(name) for name in PACKAGES if name in sys.modules}


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    root = Path(sys.modules[package].__file__ or "").parents[1]
    files = [path for path in (root / "version.txt", root / "assets/version.txt") if path.is_file()]
    return files[0].read_text(encoding="utf-8").strip() if files else "unknown"


def handle_request(request: dict[str, Any], entry: Entry, world: World) -> dict[str, Any]:
    match request:
        case {"do": "block", "side": str(side), "steps": int(num_steps)}:
            run = entry.sides[side]
            run(REALLOCATION_STEPS)
            block = time_block(run, num_steps, world.device)
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
            return {"block": block._asdict()}
        case {"do": "report"}:
            return {"losses": entry.losses(), "note": entry.note(), "report_s": entry.report_s}
        case {"do": "matmul", "times": int(times)}:
            return {"flops": [rate for rate in (matmul_flops_per_s() for _ in range(times)) if rate is not None]}
        case {"do": "heat", "seconds": float(seconds) | int(seconds)}:
            heat_device(seconds)
            return {}
    raise ValueError(f"unknown request: {request}")


def describe_failure(error: BaseException) -> dict[str, Any]:
    """The error as one line for the table; unless it is a config error, the traceback is printed too."""
    message = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
    is_config = isinstance(error, ConfigError | ModuleNotFoundError)
    if not is_config:
        print("".join(traceback.format_exception(error)[-NUM_LINES:]), file=sys.stderr, flush=True)
        message = f"{type(error).__name__}: {message}"
    return {"failed": message, "is_memory": isinstance(error, torch.OutOfMemoryError), "is_config": is_config}


def serve(spec: Spec, requests: TextIO, replies: TextIO) -> int:
    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        with warm_entry(spec) as (entry, world):
            reply(describe_contender(entry, world))
            for line in requests:
                request = json.loads(line)
                if request["do"] == "end":
                    break
                reply(handle_request(request, entry, world))
    except (Exception, SystemExit) as error:
        reply(describe_failure(error))
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    spec, requests, replies = arguments
    warnings.simplefilter("ignore")
    with (
        os.fdopen(int(requests), encoding="utf-8") as request_pipe,
        os.fdopen(int(replies), "w", encoding="utf-8") as reply_pipe,
    ):
        return serve(Spec.from_json(spec), request_pipe, reply_pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
