"""What processes of tests are forked with (`tests.forks`): imported here, all that they would import in turn."""

from __future__ import annotations

from importlib import import_module

from harness.loading import loading

with loading():
    for module in (
        "launch.train",
        "launch.node",
        "launch.local",
        "harness.faults.worker",
        "harness.train",
        "torch._dynamo",
        "tests.distributed.cases",
    ):
        import_module(module)
