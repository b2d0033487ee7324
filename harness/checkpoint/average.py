"""Averages the parameters of several checkpoints of a run into a checkpoint of its own.

Why: the average of the last checkpoints often has a lower held-out loss than each of them.
How: the checkpoints are verified, and must agree in the names, shapes and dtypes of their parameters. Then one
parameter after the other is read from each, summed in fp64, and written, so that the memory is that of one parameter.
With a decay, each checkpoint weighs that much of the next newer one: an exponential moving average over checkpoints.
Its weights are divided by their sum, so the newest one weighs most, however few there are.
Only checkpoints of the newest lineage are averaged: what a rollback has undone is another trajectory, and a tainted
checkpoint is damage. The result has parameters only. It can be exported and sampled from, but not trained further.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint import catalog, integrity, saver, store, tensor_index
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, Manifest
from harness.checkpoint.saver import Written
from harness.checkpoint.tensor_index import WEIGHTS, IndexedTensor, TensorIndex
from harness.config.errors import ConfigError, require
from harness.core.plural import pluralize

FIXED_SECTIONS = ("model.", "precision.")
"""Config keys that must not have changed between averaged checkpoints."""


def choose_lineage(root: Path, restores: Sequence[tuple[int, int]]) -> list[Checkpoint]:
    """The checkpoints that led to the newest one, itself included, oldest first; without tainted ones.

    `restores` are (iteration, restored step) of each rewind and rollback: a later step from before that iteration is
    undone. A restore that is not listed shows by its generation: steps of an earlier one must be lower.
    """
    kept: list[Checkpoint] = []
    first_step: int | None = None
    for checkpoint in reversed(catalog.list_checkpoints(root)):
        health = catalog.read_health(checkpoint.path)  # raises if it cannot be read
        iteration = integrity.read_manifest(checkpoint.path).iteration
        is_undone = any(at >= iteration and checkpoint.step > step for at, step in restores)
        if is_undone or (first_step is not None and checkpoint.step >= first_step):
            continue
        first_step = checkpoint.step
        kept += [checkpoint] if health is not Health.tainted else []
    return kept[::-1]


def select_last(lineage: Sequence[Checkpoint], count: int) -> list[Checkpoint]:
    """The newest checkpoints."""
    require(count >= 2, "--last", f"must be at least 2, got {count}")
    names = ", ".join(each.name for each in lineage) or "none"
    message = f"got {count}, but has only {pluralize(len(lineage), 'usable checkpoint')}: {names}"
    require(len(lineage) >= count, "--last", message)
    return list(lineage[-count:])


def select_steps(lineage: Sequence[Checkpoint], steps: Sequence[int]) -> list[Checkpoint]:
    """The checkpoints of these steps."""
    require(len(set(steps)) == len(steps) >= 2, "--steps", f"must name at least 2 different steps, got {steps}")
    known = {checkpoint.step: checkpoint for checkpoint in lineage}
    listed = ", ".join(map(str, known)) or "none"
    for step in steps:
        require(step in known, "--steps", f"no usable checkpoint of step {step}; there are {listed}")
    return [known[step] for step in sorted(steps)]


def check_same_config(checkpoints: Sequence[Checkpoint], changes: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Reject checkpoints between which the config of the run changed; `changes` are (iteration, key -> [old, new])."""
    iterations = [integrity.read_manifest(checkpoint.path).iteration for checkpoint in checkpoints]
    for iteration, changed in changes:
        fixed = [key for key in changed if key.startswith(FIXED_SECTIONS)]
        if fixed and min(iterations) <= iteration < max(iterations):
            old, new = changed[fixed[0]]
            message = f"changed from {old} to {new} between these checkpoints; they cannot be averaged"
            raise ConfigError(fixed[0], message)


def decay_weights(count: int, decay: float) -> list[float]:
    """Weights of `count` checkpoints, oldest first: 1 for the newest, `decay` for the one before, and so on."""
    return [decay**age for age in reversed(range(count))]


def average_checkpoints(checkpoints: Sequence[Checkpoint], root: Path, *, weights: Sequence[float]) -> Written:
    """Write the weighted average as a checkpoint below `root`, under the name of the newest one. Weights are divided by
    their sum."""
    try:
        manifests = [integrity.verify(checkpoint.path) for checkpoint in checkpoints]
    except Damaged as error:
        raise ConfigError("", str(error)) from None
    indices = [tensor_index.read(checkpoint.path) for checkpoint in checkpoints]
    layout = common_parameters(checkpoints, indices)

    def mean_of(name: str) -> Tensor:
        total = torch.zeros(layout[name].size, dtype=torch.float64)
        for checkpoint, index, weight in zip(checkpoints, indices, weights, strict=True):
            total.add_(store.read_tensors(checkpoint.path, [name], index)[name], alpha=weight)
        return total.div_(math.fsum(weights)).to(layout[name].dtype)

    root.mkdir(parents=True, exist_ok=True)
    manifest = replace(newest_of(manifests), time=time.time(), world_size=1, files={}, rollback={})
    return saver.write_computed(root / checkpoints[-1].name, layout, mean_of, manifest)


def newest_of(manifests: Sequence[Manifest]) -> Manifest:
    return max(manifests, key=lambda manifest: (manifest.generation, manifest.step))


def common_parameters(checkpoints: Sequence[Checkpoint], indices: Sequence[TensorIndex]) -> dict[str, IndexedTensor]:
    """The parameters, which must be the same in all checkpoints."""
    (first, *others), (path, *other_paths) = map(parameters_of, indices), (each.path for each in checkpoints)
    require(bool(first), str(path), "has no parameters")
    for found, other in zip(others, other_paths, strict=True):
        for name in first.keys() | found.keys():
            here, there = first.get(name), found.get(name)
            message = f"{name} is {describe(there)}, in {path.name} it is {describe(here)}; they cannot be averaged"
            require(describe(here) == describe(there), str(other), message)
    return first


def parameters_of(index: TensorIndex) -> dict[str, IndexedTensor]:
    return {name: tensor for name, tensor in index.tensors.items() if name.startswith(WEIGHTS)}


def describe(tensor: IndexedTensor | None) -> str:
    """Shape and dtype of a tensor, for an error message."""
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.size)}"
