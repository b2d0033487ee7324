"""Renders the result of a replay (`replay.json`) as text."""

from __future__ import annotations

from statistics import median
from typing import Any

NATURES = {
    "transient": "transient: two replays agree with each other but not with the log; suspect a hardware fault",
    "deterministic": "deterministic: the replay reproduces the logged step",
    "irreproducible": "irreproducible: two replays of the same step differ, so neither confirms the log",
    "unknown": "not known: the replay differs from the log before the guilty step",
}
CAUSES = {
    "data": "data: the batch also stands out on an older state",
    "data x state": "data x state: the batch does not stand out on an older state",
    "state": "state: the batch does not stand out among its neighbours, so the weights are bad",
    "none": "none: loss and gradient norm of the step are ordinary",
    "unknown": "",
}
NUM_SAMPLES = 8


def render(replayed: dict[str, Any]) -> str:
    """Text for the terminal and the post-mortem."""
    lines = [
        f"step       iteration {replayed['iteration']}, batch {replayed['cursor']}",
        f"replayed   {_path(replayed)}",
        *(f"{name:<10} {_numbers(replayed[name])}" for name in ("logged", "first", "second")),
        f"verdict    {NATURES[replayed['nature']]}",
    ]
    if cause := CAUSES[replayed["cause"]]:
        lines.append(f"cause      {cause}")
    lines.append(f"batch      on the state of this step: {_comparison(replayed['here'])}")
    if older := replayed["before"]:
        lines.append(f"batch      on an older state, {older['checkpoint']}: {_comparison(older)}")
    lines += [f"rank {rank:<5} {_seen(seen)}" for rank, seen in replayed["seen"].items()]
    if replayed.get("in_fp32"):
        lines.append(f"fp32       {_numbers(replayed['in_fp32'])}: {replayed['precision_verdict']}")
    lines += _measured(replayed.get("measured") or {})
    if replayed["samples"]:
        lines += ["", *_samples(replayed["samples"])]
    return "\n".join(lines) + "\n"


def _path(replayed: dict[str, Any]) -> str:
    steps = f"{replayed['num_on_the_way']} steps from {replayed['checkpoint']}"
    how = "bit for bit" if replayed["exactly"] else "within tolerance"
    left = replayed["left_the_log_at"]
    if left is None:
        return f"{steps}, equal to the log {how}"
    return f"{steps}; they differ from the log from iteration {left} on"


def _numbers(numbers: dict[str, Any]) -> str:
    return f"loss {float(numbers['loss']):.6g}, gradient norm {float(numbers['grad_norm']):.6g}"


def _comparison(batch: dict[str, Any]) -> str:
    usual = f", median of its neighbours {median(map(float, batch['neighbours'])):.4g}" if batch["neighbours"] else ""
    return f"loss {float(batch['loss']):.4g}{usual}"


def _seen(seen: dict[str, Any]) -> str:
    parts = [
        f"non-finite weights in {seen['broken_weights']}" if seen["broken_weights"] else "",
        f"first non-finite output in forward: {_spread(seen)}" if seen["forward"] else "",
        f"first non-finite gradient in backward: {seen['backward']}" if seen["backward"] else "",
        f"{len(seen['gradients'])} parameters with a non-finite gradient" if seen["gradients"] else "",
    ]
    return "; ".join(filter(None, parts))


def _spread(seen: dict[str, Any]) -> str:
    """The origin, and the next operation that its value reached."""
    path = seen.get("path") or [seen["forward"]]
    return " -> ".join(path[:2])


def _measured(measured: dict[str, Any]) -> list[str]:
    """The activations in order, and the tokens with the highest losses."""
    activations = [
        f"{point['point']} {float(point['rms']):.3g} (amax {float(point['amax']):.3g})"
        for point in measured.get("activations", [])
        if point["point"].count(".") < 2  # the residual stream; attention and MLP are in the file
    ]
    tokens = [
        f"{token['token']} {float(token['loss']):.3g} (row {token['row']}, position {token['position']})"
        for token in measured.get("worst_tokens", [])[:NUM_SAMPLES]
    ]
    lines = [f"activation {', '.join(activations)}"] if activations else []
    return [*lines, f"tokens     highest losses: {', '.join(tokens)}"] if tokens else lines


def _samples(samples: list[dict[str, Any]]) -> list[str]:
    """The samples with the largest gradient norms, largest first."""
    usual = median(float(sample["grad_norm"]) for sample in samples) or 1.0
    largest = sorted(samples, key=lambda sample: -float(sample["grad_norm"]))[:NUM_SAMPLES]
    return [
        f"row {sample['row']:<4} loss {float(sample['loss']):.4g}, gradient norm {float(sample['grad_norm']):.4g}"
        f" ({float(sample['grad_norm']) / usual:.1f}x the median), {sample['source']}: {sample['file']},"
        f" documents {sample['first_document']} to {sample['last_document']}: {sample['text']!r}"
        for sample in largest
    ]
