"""One table of this harness and its peers: tokens/s, MFU and memory of the same model on the same GPU, in one run.

    make bench-gpu ARGS="--torchtitan DIR --torchao DIR"        1b and 3b, all rows; DIR holds the package
    python -m tests.bench.gpu --models 1b --torchtitan DIR      one size
    python -m tests.bench.gpu --rows ours-bf16 huggingface huggingface-whole
    python -m tests.bench.gpu --models tiny --sequence 128 --batch 2 --steps 2 --rounds 1     without a GPU

Rows: `--help` lists them. All have the same number of parameters, which is checked, the same batches, fp32 weights and
moments, bf16 matmuls (fp8 in fp8 rows), gradients reduced in fp32, fused AdamW with the same settings, and gradient
clipping in every step. Each runs with its best settings (`tests.bench.gpu.peer`, `tests.bench.gpu.titan`), except
`torchtitan-shipped`, which has torchtitan's own settings, and `ours-bf16-cluster`, which makes the copies that FSDP
makes on a cluster and that a single rank can skip. The row of a contender that fails has the error message.
Every contender is a process. The reference (`--reference`, this harness in bf16) stays alive; every other row is
started beside it, alternates with it round by round, and exits (reasons: `tests.bench.gpu.bench`).
Columns: tokens/s of the median round; spread, (slowest - fastest) / median; speed relative to the reference in the same
rounds, the median with its 90 % interval; MFU, by 6 FLOPs per weight and unmasked attention, relative to the
datasheet's bf16 rate, also for fp8; causal MFU, with half of the attention; the same as MFU relative to a large bf16
matmul, measured before each row; peak of allocated memory in a round; mean loss of the first and of the last step,
which differ between rows because initialisations differ. Versions are printed below.
Left out: data loading of the peers (their batches are already on the device), logging, checkpoints, more than one GPU.
`--also` adds, for the first model: `snapshot`, the mean cost of a snapshot every 20 steps; `save`, how long a save
blocks the loop; `fits`, large models and long sequences compared with `harness plan`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.precision.attention import fast_attention
from tests.bench.clock import release_memory
from tests.bench.gpu import extra_sections
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.contender import describe_failure
from tests.bench.gpu.rows import ROWS, TORCHAO, TORCHTITAN
from tests.bench.gpu.setting import BATCH_SIZES, PROBE_EVERY, Setting
from tests.bench.gpu.table import Table, as_json, render


def has_gpu() -> bool:
    return torch.cuda.is_available()


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(
        f"  {name:30}{row.what}{'' if row.is_default else ' (only if named)'}" for name, row in ROWS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"rows:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["1b", "3b"], help="names of conf/model")
    default_rows = [name for name, row in ROWS.items() if row.is_default]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=default_rows, metavar="ROW", help="see below")
    parser.add_argument(
        "--reference", choices=ROWS, default="ours-bf16", metavar="ROW", help="the row that all others alternate with"
    )
    parser.add_argument("--also", nargs="+", choices=extra_sections.SECTIONS, default=[], help="extra measurements")
    parser.add_argument("--rounds", type=int, default=5, help="5 or more give an interval")
    parser.add_argument("--steps", type=int, default=PROBE_EVERY, help="steps of a round")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences of a batch; default: 8, fewer for larger models")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--torchao", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--directory", type=Path, help="where --also save writes; default: a temporary one")
    compile_help = "default: on if there is a GPU"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=has_gpu(), help=compile_help)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    if options.steps > PROBE_EVERY and options.steps % PROBE_EVERY:
        parser.error(f"--steps above {PROBE_EVERY} must be a multiple of it: a probe every {PROBE_EVERY} steps")
    return options


def build_settings(options: argparse.Namespace) -> list[Setting]:
    settings = [
        Setting(
            model=model,
            sequence_length=options.sequence,
            batch_size=options.batch or BATCH_SIZES.get(model, 8),
            rounds=options.rounds,
            steps=options.steps,
            is_compiled=options.compile,
            num_pairings=len(options.rows) + 1,
        )
        for model in options.models
    ]
    for setting in settings:
        setting.config()
    return settings


def measure_tables(options: argparse.Namespace, root: Path) -> tuple[list[Table], bool]:
    """Measure all tables; returns them, and whether all rows of this harness succeeded."""
    directories = {TORCHTITAN: options.torchtitan, TORCHAO: options.torchao}
    paths = {package: path.resolve() for package, path in directories.items() if path is not None}
    benches = []
    for setting in build_settings(options):
        names = tuple(dict.fromkeys((options.reference, *options.rows)))
        bench = Bench(setting, names, root / setting.model, paths=paths, reference=options.reference)
        benches.append(bench)
        bench.measure()
        print(f"\n{render(bench.table)}\n", flush=True)
    return [bench.table for bench in benches], all(bench.is_complete for bench in benches)


def measure_extra_sections(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measure the sections of `--also` in this process, after all contenders have exited."""
    sections: dict[str, Any] = {}
    with fast_attention(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in options.also:
            try:
                section = extra_sections.SECTIONS[name](build_settings(options)[0], options.directory or root)
            except (Exception, SystemExit) as error:
                section = extra_sections.Section(f"{name}: {describe_failure(error)['failed']}", {})
            release_memory()
            sections[name] = section.values
            print(f"{section.text}\n", flush=True)
    return sections


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as root:
            tables, is_complete = measure_tables(options, Path(root))
            sections = measure_extra_sections(options, Path(root))
    except ConfigError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if options.json:
        content = {"tables": [as_json(table) for table in tables], "also": sections}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
