"""Imports of the fork server (`tests.forks`): the modules that each forked process would import otherwise.

It also composes a config and reads it back, because Hydra and OmegaConf import most of their modules at the first use.
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
    ):
        import_module(module)

    from harness.config import compose
    from tests.distributed import cases

    with TemporaryDirectory() as directory:
        saved = Path(directory) / "config.yaml"
        saved.write_text(compose.to_yaml(cases.tiny()))
        compose.read(saved)
