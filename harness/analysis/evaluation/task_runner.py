"""Runs tasks of lm-evaluation-harness on an exported model. Only here `lm_eval` and `transformers` are imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.errors import ConfigError
from harness.config.run import EvalConfig

ONLY_FILTER = ",none"
"""How the library marks a metric of a task without filters."""


class TaskScores(NamedTuple):
    task: str
    metrics: dict[str, float]
    num_examples: int


def run_tasks(model: Path, cfg: EvalConfig) -> list[TaskScores]:
    """Scores of the configured tasks on a Hugging Face model directory; a group of tasks gives a row for each."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        message = f"needs lm-evaluation-harness: pip install 'pretraining-harness[evaluation]' ({error})"
        raise ConfigError("eval.harness", message) from None
    tasks = open_tasks(tuple(cfg.harness), cfg.harness_tasks_dir)
    language_model = HFLM(
        pretrained=str(model),
        tokenizer=load_tokenizer(model),
        device=cfg.harness_device,
        batch_size=cfg.harness_batch_size,
        dtype="float32",
    )
    found = simple_evaluate(
        model=language_model,
        tasks=list(cfg.harness),
        task_manager=tasks,
        num_fewshot=cfg.harness_fewshot,
        limit=cfg.harness_limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None, "only ranks above 0 get None"
    samples = found.get("n-samples", {})
    return [
        TaskScores(task, clean_metrics(values), int(samples.get(task, {}).get("effective", 0)))
        for task, values in found["results"].items()
        if clean_metrics(values)
    ]


@cache
def open_tasks(names: tuple[str, ...], folder: str | None) -> Any:
    """The library's index of tasks; of its own 10,000 files only if the folder does not have all of them."""
    from lm_eval.tasks import TaskManager

    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if all(own.match_tasks([name]) for name in names):
            return own
    tasks = TaskManager(include_path=folder)
    unknown = [name for name in names if not tasks.match_tasks([name])]
    if unknown:
        raise ConfigError("eval.harness", f"no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    return tasks


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of the model. One without an end token gets token 0 as such: the library needs one to begin an
    empty context and to end a generated text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def clean_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Metric -> value; without texts, and without the mark of metrics that have no filter."""
    return {
        name.removesuffix(ONLY_FILTER): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
    }
