"""One table of this harness and its peers: tokens/s, MFU and memory of the same model on the same GPU, in one run.

    make bench-gpu ARGS="--torchtitan DIR --torchao DIR"        1b and 3b, all rows; DIR holds the package
    python -m tests.bench.gpu --models 1b --torchtitan DIR      one size
    python -m tests.bench.gpu --rows ours-bf16 huggingface huggingface-whole
    python -m tests.bench.gpu --models tiny --sequence 128 --batch 2 --steps 2 --rounds 1     without a GPU

Rows: `--help` lists them. All have the same number of parameters, which is checked, the same batches, fp32 weights and
moments, bf16 products (but fp8's), gradients reduced in fp32, fused AdamW with the same settings, and a gradient norm
clipped in every step. Each runs at its best (`tests.bench.gpu.peer`, `tests.bench.gpu.titan`), but for
`torchtitan-shipped`, which has torchtitan's own settings, and for `ours-bf16-cluster`, which makes the copies that FSDP
makes on a cluster and that a single rank can skip. Whatever fails has a row that says why.
Every contender is a process of its own. The reference (`--reference`, this harness in bf16) stays; every other row is
started beside it, takes turns with it round by round, forth and back, and ends (`tests.bench.gpu.bench` says why).
Columns: tokens/s by the median round; spread, (slowest - fastest) / median; speed to the reference in the same rounds,
the median with its 90 % interval; MFU, by 6 FLOPs a weight and attention as if nothing were masked, against the
datasheet's bf16 rate, also for fp8; causal MFU, with half of the attention; the same as MFU against a large bf16 matrix
product, measured before each row; the most that torch's allocator handed out in a round; mean loss of the first step
and of the last, which differ between rows as their initialisations do. Versions are printed below.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.precision.attention import fast_attention
from tests.bench.clock import let_go
from tests.bench.gpu import beside
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.contender import failure
from tests.bench.gpu.rows import ROWS, TORCHAO, TORCHTITAN
from tests.bench.gpu.setting import BATCH_SIZES, PROBE_EVERY, Setting
from tests.bench.gpu.table import Table, as_json, render


def has_gpu() -> bool:
    return torch.cuda.is_available()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:30}{row.what}{'' if row.is_default else ' (if named)'}" for name, row in ROWS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"rows:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["1b", "3b"], help="names of conf/model")
    asked = [name for name, row in ROWS.items() if row.is_default]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=asked, metavar="ROW", help="see below")
    parser.add_argument(
        "--reference", choices=ROWS, default="ours-bf16", metavar="ROW", help="all others take turns with"
    )
    parser.add_argument("--also", nargs="+", choices=beside.SECTIONS, default=[], help="further measurements")
    parser.add_argument("--rounds", type=int, default=5, help="5 or more give an interval")
    parser.add_argument("--steps", type=int, default=PROBE_EVERY, help="of a round")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences of a batch; default: 8, of larger models fewer")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--torchao", type=Path, metavar="DIR", help="a directory that holds the package")
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
            num_pairings=len(options.rows) + 1,
        )
        for model in options.models
    ]
    for setting in made:
        setting.config()
    return made


def measured(options: argparse.Namespace, root: Path) -> tuple[list[Table], bool]:
    """All tables, and whether all of our own rows are there."""
    directories = {TORCHTITAN: options.torchtitan, TORCHAO: options.torchao}
    paths = {package: path.resolve() for package, path in directories.items() if path is not None}
    benches = []
    for setting in settings(options):
        names = tuple(dict.fromkeys((options.reference, *options.rows)))
        bench = Bench(setting, names, root / setting.model, paths=paths, reference=options.reference)
        benches.append(bench)
        bench.measure()
        print(f"\n{render(bench.table)}\n", flush=True)
    return [bench.table for bench in benches], all(bench.is_whole for bench in benches)


def further(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """The sections of `--also`, in this process, when all contenders have ended."""
    sections: dict[str, Any] = {}
    with fast_attention(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in options.also:
            try:
                told = beside.SECTIONS[name](settings(options)[0], options.directory or root)
            except (Exception, SystemExit) as error:
                told = beside.Section(f"{name}: {failure(error)['failed']}", {})
            let_go()
            sections[name] = told.values
            print(f"{told.text}\n", flush=True)
    return sections


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        with tempfile.TemporaryDirectory() as root:
            tables, is_whole = measured(options, Path(root))
            sections = further(options, Path(root))
    except ConfigError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if options.json:
        content = {"tables": [as_json(table) for table in tables], "also": sections}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
