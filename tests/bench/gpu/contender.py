"""A contender in a process of its own: it builds its row, warms up, and then waits on a pipe for its turn.

    python -m tests.bench.gpu.contender SPEC REQUESTS REPLIES      started by tests.bench.gpu.process

Why: this harness replaces an operator of FSDP on CUDA, Transformer Engine brings a cuDNN of its own, and peers set
options of torch. In one process each row would run under what the rows before it left.
How: one JSON object a line, over two pipes that nothing else writes to. A contender that waits has given the memory of
its activations back and keeps weights and moments; in its turn it first makes a step that is not timed, which takes
that memory again, and then the block with its run-up. It ends when it is told to, when the pipe closes, or when it
fails, with one line that says why.
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
from tests.bench.clock import WARMUP_STEPS, heat, matmul_flops_per_s, timed
from tests.bench.gpu.rows import ROWS, Entry, started
from tests.bench.gpu.setting import REFILL_STEPS, Setting

PACKAGES = ("torchtitan", "torchao", "transformers", "lightning", "accelerate", "transformer_engine", "triton")
NUM_LINES = 12
"""Frames of a traceback."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    row: str
    setting: Setting
    root: str
    """A directory of its own."""
    paths: tuple[str, ...] = ()
    """Directories that hold packages."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        read = json.loads(text)
        return cls(**read | {"setting": Setting(**read["setting"]), "paths": tuple(read["paths"])})


@contextmanager
def entered(spec: Spec) -> Iterator[tuple[Entry, World]]:
    """The row as it is timed; a compiled row that needs more graphs than torch keeps fails instead of slowing down."""
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
            started(spec.row, world, spec.setting, RunDir(Path(spec.root))) as entry,
        ):
            for _ in range(WARMUP_STEPS):
                for side in entry.sides.values():
                    side(1)
            yield entry, world
    finally:
        disconnect()


def facts(entry: Entry, world: World) -> dict[str, Any]:
    """What is told once the contender is warm."""
    return {
        "sides": list(entry.sides),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else None,
        "versions": versions(),
        "modules": sorted(name for name in sys.modules if name.startswith("harness.")),
    }


def versions() -> dict[str, str]:
    """Of torch, of what it was built with, and of the packages that this process has loaded."""
    found = {"torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        try:
            found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        except RuntimeError:  # Transformer Engine loaded another one than torch was built with
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


def answer(request: dict[str, Any], entry: Entry, world: World) -> dict[str, Any]:
    match request:
        case {"do": "turn", "side": str(side), "steps": int(num_steps)}:
            run = entry.sides[side]
            run(REFILL_STEPS)
            block = timed(run, num_steps, world.device)
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
            return {"block": block._asdict()}
        case {"do": "report"}:
            return {"losses": entry.losses(), "note": entry.note(), "judging_s": entry.judging_s}
        case {"do": "matmul", "times": int(times)}:
            return {"flops": [rate for rate in (matmul_flops_per_s() for _ in range(times)) if rate is not None]}
        case {"do": "heat", "seconds": float(seconds) | int(seconds)}:
            heat(seconds)
            return {}
    raise ValueError(f"no such request: {request}")


def failure(error: BaseException) -> dict[str, Any]:
    """One line for a table; what is not plain from it is printed in full."""
    said = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
    is_config = isinstance(error, ConfigError | ModuleNotFoundError)
    if not is_config:
        print("".join(traceback.format_exception(error)[-NUM_LINES:]), file=sys.stderr, flush=True)
        said = f"{type(error).__name__}: {said}"
    return {"failed": said, "is_memory": isinstance(error, torch.OutOfMemoryError), "is_config": is_config}


def serve(spec: Spec, requests: TextIO, replies: TextIO) -> int:
    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        with entered(spec) as (entry, world):
            reply(facts(entry, world))
            for line in requests:
                request = json.loads(line)
                if request["do"] == "end":
                    break
                reply(answer(request, entry, world))
    except (Exception, SystemExit) as error:
        reply(failure(error))
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    spec, requests, replies = arguments
    warnings.simplefilter("ignore")
    with os.fdopen(int(requests), encoding="utf-8") as asked, os.fdopen(int(replies), "w", encoding="utf-8") as told:
        return serve(Spec.from_json(spec), asked, told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
