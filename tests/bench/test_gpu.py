"""The GPU benchmark on a CPU: real rows of a tiny model in subprocesses, failures, and the rendered table."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.core.rundir import RunDir
from harness.distributed.reduce_scatter import MeasuredReduceScatter, NoCopyReduceScatter
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from harness.precision.mixed_precision import emulate_half_matmul
from tests.bench.clock import SETTLING_STEPS, Block, alternate, iterate_steps, round_order
from tests.bench.gpu import extra_sections, titan
from tests.bench.gpu.__main__ import main
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.contender import Spec, describe_failure, handle_request
from tests.bench.gpu.peer import check_size
from tests.bench.gpu.process import Contender, ContenderError
from tests.bench.gpu.rows import Entry, start_row
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import MeasuredRow, Table, render
from tests.forked_launchers import ForkedPopen, LauncherCommand
from tests.forks import Launched

TINY = ["--models", "tiny", "--sequence", "64", "--batch", "2", "--steps", "2", "--rounds", "2", "--no-compile"]
GIB = 2**30


def test_rendered_table() -> None:
    table = Table(
        title="1b: a table",
        tokens=1000,
        flops_per_token=2_000_000_000,
        causal_flops_per_token=1_800_000_000,
        peak_flops=10e12,
        matmul_flops=(7e12, 9e12, 8e12),
        reference="ours",
        rows=(
            MeasuredRow(
                name="ours", rounds=(Block(0.9, 3 * GIB), Block(1.0, GIB), Block(0.8, GIB)), losses=(9.0, 8.25)
            ),
            MeasuredRow(
                name="alternating",
                rounds=(Block(1.0, GIB, num_compiled=3), Block(1.25, GIB), Block(2.0, GIB, num_alloc_retries=2)),
                reference_rounds=(Block(1.1, GIB), Block(1.5, GIB), Block(1.8, GIB)),
                note="2 graph breaks",
            ),
            build_row(
                "five rounds",
                *[1.0] * 5,
                reference_rounds=tuple(Block(each, GIB) for each in (1.1, 1.2, 1.3, 1.4, 1.5)),
            ),
            MeasuredRow(name="accelerate", note="not installed"),
        ),
        remarks=("A remark.",),
    )
    assert render(table) == (
        "## 1b: a table\n"
        "\n"
        "Peak by the datasheet 10 TFLOP/s; bf16 matmul 8192^3 measured 3 times: 8 TFLOP/s (7 to 9).\n"
        "\n"
        "| | tokens/s | spread | speed to ours | MFU | causal MFU | of matmul | peak GiB | loss | |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---|\n"
        "| ours | 1,111 | 22.2% | - | 22.2% | 20.0% | 27.8% | 3.0 | 9.000 -> 8.250 | |\n"
        "| alternating | 800 | 80.0% | 1.100 (range: 0.900 to 1.200) | 16.0% | 14.4% | 20.0% | 1.0 | - | 2 graph "
        "breaks, 3 frames compiled while it was timed, 2 allocator retries while it was timed |\n"
        "| five rounds | 1,000 | 0.0% | 1.300 (90%: 1.100 to 1.500) | 20.0% | 18.0% | 25.0% | 1.0 | - | |\n"
        "| accelerate | - | - | - | - | - | - | - | - | not installed |\n"
        "\n"
        "A remark."
    )


def test_causal_flops_count_half_of_the_attention(tmp_path: Path) -> None:
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=1, steps=1, is_compiled=False)
    model, table = setting.config().model, Bench(setting, names=(), root=tmp_path).table
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * 64
    assert table.flops_per_token - table.causal_flops_per_token == attention // 2


def test_rendered_fits() -> None:
    fits = [
        extra_sections.Fit(extra_sections.CASES[0].name, 4096, Block(0.5, 99 * GIB), 100 * GIB, 8000.0),
        extra_sections.Fit(extra_sections.CASES[-1].name, 32768, None, 150 * GIB, None),
    ]
    assert extra_sections.render(fits).splitlines()[2:] == [
        "| 7b with 8 key-value heads, 1 x 4096, selective checkpointing | 8,192 | 8,000 | 99.0 | 100.0 |",
        "| 1b, 1 x 32768, nothing recomputed | does not fit | - | - | 150.0 |",
    ]


def test_the_order_of_sides_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr("tests.bench.clock.time.perf_counter", lambda: float(sum(name == "slow" for name, _ in calls)))

    def slow(num_steps: int, begin: Callable[[], None] = lambda: None) -> None:
        calls.extend(("slow", num_steps) for _ in iterate_steps(num_steps, begin))

    def fast(num_steps: int, begin: Callable[[], None] = lambda: None) -> None:
        calls.extend(("fast", num_steps) for _ in iterate_steps(num_steps, begin))

    rounds = alternate((slow, fast), rounds=3, num_steps=2, device=torch.device("cpu"))
    settling = [("slow", 1), ("fast", 1)] * SETTLING_STEPS
    blocks = [(side, 3) for side in ("slow", "fast", "fast", "slow", "slow", "fast")]
    assert calls == settling + [step for step in blocks for _ in range(3)]
    assert [(first.step_s, second.step_s) for first, second in rounds] == [(1.0, 0.0)] * 3, (
        "in the order of the sides, and without the run-up"
    )
    assert [round_order(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def build_row(name: str, *step_s: float, **options: Any) -> MeasuredRow:
    return MeasuredRow(name=name, rounds=tuple(Block(each, GIB) for each in step_s), **options)


@dataclass
class ScriptedContender:
    """A contender without a process: each block takes the next seconds of a script, or raises its error."""

    row: str
    script: list[float | ContenderError]
    sides: tuple[str, ...]
    log: list[str]
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def run_block(self, side: str, _: int) -> Block:
        self.log.append(side)
        outcome = self.script.pop(0)
        if isinstance(outcome, ContenderError):
            raise outcome
        return Block(outcome, GIB)

    def send_request(self, **_: Any) -> dict[str, Any]:
        return {"flops": [], "losses": [2.0, 1.0], "note": "", "report_s": []}

    def close(self) -> None:
        self.log.append(f"{self.row} exits")


class ScriptedBench(NamedTuple):
    bench: Bench
    scripts: dict[str, list[list[float | ContenderError]]]
    """Row -> the script of each of its starts."""
    log: list[str]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBench:
    """A benchmark with scripted contenders, because memory does not run out on a CPU."""
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=2, steps=2, is_compiled=False)
    scripted_bench = ScriptedBench(Bench(setting, names=(), root=tmp_path), {}, [])

    def start(_: Bench, name: str) -> ScriptedContender:
        scripted_bench.log.append(f"{name} starts")
        return ScriptedContender(name, scripted_bench.scripts[name].pop(0), (f"{name} side",), scripted_bench.log)

    monkeypatch.setattr(Bench, "start", start)
    return scripted_bench


def measure_rows(scripted: ScriptedBench, *names: str) -> list[MeasuredRow]:
    scripted.bench.names = names
    scripted.bench.measure()
    assert all(not scripts for scripts in scripted.scripts.values()), "every script was used"
    return list(scripted.bench.table.rows)


def test_the_reference_stays_alive_and_the_others_do_not(scripted: ScriptedBench) -> None:
    scripted.scripts.update(
        {"ours-bf16": [[1.0, 1.0, 1.1, 1.2, 1.3, 1.4]], "torchtitan": [[2.2, 1.2]], "huggingface": [[1, 2]]}
    )
    first, second, reference = measure_rows(scripted, "torchtitan", "huggingface", "ours-bf16")
    assert scripted.log == [
        "ours-bf16 starts",
        *["ours-bf16 side"] * 2,
        "torchtitan starts",
        *["torchtitan side", "ours-bf16 side", "ours-bf16 side", "torchtitan side"],
        "torchtitan exits",
        "huggingface starts",
        *["huggingface side", "ours-bf16 side", "ours-bf16 side", "huggingface side"],
        "huggingface exits",
        "ours-bf16 exits",
    ]
    assert [block.step_s for block in reference.rounds] == [1.0, 1.0, 1.1, 1.2, 1.3, 1.4]
    assert first.speed_to_reference is not None
    assert first.speed_to_reference == (0.75, 0.5, 1.0, 2), "of the same rounds, in any order"
    assert second.speed_to_reference is not None
    assert second.speed_to_reference.low == 0.7


def test_out_of_memory_beside_the_reference(scripted: ScriptedBench) -> None:
    """The row is measured alone, without a ratio; the reference starts again for the next."""
    memory = ContenderError("torchtitan", "out of memory", is_memory=True)
    scripted.scripts.update(
        {
            "ours-bf16": [[1.0, 1.0], [1.0, 1.0]],
            "torchtitan": [[memory], [3.0, 3.0]],
            "huggingface": [[2.0, 2.0]],
        }
    )
    _, alone, with_reference = measure_rows(scripted, "ours-bf16", "torchtitan", "huggingface")
    assert (alone.note, alone.speed_to_reference, alone.step_s) == ("out of memory beside the reference", None, 3.0)
    assert with_reference.speed_to_reference is not None
    assert with_reference.speed_to_reference.median == 0.5
    assert scripted.log.index("ours-bf16 exits") < scripted.log.index(
        "torchtitan starts", scripted.log.index("torchtitan exits")
    )


def test_a_reference_that_fails_in_a_block(scripted: ScriptedBench) -> None:
    broken = ContenderError("ours-bf16", "a bug")
    scripted.scripts.update(
        {
            "ours-bf16": [[1.0, 1.0, broken], [1.0, 1.0]],
            "torchtitan": [[3.0], [3.0, 3.0]],
            "huggingface": [[2.0, 2.0]],
        }
    )
    _, alone, with_reference = measure_rows(scripted, "ours-bf16", "torchtitan", "huggingface")
    assert (alone.note, alone.speed_to_reference) == ("the reference failed in the same round", None)
    assert with_reference.speed_to_reference is not None


def test_a_failing_row_has_its_message_and_an_own_row_fails_the_run(scripted: ScriptedBench) -> None:
    scripted.scripts.update(
        {
            "torchtitan": [[ContenderError("torchtitan", "a bug")]],
            "ours-fp8": [[ContenderError("ours-fp8", "needs a GPU", is_config=True)]],
        }
    )
    assert [row.note for row in measure_rows(scripted, "torchtitan", "ours-fp8")] == ["a bug", "needs a GPU"]
    assert scripted.bench.is_complete
    scripted.scripts["ours-bf16"] = [[ContenderError("ours-bf16", "a bug")]]
    measure_rows(scripted, "ours-bf16")
    assert not scripted.bench.is_complete


def fork_contenders(record: Path) -> None:
    """Fork all contenders but the peer of another library; record the modules of this harness that the peer imports."""

    class ForkedContender(ForkedPopen):
        @staticmethod
        def find_command(args: Sequence[str]) -> LauncherCommand | None:
            is_forked = Spec.from_json(args[3]).row != "huggingface"
            return LauncherCommand(args[2], list(args[3:]), ()) if is_forked else None

    def start(spec: Spec) -> Contender:
        contender = start_contender(spec)
        if spec.row == "huggingface":
            record.write_text(json.dumps(contender.modules))
        return contender

    start_contender = Contender.start
    vars(subprocess)["Popen"] = ForkedContender
    Contender.start = start  # type: ignore[method-assign]


@pytest.mark.full
def test_rows_alternate_in_subprocesses(tmp_path: Path) -> None:
    """Real rows of a tiny model, a checkout that does not import, and a peer, which imports no module that patches
    torch."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("raise RuntimeError('broken | checkout')\n")
    out, modules = tmp_path / "out.json", tmp_path / "modules.json"
    rows = ["ours-bf16", "torchtitan", "huggingface"]
    arguments = (*TINY, "--rows", *rows, "--torchtitan", str(tmp_path), "--json", str(out))
    first = partial(fork_contenders, modules)
    with Launched("tests.bench.gpu.__main__", *arguments, output=tmp_path / "printed", first=first) as process:
        assert process.wait(timeout=280) == 0, process.stderr
        printed, errors = process.stdout, process.stderr
    on, off, broken, peer = json.loads(out.read_text())["tables"][0]["rows"]
    assert [row["name"] for row in (on, off, broken)] == [
        *("ours, bf16, sentinel on", "ours, bf16, sentinel off"),
        "torchtitan",
    ]
    assert (broken["tokens_per_s"], broken["note"]) == (None, "RuntimeError: broken / checkout")
    assert len(on["step_s"]) == 4, "two rounds alone, and two beside the peer"
    assert off["reference_step_s"] == on["step_s"][:2]
    assert peer["reference_step_s"] == on["step_s"][2:]
    ratios = [other / own for own, other in zip(peer["step_s"], peer["reference_step_s"], strict=True)]
    assert peer["to_reference"] == statistics.median(ratios)
    for row in (on, peer):
        first, last = row["losses"]
        assert math.isclose(first, math.log(256), rel_tol=0.02)
        assert last < first, "the loss falls"
    assert "803,968 parameters, 2 x 64 tokens, 2 rounds of 2 steps, not compiled" in printed
    assert "the sentinel costs " in printed
    assert f"Versions of huggingface: torch {torch.__version__}, transformers " in printed
    assert "broken | checkout" in errors
    patching_modules = (
        "harness.distributed.fsdp",
        "harness.distributed.torch_private.chunk_cat",
        "harness.distributed.torch_private.fsdp_param",
        "harness.kernels",
        "harness.precision.fp8",
        "harness.build",
    )
    imported = json.loads(modules.read_text())
    assert "harness.distributed.world" in imported
    assert not [name for name in imported if name.startswith(patching_modules)]


def spec(tmp_path: Path, row: str) -> Spec:
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=1, steps=2, is_compiled=False)
    return Spec(row=row, setting=setting, root=str(tmp_path), paths=("/packages",))


def test_spec_survives_json(tmp_path: Path) -> None:
    assert Spec.from_json(spec(tmp_path, "huggingface").to_json()) == spec(tmp_path, "huggingface")


def test_a_killed_contender_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process in place of Python, which sends the first reply and is killed."""
    python = tmp_path / "python"
    reply = json.dumps({"sides": ["a side"], "device": None, "versions": {}, "modules": ["harness.core"]})
    python.write_text(f"#!/bin/bash\necho '{reply}' >&$5\nread -r -u $4\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    contender = Contender.start(spec(tmp_path, "huggingface"))
    assert (contender.sides, contender.modules) == (("a side",), ("harness.core",))
    with pytest.raises(ContenderError, match="ended with exit code -9"):
        contender.send_request(do="report")


def test_requests_and_failures_of_a_contender() -> None:
    """In this process."""
    assert describe_failure(torch.OutOfMemoryError("CUDA out of memory | 3 GiB")) == {
        "failed": "OutOfMemoryError: CUDA out of memory / 3 GiB",
        "is_memory": True,
        "is_config": False,
    }
    assert describe_failure(ConfigError("precision", "needs a GPU"))["is_config"]
    world = SimpleNamespace(device=torch.device("cpu"))
    step_numbers: list[int] = []

    def side(num_steps: int, begin: Callable[[], None] = lambda: None) -> None:
        step_numbers.extend(iterate_steps(num_steps, begin))

    entry = Entry(sides={"a": side}, losses=lambda: (2.0, 1.0))
    reply = handle_request({"do": "block", "side": "a", "steps": 2}, entry, world)  # type: ignore[arg-type]
    assert step_numbers == [0, 0, 1, 2], "a step to allocate memory, the run-up, and the block"
    assert Block(**reply["block"]).step_s >= 0
    assert handle_request({"do": "report"}, entry, world) == {"losses": (2.0, 1.0), "note": "", "report_s": []}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown request"):
        handle_request({"do": "nothing"}, entry, world)  # type: ignore[arg-type]


def train_parameters(name: str, tmp_path: Path) -> list[Tensor]:
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=1, steps=2, is_compiled=False)
    world = connect(setting.config().parallel)
    try:
        with (
            emulate_half_matmul(PrecisionKind.bf16, world.device),
            start_row(name, world, setting, RunDir(tmp_path / name)) as entry,
        ):
            on, *_ = entry.sides.values()
            on(3)
            parts = on.__self__.parts  # type: ignore[attr-defined]
            groups = [
                module._get_fsdp_state()._fsdp_param_group
                for module in parts.model.modules()
                if isinstance(module, FSDPModule)
            ]
            scatters = {type(group._reduce_scatter_comm) for group in groups if group is not None}
            assert scatters == {NoCopyReduceScatter if name == "ours-bf16" else MeasuredReduceScatter}
            return [local(each.detach()).clone() for each in parts.model.parameters()]
    finally:
        disconnect()


@pytest.mark.full
def test_single_rank_shortcuts_do_not_change_the_weights(tmp_path: Path) -> None:
    """With and without the copies that FSDP makes on a cluster, the weights are bit-equal."""
    with_shortcuts, without = train_parameters("ours-bf16", tmp_path), train_parameters("ours-bf16-cluster", tmp_path)
    assert len(with_shortcuts) > 10
    assert all(torch.equal(first, second) for first, second in zip(with_shortcuts, without, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "12"], "--steps above 10 must be a multiple of it"),
        (["--rounds", "0"], "--rounds and --steps must be at least 1"),
        (["--rows", "megatron"], "invalid choice: 'megatron'"),
    ],
)
def test_invalid_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "2b"]) == 2
    assert "2b" in capsys.readouterr().err


def test_a_model_of_another_size_is_rejected() -> None:
    setting = Setting(model="tiny", sequence_length=64, batch_size=2, rounds=1, steps=1, is_compiled=False)
    with pytest.raises(ValueError, match="has 6 parameters instead of 803,968"):
        check_size(nn.Linear(2, 2), setting.config())


def test_placeholder_modules_are_removed() -> None:
    missing = [name for name in titan.UNUSED_PACKAGES if importlib.util.find_spec(name) is None]
    with titan.placeholder_modules():
        for name in missing:
            for module in titan.UNUSED_PACKAGES[name]:
                assert sys.modules[module].Anything is titan.Placeholder
    assert not [module for module in sys.modules.values() if isinstance(module, titan._PlaceholderModule)]
