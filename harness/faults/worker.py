"""The worker of a drill: the trainer's own, with the faults of `drill.json` put in before it begins."""

from __future__ import annotations

from harness import train
from harness.config.schema import Config
from harness.faults.injectors import make_injector
from harness.faults.plan import read_plan
from harness.faults.site import Site, earlier_strikes, watched
from harness.run import Run


def run_worker(cfg: Config) -> int:
    """One rank's whole life in a drill; returns the exit code of the contract."""
    return train.run_worker(cfg, outfit)


def outfit(run: Run) -> Run:
    """Put every fault of the plan into the run."""
    plan = read_plan(run.directory)
    assert plan is not None, "launch.local.worker chose this worker for the plan it saw"
    injectors = [
        make_injector(
            Site(run=run, fault=fault, number=number, seed=plan.seed, struck=earlier_strikes(run, number, fault))
        )
        for number, fault in plan
    ]

    def before() -> None:
        for each in injectors:
            each.before(run.state.iteration + 1)

    def after() -> None:
        for each in injectors:
            each.after(run.state.iteration)

    run.parts.batches = watched(run.parts.batches, "__getitem__", before, first=True)
    run.parts.mailbox = watched(run.parts.mailbox, "post", after, first=False)
    return run
