"""One table of this harness and its peers: tokens/s, MFU and memory of the same model on the same GPU, in one run.

    make bench-gpu                                              1b and 3b, all rows: a quarter of an hour on an H200
    python -m tests.bench.gpu --models 1b --torchtitan DIR      one size; DIR holds the package torchtitan
    python -m tests.bench.gpu --rows ours-bf16 huggingface huggingface-whole
    python -m tests.bench.gpu --models tiny --sequence 128 --batch 2 --steps 2 --rounds 1     without a GPU

Rows: this harness in bf16 and fp8, each with its sentinel on and off in turns (`tests.bench.sentinel` says what that
is); torchtitan's Llama; Hugging Face's Llama with FSDP2, by itself, by Lightning Fabric and by accelerate. All have the
same number of parameters, which is checked, the same batches, fp32 weights and moments, bf16 products (but fp8's),
gradients reduced in fp32, fused AdamW with the same settings, and a gradient norm clipped in every step. Each runs at
its best (`tests.bench.gpu.peer`); `huggingface-whole`, all layers in one graph, takes minutes to compile and runs only
where it is named, and so does `torchtitan-shipped`, with its own defaults. Whatever fails has a row that says why.
A row is built, compiled and warmed up, then timed in rounds of steps, each after a step of run-up; rows follow each
other in one process, and each is taken down before the next. Only torchtitan, where it is asked for and starts, stays:
it takes turns with every other row, a round of its own beside each of theirs, before it in one and after it in the next
(`tests.bench.gpu.reference`). A row that finds no room beside it is measured alone afterwards.
Columns: tokens/s by the median round; spread, (slowest - fastest) / median; speed to torchtitan's, the median over
their turns, or by medians where it took none; MFU, by 6 FLOPs a weight and attention as if nothing were masked, against
the datasheet's bf16 rate, also for fp8; the same against a large bf16 matrix product, measured between the rows, whose
median counts; the most that torch's allocator handed out in a round, without what a neighbour holds; mean loss of the
first step and of the last, which differ between rows as their initialisations do.
Left out: what feeds the peers (their batches lie on the device already), logging, checkpoints, more than one GPU.
`--also` adds, for the first of the models: `snapshot`, what a snapshot every 20 steps costs on average; `save`, how
long a save holds up the loop; `fits`, large models and long sequences beside what `harness plan` says of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from harness.compose import load
from harness.config import EXIT_BAD_CONFIG, ConfigError, ParallelConfig, PrecisionKind
from harness.fp8.engine import require_engine
from harness.parallel import World, connect, disconnect
from harness.precision import able_products, fast_attention
from harness.rundir import RunDir
from tests.bench.clock import heat, let_go
from tests.bench.gpu import beside
from tests.bench.gpu.bench import ROWS, SHIPPED, Bench, reason
from tests.bench.gpu.setting import BATCH_SIZES, PROBE_EVERY, Setting
from tests.bench.gpu.table import Table, as_json, render

NOT_ASKED = {"huggingface-whole", SHIPPED}
"""Rows that run only when they are named: one takes minutes to compile, the other is a slower way of its neighbour."""
HEATED_S = 10.0
"""For how long the device is made to work before the first row: a cool one is faster, and would favour it."""


def load_engine() -> None:
    """Transformer Engine before anything else, where there is one: no row is to choose another cuDNN for the next."""
    with suppress(ConfigError):
        require_engine(load(["precision=fp8"]).precision, torch.device("cuda:0" if has_gpu() else "cpu"))


def has_gpu() -> bool:
    return torch.cuda.is_available()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["1b", "3b"], help="names of conf/model")
    asked = [name for name in ROWS if name not in NOT_ASKED]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=asked, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--also", nargs="+", choices=beside.SECTIONS, default=[], help="further measurements")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=PROBE_EVERY, help="of a round")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences of a batch; default: 8, of larger models fewer")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--directory", type=Path, help="where --also save writes; default: a temporary one")
    compile_help = "default: where there is a GPU"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=has_gpu(), help=compile_help)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    if options.steps > PROBE_EVERY and options.steps % PROBE_EVERY:
        parser.error(f"--steps above {PROBE_EVERY} must be a multiple of it: a probe every {PROBE_EVERY} steps")
    return options


def settings(options: argparse.Namespace) -> list[Setting]:
    made = [
        Setting(
            model=model,
            sequence_length=options.sequence,
            batch_size=options.batch or BATCH_SIZES.get(model, 8),
            rounds=options.rounds,
            steps=options.steps,
            is_compiled=options.compile,
        )
        for model in options.models
    ]
    for setting in made:
        setting.config()
    return made


@contextmanager
def connected(cfg: ParallelConfig) -> Iterator[World]:
    """One process group for all rows: the reference outlives the others."""
    world = connect(cfg)
    try:
        with able_products(PrecisionKind.bf16, world.device):
            yield world
    finally:
        disconnect()


def measured(options: argparse.Namespace, root: Path) -> tuple[list[Table], dict[str, Any], bool]:
    """All tables, the further sections, and whether all of our own rows are there.

    A row that needs more graphs than torch.compile keeps is to fail, and not to go on without them unsaid.
    """
    made, names = settings(options), tuple(dict.fromkeys(options.rows))
    load_engine()
    heat(HEATED_S)
    benches = []
    strict = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with strict, connected(made[0].config().parallel) as world:
        for setting in made:
            bench = Bench(setting, world, RunDir(root), names, options.torchtitan)
            benches.append(bench)
            print(f"{bench.table.title}\n", flush=True)
            bench.measure()
            print(f"\n{render(bench.table)}\n", flush=True)
    sections: dict[str, Any] = {}
    for name in options.also:
        try:
            told = beside.SECTIONS[name](made[0], options.directory or root)
        except (Exception, SystemExit) as error:
            told = beside.Section(f"{name}: {reason(error)}", {})
        let_go()
        sections[name] = told.values
        print(f"{told.text}\n", flush=True)
    return [bench.table for bench in benches], sections, all(bench.is_whole for bench in benches)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    fp32_before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with fast_attention(), tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables, sections, is_whole = measured(options, Path(root))
    except ConfigError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    finally:
        torch.set_float32_matmul_precision(fp32_before)
    if options.json:
        content = {"tables": [as_json(table) for table in tables], "also": sections}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
