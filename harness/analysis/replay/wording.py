"""A replay in words, from the plain data that lies in the incident's folder."""

from __future__ import annotations

from statistics import median
from typing import Any

NATURES = {
    "transient": "transient: two replays agree with each other and not with the log, so it was in the machine",
    "deterministic": "deterministic: it comes again, with the same numbers",
    "irreproducible": "irreproducible: two replays of the same step differ, so nothing can be said of the log",
    "unknown": "not known: the replay had left the log before the guilty step",
}
CAUSES = {
    "data": "data: the batch stands out on an older state as well",
    "data x state": "data x state: on an older state the same batch does not stand out",
    "state": "state: the batch does not stand out among its neighbours, the weights are what is wrong",
    "unknown": "",
}
NUM_SAMPLES = 8


def render(replayed: dict[str, Any]) -> str:
    """Text for a terminal, and for the post-mortem."""
    lines = [
        f"step       iteration {replayed['iteration']}, batch {replayed['cursor']}",
        f"way        {_way(replayed)}",
        *(f"{name:<10} {_numbers(replayed[name])}" for name in ("logged", "first", "second")),
        f"verdict    {NATURES[replayed['nature']]}",
    ]
    if words := CAUSES[replayed["cause"]]:
        lines.append(f"cause      {words}")
    lines.append(f"batch      on the state of this step: {_standing(replayed['here'])}")
    if older := replayed["before"]:
        lines.append(f"batch      on an older state, {older['checkpoint']}: {_standing(older)}")
    lines += [f"rank {rank:<5} {_seen(seen)}" for rank, seen in replayed["seen"].items()]
    if replayed["samples"]:
        lines += ["", *_samples(replayed["samples"])]
    return "\n".join(lines) + "\n"


def _way(replayed: dict[str, Any]) -> str:
    steps = f"{replayed['num_on_the_way']} steps from {replayed['checkpoint']}"
    how = "bit for bit" if replayed["exactly"] else "to rounding"
    left = replayed["left_the_log_at"]
    return f"{steps}, as logged {how}" if left is None else f"{steps}, which leave the log at iteration {left}"


def _numbers(numbers: dict[str, Any]) -> str:
    return f"loss {float(numbers['loss']):.6g}, gradient norm {float(numbers['grad_norm']):.6g}"


def _standing(standing: dict[str, Any]) -> str:
    usual = f", its neighbours {median(map(float, standing['neighbours'])):.4g}" if standing["neighbours"] else ""
    return f"loss {float(standing['loss']):.4g}{usual}"


def _seen(seen: dict[str, Any]) -> str:
    parts = [
        f"weights of {seen['broken_weights']} are not finite" if seen["broken_weights"] else "",
        f"forward, {seen['forward']} is the first to give what is not finite" if seen["forward"] else "",
        f"backward, {seen['backward']} is the first" if seen["backward"] else "",
        f"{len(seen['gradients'])} gradients are not finite" if seen["gradients"] else "",
    ]
    return "; ".join(filter(None, parts))


def _samples(samples: list[dict[str, Any]]) -> list[str]:
    """The heaviest first."""
    usual = median(float(sample["grad_norm"]) for sample in samples) or 1.0
    heaviest = sorted(samples, key=lambda sample: -float(sample["grad_norm"]))[:NUM_SAMPLES]
    return [
        f"row {sample['row']:<4} loss {float(sample['loss']):.4g}, gradient norm {float(sample['grad_norm']):.4g}"
        f" ({float(sample['grad_norm']) / usual:.1f}x the median), {sample['source']}: {sample['file']},"
        f" documents {sample['first_document']} to {sample['last_document']}: {sample['text']!r}"
        for sample in heaviest
    ]
