"""Whole runs in which one rank differs: other data, another decision, a failing disk. Functions are sent to real
processes by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from harness import build as building
from harness import resume, train
from harness.config.schema import Config
from harness.data.order.ledger import Ledger
from harness.faults.site import intercept
from harness.run import Run
from tests.distributed.cases import tiny

Change = Callable[[Run], None]
NO_DISK = OSError(errno.EIO, "Input/output error")


@dataclass
class Left:
    """How one rank ended a run."""

    code: int | None
    error: str = ""
    """The exception that it raised, if any."""
    iteration: int = 0


def start(directory: str, change: Change, *overrides: str) -> Left:
    """A run with one change, made on every rank before the first step."""
    cfg = tiny("run.name=victim", *overrides, directory=directory)
    return begin(cfg, change)


def begin(cfg: Config, change: Change = lambda _: None) -> Left:
    held: list[Run] = []

    def outfit(run: Run) -> Run:
        change(run)
        held.append(run)
        return run

    try:
        code = train.run_worker(cfg, outfit)
    except Exception as error:
        return Left(None, f"{type(error).__name__}: {error}")
    return Left(code, iteration=held[0].state.iteration)


def another_evaluation(run: Run) -> None:
    """Rank 1 would evaluate after step 7; rank 0 never does, and gets a stop request in the same step."""
    if run.parts.world.rank == 1:
        run.cfg.eval.every_steps = 7
    else:
        _at(run, 7, lambda: run.stop.received.append(15))


def another_digest(run: Run) -> None:
    """Rank 1 has decided differently by step 7, and rank 0 gets a stop request in the same step."""
    if run.parts.world.rank == 1:
        _at(run, 7, lambda: setattr(run.parts.sentinel, "digest", run.parts.sentinel.digest ^ 1))
    else:
        _at(run, 7, lambda: run.stop.received.append(15))


def _at(run: Run, iteration: int, act: Callable[[], Any]) -> None:
    def look() -> None:
        if run.state.iteration + 1 == iteration:
            act()

    run.parts.batches = intercept(run.parts.batches, "__getitem__", look, first=True)


def other_tokens(run: Run) -> None:
    """Rank 2 reads other bytes than the other ranks, from files of the same size and name."""
    if run.parts.world.rank == 2:
        batches = run.parts.batches
        (source,) = batches.sources
        corpus: Any = _Shifted(source.corpus)
        batches.sources = (source._replace(corpus=corpus),)
        batches._prefetched.clear()


class _Shifted:
    """A corpus of increasing token ids."""

    def __init__(self, corpus: Any) -> None:
        self._corpus = corpus

    def rows(self, indices: Any) -> Any:
        return (np.asarray(self._corpus.rows(indices), dtype=np.int64) + 1) % self._corpus.vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)


def _fails(*_arguments: Any, **_options: Any) -> Any:
    raise NO_DISK


def open_with_failure(directory: str, what: str, rank: int, *overrides: str) -> Left:
    """Start a run while one rank cannot read or write something."""
    patches: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "data": lambda: patch.object(building, "open_data", _fails),
        "ledger": lambda: patch.object(Ledger, "load", _fails),
        "log": lambda: patch.object(resume, "events_since", _fails),
        "manifest": lambda: patch.object(train, "write_manifest", _fails),
        "directory": lambda: patch.object(train, "open_run", _fails),
        "engine": lambda: patch.object(train, "require_engine", _fails),
    }
    is_here = os.environ["RANK"] == str(rank)
    with patches[what]() if is_here else nullcontext():
        return begin(tiny("run.name=victim", *overrides, directory=directory))
