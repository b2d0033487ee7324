"""Rejects a resume with AdamW from a checkpoint of Muon, before the launcher writes the configuration.

Why: jobs of Slurm, Kubernetes and sweeps read their configuration from the run directory, so the launcher replaces it
before the ranks load the checkpoint. A rejection by the ranks would leave the run with a configuration that its
checkpoints do not fit.
Left out: damaged and unreadable checkpoints, which the ranks report; other state, whose shapes follow from keys that
`harness.core.rundir.check_resume` compares.
"""

from __future__ import annotations

from contextlib import suppress

from harness.config.errors import ConfigError, StorageError
from harness.config.optim import OptimizerKind
from harness.config.schema import Config
from harness.core.rundir import RunDir, differences

KEY = "optim.kind"


def require_optimizer_state(cfg: Config, run: RunDir) -> None:
    """Reject AdamW if the newest checkpoint has no second moments of some weights. Imports torch only then."""
    if cfg.optim.kind is OptimizerKind.adamw and KEY in differences(cfg, run):
        from harness.checkpoint import catalog, tensor_index
        from harness.checkpoint.catalog import Health
        from harness.checkpoint.integrity import OtherVersion

        names: set[str] = set()
        with suppress(StorageError, OtherVersion):
            saved = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
            names = set(tensor_index.read(saved[-1].path).tensors) if saved else set()
        if any(name.endswith(".exp_avg") and f"{name}_sq" not in names for name in names):
            message = f"{saved[-1].path} is a checkpoint of Muon, which has no state that AdamW could continue with"
            raise ConfigError(KEY, f"{message}; keep optim=muon, or choose another run.name")
