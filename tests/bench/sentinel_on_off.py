"""The picture of the README: the same injected faults with the sentinel on and off, and a run without faults.

    python -m tests.bench.sentinel_on_off --picture docs/sentinel-on-off.png

Three runs of the same small model on the same batches, with two gloo ranks each: without faults; with all faults and
the default sentinel; with all faults and `sentinel=observe`, which reports findings and takes no action. Prints the
final loss of each run. About a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.core.event_json import read
from harness.core.events import Action, ActionKind, StepRecord
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord, gather
from harness.faults.fault_plan import Fault, FaultKind, FaultPlan
from launch.drills.fault_environment import FaultEnvironment
from launch.drills.runner import train_victim

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_STEPS = 240
FAULTS = {
    "gradient x 10,000\non one rank": Fault(
        kind=FaultKind.big_grad, at=60, rank=-1, layer="blocks.1", factor=1e4, duration=1
    ),
    "learning rate x 100\nfor 3 steps": Fault(kind=FaultKind.lr_spike, at=110, duration=3, factor=100),
    "bit flip\nin a weight": Fault(kind=FaultKind.bit_flip_weight, at=170, rank=-1, layer="blocks.1.mlp.up", bit=30),
}
CLEAN, ON, OFF = "no faults", "faults, sentinel on", "faults, sentinel off"
OVERRIDES = {CLEAN: "sentinel=default", ON: "sentinel=default", OFF: "sentinel=observe"}
COLORS = {CLEAN: "#24292f", ON: "#2563a8", OFF: "#c8322b"}
LIMIT_S = 600.0
SMOOTHING = 0.7
INK, GRID = "#24292f", "#e6e8eb"


class Curve(NamedTuple):
    steps: list[int]
    """Progress in steps of the run; a step that was repeated after a rewind replaces the first one."""
    losses: list[float]
    actions: list[str]
    exit_code: int


def train(label: str, directory: Path) -> Curve:
    """Train one of the three runs and read its event log."""
    base = scenario.load_scenario("lr_spike")
    overrides = [f"train.num_steps={NUM_STEPS}", f"run.dir={directory}", OVERRIDES[label]]
    cfg = directories.configure(base.train, overrides)
    run = RunDir(directory / label.replace(", ", "-").replace(" ", "-"))
    directories.create_directory(cfg, run)
    plan = FaultPlan(seed=0, faults=[] if label == CLEAN else list(FAULTS.values()))
    DrillRecord(name=run.path.name, scenario=base, plan=plan, twin="").write(run)
    train_victim(FaultEnvironment(cfg=cfg), run, max_starts=1, limit_s=LIMIT_S, report=print)
    by_step: dict[int, float] = {}
    actions = []
    for event in read(run.events):
        if isinstance(event, StepRecord) and not event.refused:
            by_step[event.step] = event.loss
        elif isinstance(event, Action) and event.kind is not ActionKind.watch:
            actions.append(str(event.kind))
    code = gather(run).exit_code
    return Curve(list(by_step), list(by_step.values()), actions, -1 if code is None else code)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential moving average; a value that is not finite is a gap."""
    finite = (loss if math.isfinite(loss) else math.nan for loss in losses)
    return list(accumulate(finite, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss))


def draw(curves: dict[str, Curve], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6), dpi=150, layout="constrained", facecolor="white")
    axes: Axes = figure.subplots()
    for label, width in ((OFF, 1.6), (ON, 1.8), (CLEAN, 1.0)):
        curve = curves[label]
        style = (0, (2, 2)) if label == CLEAN else "-"
        axes.plot(
            curve.steps, smoothed(curve.losses), color=COLORS[label], linewidth=width, linestyle=style, label=label
        )
    top = axes.get_ylim()[1] * 1.12
    axes.set_ylim(top=top)
    for text, fault in FAULTS.items():
        axes.axvline(fault.at, color=GRID, linewidth=1.2, zorder=0)
        axes.text(fault.at + 2, top, text, va="top", fontsize=8, color=INK)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("training loss (nats)", color=INK)
    axes.set_xlim(0, NUM_STEPS)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.02, 0.82))
    figure.savefig(out, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sentinel_on_off", description=__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", required=True, help="where the PNG is written")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        curves = {label: train(label, Path(directory)) for label in (CLEAN, ON, OFF)}
    for label, curve in curves.items():
        print(f"{label}: last loss {curve.losses[-1]:.3f} at step {curve.steps[-1]}, ", end="")
        print(f"actions: {', '.join(curve.actions) or 'none'}; exit code {curve.exit_code}")
    draw(curves, options.picture)


if __name__ == "__main__":
    main()
