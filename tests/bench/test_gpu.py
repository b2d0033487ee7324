"""The GPU benchmark on a CPU: real rows of a tiny model, a broken peer among them, and the table to the letter."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bench.clock import Block
from tests.bench.gpu import beside, titan
from tests.bench.gpu.__main__ import main
from tests.bench.gpu.peer import check_size
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Row, Table, render

TINY = ["--models", "tiny", "--sequence", "64", "--batch", "2", "--steps", "2", "--rounds", "2", "--no-compile"]
GIB = 2**30


def test_table_to_the_letter() -> None:
    table = Table(
        title="1b: a table",
        tokens=1000,
        flops_per_token=2_000_000_000,
        peak_flops=10e12,
        matmul_flops=(7e12, 9e12, 8e12),
        reference="torchtitan",
        rows=(
            Row(name="ours", rounds=(Block(0.9, 3 * GIB), Block(1.0, GIB), Block(0.8, GIB)), losses=(9.0, 8.25)),
            Row(name="torchtitan", rounds=(Block(1.0, 2 * GIB), Block(1.0, 2 * GIB)), note="2 graph breaks"),
            Row(name="accelerate", note="not installed"),
        ),
        remarks=("A remark.",),
    )
    assert render(table) == (
        "## 1b: a table\n"
        "\n"
        "Peak by the datasheet 10 TFLOP/s; bf16 matmul 8192^3 measured 3 times: 8 TFLOP/s (7 to 9).\n"
        "\n"
        "| | tokens/s | spread | to torchtitan | MFU | of matmul | peak GiB | loss | |\n"
        "|---|---:|---:|---:|---:|---:|---:|---|---|\n"
        "| ours | 1,111 | 22.2% | 1.111 | 22.2% | 27.8% | 3.0 | 9.000 -> 8.250 | |\n"
        "| torchtitan | 1,000 | 0.0% | 1.000 | 20.0% | 25.0% | 2.0 | - | 2 graph breaks |\n"
        "| accelerate | - | - | - | - | - | - | - | not installed |\n"
        "\n"
        "A remark."
    )


def test_what_fits_to_the_letter() -> None:
    fits = [
        beside.Fit(beside.CASES[0].name, 4096, Block(0.5, 99 * GIB), 100 * GIB, 8000.0),
        beside.Fit(beside.CASES[-1].name, 32768, None, 150 * GIB, None),
    ]
    assert beside.render(fits).splitlines()[2:] == [
        "| 7b, 1 x 4096, selective checkpointing | 8,192 | 8,000 | 99.0 | 100.0 |",
        "| 1b, 1 x 32768, nothing recomputed | does not fit | - | - | 150.0 |",
    ]


def test_real_rows_and_a_broken_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of each kind, one after the other in this process, which is left as it was."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("raise RuntimeError('broken | checkout')\n")
    before = (list(sys.path), torch.get_float32_matmul_precision())
    rows = ["ours-bf16", "torchtitan", "huggingface"]
    out = tmp_path / "out.json"
    assert main([*TINY, "--rows", *rows, "--torchtitan", str(tmp_path), "--json", str(out)]) == 0
    assert (list(sys.path), torch.get_float32_matmul_precision()) == before
    assert not torch.distributed.is_initialized()

    on, off, broken, other = json.loads(out.read_text())["tables"][0]["rows"]
    assert (on["name"], off["name"]) == ("ours, bf16, sentinel on", "ours, bf16, sentinel off")
    assert all(len(row["step_s"]) == 2 and row["tokens_per_s"] > 0 for row in (on, off))
    assert (broken["tokens_per_s"], broken["note"]) == (None, "RuntimeError: broken / checkout")
    for row in (on, other):
        first, last = row["losses"]
        assert math.isclose(first, math.log(256), rel_tol=0.02)
        assert last < first, "it trains"
    printed = capsys.readouterr()
    assert "803,968 parameters, 2 x 64 tokens, 2 rounds of 2 steps, not compiled" in printed.out
    assert "The sentinel costs " in printed.out
    assert "broken | checkout" in printed.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "12"], "--steps above 10 must be a multiple of it"),
        (["--rounds", "0"], "--rounds and --steps must be at least 1"),
        (["--rows", "megatron"], "invalid choice: 'megatron'"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "2b"]) == 2
    assert "2b" in capsys.readouterr().err


def test_another_size_is_another_race() -> None:
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=1, steps=1, is_compiled=False)
    with pytest.raises(ValueError, match="has 6 parameters, and ours 803,968"):
        check_size(nn.Linear(2, 2), setting.config())


def test_empty_modules_are_taken_away() -> None:
    missing = [name for name in titan.IDLE if importlib.util.find_spec(name) is None]
    with titan.standing_in():
        for name in missing:
            for module in titan.IDLE[name]:
                assert sys.modules[module].Anything is titan.Nothing
    assert not [module for module in sys.modules.values() if isinstance(module, titan._Empty)]
