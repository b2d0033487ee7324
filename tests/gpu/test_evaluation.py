"""lm-evaluation-harness on checkpoints of a run on a GPU, by a process that uses the same GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from harness.analysis.evaluation import evaluator
from harness.checkpoint import catalog
from harness.config import compose
from harness.core import event_json
from harness.core.events import TaskEvaluated
from harness.core.rundir import RunDir
from tests.analysis.evaluation.test_evaluation import NUM_EXAMPLES, set_environment, write_task
from tests.distributed import cases
from tests.forks import Launched

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def test_checkpoints_are_evaluated_on_the_gpu_that_trains(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    write_task(tmp_path / "tasks")
    arguments = [
        *cases.TINY,
        "parallel.device=cuda",
        "launch.nproc=1",
        "train.num_steps=8",
        "train.sequence_length=64",
        "checkpoint.every_steps=4",
        "eval.harness=[bytes_task]",
        "eval.harness_device=cuda:0",
        f"eval.harness_tasks_dir={tmp_path}/tasks",
        f"run.dir={tmp_path}",
        "run.name=first",
    ]
    variables = OFFLINE | {"HF_HOME": str(tmp_path / "hf")}
    output = tmp_path / "output"
    with Launched("launch.train", *arguments, output=output, first=partial(set_environment, variables)) as launched:
        assert launched.wait(timeout=280) == 0, launched.stderr
    run = RunDir(tmp_path / "first")
    scored = [event for event in event_json.read(run.events) if isinstance(event, TaskEvaluated)]
    assert scored, (run.logs / "evaluation.log").read_text()
    assert (scored[-1].step, scored[-1].num_examples) == (8, NUM_EXAMPLES)
    assert scored[-1].metrics["acc"] == 0.5


def test_the_chosen_gpu_computes_and_agrees_with_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    write_task(tmp_path / "tasks")
    for name, value in (OFFLINE | {"HF_HOME": str(tmp_path / "hf")}).items():
        monkeypatch.setenv(name, value)
    overrides = ["train.num_steps=2", "checkpoint.every_steps=2", f"run.dir={tmp_path}", "run.name=first"]
    with Launched("launch.train", *cases.TINY, *overrides, output=tmp_path / "output") as launched:
        assert launched.wait(timeout=280) == 0, launched.stderr
    run = RunDir(tmp_path / "first")
    cfg = compose.read(run.config)
    cfg.eval.harness, cfg.eval.harness_tasks_dir = ["bytes_task"], str(tmp_path / "tasks")
    (checkpoint,) = catalog.list_checkpoints(run.checkpoints)
    metrics = {}
    for device in ("cpu", "cuda:0"):
        cfg.eval.harness_device = device
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (event,) = evaluator.evaluate_checkpoint(run, checkpoint, cfg)
        metrics[device] = event.metrics
        assert (torch.cuda.max_memory_allocated() > before) == (device != "cpu")
    assert metrics["cuda:0"] == metrics["cpu"]
