"""Silent data corruption: how soon a corrupting rank is found, false alarms on clean steps, and the cost of the checks.

    python -m tests.bench.corruption                                        all three, 2 gloo ranks, a small model
    python -m tests.bench.corruption --only clean --steps 100000            more clean steps
    python -m tests.bench.corruption --only clean --steps 60000 --from-step 40000    those that an earlier call left
    python -m tests.bench.corruption --only cost +experiment=1b_bf16        1.26B parameters, 4k x 8 tokens, on a GPU
    python -m tests.bench.corruption --only seeds clean --steps 2000 precision=bf16 parallel.device=cuda \\
        launch.ranks_per_gpu=2                                              2 NCCL ranks that share a GPU

*seeds*: each seed draws a rank, a layer, a tensor (activation, weight as it is read, gradient), a low bit of the
mantissa, an iteration, and whether the error hits another value each time or always the same one. From that iteration
on the bit is wrong in every pass of the rank. Counted are the steps until a check names the rank, at most `--every` x
ranks. With two ranks an error that a rank repeats names both. A single low bit is the smallest error there is. Rounding
hides it in some steps, more often in bf16. A seed that is not found in time is computed with and without the error, to
count the steps in which any bit of an output or gradient differs; if there is none, the seed is not counted.
*clean*: every step is checked, on own rows and on those of another rank in turn.
*cost*: blocks of steps that are all checked alternate with blocks that are not, in one run with one rank. One check in
`sentinel.sdc.every` steps costs that much less.
The steps are those of the training loop: forward and backward passes, one all-reduce, gate and update. Overrides change
the small model of *seeds* and *clean*, or the model of *cost*.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from harness.config.compose import load
from harness.distributed.bit_digests import Computation
from harness.distributed.collectives import all_reduce_sum
from harness.distributed.determinism import deterministic_algorithms
from harness.faults.fault_plan import Fault, FaultKind
from harness.faults.injectors import make_injector
from harness.faults.site import Site
from harness.recomputation import choose_distance, compare_computations, discarding
from harness.run import Run
from harness.sentinel.device.slots import find_corrupted
from harness.step import differentiate, finish_step, forward_backward
from tests.bench.paired_steps import measure_paired
from tests.bench.sentinel import SentinelSteps
from tests.distributed.drill_cases import inspect_run_with
from tests.distributed.pool import Pool

PARTS = ("seeds", "clean", "cost")
SMALL = ("model.dim=16", "model.ffn_dim=32", "train.sequence_length=16", "train.batch_size=4", "run.deterministic=true")
KINDS = (FaultKind.bit_flip_activation, FaultKind.bit_flip_read, FaultKind.bit_flip_backward)
LAYERS = {
    FaultKind.bit_flip_activation: ("blocks.{}.attention", "blocks.{}.mlp", "blocks.{}", "blocks.{}.mlp_norm"),
    FaultKind.bit_flip_read: ("blocks.{}.attention.query", "blocks.{}.mlp.gate", "blocks.{}.mlp.down"),
    FaultKind.bit_flip_backward: ("blocks.{}",),
}
MANTISSA_BITS = range(12)
"""Low bits of an fp32 value; in bf16 its lowest bit."""
PATIENCE = 10
"""Multiple of the goal after which a seed is given up."""
CASE_LIMIT_S = 36_000
CLEAN_STEPS = 5_000
"""Of a run with a seed of its own, after which the false alarms so far are printed."""


class Found(NamedTuple):
    """How one seed was found."""

    fault: Fault
    steps: int | None
    """From the first strike to the check that names the rank, both included; None: not found."""
    ranks: list[int]
    stage: str
    num_effects: int = 0
    """If it was not found in time: in how many of `--every` x ranks further steps it changed any output or gradient."""

    @property
    def is_right_layer(self) -> bool:
        block = ".".join(self.fault.layer.split(".")[:2])
        return self.stage.endswith(block)


class CheckedStep(NamedTuple):
    """What one step reported."""

    codes: torch.Tensor
    """1 + the first stage that differs, of each rank; on the device."""


def step(run: Run, distance: int | None, *, probe: bool = False) -> CheckedStep:
    """One step of the loop, computed twice if a distance is given."""
    parts, cfg = run.parts, run.cfg
    forward_backward(parts, parts.batches[run.state.iteration], cfg=cfg, probe=probe, recompute=distance)
    report = finish_step(parts, cfg=cfg, probe=probe)
    run.state.iteration += 1
    return CheckedStep(parts.signals.layout.slot(report[: parts.signals.layout.size], "corruption"))


def draw_fault(seed: int, *, num_ranks: int, num_layers: int, first: int, duration: int) -> Fault:
    """The fault of one seed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    return Fault(
        kind=kind,
        at=first,
        duration=duration,
        rank=rng.randrange(num_ranks),
        layer=rng.choice(LAYERS[kind]).format(rng.randrange(num_layers)),
        bit=rng.choice(MANTISSA_BITS),
        is_stuck=num_ranks > 1 and rng.random() < 0.5,
    )


def find_seeds(run: Run, num_seeds: int, every: int) -> list[Found]:
    """Inject the fault of each seed and count the steps until it is found."""
    world, found = run.parts.world, list[Found]()
    limit = every * world.size
    for seed in range(num_seeds):
        offset = random.Random(-1 - seed).randrange(2 * limit)
        for _ in range(offset % every):
            run.state.iteration += 1  # the fault begins anywhere between two checks
        first = run.state.iteration + 1
        fault = draw_fault(
            seed,
            num_ranks=world.size,
            num_layers=run.cfg.model.num_layers,
            first=first,
            duration=(PATIENCE + 2) * limit,
        )
        injector = make_injector(Site(run=run, fault=fault, number=seed, seed=seed, struck=frozenset()))
        found.append(find_fault(run, injector, fault, every=every, limit=limit))
        injector.before(sys.maxsize)  # it strikes no more
        injector.after(sys.maxsize)
    return found


def find_fault(run: Run, injector: Any, fault: Fault, *, every: int, limit: int) -> Found:
    """Run steps until a check names the rank of the fault, at most `PATIENCE` times `limit`."""
    num_ranks, layout, num_effects = run.parts.world.size, run.parts.signals.layout, 0
    for number in range(1, PATIENCE * limit + 1):
        if number == limit + 1:
            num_effects = sum(has_effect(run, injector) for _ in range(limit))
            if not num_effects:
                break
        iteration = run.state.iteration
        injector.before(iteration + 1)
        distance = choose_distance(iteration, every=every, is_repeating=False, num_ranks=num_ranks)
        codes = step(run, distance).codes.cpu()
        if distance is not None and codes.any():
            ranks = find_corrupted(codes.numpy(), distance=distance)
            if fault.rank in ranks:
                stage, _ = layout.describe_stage(int(codes[codes > 0].min()) - 1)
                return Found(fault, number, ranks, stage, num_effects)
    return Found(fault, None, [], "", num_effects)


def has_effect(run: Run, injector: Any) -> bool:
    """Compute a batch without and with the fault, and apply no update: whether any output or gradient differs."""
    parts, cfg = run.parts, run.cfg
    digests, rows = parts.comm_stats.digests, parts.batches[run.state.iteration].micro_batches(None)[0]
    assert digests is not None
    seed = parts.loss_scale.value / (cfg.train.batch_size * cfg.train.sequence_length)
    for computation in (Computation.again, Computation.step):
        injector.before(run.state.iteration + 1 if computation is Computation.step else sys.maxsize)
        with discarding(parts), digests.recording(computation):
            differentiate(parts, rows, seed=seed, probe=False, digests=digests)
    run.state.iteration += 1
    return bool(all_reduce_sum(compare_computations(digests, 0)))


def count_false_alarms(run: Run, num_steps: int) -> int:
    """Clean steps that are all computed twice: how many differ."""
    num_ranks, device = run.parts.world.size, run.parts.world.device
    alarms = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(num_steps):
        distance = choose_distance(number, every=1, is_repeating=False, num_ranks=num_ranks)
        alarms += (step(run, distance, probe=number % 10 == 0).codes > 0).any()
    return int(alarms)


def report_seeds(found: list[Found], *, every: int, num_ranks: int) -> None:
    limit = every * num_ranks
    harmless = [each for each in found if each.steps is None and not each.num_effects]
    counted = [each for each in found if each not in harmless]
    in_time = [each for each in counted if each.steps is not None and each.steps <= limit]
    steps = [each.steps for each in counted if each.steps is not None]
    named = [each for each in counted if each.steps is not None]
    alone = sum(each.ranks == [each.fault.rank] for each in named)
    print(f"permanent corruption: {len(in_time)} of {len(counted)} seeds found within {limit} steps")
    print(f"  a check every {every} steps, {num_ranks} ranks, {len(found)} seeds drawn")
    print(f"  in {len(harmless)} seeds no bit of any output or gradient differs: rounding hides the error; not counted")
    print(f"  steps until found: median {statistics.median(steps):g}, most {max(steps)}")
    print(f"  the rank alone was named in {alone}, with one other in {len(named) - alone}")
    print(f"  the layer was named in {sum(each.is_right_layer for each in named)}")
    for kind in KINDS:
        for is_stuck in (False, True):
            own = [each for each in counted if (each.fault.kind, each.fault.is_stuck) == (kind, is_stuck)]
            place = "the same value" if is_stuck else "another value"
            print(f"  {kind}, {place} each time: {sum(each in in_time for each in own)} of {len(own)}")
    for each in counted:
        if each not in in_time:
            when = "never" if each.steps is None else f"after {each.steps} steps"
            print(f"  found {when}; rounding hides it in all but {each.num_effects} of {limit} steps: {each.fault}")


def measure_cost(overrides: list[str], *, rounds: int, num_steps: int) -> None:
    """Blocks of checked and unchecked steps in one run, with one rank."""
    cfg = load([*overrides, "run.deterministic=true", "checkpoint.every_steps=0", "checkpoint.ring.slots=0"])

    def make_side(steps: SentinelSteps, is_checked: bool) -> SentinelSteps:
        return replace(steps, recompute=0 if is_checked else None)

    with deterministic_algorithms(enabled=True):
        blocks = measure_paired(cfg, make_side, rounds=rounds, num_steps=num_steps)
    checked, plain = (max(block[side].peak_bytes for block in blocks.rounds) / 2**30 for side in (0, 1))
    print(blocks.render_cost("check", "checked", every=cfg.sentinel.sdc.every or 128))
    print(f"  peak GiB {plain:.2f}, checked {checked:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Find silent data corruption: latency, false alarms, cost.")
    parser.add_argument("overrides", nargs="*", default=[], help="Hydra overrides")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=100, help="permanent faults")
    parser.add_argument("--every", type=int, default=8, help="steps between checks while seeds are searched for")
    parser.add_argument("--steps", type=int, default=2000, help="clean steps")
    parser.add_argument("--from-step", type=int, default=0, help="clean steps that earlier calls have done")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of blocks for the cost")
    parser.add_argument("--block-steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    small = (*SMALL, *options.overrides)
    with tempfile.TemporaryDirectory() as directory, closing(Pool(timeout_s=CASE_LIMIT_S)) as pool:
        if "seeds" in options.only:
            found = pool.run(
                options.ranks, inspect_run_with, f"{directory}/seeds", small, find_seeds, options.seeds, options.every
            )
            assert all(each == found[0] for each in found), "ranks differ"
            report_seeds(found[0], every=options.every, num_ranks=options.ranks)
        if "clean" in options.only:
            alarms = 0
            end = options.from_step + options.steps
            for first in range(options.from_step, end, CLEAN_STEPS):
                num_steps = min(CLEAN_STEPS, end - first)
                run = (options.ranks, inspect_run_with, f"{directory}/clean-{first}", (*small, f"run.seed={first}"))
                alarms += pool.run(*run, count_false_alarms, num_steps)[0]
                done = f"steps {options.from_step:,} to {first + num_steps:,}, each checked, {options.ranks} ranks"
                print(f"clean: {alarms} false alarms in {done}", flush=True)
    if "cost" in options.only:
        measure_cost(options.overrides, rounds=options.rounds, num_steps=options.block_steps)


if __name__ == "__main__":
    main()
