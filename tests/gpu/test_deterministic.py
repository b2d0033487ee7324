"""`run.deterministic` on a GPU: starts, kills, skips, rewinds, rollbacks and replays are bit-identical.

Whole runs with the commands of a user, on 1, 2 and 4 NCCL ranks that share the GPU. Loss, gradient norm and digest of
the weights of every step are compared, and all weights and moments at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.checkpoint import store
from harness.core.event_json import read
from harness.core.events import Action, ActionKind, RunRestarted, StepRecord
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from launch.drills.runner import start_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
SIZE = (
    "model.dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=512",
    "train.sequence_length=512",
    "train.batch_size=16",
)
"""Attention over several tiles, so that the order of its sums matters."""


class Setting(NamedTuple):
    """On how many ranks and how a model is trained, and where a rank is killed."""

    num_ranks: int
    overrides: tuple[str, ...]
    num_steps: int
    killed_at: int

    def configure(self, runs: Path) -> list[str]:
        """The overrides of a run."""
        ranks = (f"launch.nproc={self.num_ranks}", f"launch.ranks_per_gpu={self.num_ranks}", "parallel.device=cuda")
        return [*SIZE, *ranks, *self.overrides, f"train.num_steps={self.num_steps}", f"run.dir={runs}"]


ONE_RANK = Setting(1, ("precision=fp8", "parallel.compile=true"), 40, 25)
TWO_RANKS = Setting(2, ("precision=bf16", "parallel.compile=true"), 120, 57)
HSDP = ("parallel.replicate=2", "train.micro_batch_size=2", "checkpoint.ring.shared_dir=null")
FOUR_RANKS = Setting(4, ("precision=fp8", "parallel.compile=false", *HSDP), 24, 15)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def prepare(setting: Setting, run: RunDir, drill: str = "", *overrides: str, ledger: Path | None = None) -> RunDir:
    """A run directory that is ready to start, with the fault of a drill or with a ledger."""
    planned = scenario.load_scenario(drill or "nan_grad", overrides)
    cfg = directories.configure(planned.train, setting.configure(run.path.parent))
    assert cfg.run.deterministic, "the default of drills"
    directories.create_directory(cfg, run)
    if drill:
        DrillRecord(name=drill, scenario=planned, plan=planned.plan, twin="").write(run)
    if ledger is not None:
        run.ledger.write_bytes(ledger.read_bytes())
    return run


def train(run: RunDir) -> RunDir:
    """Start a run as a drill does, and wait for its end."""
    started = start_here(run, limit_s=LIMIT_S)
    tails = [path.read_text(errors="replace")[-4000:] for path in sorted(run.logs.rglob("*.std*"))]
    assert started.exit_code == 0, "\n".join([*started.said, *tails])
    output = (run.logs / "start-0.stdout").read_text()
    assert "run.deterministic: the first batch, computed twice, gave the same bits" in output
    print(f"{run.path.name}: {started.seconds:.0f} s")
    return run


def steps_of(run: RunDir) -> dict[int, tuple[Any, ...]]:
    """Batch -> what its last applied step logged."""
    records = [event for event in read(run.events) if isinstance(event, StepRecord) and not event.refused]
    return {
        record.cursor: (record.step, record.loss, record.grad_norm, record.weight_digest, record.lr)
        for record in records
    }


def assert_identical(run: RunDir, control: RunDir) -> None:
    """All steps, and weights and moments at the end, have the same bits."""
    found, expected = steps_of(run), steps_of(control)
    assert found.keys() == expected.keys()
    different = [cursor for cursor in expected if found[cursor] != expected[cursor]]
    first = min(different, default=0)
    assert not different, f"{len(different)} steps differ, first batch {first}: {found[first]}, {expected[first]}"
    paths = [max(each.checkpoints.glob("step-*"), key=lambda path: path.name) for each in (run, control)]
    names = [name for name in store.read_shapes(paths[0]) if name.startswith(("model.", "optimizer."))]
    assert len(names) > 30
    one, other = (store.read_tensors(path, names) for path in paths)
    assert [name for name in names if not torch.equal(one[name], other[name])] == []


def actions(run: RunDir) -> set[ActionKind]:
    return {event.kind for event in read(run.events) if isinstance(event, Action)}


def restarts(run: RunDir) -> int:
    return sum(isinstance(event, RunRestarted) for event in read(run.events))


def train_at_once(*prepared: RunDir) -> list[RunDir]:
    """Train several runs at the same time. Their kernels take turns on the GPU, which makes collectives slow."""
    with ThreadPoolExecutor(max_workers=len(prepared)) as executor:
        futures: list[Future[RunDir]] = [executor.submit(train, run) for run in prepared]
        return [future.result() for future in futures]


def test_one_rank_in_one_process(tmp_path: Path) -> None:
    """The check at the start passes, no result depends on uninitialized memory, and no step waits for the device."""
    precision = "precision=fp8" if HAS_TRANSFORMER_ENGINE else "precision=bf16"
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.gpu.deterministic_worker", str(result), precision, "parallel.compile=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found == {"line": "the first batch, computed twice, gave the same bits", "equal": True, "pending": 0}


SHARED_CONTROL = pytest.mark.xdist_group("deterministic-control")


@pytest.fixture(scope="module")
def control(runs: Path) -> RunDir:
    """Two ranks, bf16, compiled, without a fault."""
    return train(prepare(TWO_RANKS, RunDir(runs / "control")))


@SHARED_CONTROL
def test_two_starts_and_a_killed_rank_on_two_ranks(runs: Path, control: RunDir) -> None:
    """The other start is the drill: until the kill it is a second start, after it a resumed one."""
    victim = train(prepare(TWO_RANKS, RunDir(runs / "killed"), "kill_rank", f"drill.fault.at={TWO_RANKS.killed_at}"))
    assert restarts(victim) == 1
    assert_identical(victim, control)
    manifest = json.loads(victim.manifest.read_text())
    assert manifest["deterministic"]["enabled"]
    assert manifest["deterministic"]["environment"]["NCCL_ALGO"] == "Ring"
    print(manifest["deterministic"])


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(ONE_RANK, id="1 rank fp8 compiled"),
        pytest.param(FOUR_RANKS, id="4 ranks HSDP fp8 accumulation"),
    ],
)
@pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="needs Transformer Engine")
def test_two_starts_and_a_killed_rank(tmp_path: Path, setting: Setting) -> None:
    prepared = (
        prepare(setting, RunDir(tmp_path / "control")),
        prepare(setting, RunDir(tmp_path / "killed"), "kill_rank", f"drill.fault.at={setting.killed_at}"),
    )
    runs = train_at_once(*prepared) if setting.num_ranks == 1 else [train(run) for run in prepared]
    assert [restarts(run) for run in runs] == [0, 1]
    assert_identical(*runs)


@SHARED_CONTROL
def test_a_rewind_and_a_rollback_are_identical_to_the_control_run(runs: Path, control: RunDir) -> None:
    rewound, rolled_back = train_at_once(
        prepare(TWO_RANKS, RunDir(runs / "rewound"), "lr_spike"),
        prepare(TWO_RANKS, RunDir(runs / "rolled-back"), "optimizer_reset"),
    )
    assert ActionKind.rewind in actions(rewound)
    assert ActionKind.rollback in actions(rolled_back)
    assert_identical(rewound, control)
    assert_identical(rolled_back, control)


def test_a_skip_is_identical_to_a_control_run_with_the_same_ledger(runs: Path) -> None:
    victim = train(prepare(TWO_RANKS, RunDir(runs / "skipped"), "nan_grad"))
    assert ActionKind.skip in actions(victim)
    excluded = train(prepare(TWO_RANKS, RunDir(runs / "excluded"), ledger=victim.ledger))
    assert ActionKind.skip not in actions(excluded)
    assert len(steps_of(excluded)) == TWO_RANKS.num_steps
    assert_identical(victim, excluded)


def harness(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", "launch.cli.main", *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@SHARED_CONTROL
def test_a_replay_gives_the_logged_bits(runs: Path, control: RunDir) -> None:
    """Compiled, like the run: from the newest checkpoint before the iteration."""
    done = harness("replay", str(control.path), "--iteration", "117", cwd=runs)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((control.incidents / "iteration-117" / "replay.json").read_text())
    assert found["exactly"]
    assert found["num_on_the_way"] >= 2
    assert (found["left_the_log_at"], found["nature"]) == (None, "deterministic"), found
    assert found["first"] == found["second"] == found["logged"]
