"""How good the detectors are: real training logs with labels, our rules beside published ones.

    python -m tests.bench.curves [--curves DIR] [--perturb] [--each]

Reads public logs that are not part of this repository: `../shared/curves` beside the checkout, or DIR. Labels name
loss spikes (onset, end) and the class of a run. A spike counts as found when an alarm falls between ten rows before its
onset and ten rows after its end; rows farther than that (fifty after the end) from any spike are clean. Alarms closer
than twelve rows are one. Published rules are written again from their descriptions:
- OLMo-core: six standard deviations above the mean of the last 128, loss or gradient norm, from 64 values on.
- llm.c: z-score of seven within a window of 128 that holds the value itself.
- llm-foundry: twice the mean of the last 100, five times in a row.
- Megatron-LM: ten times the largest of the first 100.
- ZClip: gradient norm 2.5 standard deviations above its exponential mean; a clip counts as an alarm.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from argparse import ArgumentParser
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from harness.config import DetectConfig
from harness.events import FindingKind
from harness.sentinel.baseline import FLOATS, advance, begin, beyond, gate_bounds
from harness.sentinel.detectors import Detectors
from harness.sentinel.foreign import empty_record
from launch.judge import detect_config

CURVES = Path(__file__).resolve().parents[3] / "shared" / "curves"
GROUPS = {"noisy-benign": "single rank", "datashift": "data shift", "nan": "nan"}
"""Class of a run -> where its false alarms are counted."""
BEFORE_ROWS, AFTER_ROWS, CLEAN_AFTER_ROWS, SAME_ROWS, LEAST_ROWS = 10, 10, 50, 12, 100


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """Empty where the log has none."""
    spikes: tuple[tuple[int, int], ...]
    """Onset and end, in steps."""
    kind: str


@dataclass(slots=True)
class Score:
    spikes: int = 0
    latencies: list[int] = field(default_factory=list)
    """Steps from onset to alarm, of the spikes that were found."""
    false_alarms: Counter[str] = field(default_factory=Counter)
    clean_rows: Counter[str] = field(default_factory=Counter)


Rule = Callable[[Curve], Iterator[int]]
"""Places of the rows that raise an alarm."""


def load(folder: Path) -> list[Curve]:
    """All labelled logs that are long enough to learn from."""
    labels = json.loads((folder / "labels.json").read_text())
    return [curve for name, label in labels.items() if len((curve := read(folder, name, label)).steps) >= LEAST_ROWS]


def read(folder: Path, name: str, label: dict[str, Any]) -> Curve:
    with (folder / f"{name}.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    spikes = tuple((spike["onset"], spike.get("end", spike["onset"])) for spike in label.get("loss_spikes", []))
    return Curve(
        name,
        tuple(int(float(row["step"])) for row in rows),
        tuple(float(row["loss"]) for row in rows),
        tuple(float(row["grad_norm"]) for row in rows) if "grad_norm" in rows[0] else (),
        spikes,
        GROUPS.get(label["class"], "clean"),
    )


def ours(curve: Curve, cfg: DetectConfig) -> Iterator[int]:
    record, detectors = empty_record(), Detectors(cfg)
    for place, (step, loss) in enumerate(zip(curve.steps, curve.losses, strict=True)):
        record.step = record.iteration = step
        record.loss, record.grad_norm = loss, curve.grad_norms[place] if curve.grad_norms else 0.0
        if any(finding.kind is not FindingKind.grad_spike for finding in detectors.observe(record)):
            yield place


def gate(curve: Curve, cfg: DetectConfig) -> Iterator[int]:
    """Rows whose update the gate would refuse; what it refuses it does not learn from."""
    loss_state, grad_state = begin(), begin()
    for place, loss in enumerate(curve.losses):
        grad_norm = curve.grad_norms[place] if curve.grad_norms else 1.0
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        refused = not finite or beyond(loss, grad_norm, gate_bounds(loss_state, grad_state, cfg, FLOATS))
        loss_state = advance(loss_state, loss, not refused, cfg, FLOATS)
        grad_state = advance(grad_state, grad_norm, not refused, cfg, FLOATS)
        if refused:
            yield place


def olmo(curve: Curve) -> Iterator[int]:
    losses: deque[float] = deque(maxlen=128)
    norms: deque[float] = deque(maxlen=128)
    for place, loss in enumerate(curve.losses):
        pairs = [(losses, loss)] + ([(norms, curve.grad_norms[place])] if curve.grad_norms else [])
        if any(len(past) >= 64 and value > _mean(past) + 6 * _deviation(past) for past, value in pairs):
            yield place
        for past, value in pairs:
            past.append(value)


def llmc(curve: Curve) -> Iterator[int]:
    losses: deque[float] = deque(maxlen=128)
    for place, loss in enumerate(curve.losses):
        losses.append(loss)
        if len(losses) == 128 and loss - _mean(losses) > 7 * _deviation(losses) > 0:
            yield place


def foundry(curve: Curve) -> Iterator[int]:
    past: deque[float] = deque(maxlen=100)
    in_row = 0
    for place, loss in enumerate(curve.losses):
        in_row = in_row + 1 if len(past) == 100 and loss > 2 * _mean(past) else 0
        past.append(loss)
        if in_row >= 5:
            yield place


def megatron(curve: Curve) -> Iterator[int]:
    limit = 10 * max(curve.losses[:100])
    yield from (place for place, loss in enumerate(curve.losses) if place >= 100 and loss > limit)


def zclip(curve: Curve) -> Iterator[int]:
    mean = variance = 0.0
    for place, norm in enumerate(curve.grad_norms):
        if place < 25:
            mean += (norm - mean) / (place + 1)
            variance += ((norm - mean) ** 2 - variance) / (place + 1)
            continue
        z = (norm - mean) / (math.sqrt(variance) + 1e-6)
        if z > 2.5:
            yield place
            norm = mean + 2.5 * 2.5 / z * math.sqrt(variance)
        mean, variance = 0.97 * mean + 0.03 * norm, 0.97 * variance + 0.03 * (norm - mean) ** 2


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: Sequence[float] | deque[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def score(curves: Sequence[Curve], rule: Rule, *, each: bool = False) -> Score:
    total = Score()
    for curve in curves:
        steps = [curve.steps[place] for place in alarms(rule(curve))]
        interval = statistics.median(later - earlier for earlier, later in pairwise(curve.steps))
        before, after, clean_after = (rows * interval for rows in (BEFORE_ROWS, AFTER_ROWS, CLEAN_AFTER_ROWS))
        first = [next((at for at in steps if onset - before <= at <= end + after), None) for onset, end in curve.spikes]
        total.spikes += len(first)
        total.latencies += [at - onset for at, (onset, _) in zip(first, curve.spikes, strict=True) if at is not None]
        clean = {
            step
            for step in curve.steps
            if not any(onset - before <= step <= end + clean_after for onset, end in curve.spikes)
        }
        false = [at for at in steps if at in clean]
        total.false_alarms[curve.kind] += len(false)
        total.clean_rows[curve.kind] += len(clean)
        if each:
            print(f"  {curve.name}: found {first} of {[onset for onset, _ in curve.spikes]}, false {false}")
    return total


def alarms(places: Iterator[int]) -> list[int]:
    """First rows of episodes."""
    out: list[int] = []
    last = -SAME_ROWS - 1
    for place in places:
        if place - last > SAME_ROWS:
            out.append(place)
        last = place
    return out


def perturbed(curve: Curve, how: str) -> Curve:
    """The same log, otherwise noisy, logged or begun."""
    random = Random(curve.name)
    levels = smooth(curve.losses)
    match how.split():
        case ["noise", factor]:
            scaled = zip(curve.losses, levels, strict=True)
            return replace(curve, losses=tuple(level * (loss / level) ** float(factor) for loss, level in scaled))
        case ["extra", sigma]:
            return replace(curve, losses=tuple(loss * math.exp(random.gauss(0, float(sigma))) for loss in curve.losses))
        case ["every", num]:
            return _picked(curve, slice(0, None, int(num)))
        case ["cut", num]:
            kept = _picked(curve, slice(int(num) if len(curve.steps) > 1000 else 0, None))
            return replace(kept, spikes=tuple(spike for spike in kept.spikes if spike[0] > kept.steps[20]))
        case ["drift", slope]:
            grown = enumerate(curve.losses)
            return replace(curve, losses=tuple(loss * math.exp(float(slope) * place) for place, loss in grown))
        case _:
            return curve


PERTURBATIONS = (
    *("as it is", "noise 0.5", "noise 2", "extra 0.01", "every 2", "every 5", "every 10"),
    *("cut 300", "cut 550", "drift 0.00005"),
)


@cache
def smooth(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Running median over 31 rows."""
    return tuple(statistics.median(losses[max(0, place - 15) : place + 16]) for place in range(len(losses)))


def _picked(curve: Curve, rows: slice) -> Curve:
    return replace(curve, steps=curve.steps[rows], losses=curve.losses[rows], grad_norms=curve.grad_norms[rows])


def line(name: str, total: Score) -> str:
    kinds = ("clean", "single rank", "data shift")
    rates = [f"{1e4 * total.false_alarms[kind] / max(1, total.clean_rows[kind]):.2f}" for kind in kinds]
    latency = f"{statistics.median(total.latencies):.1f}" if total.latencies else "-"
    nan = "yes" if total.false_alarms["nan"] else "no"
    return HEAD.format(name, f"{len(total.latencies)} / {total.spikes}", latency, *rates, nan)


HEAD = "{:16s} {:>9s} {:>8s} {:>8s} {:>12s} {:>11s} {:>5s}"


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--perturb", action="store_true", help="our rule on noisier, sparser, shorter logs")
    parser.add_argument("--each", action="store_true", help="every log by itself")
    words = parser.parse_args()
    if not (words.curves / "labels.json").is_file():
        print(f"no curves: {words.curves} does not exist; nothing measured")
        return
    curves, cfg = load(words.curves), detect_config([])
    print("alarms in 10,000 clean rows of: all batches | one rank's loss | data that shifts; latency in steps")
    print(HEAD.format("rule", "spikes", "latency", "clean", "single rank", "data shift", "NaN"))
    rules: dict[str, Rule] = {
        "ours": lambda curve: ours(curve, cfg),
        "our gate": lambda curve: gate(curve, cfg),
        "OLMo-core": olmo,
        "OLMo-core, loss": lambda curve: olmo(replace(curve, grad_norms=())),
        "llm.c": llmc,
        "llm-foundry": foundry,
        "Megatron-LM": megatron,
        "ZClip": zclip,
    }
    for name, rule in rules.items():
        print(line(name, score(curves, rule, each=words.each and name == "ours")))
    if words.perturb:
        for how in PERTURBATIONS:
            finite = [perturbed(curve, how) for curve in curves if curve.kind != "nan"]
            print(line(how, score(finite, rules["ours"])))


if __name__ == "__main__":
    main()
