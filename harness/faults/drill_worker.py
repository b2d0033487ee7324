"""The worker of a drill: the normal training worker, with the faults of `drill.json` installed."""

from __future__ import annotations

from harness import train
from harness.config.schema import Config
from harness.faults.fault_plan import read_plan
from harness.faults.injectors import make_injector
from harness.faults.site import Site, begin_time, earlier_strikes, intercept
from harness.run import Run


def run_drill_worker(cfg: Config) -> int:
    """Run one rank of a drill; returns its exit code."""
    return train.run_worker(cfg, install_faults)


def install_faults(run: Run) -> Run:
    """Install every fault of the plan in the run."""
    plan = read_plan(run.directory)
    assert plan is not None, "launch.local.worker chose this worker for the plan it saw"
    begun = begin_time(run)
    injectors = [
        make_injector(
            Site(
                run=run,
                fault=fault,
                number=number,
                seed=plan.seed,
                struck=earlier_strikes(run, number, fault),
                begun=begun,
            )
        )
        for number, fault in plan
    ]

    def before() -> None:
        for injector in injectors:
            injector.before(run.state.iteration + 1)

    def after() -> None:
        for injector in injectors:
            injector.after(run.state.iteration)

    run.parts.batches = intercept(run.parts.batches, "__getitem__", before, first=True)
    run.parts.mailbox = intercept(run.parts.mailbox, "post", after, first=False)
    return run
