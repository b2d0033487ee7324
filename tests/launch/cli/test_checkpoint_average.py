"""`harness checkpoint average`: the mean of each parameter, which checkpoints it takes, and what it refuses."""

from __future__ import annotations

import json
import weakref
from fractions import Fraction
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.analysis.held_out_loss import measure_loss, read_held_out_rows
from harness.checkpoint import average, catalog, integrity, saver, store, tensor_index
from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.core import rundir
from harness.core.event_json import to_json
from harness.core.events import ActionKind, Intervention, Outcome
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.world import connect, disconnect
from harness.huggingface import convert
from harness.model.init import initialize
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear
from launch.cli import checkpoint
from tests.distributed.cases import tiny

CPU = torch.device("cpu")
SAVED = ((10, 0), (20, 0), (30, 0), (20, 1), (40, 1))
"""(step, generation): a rollback to step 10 has undone steps 20 and 30 of generation 0."""


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    cfg = tiny(directory=str(directory))
    run = RunDir(directory / "first")
    run.path.mkdir()
    run.config.write_text(compose.to_yaml(cfg))
    undone = Outcome(time=0.0, iteration=35, kind=ActionKind.rollback, incident=1, succeeded=True, step=10)
    failed = Outcome(time=0.0, iteration=150, kind=ActionKind.rewind, incident=2, succeeded=False, step=5)
    run.events.write_text(f"{to_json(undone)}\n{to_json(failed)}\n")
    world = connect(cfg.parallel)
    try:
        for number, (step, generation) in enumerate(SAVED):
            model = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear)
            initialize(model, cfg.model, seed=number)
            tensors = convert.initial_tensors({name: each.detach() for name, each in model.named_parameters()})
            state = RunState(step=step, generation=generation, iteration=step + 100 * generation, tokens=step)
            saver.write(run.checkpoints, tensors, state, world=world, rollback={})
    finally:
        disconnect()
    return run.path


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> RunDir:
    """A copy of the run, whose checkpoints are links to the files."""
    copied = RunDir(tmp_path / "first")
    for path in saved_run.rglob("*"):
        target = copied.path / path.relative_to(saved_run)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.hardlink_to(path)
    return copied


def parameters(path: Path) -> dict[str, Tensor]:
    names = [name for name in store.read_shapes(path) if name.startswith("model.")]
    return store.read_tensors(path, names)


def run_average(run: RunDir, *arguments: str) -> int:
    return checkpoint.main(["average", str(run.path), *arguments])


def test_the_average_is_the_mean_of_each_parameter_and_can_be_exported(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = RunDir(tmp_path / "average")
    assert run_average(run, "--last", "3", "--output", str(output.path), "--device", "cpu", "--eval-rows", "4") == 0
    (written,) = catalog.list_checkpoints(output.checkpoints)
    names = ["step-00000010-gen-0", "step-00000020-gen-1", "step-00000040-gen-1"]
    each = [parameters(run.checkpoints / name) for name in names]
    found = parameters(written.path)
    assert found.keys() == store.read_shapes(written.path).keys() == each[0].keys(), "only parameters are stored"
    for name, tensor in found.items():
        assert torch.equal(tensor, torch.stack([one[name].double() for one in each]).mean(0).float())
    manifest = integrity.verify(written.path)
    assert (manifest.step, manifest.generation, manifest.tokens, manifest.world_size) == (40, 1, 40, 1)
    assert json.loads((output.path / "average.json").read_text())["checkpoints"] == names
    lines = capsys.readouterr().out.splitlines()
    cfg = convert.read_config(run)
    rows = read_held_out_rows(cfg, run, num_rows=4, device=CPU)
    paths = [*(run.checkpoints / name for name in names), written.path]
    losses = [measure_loss(path, cfg, rows, device=CPU) for path in paths]
    assert all(" held-out loss on 4 sequences " in line for line in lines[1:5])
    assert [line.split()[-1] for line in lines[1:5]] == [f"{loss:.6f}" for loss in losses]
    exported = convert.export_model(
        output, convert.choose_checkpoint(output), tmp_path / "hf", dtype=PrecisionKind.fp32
    )
    assert exported.files


@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_the_exponential_average_is_exact_and_weighs_the_newest_most(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], decay: float
) -> None:
    """Every element is the rational sum, rounded once to float32, to within what float64 can tell from a tie."""
    output = RunDir(tmp_path / "average")
    arguments = ("--last", "3", "--decay", str(decay), "--output", str(output.path), "--eval-rows", "0")
    assert run_average(run, *arguments) == 0
    names = ["step-00000010-gen-0", "step-00000020-gen-1", "step-00000040-gen-1"]
    oldest, middle, newest = (parameters(run.checkpoints / name) for name in names)
    (written,) = catalog.list_checkpoints(output.checkpoints)
    found = parameters(written.path)
    exact = [Fraction(decay) ** 2, Fraction(decay), Fraction(1)]
    for name, tensor in found.items():
        each = [one[name].flatten()[:200].tolist() for one in (oldest, middle, newest)]
        sums = [sum(map(mul, exact, map(Fraction, values))) / sum(exact) for values in zip(*each, strict=True)]
        elements = tensor.flatten()[:200]
        spacings = np.spacing(np.abs(elements.numpy())).tolist()
        for element, expected, spacing in zip(elements.tolist(), sums, spacings, strict=True):
            assert abs(Fraction(element) - expected) <= Fraction(spacing) / 2 * (1 + Fraction(2) ** -24)
        plain = (oldest[name].double() * decay**2 + middle[name].double() * decay + newest[name].double()) / (
            1 + decay + decay**2
        )
        assert torch.allclose(tensor.double(), plain, rtol=2**-23, atol=0)
    record = json.loads((output.path / "average.json").read_text())
    shares = [float(weight / sum(exact)) for weight in exact]
    assert (record["checkpoints"], record["decay"]) == (names, decay)
    assert record["weights"] == pytest.approx(shares)
    assert shares == sorted(shares)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("exponential average of 3 checkpoints: ")
    listed = ", ".join(f"{name} {share:.4f}" for name, share in zip(names, shares, strict=True))
    assert out[1] == f"  weights {listed}"


def test_chosen_steps_are_averaged_without_an_evaluation(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "average"
    assert run_average(run, "--steps", "40,10", "--output", str(output), "--eval-rows", "0") == 0
    assert json.loads((output / "average.json").read_text())["checkpoints"] == [
        "step-00000010-gen-0",
        "step-00000040-gen-1",
    ]
    assert "held-out" not in capsys.readouterr().out


def test_without_the_data_the_average_is_written_and_the_reason_printed(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny("data=files", "data.sources.main.paths=[/no/such]")
    rundir.write_atomically(run.config, compose.to_yaml(cfg))
    assert run_average(run, "--last", "2", "--output", str(tmp_path / "average"), "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "held-out loss: not measured: data.sources.main.paths: /no/such: no such file" in out
    assert len(catalog.list_checkpoints(tmp_path / "average" / "checkpoints")) == 1


def test_the_lineage_has_neither_undone_nor_tainted_checkpoints(run: RunDir) -> None:
    def ages(*restores: tuple[int, int]) -> list[tuple[int, int]]:
        return [(each.step, each.generation) for each in average.choose_lineage(run.checkpoints, restores)]

    assert ages((35, 10)) == ages() == [(10, 0), (20, 1), (40, 1)]
    catalog.mark(run.checkpoints / "step-00000020-gen-1", Health.tainted, "a spike")
    assert ages((35, 10)) == ages() == [(10, 0), (40, 1)]
    catalog.delete(run.checkpoints / "step-00000020-gen-1")
    assert ages((35, 10)) == [(10, 0), (40, 1)], "the log knows what was undone"
    assert ages((35, 20)) == [(10, 0), (20, 0), (40, 1)]
    assert ages((5, 0)) == [(10, 0), (20, 0), (30, 0), (40, 1)]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--last", "1"], "--last: must be at least 2, got 1"),
        (["--last", "4"], "--last: got 4, but has only 3 usable checkpoints: step-00000010-gen-0, "),
        (["--steps", "10"], "--steps: must name at least 2 different steps, got [10]"),
        (["--steps", "10,10"], "--steps: must name at least 2 different steps, got [10, 10]"),
        (["--steps", "10,30"], "--steps: no usable checkpoint of step 30; there are 10, 20, 40"),
        (["--steps", "10,x"], "argument --steps: must be steps separated by commas, got '10,x'"),
        (["--last", "2", "--decay", "0"], "--decay: must be above 0 and below 1, got 0.0"),
        (["--last", "2", "--decay", "1"], "--decay: must be above 0 and below 1, got 1.0"),
        (["--last", "2", "--decay", "nan"], "--decay: must be above 0 and below 1, got nan"),
        (["--last", "2", "--eval-rows", "-1"], "--eval-rows: must be 0 (no evaluation) or more, got -1"),
    ],
)
def test_invalid_arguments_are_one_line(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run_average(run, *arguments, "--output", str(tmp_path / "average")) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "average").exists()


def test_a_change_of_the_precision_between_the_checkpoints_is_refused(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = Intervention(time=0.0, iteration=50, who="ada", reason="", changes={"precision.kind": ["bf16", "fp8"]})
    run.interventions.write_text(to_json(changed) + "\n")
    refused = "precision.kind: changed from bf16 to fp8 between these checkpoints; they cannot be averaged"
    assert run_average(run, "--last", "3", "--output", str(tmp_path / "average"), "--eval-rows", "0") == 2
    assert capsys.readouterr().err == f"harness: {refused}\n"
    assert run_average(run, "--steps", "20,40", "--output", str(tmp_path / "average"), "--eval-rows", "0") == 0


def test_other_shapes_and_damage_are_refused_and_leave_nothing(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run.checkpoints / "step-00000040-gen-1"
    layout = {name: each for name, each in tensor_index.read(newest).tensors.items() if ".norm." in name}
    manifest = integrity.read_manifest(newest)
    saver.write_computed(
        run.checkpoints / "step-00000050-gen-1", layout, lambda name: torch.zeros(layout[name].size), manifest
    )
    arguments = ("--output", str(tmp_path / "average"), "--eval-rows", "0")
    assert run_average(run, "--steps", "40,50", *arguments) == 2
    assert "step-00000050-gen-1: model." in (err := capsys.readouterr().err)
    assert "is missing, in step-00000040-gen-1 it is float32" in err
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    assert run_average(run, "--steps", "20,40", *arguments) == 2
    assert f"{shard}: its content is not what was saved" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "average" in path.name]


def test_one_tensor_is_in_memory_at_a_time(run: RunDir, tmp_path: Path) -> None:
    source = run.checkpoints / "step-00000010-gen-0"
    layout = average.parameters_of(tensor_index.read(source))
    alive: list[weakref.ref[Tensor]] = []

    def compute(name: str) -> Tensor:
        assert not [each for each in alive if each() is not None], "the last tensor is released first"
        tensor = store.read_tensors(source, [name])[name]
        alive.append(weakref.ref(tensor))
        return tensor

    saver.write_computed(tmp_path / "checkpoints" / source.name, layout, compute, integrity.read_manifest(source))
    assert len(alive) == len(layout)
    copied = parameters(tmp_path / "checkpoints" / source.name)
    assert all(torch.equal(tensor, copied[name]) for name, tensor in parameters(source).items())


def test_an_error_of_a_computation_is_raised_and_leaves_nothing(run: RunDir, tmp_path: Path) -> None:
    source = run.checkpoints / "step-00000010-gen-0"
    layout = average.parameters_of(tensor_index.read(source))

    def fail(name: str) -> Tensor:
        raise ConfigError(name, "cannot be read")

    with pytest.raises(ConfigError, match="cannot be read"):
        saver.write_computed(tmp_path / source.name, layout, fail, integrity.read_manifest(source))
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
