"""Chooses checkpoints to evaluate, exports each to a temporary directory, and evaluates it.

How: only the run directory is read. A checkpoint that is damaged, or that training deletes meanwhile, is skipped. A
result becomes an event in the log of the run through rank 0, which also writes `evaluations/NAME.json`; a checkpoint
without that file counts as not evaluated, so nothing is lost if this process or rank 0 is killed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from harness.analysis.evaluation.byte_tokenizer import write_byte_tokenizer
from harness.analysis.evaluation.task_runner import run_tasks
from harness.analysis.sampling import find_codec
from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Checkpoint, Health
from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.config.run import EvalConfig
from harness.config.schema import Config
from harness.core.events import TaskEvaluated
from harness.core.rundir import RunDir
from harness.data.prepare.tokenizer import ByteTokenizer
from harness.huggingface.convert import Exported, export_model
from harness.huggingface.names import require_exportable

TEMPORARY = ".model-"
"""Beginning of the name of an export; what a killed process left is deleted at the next start."""


class NotExportedError(Exception):
    """This checkpoint cannot be exported: it is damaged, for example, or the disk is full. The next one may be."""


def choose_due(run: RunDir, cfg: EvalConfig, *, is_last: bool, given_up: set[str]) -> Checkpoint | None:
    """The newest checkpoint that is to be evaluated now; None: nothing is due.

    The steps since the last evaluated checkpoint count in both directions, because a rollback goes back.
    """
    saved = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
    if not saved or saved[-1].name in given_up or is_evaluated(run, saved[-1].name):
        return None
    evaluated = [catalog.parse_name(path.stem) for path in run.evaluations.glob("step-*.json")]
    if is_last or not evaluated:
        return saved[-1]
    last_step, _ = max(evaluated, key=lambda found: (found[1], found[0]))  # of the newest generation
    return saved[-1] if abs(saved[-1].step - last_step) >= cfg.harness_every_steps else None


def is_evaluated(run: RunDir, name: str) -> bool:
    return (run.evaluations / f"{name}.json").exists()


def evaluate_checkpoint(run: RunDir, checkpoint: Checkpoint, cfg: Config) -> list[TaskEvaluated]:
    """Export a checkpoint, run the tasks on it, and delete the export; one event for each task.

    Raises `ConfigError` if the model has no Hugging Face form or a task does not exist, which holds for every
    checkpoint; `NotExportedError`, `Damaged` or `OSError` if the reason is this checkpoint.
    """
    begun_s = time.monotonic()
    require_exportable(cfg.model)
    iteration = integrity.read_manifest(checkpoint.path).iteration
    run.evaluations.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=run.evaluations))
    try:
        model = folder / "model"
        exported = export_checkpoint(run, checkpoint, model)
        if not exported.has_tokenizer and isinstance(find_codec(cfg).tokenizer, ByteTokenizer):
            write_byte_tokenizer(model)
        scores = run_tasks(model, cfg.eval)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - begun_s
    return [
        TaskEvaluated(
            time=time.time(),
            iteration=iteration,
            step=checkpoint.step,
            directory=checkpoint.name,
            task=each.task,
            metrics=each.metrics,
            num_examples=each.num_examples,
            seconds=seconds,
        )
        for each in scores
    ]


def export_checkpoint(run: RunDir, checkpoint: Checkpoint, model: Path) -> Exported:
    """Export a checkpoint of a model that can be exported."""
    try:
        return export_model(run, checkpoint, model, dtype=PrecisionKind.fp32)
    except ConfigError as error:
        raise NotExportedError(str(error)) from None
