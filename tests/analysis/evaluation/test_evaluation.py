"""lm-evaluation-harness on checkpoints of a real run, with a task of its own, offline."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from harness.analysis.dashboard.page_data import page_data
from harness.analysis.dashboard.story import Story
from harness.analysis.evaluation import evaluator
from harness.analysis.evaluation.__main__ import evaluate_until_end
from harness.analysis.evaluation.byte_tokenizer import write_byte_tokenizer
from harness.analysis.evaluation.evaluator import choose_due
from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Checkpoint, Health
from harness.config import compose
from harness.config.errors import EXIT_CRASHED, EXIT_DONE
from harness.config.schema import Config
from harness.core import event_json
from harness.core.event_json import from_json, to_json
from harness.core.events import RunEnded, RunRestarted, StepRecord, TaskEvaluated
from harness.core.rundir import RunDir
from harness.telemetry.evaluation_process import EVALUATION_LOG, EvaluationProcess
from harness.telemetry.sinks.metrics import metrics_of
from tests.composed import load
from tests.distributed import cases
from tests.forks import Launched

TASK = """\
task: bytes_task
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
process_docs: !function slow.load
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
LOAD_SLOWLY = """\
import time
seconds = [40]
def load(rows):
    if seconds:
        time.sleep(seconds.pop())
    return rows
"""
"""Once: the evaluation takes longer than a start may take, and longer than a rank may stand still."""
NUM_EXAMPLES = 6


def write_task(directory: Path) -> None:
    directory.mkdir()
    rows = [
        {"question": "The name of the module is", "choices": [" import", " xqzjv"], "answer": number % 2}
        for number in range(NUM_EXAMPLES)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "slow.py").write_text(LOAD_SLOWLY)
    (directory / "bytes_task.yaml").write_text(TASK.format(file=directory / "rows.jsonl"))


def set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


@pytest.mark.full
def test_checkpoints_of_a_run_are_evaluated_beside_it(tmp_path: Path) -> None:
    """The run waits for the last evaluation, and is not taken for hung meanwhile."""
    pytest.importorskip("lm_eval")
    write_task(tmp_path / "tasks")
    arguments = [
        *cases.TINY,
        "train.num_steps=8",
        "train.sequence_length=64",
        "checkpoint.every_steps=4",
        "eval.harness=[bytes_task]",
        f"eval.harness_tasks_dir={tmp_path}/tasks",
        "eval.harness_exit_wait_s=500",
        "launch.nproc=2",
        "launch.start_within_s=20",
        "launch.hang_after_s=20",
        f"run.dir={tmp_path}",
        "run.name=first",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    output = tmp_path / "output"
    with Launched("launch.train", *arguments, output=output, first=partial(set_environment, offline)) as launched:
        assert launched.wait(timeout=400) == 0, launched.stderr
        printed = launched.stdout + launched.stderr
    run = RunDir(tmp_path / "first")
    log = (run.logs / "evaluation.log").read_text()
    found = list(event_json.read(run.events))
    scored = [event for event in found if isinstance(event, TaskEvaluated)]
    assert scored, f"{printed}\n{log}"
    last = scored[-1]
    assert (last.step, last.iteration, last.directory) == (8, 8, catalog.name_of(8, 0))
    assert last.task == "bytes_task"
    assert last.metrics["acc"] == 0.5, "the same two texts, each right in half of the rows"
    assert last.num_examples == NUM_EXAMPLES
    assert isinstance(found[-1], RunEnded), "the sinks get the result before the run ends"
    assert found[-1].exit_code == 0
    assert last.time - max(event.time for event in found if isinstance(event, StepRecord)) > 20
    assert not any(isinstance(event, RunRestarted) for event in found)
    assert "step 8: bytes_task: acc 0.5" in printed
    assert json.loads((run.evaluations / f"{last.directory}.json").read_text())["tasks"]["bytes_task"] == last.metrics
    assert [path.name for path in run.evaluations.iterdir() if path.name.startswith(".")] == []

    story = Story()
    story.read_more(run)
    data = page_data(run, story, now_s=0.0)
    assert list(data["tasks"]["columns"]) == ["bytes_task acc"]


def save_damaged(run: RunDir, step: int) -> str:
    """A checkpoint whose only file is not the one that its manifest states."""
    path = run.checkpoints / catalog.name_of(step, 0)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"weights")
    integrity.write_checkpoint_manifest(
        path,
        integrity.Manifest(
            step=step,
            generation=0,
            iteration=step,
            tokens=step,
            time=0.0,
            world_size=1,
            files=integrity.hash_files(path, ["__0_0.distcp"]),
        ),
    )
    (path / "__0_0.distcp").write_bytes(b"Weights")
    return path.name


def prepare(directory: Path) -> tuple[RunDir, Config]:
    cfg = load([*cases.TINY, "eval.harness=[x]"])
    run = RunDir(directory)
    run.path.mkdir()
    run.config.write_text(compose.to_yaml(cfg))
    return run, cfg


def test_the_exit_code_says_whether_the_last_checkpoint_was_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cfg = prepare(tmp_path / "run")
    assert evaluate_until_end(run, cfg, io.StringIO(), trainer=None) == EXIT_DONE, "there is none"
    name = save_damaged(run, 4)
    assert evaluate_until_end(run, cfg, io.StringIO(), trainer=None) == EXIT_CRASHED
    printed = capsys.readouterr().err
    assert f"{name}: not evaluated: " in printed
    assert "Traceback" not in printed
    (run.evaluations / f"{name}.json").write_text("{}")
    assert evaluate_until_end(run, cfg, io.StringIO(), trainer=None) == EXIT_DONE, "it was evaluated before"


def test_a_checkpoint_that_was_given_up_and_is_gone_at_the_end_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cfg = prepare(tmp_path / "run")
    name = save_damaged(run, 4)
    listed = evaluator.choose_due

    def delete_after_trial(*arguments: Any, given_up: set[str], **options: Any) -> Checkpoint | None:
        if given_up:
            shutil.rmtree(run.checkpoints / name, ignore_errors=True)
        return listed(*arguments, given_up=given_up, **options)

    monkeypatch.setattr(evaluator, "choose_due", delete_after_trial)
    assert evaluate_until_end(run, cfg, io.StringIO(), trainer=None) == EXIT_DONE


@pytest.mark.full
def test_evaluations_go_on_after_the_storage_and_a_checkpoint_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory of the checkpoints is on a lost mount at first."""
    run, cfg = prepare(tmp_path / "run")
    run.checkpoints.symlink_to(tmp_path / "mount")
    process = EvaluationProcess.start(run, cfg.eval)
    assert process is not None
    log = run.logs / EVALUATION_LOG

    def wait_for(text: str) -> None:
        deadline_s = time.monotonic() + 300
        while text not in log.read_text():
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)

    wait_for("the checkpoints cannot be listed: ")
    (tmp_path / "mount").mkdir()
    wait_for(f"{save_damaged(run, 4)}: not evaluated: ")
    wait_for(f"{save_damaged(run, 8)}: not evaluated: ")
    assert not process.finish(300)
    warning, *others = capsys.readouterr().err.splitlines()
    assert re.match(r"warning: the last checkpoint was not evaluated: .* step-00000008-gen-0: not evaluated: ", warning)
    assert not others


def test_an_event_becomes_metrics_and_is_read_back() -> None:
    event = TaskEvaluated(
        time=1.0,
        iteration=40,
        step=38,
        directory="step-00000038-gen-0",
        task="arc_easy",
        metrics={"acc": 0.25, "acc_norm": 0.5},
        num_examples=4,
        seconds=2.0,
    )
    assert metrics_of(event) == {"task/arc_easy/acc": 0.25, "task/arc_easy/acc_norm": 0.5}
    assert from_json(to_json(event)) == event


def test_a_byte_tokenizer_gives_every_byte_its_number(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("Hello, world.\n", "naïve 東京 🚀", "".join(map(chr, range(1, 128)))):
        assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_the_newest_checkpoint_is_due_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    cfg = load(["eval.harness=[x]", "eval.harness_every_steps=10"]).eval

    def due(*, is_last: bool = False, given_up: tuple[str, ...] = ()) -> str | None:
        chosen = choose_due(run, cfg, is_last=is_last, given_up=set(given_up))
        return None if chosen is None else chosen.name

    def save(step: int, generation: int = 0) -> str:
        name = catalog.name_of(step, generation)
        (run.checkpoints / name).mkdir(parents=True)
        return name

    assert due(is_last=True) is None
    first = save(4)
    assert due() == first
    assert due(given_up=(first,)) is None
    run.evaluations.mkdir()
    (run.evaluations / f"{first}.json").write_text("{}")
    assert due(is_last=True) is None
    second = save(13)
    assert due() is None, "9 steps after the last one"
    assert due(is_last=True) == second
    third = save(14)
    assert due() == third
    (run.evaluations / f"{third}.json").write_text("{}")
    back = save(2, generation=1)
    assert due() == back, "the run was rolled back by 12 steps"
    (run.evaluations / f"{back}.json").write_text("{}")
    close = save(11, generation=1)
    assert due() is None, "9 steps after the last one, and before those of the steps that were undone"
    assert due(is_last=True) == close
    third = save(12, generation=1)
    assert due() == third
    catalog.mark(run.checkpoints / third, Health.tainted, "incident")
    assert due() is None
