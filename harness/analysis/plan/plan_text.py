"""Renders a plan as text: one run in sections, or a table over several numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness.analysis.plan.calibration import NUM_STEPS, TOLERANCE
from harness.analysis.plan.memory import FRAGMENTED, OUTSIDE_BYTES
from harness.analysis.plan.plan import Fp8, Plan
from harness.analysis.plan.traffic import LINK_EFFICIENCY, SEQUENCES, CollectiveKind
from harness.analysis.plan.work import RATES
from harness.checkpoint.ring_cost import RollbackCost
from harness.config.optim import MomentDtype, OptimizerKind
from harness.config.precision import Fp8Engine

WIDTH = 18
MOMENTS = {
    "loss": "in the loss",
    "turn": "between forward and backward",
    "backward": "in backward",
    "reduction": "in the last gradient reduction",
    "update": "in the optimizer step",
}
PARTS = {
    "weights": "fp32, this rank's shard",
    "moments": "both of AdamW's, this rank's shard",
    "gradients": "fp32, this rank's shard",
    "gathered": "unsharded weights of the blocks in use, of embedding and head",
    "in_flight": "collective buffers and unsharded gradients",
    "activations": "kept for backward, and temporary",
    "logits": "one chunk of the loss, and the head's gradient",
    "other": "batch and workspaces",
}
MUON_MOMENTS = "one of Muon's for matrices, both of AdamW's for the rest, this rank's shard"
KERNELS = {
    "gemm_s": "GEMM in blocks",
    "attention_s": "attention",
    "elementwise_s": "elementwise",
    "quantize_s": "fp8 quantization",
    "head_s": "head and loss",
    "weights_s": "casts of weights",
    "optimizer_s": "optimizer",
    "orthogonalize_s": "Newton-Schulz",
}
UNKNOWN_TIME = "not known; set cluster=h100, cluster=h200 or cluster.peak_tflops"
COLUMNS = ("ranks", "memory", "fits", "sent", "inter-node", "compute", "waiting", "step", "MFU", "tokens/s")


def render(plan: Plan) -> str:
    """The plan of one run."""
    ranks, replicas = _count(plan.num_ranks, "rank", "ranks"), _count(plan.replicate, "replica", "replicas")
    replicas += " of the model"
    if plan.context > 1:
        replicas += f", each sequence on {plan.context} ranks"
    sections = {
        f"model {plan.model}": {
            "parameters": f"{plan.num_parameters:,}",
            "per token": _si(plan.flops_per_token, "FLOP"),
            "per step": f"{plan.tokens_per_step:,} tokens, {_si(plan.flops_per_step, 'FLOP')}",
            **_padding(plan),
            **_stages(plan),
        },
        f"memory per device ({ranks}, {replicas}), peak {MOMENTS[plan.memory.moment]}": _memory(plan),
        "activations in host memory": _offload(plan),
        "data sent per rank and step": _traffic(plan),
        "compute per device and step": _compute(plan),
        "time": _pace(plan),
        "price": _price(plan),
        "checkpoints": {"on disk": f"{_si(plan.checkpoint_bytes, 'B')} each", **_ring(plan)},
        "a restore loses at most": {
            "rewind": "no snapshots are kept" if plan.rewind is None else _lost(plan.rewind, plan.step_time_s),
            "rollback": _lost(plan.rollback, plan.step_time_s),
        },
        "assumptions": _assumptions(plan),
    }
    return _text({title: rows for title, rows in sections.items() if rows})


def render_table(plans: Sequence[Plan]) -> str:
    """The same run on several numbers of ranks, one row each."""
    rows = [COLUMNS, *(_row(plan) for plan in plans)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = "memory: GB per device; sent: GB per rank and step; inter-node: part of sent that goes to other machines"
    times = [f"time: {_basis(*plans) if plans[0].pace is not None else UNKNOWN_TIME}"]
    assumptions = [f"{name}: {value}" for name, value in _assumptions(plans[0]).items()]
    return "\n".join([*lines, "", notes, *times, *assumptions]) + "\n"


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """All numbers of the plan as JSON-ready data."""
    numbers = asdict(plan)
    numbers["memory"] |= {"peak_bytes": plan.memory.peak_bytes, "needed_bytes": plan.memory.needed_bytes}
    for entry, call in zip(numbers["traffic"]["calls"], plan.traffic.calls, strict=True):
        entry |= {"sent_bytes": call.sent_bytes, "sent_far_bytes": call.sent_far_bytes}
    return numbers | {"step_time_s": plan.step_time_s, "run_time_s": plan.run_time_s}


def _row(plan: Plan) -> tuple[str, ...]:
    pace, allowed = plan.pace, plan.memory_allowed_bytes
    fits = "-" if allowed is None else "yes" if plan.memory.needed_bytes <= allowed else "no"
    timing: tuple[str, ...] = ("-",) * 5
    if pace is not None:
        seconds = [_duration(value) for value in (pace.work_s, pace.waiting_s, pace.step_time_s)]
        timing = (*seconds, _percent(pace.mfu), f"{pace.tokens_per_s:,.0f}")
    traffic = plan.traffic
    sizes = [_gb(value) for value in (plan.memory.needed_bytes, traffic.sent_bytes, traffic.sent_far_bytes)]
    return (f"{plan.num_ranks:,}", sizes[0], fits, sizes[1], sizes[2], *timing)


def _padding(plan: Plan) -> dict[str, str]:
    if not plan.num_padding:
        return {}
    share = _percent(plan.num_padding / plan.num_sequences)
    count = f"{plan.num_padding:,} of {plan.num_sequences:,} sequences ({share})"
    return {"padding": f"{count}: the batch does not divide evenly among the ranks"}


def _stages(plan: Plan) -> dict[str, str]:
    if len(plan.stages) == 1:
        return {}
    stages = [
        f"{stage.num_steps:,} steps of {stage.batch_size:,} sequences in {stage.precision}" for stage in plan.stages
    ]
    return {"stages": "; ".join(stages), "run": f"{plan.num_tokens:,} tokens"}


def _memory(plan: Plan) -> dict[str, str]:
    parts = asdict(plan.memory.parts)
    has_muon = plan.optimizer is OptimizerKind.muon
    dtype = "bf16 (Muon's fp32)" if has_muon and plan.moment_dtype is MomentDtype.bf16 else str(plan.moment_dtype)
    texts = PARTS | {"moments": f"{dtype}, {MUON_MOMENTS if has_muon else PARTS['moments']}"}
    rows = {name.replace("_", " "): f"{_gb(parts[name]):>7} GB  {what}" for name, what in texts.items()}
    rows["outside"] = f"{_gb(plan.memory.outside_bytes):>7} GB  CUDA context, NCCL, fragmentation"
    allowed = plan.memory_allowed_bytes
    available = "" if allowed is None else f"  of {_gb(allowed)} GB (cluster.memory_gb)"
    rows["total"] = f"{_gb(plan.memory.needed_bytes):>7} GB{available}"
    if allowed is not None and plan.memory.needed_bytes > allowed:
        rows["total"] += "; DOES NOT FIT"
    return rows


def _offload(plan: Plan) -> dict[str, str]:
    if not plan.offload_bytes:
        return {}
    copied = f"{_gb(plan.offload_bytes / plan.num_per_node)} GB per rank to the host and back in each micro-batch"
    if plan.pace is not None:
        time = "cluster.host_gb_s is not set: no waiting is planned"
        if plan.pace.copies_s is not None:
            waiting = _duration(plan.pace.copy_waiting_s)
            time = f"{_duration(plan.pace.copies_s)} a step, of which {waiting} do not overlap with compute"
        copied = f"{copied}; {time}"
    return {
        "per machine": f"{_gb(plan.offload_bytes):>7} GB",
        "copied": copied,
    }


def _traffic(plan: Plan) -> dict[str, str]:
    if not plan.traffic.calls:
        return {}
    rows = {}
    by_name = {
        kind.replace("_", "-"): [call for call in plan.traffic.calls if call.kind is kind] for kind in CollectiveKind
    }
    for name, of_kind in by_name.items():
        for is_shared, row in ((False, name), (True, "keys, values" if name == "all-gather" else "their gradients")):
            if calls := [call for call in of_kind if (call.of == SEQUENCES) is is_shared]:
                sent = sum(call.num_calls * call.sent_bytes for call in calls)
                group, num_calls = calls[0].group, sum(call.num_calls for call in calls)
                where = f"{group.num_ranks:,} ranks on {_count(group.num_nodes, 'machine', 'machines')}"
                rows[row] = f"{_gb(sent):>7} GB  {num_calls:,} calls among {where}"
    rows["inter-node"] = f"{_gb(plan.traffic.sent_far_bytes):>7} GB  part of it, through the network port of one device"
    return rows


def _pace(plan: Plan) -> dict[str, str]:
    pace = plan.pace
    if pace is None:
        return {"step": UNKNOWN_TIME}
    links = "link rates are not set (cluster.intra_node_gb_s, cluster.inter_node_gb_s): no waiting is planned"
    if pace.traffic_s is not None:
        links = f"{_duration(pace.traffic_s)}, of which {_duration(pace.waiting_s)} do not overlap with compute"
    rows = {"compute": f"{_duration(pace.work_s)}, {_percent(pace.device_mfu)} of the device's bf16 rate"}
    if plan.traffic.calls:
        rows["communication"] = links
    rows["step"] = f"{_duration(pace.step_time_s)}, {pace.tokens_per_s:,.0f} tokens/s, {_percent(pace.mfu)} MFU"
    rows["run"] = f"{_duration(plan.run_time_s or 0.0)} for {plan.num_steps:,} steps"
    rows["basis"] = _basis(plan)
    return rows


def _compute(plan: Plan) -> dict[str, str]:
    """Time of each part; empty if the user gave an MFU, which has no parts."""
    if plan.pace is None or plan.is_mfu_given:
        return {}
    parts, total_s = asdict(plan.pace.parts), plan.pace.work_s
    return {
        what: f"{_duration(parts[name]):>8}  {_percent(parts[name] / total_s):>6}"
        for name, what in KERNELS.items()
        if parts[name]
    }


def _basis(*plans: Plan) -> str:
    """What the step time is based on; for several plans, all reasons why it is not measured."""
    reasons = dict.fromkeys(reason for plan in plans for reason in plan.unmeasured)
    if reasons:
        return f"estimate without measurement: {'; '.join(reasons)}"
    if plans[0].is_mfu_given:
        return "--mfu"
    return f"{NUM_STEPS} steps measured on one H200, each planned within {100 * TOLERANCE:g} %"


def _price(plan: Plan) -> dict[str, str]:
    price = plan.price
    if price is None:
        return {}
    rows = {"run": f"{price.run:,.2f}", "1,000 steps": f"{price.thousand_steps:,.2f}"}
    for name, lost in (("rewind", price.rewind_at_most), ("rollback", price.rollback_at_most)):
        if lost is not None:
            rows[name] = f"at most {lost:,.2f}"
    return rows


def _ring(plan: Plan) -> dict[str, str]:
    snapshots = _count(plan.ring_slots, "snapshot", "snapshots")
    rows = {"in host memory": f"{_si(plan.ring_bytes, 'B')} per machine: {snapshots} and the one being saved"}
    if plan.ring_replicas:
        partners = _count(plan.ring_replicas, "buffer", "buffers")
        rows["in host memory"] += f", {partners} for the snapshots of a partner on another machine"
    if plan.ring_allowed_bytes is not None:
        fits = plan.ring_bytes <= plan.ring_allowed_bytes
        refusal = "" if fits else "; TOO LITTLE, the run will not start"
        rows["allowed"] = f"{_si(plan.ring_allowed_bytes, 'B')} (checkpoint.ring.memory_gb){refusal}"
    return rows


def _lost(cost: RollbackCost, step_time_s: float | None) -> str:
    by_clock = ""
    if cost.minutes_at_most is not None and step_time_s is None:
        by_clock = f"{cost.minutes_at_most:g} minutes and {cost.steps_besides:,} steps"
    if cost.steps_at_most is None:
        return by_clock
    text = f"{cost.steps_at_most:,} steps (on average {cost.steps_on_average:,}), {cost.tokens_at_most:,} tokens"
    if step_time_s is not None:
        text += f", {_duration(cost.steps_at_most * step_time_s)}"
    return f"{text}; or {by_clock}, whichever is less" if by_clock else text


def _assumptions(plan: Plan) -> dict[str, str]:
    """Constants that the numbers are computed with."""
    rows = {"memory": f"{_gb(OUTSIDE_BYTES)} GB outside torch, and {100 * FRAGMENTED:g} % fragmentation"}
    if plan.pace is not None:
        if not plan.is_mfu_given:
            rows["compute"] = (
                f"GEMM at {_percent(RATES.gemm)} and attention at {_percent(RATES.attention)} of the bf16 rate at most,"
                f" {_percent(RATES.bandwidth)} of the memory's bandwidth"
            )
        if plan.fp8 is not None:
            rows["fp8"] = _fp8(plan.fp8)
        rows["communication"] = (
            f"rings at {100 * LINK_EFFICIENCY:g} % of the links' rates with NCCL's latencies, overlapped block by block"
        )
    return rows


def _fp8(fp8: Fp8) -> str:
    if fp8.engine == Fp8Engine.emulated:
        return "the emulated engine is slower than bf16 (not measured); compute is planned as in bf16"
    assert fp8.peak_tflops is not None, "a step time needs the rate of the device"
    return (
        f"{_percent(fp8.flops_share)} of the FLOPs, at most at {_percent(RATES.fp8_gemm)} of {fp8.peak_tflops:,.0f} "
        "TFLOP/s; MFU is a share of the bf16 rate"
    )


def _text(sections: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {name:<{WIDTH}}{value}" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _gb(num_bytes: float) -> str:
    size = num_bytes / 1e9
    return f"{size:,.1f}" if size >= 10 else f"{size:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _si(value: float, unit: str) -> str:
    """A quantity with an SI prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
