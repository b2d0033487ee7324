"""Early signs: how long before harm a precursor is raised, false ones on clean steps, and the cost of a probe.

    python -m tests.bench.precursor                              all three, one rank, small models
    python -m tests.bench.precursor --only clean --runs 60       more clean runs
    python -m tests.bench.precursor --only cost +experiment=1b_bf16      1.26B parameters, 4k x 8 tokens, on a GPU

*drills*: runs that degrade slowly, with faults of `harness.faults`. Detectors only watch; no action is taken. The lead
is counted from the first precursor to the first harm: a finding about the loss, or a rejected update. Where no harm
follows, the steps until the signal passed its bound are given instead; they are no lead.
*clean*: runs without a fault, with different seeds, schedules, depths and learning rates; every precursor is a false
one. Runs in which the loss itself has a finding or an update is rejected after step 100 are counted apart, because they
are not known to be clean.
*cost*: blocks in which every step is probed alternate with blocks in which none is, in one run. One probe in
`sentinel.probe_every` steps costs that much less.
The thresholds of the detector were chosen on seed 0 of the drills and on seven clean runs with seeds below 100. Neither
is used here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from harness.build import Parts, build
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.events import Finding, FindingKind, StepRecord
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.world import connect, disconnect
from harness.faults.fault_plan import Fault, FaultKind
from harness.faults.injectors import make_injector
from harness.faults.site import Site
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.step import finish_step, forward_backward
from tests.bench.paired_steps import measure_paired
from tests.bench.sentinel import SentinelSteps

PARTS = ("drills", "clean", "cost")
QUIET = (
    *("checkpoint.every_steps=0", "checkpoint.ring.slots=0", "sentinel.sdc.every=0", "telemetry=plain"),
    *("eval.every_steps=0", "parallel.device=cpu"),
)
SMALL = (
    *("model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "train.sequence_length=32"),
    *("optim.warmup_steps=20", "model.dim=16", "model.ffn_dim=32", "train.batch_size=4"),
)
DRILLED = (*SMALL, "model.dim=32", "model.ffn_dim=48", "train.batch_size=8", "optim.schedule=constant")
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("optim.schedule=constant",),
    ("model.num_layers=1", "optim.lr=0.01"),
    ("optim.beta2=0.99", "optim.schedule=wsd", "optim.decay_steps=300"),
)
"""Clean runs take them in turn."""
FIRST_CLEAN_SEED = 100
FAULT_AT = 100
HARM = frozenset({FindingKind.loss_spike, FindingKind.divergence, FindingKind.level_shift, FindingKind.nonfinite})


class Drill(NamedTuple):
    fault: Fault
    num_steps: int
    overrides: tuple[str, ...] = ()


DRILLS = {
    "logit_growth": Drill(
        Fault(kind=FaultKind.logit_growth, at=FAULT_AT, duration=250, layer="blocks.1.attention", factor=1.02), 350
    ),
    "rising_lr": Drill(Fault(kind=FaultKind.lr_spike, at=FAULT_AT, duration=300, factor=1.03, growth=1.03), 400),
    "gradient_growth": Drill(
        Fault(kind=FaultKind.big_grad, at=FAULT_AT, duration=200, layer="head", factor=1.03, growth=1.03),
        300,
        ("optim.beta2=0.999", "optim.clip_norm=null"),
    ),
    "fp8_creep": Drill(
        Fault(kind=FaultKind.fp8_outlier, at=FAULT_AT, duration=100, layer="blocks.1.mlp", factor=64, growth=1.08),
        200,
        ("precision=fp8_emulated", "train.sequence_length=16", "train.batch_size=4"),
    ),
}


class Watched(NamedTuple):
    """A run whose detectors only watch."""

    records: list[StepRecord]
    findings: list[Finding]

    @property
    def precursors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind is FindingKind.precursor]

    @property
    def harm(self) -> int | None:
        """Iteration of the first finding about the loss or of the first rejected update, after the start."""
        found = [finding.iteration for finding in self.findings if finding.kind in HARM]
        rejected = [record.iteration for record in self.records if record.refused]
        return min((each for each in (*found, *rejected) if each > FAULT_AT), default=None)

    def crossing(self, finding: Finding) -> int | None:
        """Iteration of the first probe at which the signal of a precursor passed its bound."""
        for record in self.records:
            values = {**record.attention_logits} if finding.bound > 1 else {**record.fp8_underflow}
            if any(values.get(group, 0.0) > finding.bound for group in finding.groups):
                return record.iteration
        return None


def watch(cfg: Config, fault: Fault | None = None) -> Watched:
    """Train in this process and run the detectors on every record."""
    with tempfile.TemporaryDirectory() as directory:
        world, root = connect(cfg.parallel), RunDir(Path(directory))
        with closing(build(cfg, world, root)) as parts:
            records = list(train(cfg, parts, root, fault))
        disconnect()
    detectors, findings = Detectors(cfg.sentinel.detect), list[Finding]()
    for record in records:
        findings += detectors.observe(record)
    return Watched(records, findings)


def train(cfg: Config, parts: Parts, root: RunDir, fault: Fault | None) -> Iterator[StepRecord]:
    state = RunState()
    run: Any = SimpleNamespace(parts=parts, state=state, directory=root, cfg=cfg)
    injector = None
    if fault is not None:
        injector = make_injector(Site(run=run, fault=fault, number=0, seed=cfg.run.seed, struck=frozenset()))
    for iteration in range(1, cfg.train.num_steps + 1):
        probe = (iteration - 1) % cfg.sentinel.probe_every == 0
        if injector is not None:
            injector.before(iteration)
        forward_backward(parts, parts.batches[iteration - 1], cfg=cfg, probe=probe)
        parts.signals.add_host_facts(decision=0, busy_s=0.0)
        report = finish_step(parts, cfg=cfg, probe=probe)
        state.iteration = iteration
        if injector is not None:
            injector.after(iteration)
        facts = HostFacts(
            iteration=iteration,
            cursor=iteration - 1,
            tokens=0,
            probed=probe,
            posted_s=0.0,
            memory_bytes=0,
            batch={},
            in_fp8=parts.fp8_layers.in_fp8,
        )
        record = unpack_report(
            parts.signals.layout,
            facts,
            report,
            dim=cfg.model.dim,
            dynamic_scale=False,
            clip_norm=cfg.optim.clip_norm,
            replicate=parts.world.replicate,
        )
        record.beta2 = cfg.optim.beta2 if probe else None
        yield record


def report_drills(seeds: Sequence[int], names: Sequence[str]) -> None:
    leads: list[int] = []
    for name in names:
        drill = DRILLS[name]
        for seed in seeds:
            overrides = [*QUIET, *DRILLED, *drill.overrides, f"train.num_steps={drill.num_steps}", f"run.seed={seed}"]
            seen = watch(load(overrides), drill.fault)
            after = [each for each in seen.precursors if each.iteration >= FAULT_AT]
            first, harm = after[0] if after else None, seen.harm
            early = len(seen.precursors) - len(after)
            if first is not None and harm is not None:
                leads.append(harm - first.iteration)
                outcome = f"harm at {harm}: lead {leads[-1]}"
            else:
                crossing = None if first is None else seen.crossing(first)
                margin = (
                    "" if crossing is None or first is None else f"; bound passed {crossing - first.iteration} later"
                )
                outcome = f"harm {'never' if harm is None else f'at {harm}'}{margin}"
            found = "no precursor" if first is None else f"precursor at {first.iteration} ({first.message})"
            others = sorted({str(each.kind) for each in seen.findings} - {"precursor"})
            print(f"{name}, seed {seed}: {found}; {outcome}; before the fault {early}; others {others}", flush=True)
    if leads:
        print(
            f"lead before harm: median {statistics.median(leads):g} of {len(leads)} runs, {min(leads)} to {max(leads)}"
        )


def report_clean(num_runs: int, num_steps: int, overrides: Sequence[str]) -> None:
    num_clean = num_false = num_other = 0
    for number in range(num_runs):
        seed = FIRST_CLEAN_SEED + number
        variant = VARIANTS[number % len(VARIANTS)]
        seen = watch(load([*QUIET, *SMALL, *variant, *overrides, f"train.num_steps={num_steps}", f"run.seed={seed}"]))
        for finding in seen.precursors:
            print(f"  seed {seed} {variant}, iteration {finding.iteration}: {finding.message}", flush=True)
        if seen.harm is None:
            num_clean, num_false = num_clean + num_steps, num_false + len(seen.precursors)
        else:
            num_other += num_steps
            print(f"  seed {seed} {variant}: harm at {seen.harm}, {len(seen.precursors)} precursors; not counted")
        print(f"  {num_false} false precursors in {num_clean} clean steps, {num_other} others", flush=True)


def measure_cost(overrides: list[str], *, rounds: int, num_steps: int) -> None:
    """Blocks of probed and unprobed steps in one run, with one rank."""
    cfg = load([*overrides, "checkpoint.every_steps=0", "checkpoint.ring.slots=0", "sentinel.sdc.every=0"])

    def make_side(steps: SentinelSteps, is_probed: bool) -> SentinelSteps:
        every = 1 if is_probed else 10**9
        return replace(steps, cfg=replace(cfg, sentinel=replace(cfg.sentinel, probe_every=every)))

    blocks = measure_paired(cfg, make_side, rounds=rounds, num_steps=num_steps)
    print(blocks.render_cost("probe", "probed", every=cfg.sentinel.probe_every))


def main() -> None:
    parser = argparse.ArgumentParser(description="Precursors: lead before harm, false alarms, cost of a probe.")
    parser.add_argument("overrides", nargs="*", default=[], help="Hydra overrides of the clean runs and of the cost")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--drills", nargs="+", choices=list(DRILLS), default=list(DRILLS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the drills")
    parser.add_argument("--runs", type=int, default=10, help="clean runs")
    parser.add_argument("--steps", type=int, default=1500, help="steps of a clean run")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of blocks for the cost")
    parser.add_argument("--block-steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    if "drills" in options.only:
        torch.set_num_threads(1)
        report_drills(options.seeds, options.drills)
    if "clean" in options.only:
        torch.set_num_threads(1)
        report_clean(options.runs, options.steps, options.overrides)
    if "cost" in options.only:
        measure_cost(options.overrides, rounds=options.rounds, num_steps=options.block_steps)


if __name__ == "__main__":
    main()
