"""What processes of tests are forked with (`tests.forks`): imported here, all that they would import in turn.

A configuration is composed too, and read back: of Hydra and OmegaConf most is imported and looked up by the first who
asks, and each process would be the first.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.core.fast_imports import loading

with loading():
    for module in (
        "launch.train",
        "launch.local.node",
        "launch.local.start",
        "harness.faults.drill_worker",
        "harness.train",
        "torch._dynamo",
        "tests.distributed.cases",
    ):
        import_module(module)

    from harness.config import compose

    with TemporaryDirectory() as directory:
        saved = Path(directory) / "config.yaml"
        saved.write_text(compose.to_yaml(compose.load(["launch.nproc=1"])))
        compose.read(saved)
