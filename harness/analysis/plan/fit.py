"""Whether a job fits into its devices, and the smallest change that would make it fit.

Why: a job that cannot fit must not queue for a night to find that out, and whoever is refused wants to know what to do.
How: the memory of a rank is held against `cluster.memory_gb`; where that is not known, nothing is refused. What could
be changed is tried in the order of what it costs: gather blocks twice, keep less, take smaller micro-batches, keep the
inputs of blocks alone; then two of these, then all; then the same with more ranks. The first that fits is told.
Left out: host memory, which the ring checks on the machine itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import reduce
from itertools import combinations, product

from harness.analysis.plan.memory import Memory, memory
from harness.analysis.plan.resharding import BYTES_PER_GB, resharded
from harness.config.errors import ConfigError
from harness.config.parallel import ActivationCheckpointing
from harness.config.schema import Config, check_world, sharing

MOST_RANKS = 16384
NAMES = {"in_flight": "buffers in flight", "gathered": "gathered weights", "other": "batch and workspaces"}
"""Parts whose names say too little."""

Change = tuple[str, Config]
"""The words that make it, and what comes of them."""


def refusal(cfg: Config, *, world_size: int) -> str:
    """One line that says what is too large and what to change; empty where the job fits, or where nobody said what
    there is."""
    if cfg.cluster.memory_gb is None:
        return ""
    held = memory(cfg, world_size=world_size)
    allowed = cfg.cluster.memory_gb * BYTES_PER_GB
    if held.needed_bytes <= allowed:
        return ""
    part = max(fields(held.parts), key=lambda field: getattr(held.parts, field.name)).name
    ranks = "the one rank" if world_size == 1 else f"each of {world_size:,} ranks"
    return (
        f"cluster.memory_gb: {ranks} needs {_gb(held.needed_bytes)} of device memory and has {_gb(allowed)}; most of "
        f"it is {NAMES.get(part, part)}, {_gb(getattr(held.parts, part))}; {_advice(cfg, held, world_size)}"
    )


def _advice(cfg: Config, held: Memory, world_size: int) -> str:
    """The first change that fits, or what would still be needed."""
    assert cfg.cluster.memory_gb is not None
    allowed = cfg.cluster.memory_gb * BYTES_PER_GB
    least = held
    for words, changed in _changes(cfg, world_size):
        then = memory(changed, world_size=world_size)
        if then.needed_bytes <= allowed:
            return f"{words} saves {_gb(held.needed_bytes - then.needed_bytes)} and fits"
        least = min(least, then, key=_needed)
    for ranks in _more_ranks(cfg, world_size):
        for words, changed in [("", cfg), *_changes(cfg, ranks)]:
            if memory(changed, world_size=ranks).needed_bytes <= allowed:
                return f"{ranks:,} ranks{' and ' + words if words else ''} would do"
    return f"no setting of parallel and train.micro_batch_size takes less than {_gb(least.needed_bytes)}"


def _changes(cfg: Config, world_size: int) -> Iterator[Change]:
    """What could be set otherwise on as many ranks: alone before together, and what costs least first."""
    kinds = list(ActivationCheckpointing)
    stronger = kinds[kinds.index(cfg.parallel.activation_checkpointing) + 1 :]
    choices = [
        [] if resharded(cfg) else ["parallel.reshard_after_forward=true"],
        [f"parallel.activation_checkpointing={kind}" for kind in stronger],
        [f"train.micro_batch_size={size}" for size in _smaller(cfg, world_size)],
    ]
    for count in range(1, len(choices) + 1):
        ways = [words for taken in combinations(choices, count) for words in product(*taken)]
        for words in sorted(ways, key=_is_costly):
            yield " ".join(words), reduce(_with, words, cfg)


def _is_costly(words: tuple[str, ...]) -> bool:
    """Whether a third of the work is done again."""
    return f"parallel.activation_checkpointing={ActivationCheckpointing.full}" in words


def _with(cfg: Config, word: str) -> Config:
    key, _, value = word.partition("=")
    match key:
        case "parallel.reshard_after_forward":
            return replace(cfg, parallel=replace(cfg.parallel, reshard_after_forward=True))
        case "parallel.activation_checkpointing":
            kind = ActivationCheckpointing(value)
            return replace(cfg, parallel=replace(cfg.parallel, activation_checkpointing=kind))
        case _:
            return replace(cfg, train=replace(cfg.train, micro_batch_size=int(value)))


def _smaller(cfg: Config, world_size: int) -> list[int]:
    """Sizes of a micro-batch below the present one, the largest first."""
    share, now = sharing(cfg, world_size).largest_share, sharing(cfg, world_size).micro_batch_slots
    return [size for size in range(now - 1, 0, -1) if share % size == 0]


def _more_ranks(cfg: Config, world_size: int) -> Iterator[int]:
    """Twice as many, and so on, as far as the batch can be shared out."""
    ranks = 2 * world_size
    while ranks <= MOST_RANKS:
        try:
            check_world(cfg, ranks)
        except ConfigError:
            return
        yield ranks
        ranks *= 2


def _needed(held: Memory) -> int:
    return held.needed_bytes


def _gb(num_bytes: float) -> str:
    size = num_bytes / BYTES_PER_GB
    return f"{size:,.0f} GB" if size >= 100 else f"{size:.3g} GB"
