"""Rejects a changed configuration that the ranks would reject, before the launcher writes it.

Why: jobs of Slurm, Kubernetes and sweeps read their configuration from the run directory, so the launcher replaces it
before the ranks load the checkpoint. A rejection by the ranks would leave the run with a configuration that its
checkpoints do not fit, and a change of the data order would not be seen at all: the ranks compare with the file.
Left out: damaged and unreadable checkpoints and files of the corpus, which the ranks report; other state, whose shapes
follow from keys that `harness.core.rundir.check_resume` compares.
"""

from __future__ import annotations

from contextlib import suppress

from harness.config.errors import ConfigError, StorageError
from harness.config.optim import OptimizerKind
from harness.config.run import ResumePolicy
from harness.config.schema import Config
from harness.core.locking.run_lease import naming_full_disk
from harness.core.rundir import RunDir, check_resume, differences, locate
from harness.telemetry.event_log import prepare_run

OPTIMIZER = "optim.kind"


def prepare_fitting_run(cfg: Config) -> RunDir:
    """Create a run directory, or replace the configuration of a run by one that fits it."""
    run = locate(cfg)
    require_fitting(cfg, run)
    with naming_full_disk(run.path):
        return prepare_run(cfg)


def require_fitting(cfg: Config, run: RunDir) -> None:
    """Reject a configuration that `run.resume` or the state of the run does not admit. Imports torch only if something
    changed."""
    check_resume(cfg, run)
    changes = differences(cfg, run) if cfg.run.resume is ResumePolicy.changed else {}
    if OPTIMIZER in changes and cfg.optim.kind is OptimizerKind.adamw:
        require_optimizer_state(run)
    if changes:
        from harness.run_corpus import require_same_windows

        require_same_windows(cfg, run)


def require_optimizer_state(run: RunDir) -> None:
    """Reject AdamW if the newest checkpoint has no second moments of some weights."""
    from harness.checkpoint import catalog, tensor_index
    from harness.checkpoint.catalog import Health
    from harness.checkpoint.integrity import OtherVersion

    names: set[str] = set()
    with suppress(StorageError, OtherVersion):
        saved = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
        names = set(tensor_index.read(saved[-1].path).tensors) if saved else set()
    if any(name.endswith(".exp_avg") and f"{name}_sq" not in names for name in names):
        message = f"{saved[-1].path} is a checkpoint of Muon, which has no state that AdamW could continue with"
        raise ConfigError(OPTIMIZER, f"{message}; keep optim=muon, or choose another run.name")
