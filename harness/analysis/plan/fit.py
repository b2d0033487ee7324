"""Checks whether a job fits into device memory, and finds the cheapest change that makes it fit.

Why: a job that cannot fit must not queue for a night first, and the user needs to know what to change.
How: the memory of a rank is compared with `cluster.memory_gb`; if that is not set, every job is accepted. Changes are
tried in order of their cost: reshard after forward, selective checkpointing, smaller micro-batches, full checkpointing;
then combinations of two, then of all; then the same with each sequence on several ranks (`parallel.context`); then all
of these with more ranks. The first one that fits is suggested.
Left out: host memory, which the snapshot ring checks on the machine itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import reduce
from itertools import combinations, product

from harness.analysis.plan.memory import Memory, memory
from harness.analysis.plan.resharding import BYTES_PER_GB, rank_memory_bytes, will_reshard
from harness.config.errors import ConfigError
from harness.config.parallel import ActivationCheckpointing
from harness.config.schema import Config, check_world, sharing
from harness.model.flex_limits import MASK_BLOCK

MOST_RANKS = 16384
SMALLEST_GB = 0.1
"""Less is shown in MB."""
NAMES = {"in_flight": "buffers in flight", "gathered": "gathered weights", "other": "batch and workspaces"}
"""Longer names of some parts."""

Change = tuple[str, Config]
"""Overrides, and the configuration with them."""


def refusal(cfg: Config, *, world_size: int) -> str:
    """One line that says what is too large and what to change; empty if the job fits or `cluster.memory_gb` is not
    set."""
    allowed = rank_memory_bytes(cfg)
    if allowed is None:
        return ""
    held = memory(cfg, world_size=world_size)
    if held.needed_bytes <= allowed:
        return ""
    part = max(fields(held.parts), key=lambda field: getattr(held.parts, field.name)).name
    ranks = "the only rank" if world_size == 1 else f"each of {world_size:,} ranks"
    return (
        f"cluster.memory_gb: {ranks} needs {memory_text(held.needed_bytes)} of device memory and has "
        f"{memory_text(allowed)}; the largest part is {NAMES.get(part, part)}, "
        f"{memory_text(getattr(held.parts, part))}; "
        f"{suggest_change(cfg, allowed_bytes=allowed, world_size=world_size)}"
    )


def suggest_change(cfg: Config, *, allowed_bytes: float, world_size: int, can_add_ranks: bool = True) -> str:
    """The first change that fits into this memory of a rank, or the least memory that any change needs."""
    least = held = memory(cfg, world_size=world_size)
    for overrides, changed in _changes(cfg, world_size):
        then = memory(changed, world_size=world_size)
        if then.needed_bytes <= allowed_bytes:
            return f"{overrides} saves {memory_text(held.needed_bytes - then.needed_bytes)} and fits"
        least = min(least, then, key=_needed)
    for ranks in _more_ranks(cfg, world_size) if can_add_ranks else ():
        for overrides, changed in [("", cfg), *_changes(cfg, ranks)]:
            if is_possible(changed, ranks) and memory(changed, world_size=ranks).needed_bytes <= allowed_bytes:
                return f"{ranks:,} ranks{' and ' + overrides if overrides else ''} would fit"
    return f"no setting of parallel and train.micro_batch_size needs less than {memory_text(least.needed_bytes)}"


def _changes(cfg: Config, world_size: int) -> Iterator[Change]:
    """Changes for the same number of ranks: first those that leave whole sequences on each rank."""
    if is_possible(cfg, world_size):
        yield from _changes_of_rank(cfg, world_size)
    for context in _wider(cfg, world_size):
        override = f"parallel.context={context}"
        shared = replace(cfg, parallel=replace(cfg.parallel, context=context))
        yield override, shared
        for overrides, changed in _changes_of_rank(shared, world_size):
            yield f"{override} {overrides}", changed


def _wider(cfg: Config, world_size: int) -> Iterator[int]:
    """Doubled numbers of ranks for each sequence, as long as its chunks consist of whole blocks of a mask."""
    context = 2 * cfg.parallel.context
    while cfg.train.sequence_length % (2 * context * MASK_BLOCK) == 0 and context <= world_size:
        if is_possible(replace(cfg, parallel=replace(cfg.parallel, context=context)), world_size):
            yield context
        context *= 2


def is_possible(cfg: Config, world_size: int) -> bool:
    """Whether this number of ranks can run the configuration."""
    try:
        check_world(cfg, world_size)
    except ConfigError:
        return False
    return True


def _changes_of_rank(cfg: Config, world_size: int) -> Iterator[Change]:
    """Changes for the same number of ranks and the same part of a sequence on each: single ones before combinations,
    cheap ones first."""
    kinds = list(ActivationCheckpointing)
    stronger = kinds[kinds.index(cfg.parallel.activation_checkpointing) + 1 :]
    choices = [
        [] if will_reshard(cfg) else ["parallel.reshard_after_forward=true"],
        [f"parallel.activation_checkpointing={kind}" for kind in stronger],
        [f"train.micro_batch_size={size}" for size in _smaller(cfg, world_size)],
    ]
    for count in range(1, len(choices) + 1):
        changes = [overrides for chosen in combinations(choices, count) for overrides in product(*chosen)]
        for overrides in sorted(changes, key=_is_costly):
            yield " ".join(overrides), reduce(_apply, overrides, cfg)


def _is_costly(overrides: tuple[str, ...]) -> bool:
    """Whether the forward pass is computed twice."""
    return f"parallel.activation_checkpointing={ActivationCheckpointing.full}" in overrides


def _apply(cfg: Config, override: str) -> Config:
    key, _, value = override.partition("=")
    match key:
        case "parallel.reshard_after_forward":
            return replace(cfg, parallel=replace(cfg.parallel, reshard_after_forward=True))
        case "parallel.activation_checkpointing":
            kind = ActivationCheckpointing(value)
            return replace(cfg, parallel=replace(cfg.parallel, activation_checkpointing=kind))
        case _:
            return replace(cfg, train=replace(cfg.train, micro_batch_size=int(value)))


def _smaller(cfg: Config, world_size: int) -> list[int]:
    """Micro-batch sizes below the current one, the largest first."""
    share, now = sharing(cfg, world_size).largest_share, sharing(cfg, world_size).micro_batch_slots
    return [size for size in range(now - 1, 0, -1) if share % size == 0]


def _more_ranks(cfg: Config, world_size: int) -> Iterator[int]:
    """Doubled numbers of ranks, as long as the batch can be divided among them, or its sequences among several."""
    ranks = 2 * world_size
    while ranks <= MOST_RANKS:
        if not is_possible(cfg, ranks) and next(_wider(cfg, ranks), None) is None:
            return
        yield ranks
        ranks *= 2


def _needed(held: Memory) -> int:
    return held.needed_bytes


def memory_text(num_bytes: float) -> str:
    """A number of bytes in three digits: 16.8 MB, 54.3 GB, 1,234 GB."""
    size = num_bytes / BYTES_PER_GB
    if size < SMALLEST_GB:
        return f"{1000 * size:.3g} MB"
    return f"{size:,.0f} GB" if size >= 100 else f"{size:.3g} GB"
