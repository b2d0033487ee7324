"""The GPU benchmark on a CPU: real rows of a tiny model in turns, peers that fail, and the table to the letter."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.rundir import RunDir
from tests.bench.clock import SETTLING_STEPS, WARMUP_STEPS, Block, held_bytes, in_turns, led, order
from tests.bench.gpu import beside, hugging_face, titan
from tests.bench.gpu.__main__ import connected, main
from tests.bench.gpu.bench import Bench, left_by
from tests.bench.gpu.peer import Job, Peer, Step, check_size
from tests.bench.gpu.reference import READY_STEPS
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Row, Table, render, values_of

pytestmark = pytest.mark.full

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
            Row(
                name="in turns",
                rounds=(Block(1.0, GIB, num_compiled=3), Block(1.25, GIB), Block(2.0, GIB, num_shortages=2)),
                beside=(Block(1.1, 9 * GIB), Block(1.5, 9 * GIB), Block(1.8, 9 * GIB)),
                note="no room",
            ),
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
        "| in turns | 800 | 80.0% | 1.100 | 16.0% | 20.0% | 1.0 | - | no room, 3 frames compiled while it was timed, "
        "the allocator ran short 2 times while it was timed |\n"
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


def test_sides_go_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr("tests.bench.clock.time.perf_counter", lambda: float(sum(name == "slow" for name, _ in ran)))

    def slow(num_steps: int, begin: Callable[[], None] = lambda: None) -> None:
        ran.extend(("slow", num_steps) for _ in led(num_steps, begin))

    def fast(num_steps: int, begin: Callable[[], None] = lambda: None) -> None:
        ran.extend(("fast", num_steps) for _ in led(num_steps, begin))

    taken = in_turns((slow, fast), rounds=3, num_steps=2, device=torch.device("cpu"))
    settling = [("slow", 1), ("fast", 1)] * SETTLING_STEPS
    blocks = [(side, 3) for side in ("slow", "fast", "fast", "slow", "slow", "fast")]
    assert ran == settling + [step for step in blocks for _ in range(3)]
    assert [(first.step_s, second.step_s) for first, second in taken] == [(1.0, 0.0)] * 3, (
        "as the sides, not as they ran, and without the run-up"
    )
    assert [order(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_memory_of_others_is_not_counted() -> None:
    assert Block(0.5, 9 * GIB, 1, 2).without(4 * GIB) == Block(0.5, 5 * GIB, 1, 2)
    assert held_bytes(torch.device("cpu")) == 0
    assert left_by("ours-fp8", 2**26) == []
    assert left_by("ours-fp8", 3 * GIB) == ["ours-fp8 left 3.0 GiB on the device."]


def test_a_reference_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are measured without it, in this process, which is left as it was."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("raise RuntimeError('broken | checkout')\n")
    before = (list(sys.path), torch.get_float32_matmul_precision())
    out = tmp_path / "out.json"
    rows = ["ours-bf16", "torchtitan"]
    assert main([*TINY, "--rows", *rows, "--torchtitan", str(tmp_path), "--json", str(out)]) == 0
    assert (list(sys.path), torch.get_float32_matmul_precision()) == before
    assert not torch.distributed.is_initialized()

    on, off, broken = json.loads(out.read_text())["tables"][0]["rows"]
    assert (on["name"], off["name"]) == ("ours, bf16, sentinel on", "ours, bf16, sentinel off")
    assert all(len(row["step_s"]) == 2 and row["tokens_per_s"] > 0 for row in (on, off))
    assert all(row["to_reference"] is None and row["reference_step_s"] == [] for row in (on, off))
    assert (broken["tokens_per_s"], broken["note"]) == (None, "RuntimeError: broken / checkout")
    printed = capsys.readouterr()
    assert "803,968 parameters, 2 x 64 tokens, 2 rounds of 2 steps, not compiled" in printed.out
    assert "The sentinel costs " in printed.out
    assert " turns, one beside" not in printed.out
    assert "broken | checkout" in printed.err


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Of a tiny model, with Hugging Face's as the reference."""
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=2, steps=2, is_compiled=False)
    with warnings.catch_warnings(), connected(setting.config().parallel) as world:
        warnings.simplefilter("ignore")
        yield Bench(setting, world, RunDir(tmp_path), names=(), reference="huggingface")


def test_real_rows_take_turns(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.names = ("ours-bf16", "huggingface", "huggingface-whole")
    bench.measure()
    assert bench.is_whole
    on, off, reference, whole = (values_of(bench.table, row) for row in bench.table.rows)
    for row in (on, off, whole):
        ratios = [other / own for own, other in zip(row["step_s"], row["reference_step_s"], strict=True)]
        assert row["to_reference"] == statistics.median(ratios)
    assert on["reference_step_s"] == off["reference_step_s"], "three sides of the same turns"
    assert reference["step_s"] == on["reference_step_s"] + whole["reference_step_s"]
    assert (len(reference["step_s"]), reference["to_reference"]) == (4, 1.0)
    for row in (on, reference, whole):
        first, last = row["losses"]
        assert math.isclose(first, math.log(256), rel_tol=0.02)
        assert last < first, "it trains"
    name = "Hugging Face Llama, FSDP2, block by block"
    assert bench.remarks[-1] == (
        f"{name} took 4 turns, one beside every round of the other rows, before it and after it in alternation; "
        f"to {name}: the median over a row's turns."
    )
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == [on["name"], off["name"], whole["name"], reference["name"]], "as they finish"


@dataclass
class Lame:
    """A peer that makes quick steps, and runs out of memory in some of them."""

    name: str
    fails_at: Callable[[int], bool]
    num_steps: int = 0
    num_started: int = 0
    num_open: int = 0

    @contextmanager
    def start(self, _: Job) -> Iterator[Step]:
        self.num_started, self.num_open = self.num_started + 1, self.num_open + 1
        yield self.step
        self.num_open -= 1

    def step(self, *_: Tensor) -> Tensor:
        self.num_steps += 1
        if self.fails_at(self.num_steps):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.tensor(1 / self.num_steps)

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.start)


def test_no_room_beside_the_reference(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is measured when the reference is gone, which goes on with the next."""
    reference = Lame("reference", lambda _: False)
    large = Lame("large", lambda _: reference.num_open > 0)
    small = Lame("small", lambda _: False)
    for name, lame in (("huggingface", reference), ("lightning", large), ("accelerate", small)):
        monkeypatch.setitem(hugging_face.PEERS, name, lame.peer)
    bench.names = ("lightning", "huggingface", "accelerate")
    bench.measure()
    found = {row.name: row for row in bench.table.rows}
    assert list(found) == ["large", "reference", "small"]
    assert found["large"].note == "no room beside the reference"
    assert [(len(row.rounds), len(row.beside)) for row in found.values()] == [(2, 0), (2, 0), (2, 2)]
    medians = [values_of(bench.table, found[name])["tokens_per_s"] for name in ("large", "reference")]
    assert values_of(bench.table, found["large"])["to_reference"] == pytest.approx(medians[0] / medians[1])
    assert (reference.num_started, large.num_started) == (1, 2)


def test_a_reference_that_breaks_in_its_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left halfway is not to be trusted: the next row meets a new one."""
    first_turn = WARMUP_STEPS + READY_STEPS + SETTLING_STEPS + 1
    reference, small = Lame("reference", lambda step: step == first_turn), Lame("small", lambda _: False)
    for name, lame in (("huggingface", reference), ("lightning", small), ("accelerate", small)):
        monkeypatch.setitem(hugging_face.PEERS, name, lame.peer)
    bench.names = ("huggingface", "lightning", "accelerate")
    bench.measure()
    assert (reference.num_started, reference.num_open) == (2, 0)
    kept, alone, beside = bench.table.rows
    assert (alone.note, len(alone.rounds), alone.beside) == ("no room beside the reference", 2, ())
    assert beside.beside == kept.rounds
    assert beside.note == ""


def test_a_reference_without_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hugging_face.PEERS, "huggingface", Lame("reference", lambda _: False).peer)
    bench.names = ("huggingface",)
    bench.measure()
    (row,) = bench.table.rows
    assert len(row.rounds) == 2
    assert row.losses is not None
    assert row.losses == pytest.approx((1.0, 1 / bench.setting.num_steps)), "of the steps that other rows make"
    assert bench.remarks == []


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
