"""Runs all tests that need CUDA and prints a Markdown summary.

    python -m tests.gpu [pytest arguments]
    python -m tests.gpu -n 6 --dist loadgroup        on many cores; tests that share ranks stay together
    python -m tests.gpu --add-to FILE -k context     in parts: the table is of all calls with this file
    python -m tests.gpu --add-to FILE --rest         those that have not passed in the calls before
    python -m tests.gpu --add-to FILE -m alone       what is skipped with several workers
    python -m tests.gpu --show FILE                  the table alone, on any machine

Exit code 2 without a CUDA device, otherwise pytest's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.gpu.summary import Recorder, passed_tests, render

DIRECTORY = Path(__file__).parent


def versions() -> str:
    """Date, hardware and versions, in one line."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    parts = [
        datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"NCCL {nccl}",
    ]
    if importlib.util.find_spec("transformer_engine") is None:
        parts.append("no Transformer Engine")
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", add_help=False, allow_abbrev=False)
    parser.add_argument("--add-to", type=Path)
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--show", type=Path)
    options, arguments = parser.parse_known_args()
    if options.show:
        if not options.show.is_file():
            parser.error(f"--show: {options.show}: no such file")
        print(render(options.show))
        return 0
    if options.rest:
        if not options.add_to:
            parser.error("--rest: needs --add-to FILE, which says what has passed")
        arguments += [f"--deselect={test}" for test in passed_tests(options.add_to)]
    if not torch.cuda.is_available():
        print("tests.gpu: torch finds no CUDA device", file=sys.stderr)
        return 2
    with TemporaryDirectory() as scratch:
        file = options.add_to or Path(scratch) / "results.jsonl"
        plugins = [Recorder(file, versions())]
        code = pytest.main(["--override-ini", f"testpaths={DIRECTORY}", *arguments], plugins=plugins)
        if file.exists():
            print(f"\n{render(file)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
