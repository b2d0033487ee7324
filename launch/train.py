"""`harness train`: a Hydra app that composes a configuration, checks it, and starts its workers.

Why: Hydra lives here, in the launcher, and never in a worker: N ranks that each parse, log and make directories are N
truths about one run.
How: the job function turns the composed tree into a checked `Config` and hands it to `launch.local`, or collects it
with the others of a sweep for `launch.sweeps.multirun`. A complaint about the configuration is one line on stderr and
leaves nothing on disk.
Left out: a sweep with a value that does not even compose (a wrong type, an unknown key) is refused by Hydra as a whole,
before its first job; only what the checks of `harness.config.schema` refuse is reported job by job.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.compose import check, conf_dir, explain, register
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.launch import LaunchKind
from harness.config.schema import Config, check_world
from harness.core.credentials import require_variable
from harness.core.fast_imports import loading
from harness.core.locking.run_lease import require_free
from harness.core.rundir import check_resume, locate, name_run
from launch.local.thread_count import count_expected_ranks, rank_thread_environment
from launch.local.worker import select_worker
from launch.sweeps.jobs import Composed
from launch.sweeps.multirun import sweep_over


def main(argv: Sequence[str] | None = None) -> int:
    """The Hydra command line; returns the exit code of the run, or the worst one of a sweep."""
    import hydra

    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.argv = ["harness train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    codes: list[int] = []
    sweep: list[Composed] = []

    def job(tree: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            sweep.append(job_of_sweep(tree, settings, arguments))
        else:
            codes.append(run_job(tree, settings, arguments))

    register()
    register_sweep_name()
    app = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)
    try:
        app()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        explained = explain(error, [word for word in arguments if "=" in word])
        if not isinstance(explained, ConfigError):
            raise
        print(f"harness: {explained}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if sweep:
        return sweep_over(sweep[0].sweep, sweep, arguments)
    return codes[0] if codes else EXIT_DONE


def run_job(tree: Any, settings: Any, arguments: Sequence[str]) -> int:
    """One run from its composed tree to its exit code."""
    try:
        cfg = check(tree)
        left = ", ".join(swept_keys(settings, arguments))
        require(not left, "sweep", f"is for many runs: add --multirun, or give a value to {left}")
        return start(cfg)
    except StorageError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        print(f"harness: {complaint(error, settings)}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def job_of_sweep(tree: Any, settings: Any, arguments: Sequence[str]) -> Composed:
    """One job of a sweep as Hydra composed it, checked; it is started when all are known."""
    keys = swept_keys(settings, arguments)
    words = [word.partition("=") for word in settings.overrides.task]
    overrides = {key: value for key, _, value in words if key in keys}
    directory = Path(settings.sweep.dir)
    try:
        return Composed(sweep=directory, overrides=overrides, cfg=check(tree))
    except Exception as error:
        return Composed(sweep=directory, overrides=overrides, cfg=None, problem=complaint(error, settings))


def complaint(error: Exception, settings: Any) -> str:
    """What is wrong with a configuration, in one line; any other error is raised."""
    explained = explain(error, list(settings.overrides.task))
    if not isinstance(explained, ConfigError):
        raise error
    return str(explained)


def start(cfg: Config) -> int:
    """Name the run, refuse what this machine or the run's directory cannot take, and launch it here or as a job."""
    name_run(cfg)
    check_resume(cfg, locate(cfg))
    require_free(locate(cfg).path, wait=cfg.launch.kind is LaunchKind.local)
    if cfg.launch.kind is LaunchKind.slurm:
        from launch.slurm import submit

        return submit.start(cfg)
    require_variable(cfg.telemetry.tracking_uri if cfg.telemetry.mlflow else None)
    require(not cfg.launch.dry_run, "launch.dry_run", "is for launch=slurm; `harness train --cfg job` shows this one")
    several = f"{cfg.launch.nodes} machines are for launch=slurm, or for `python -m launch.local.node` on each of them"
    require(cfg.launch.nodes == 1, "launch.nodes", several)
    with rank_thread_environment(cfg, count_expected_ranks(cfg)), loading():
        from launch.local import start as local

        worker = select_worker(locate(cfg))
    check_world(cfg, local.num_ranks(cfg))
    return local.launch(cfg, worker)


def swept_keys(settings: Any, arguments: Sequence[str]) -> list[str]:
    """Keys that have several values: on the command line, or in a preset that the command line does not overrule."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    words = parser.parse_overrides([word for word in arguments if "=" in word])
    given = {word.get_key_element() for word in words}
    preset = [f"{key}={value}" for key, value in (settings.sweeper.params or {}).items() if key not in given]
    return [word.get_key_element() for word in [*parser.parse_overrides(preset), *words] if word.is_sweep_override()]


def register_sweep_name() -> None:
    """What `conf/config.yaml` calls the directory of a sweep: the name of the run, or the time it was started."""
    from omegaconf import OmegaConf

    default = time.strftime("sweep-%Y%m%d-%H%M%S")
    OmegaConf.register_new_resolver("sweep_name", lambda name: name or default, replace=True)


if __name__ == "__main__":
    sys.exit(main())
