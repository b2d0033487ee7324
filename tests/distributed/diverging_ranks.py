"""Whole runs in which one rank differs: its data, its decisions, or a failing disk. The functions are sent to worker
processes by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from harness import build as building
from harness import resume, train
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.data.order.ledger import Ledger
from harness.distributed.world import connected
from harness.faults.site import intercept
from harness.run import Run
from tests.distributed.cases import tiny

Change = Callable[[Run], None]
IO_ERROR = OSError(errno.EIO, "Input/output error")


@dataclass
class RankResult:
    """How one rank ended a run."""

    code: int | None
    error: str = ""
    """The exception that it raised, if any."""
    iteration: int = 0


def run_with_change(directory: str, change: Change, *overrides: str) -> RankResult:
    """A run with one change that is applied on every rank before the first step."""
    cfg = tiny("run.name=victim", *overrides, directory=directory)
    return run_rank(cfg, change)


def run_rank(cfg: Config, change: Change = lambda _: None) -> RankResult:
    captured: list[Run] = []

    def wrap(run: Run) -> Run:
        change(run)
        captured.append(run)
        return run

    try:
        code = train.run_worker(cfg, wrap)
    except Exception as error:
        return RankResult(None, f"{type(error).__name__}: {error}")
    return RankResult(code, iteration=captured[0].state.iteration)


def leave_with_error(is_of_one_rank: bool) -> tuple[bool, bool]:
    """Leave the contexts of a run by an error: whether the group was destroyed, and whether the parts were closed."""
    cfg, closed = tiny(), []
    error = ConfigError("key", "wrong")
    error.is_of_one_rank = is_of_one_rank
    with (
        patch.object(building.Parts, "close", lambda parts: closed.append(parts)),
        suppress(ConfigError),
        connected(cfg.parallel) as world,
        building.closing_parts(building.build(cfg, world, RunDir(Path("/nonexistent")))) as parts,
    ):
        raise error
    parts.close()
    return not dist.is_initialized(), closed == [parts]


def evaluate_on_rank_1(run: Run) -> None:
    """Rank 1 would evaluate after step 7; rank 0 never does, and gets a stop request in the same step."""
    if run.parts.world.rank == 1:
        run.cfg.eval.every_steps = 7
    else:
        _call_at(run, 7, lambda: run.stop.received.append(15))


def change_digest_on_rank_1(run: Run) -> None:
    """Rank 1 has decided differently by step 7, and rank 0 gets a stop request in the same step."""
    if run.parts.world.rank == 1:
        _call_at(run, 7, lambda: setattr(run.parts.sentinel, "digest", run.parts.sentinel.digest ^ 1))
    else:
        _call_at(run, 7, lambda: run.stop.received.append(15))


def _call_at(run: Run, iteration: int, action: Callable[[], Any]) -> None:
    def call_if_due() -> None:
        if run.state.iteration + 1 == iteration:
            action()

    run.parts.batches = intercept(run.parts.batches, "__getitem__", call_if_due, first=True)


def shift_tokens_on_rank_2(run: Run) -> None:
    """Rank 2 reads other tokens than the other ranks, from files of the same size and name."""
    if run.parts.world.rank == 2:
        batches = run.parts.batches
        (source,) = batches.sources
        corpus: Any = _Shifted(source.corpus)
        batches.sources = (source._replace(corpus=corpus),)
        batches._prefetched.clear()


class _Shifted:
    """A corpus with every token id increased by 1, modulo the vocabulary."""

    def __init__(self, corpus: Any) -> None:
        self._corpus = corpus

    def rows(self, indices: Any) -> Any:
        return (np.asarray(self._corpus.rows(indices), dtype=np.int64) + 1) % self._corpus.vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)


def _raise_io_error(*_arguments: Any, **_options: Any) -> Any:
    raise IO_ERROR


def open_with_failure(directory: str, what: str, rank: int, *overrides: str) -> RankResult:
    """Start a run while one rank cannot read or write something."""
    patches: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "data": lambda: patch.object(building, "open_data", _raise_io_error),
        "ledger": lambda: patch.object(Ledger, "load", _raise_io_error),
        "log": lambda: patch.object(resume, "events_since", _raise_io_error),
        "manifest": lambda: patch.object(train, "write_manifest", _raise_io_error),
        "directory": lambda: patch.object(train, "open_run", _raise_io_error),
        "accepted config": lambda: patch.object(train, "accept_config", _raise_io_error),
        "engine": lambda: patch.object(train, "require_engine", _raise_io_error),
    }
    is_faulty_rank = os.environ["RANK"] == str(rank)
    with patches[what]() if is_faulty_rank else nullcontext():
        return run_rank(tiny("run.name=victim", *overrides, directory=directory))
