"""Checks whether a run fits into the memory of this machine, before it starts and after it ran out.

Why: a model that cannot fit otherwise dies after minutes of allocation, with an error of the allocator or without one.
How: a run whose weights, moments, gradients and snapshots alone exceed all memory is rejected: they are exact, and no
waiting helps. The peak of a step is an estimate, and free memory changes (a process that died a second ago may still
hold it), so a run that only exceeds what is free gets a warning. Both name the smallest change that fits into what is
free: first settings that keep the model (`harness.analysis.plan.fit`), then the largest model preset.
On CPU all ranks of a machine share its memory, and more ranks do not help; on GPUs each rank has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from harness.analysis.plan.fit import memory_text, suggest_change
from harness.analysis.plan.memory import OUTSIDE_BYTES, Memory, batch_bytes, memory, offloaded_bytes
from harness.analysis.plan.preflight import parameters_text
from harness.analysis.plan.resharding import BYTES_PER_GB
from harness.checkpoint.ring_cost import num_buffers, num_replica_buffers
from harness.config import compose, conf_files
from harness.config.errors import ConfigError
from harness.config.model import ModelConfig
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.model.size import num_parameters

LESS = 0.9
"""Share of the estimate that a change must come down to, if the estimate itself should have fitted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """The memory that the ranks of this machine find."""

    total_bytes: int
    """Of one GPU, the one with the least; on CPU of the whole machine, or of its cgroup."""
    free_bytes: int
    """What is free of it now."""
    num_ranks: int
    """Ranks of the run on this machine."""
    is_gpu: bool
    ranks_per_gpu: int = 1
    host_bytes: int | None = None
    """Free host memory beside GPUs; None: not known."""

    @property
    def rank_bytes(self) -> float:
        """What one rank may use of the free memory."""
        return self.free_bytes / self.num_sharing

    @property
    def num_sharing(self) -> int:
        """Ranks that share the memory."""
        return self.ranks_per_gpu if self.is_gpu else self.num_ranks

    @property
    def kind(self) -> str:
        return "GPU memory" if self.is_gpu else "memory"


def check_memory(cfg: Config, machine: MachineMemory, *, world_size: int) -> list[str]:
    """Reject a run that cannot fit. Returns a warning if the estimated peak of a step does not fit, else nothing."""
    cfg = _on_machine(cfg, machine)
    held = memory(cfg, world_size=world_size)
    sure_bytes = _sure_bytes(cfg, held, machine)
    if machine.is_gpu and machine.host_bytes is not None:
        check_host_memory(cfg, machine, machine.host_bytes, world_size)
    parts = "weights, moments, gradients" + ("" if sure_bytes == held.update_peak_bytes else " and snapshots")
    if sure_bytes * machine.num_sharing > machine.total_bytes:
        there = f"this machine has {memory_text(machine.total_bytes)}"
        tokens_bytes = batch_bytes(cfg, world_size=world_size)
        if tokens_bytes > sure_bytes / 2:
            parts = f"{memory_text(machine.num_sharing * tokens_bytes)} of it for the tokens of a batch"
            key = "train.batch_size" if cfg.train.batch_tokens is None else "train.batch_tokens"
            raise ConfigError(key, f"{_needs(cfg, sure_bytes, parts, machine)}, and {there}; choose a smaller batch")
        line = f"{_needs(cfg, sure_bytes, parts, machine)}, and {there}"
        if held.update_peak_bytes * machine.num_sharing <= machine.total_bytes:
            raise ConfigError("checkpoint.ring.slots", f"{line}; without snapshots it fits: choose fewer, or 0")
        raise ConfigError("model", f"{line}; {smallest_change(cfg, machine, world_size)}")
    peak_bytes = _estimated_bytes(held, machine)
    if max(sure_bytes, peak_bytes) <= machine.rank_bytes:
        return []
    if sure_bytes > peak_bytes:
        line = _needs(cfg, sure_bytes, parts, machine)
    else:
        line = _needs(cfg, peak_bytes, "estimated peak of a step", machine)
    there = f"{memory_text(machine.free_bytes)} is free on this machine"
    return [f"train.micro_batch_size: {line}, and {there}; {smallest_change(cfg, machine, world_size)}"]


def check_host_memory(cfg: Config, machine: MachineMemory, host_bytes: int, world_size: int) -> None:
    """Reject activations that do not fit into the free host memory."""
    needed = machine.num_ranks * offloaded_bytes(cfg, world_size=world_size)
    if needed > host_bytes:
        ranks = "1 rank" if machine.num_ranks == 1 else f"{machine.num_ranks} ranks"
        message = f"{ranks} would keep {memory_text(needed)} of activations in host memory, and "
        message += f"{memory_text(host_bytes)} is free; set train.micro_batch_size lower, activation_checkpointing=full"
        raise ConfigError("parallel.activation_offload", f"{message}, or this to false")


def smallest_change(cfg: Config, machine: MachineMemory, world_size: int) -> str:
    """The smallest change that fits into this machine; if the run should have fitted, one that needs less memory."""
    cfg = _on_machine(cfg, machine)
    held = memory(cfg, world_size=world_size)
    allowed = min(_allowed_bytes(machine), max(LESS * held.needed_bytes, OUTSIDE_BYTES))
    if machine.is_gpu or _sure_bytes(cfg, held, machine) <= machine.rank_bytes:
        change = suggest_change(cfg, allowed_bytes=allowed, world_size=world_size, can_add_ranks=machine.is_gpu)
        if not change.startswith("no setting"):
            return change
    preset = largest_preset(cfg, machine, world_size)
    return f"the largest model that fits is model={preset}" if preset else "no model preset fits"


def estimate_line(cfg: Config, machine: MachineMemory, world_size: int) -> str:
    """What the plan estimates for one rank at the peak of a step."""
    held = memory(_on_machine(cfg, machine), world_size=world_size)
    return f"the plan estimates {memory_text(_estimated_bytes(held, machine))} for each rank"


def largest_preset(cfg: Config, machine: MachineMemory, world_size: int) -> str:
    """Name of the largest smaller model preset that fits with the other settings of this run; empty if none does."""
    for name, model in sorted(model_presets().items(), key=lambda item: -num_parameters(item[1])):
        smaller = replace(cfg, model=model)
        if num_parameters(model) >= num_parameters(cfg.model):
            continue
        held = memory(smaller, world_size=world_size)
        if held.needed_bytes <= _allowed_bytes(machine) and _sure_bytes(smaller, held, machine) <= machine.rank_bytes:
            return name
    return ""


def model_presets() -> dict[str, ModelConfig]:
    """The models of `conf/model`, by name."""
    folder = conf_files.conf_dir() / "model"
    base = conf_files.read_tree(folder / f"{conf_files.BASE}.yaml")
    presets = {}
    for name in conf_files.options_of("model"):
        tree = conf_files.read_tree(folder / f"{name}.yaml")
        own = {key: value for key, value in tree.get("model", tree).items() if key != "defaults"}
        presets[name] = compose.load_typed(ModelConfig, "model", [base, own], [])
    return presets


def _on_machine(cfg: Config, machine: MachineMemory) -> Config:
    """The config with the kind and the memory of this machine, from which training also decides whether to reshard."""
    device_bytes = machine.rank_bytes * cfg.launch.ranks_per_gpu
    cfg = replace(cfg, cluster=replace(cfg.cluster, memory_gb=device_bytes / BYTES_PER_GB))
    return cfg if machine.is_gpu else replace(cfg, parallel=replace(cfg.parallel, device=DeviceKind.cpu))


def _allowed_bytes(machine: MachineMemory) -> float:
    """What the planned memory of a rank may be; it includes a CUDA context, which a CPU rank does not have."""
    return machine.rank_bytes + (0 if machine.is_gpu else OUTSIDE_BYTES)


def _estimated_bytes(held: Memory, machine: MachineMemory) -> int:
    return held.needed_bytes - (0 if machine.is_gpu else OUTSIDE_BYTES)


def _ring_bytes(cfg: Config, held: Memory) -> int:
    ring = cfg.checkpoint.ring
    replicas = num_replica_buffers(ring, num_nodes=cfg.launch.nodes, replicate=cfg.parallel.replicate)
    return (num_buffers(ring) + replicas) * (held.parts.weights + held.parts.moments)


def _sure_bytes(cfg: Config, held: Memory, machine: MachineMemory) -> int:
    """What a rank needs in any case; on CPU the snapshots are in the same memory."""
    return held.update_peak_bytes + (0 if machine.is_gpu else _ring_bytes(cfg, held))


def _needs(cfg: Config, num_bytes: float, what: str, machine: MachineMemory) -> str:
    """What is needed by all ranks that share the memory."""
    size = parameters_text(num_parameters(cfg.model))
    sharing = machine.num_sharing
    who = f"{sharing} ranks" if sharing > 1 else "each rank" if machine.is_gpu else "the only rank"
    verb = "need" if who.endswith("ranks") else "needs"
    return f"{who} with {size} parameters {verb} {memory_text(sharing * num_bytes)} of {machine.kind} ({what})"
