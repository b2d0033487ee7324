"""`harness train`: a Hydra app that composes a configuration, checks it, and starts its workers.

Why: Hydra lives here, in the launcher, and never in a worker: N ranks that each parse, log and make directories are N
truths about one run.
How: the job function turns the composed tree into a checked `Config` and hands it to `launch.local`. Exit codes are
collected, not raised, so that one failing job does not end a sweep; the process exits with the worst of them. A
complaint about the configuration is one line on stderr and leaves nothing on disk.
Left out: a sweep with a value that does not even compose (a wrong type, an unknown key) is refused by Hydra as a whole,
before its first job; only what the checks of `harness.config` refuse is reported job by job.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.compose import check, conf_dir, explain, register
from harness.config import (
    EXIT_BAD_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_INTERRUPTED,
    Config,
    ConfigError,
    check_world,
)
from harness.rundir import check_resume, locate, name_run

WORST_LAST = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_HALTED, 1, EXIT_BAD_CONFIG)
LONGEST_NAME = 150


def main(argv: Sequence[str] | None = None) -> int:
    """The Hydra command line; returns the exit code of the run, or the worst one of a sweep."""
    import hydra

    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.argv = ["harness train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    codes: list[int] = []

    def job(tree: Any) -> None:
        if EXIT_INTERRUPTED not in codes:
            codes.append(run_job(tree, arguments))

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
    return max(codes, key=WORST_LAST.index, default=EXIT_DONE)


def run_job(tree: Any, arguments: Sequence[str]) -> int:
    """One run, or one job of a sweep, from its composed tree to its exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    settings = HydraConfig.get()
    overrides = list(settings.overrides.task)
    in_sweep = settings.mode == RunMode.MULTIRUN
    swept = swept_among(overrides, arguments) if in_sweep else []
    try:
        cfg = check(tree)
        if in_sweep:
            place_in_sweep(cfg, Path(settings.sweep.dir), swept, settings.job.num)
        return start(cfg)
    except Exception as error:
        explained = explain(error, overrides)
        if not isinstance(explained, ConfigError):
            raise
        job = f"job {settings.job.num} ({', '.join(swept)}): " if in_sweep else ""
        print(f"harness: {job}{explained}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def start(cfg: Config) -> int:
    """Name the run, refuse what this machine or the run's directory cannot take, and launch it here."""
    name_run(cfg)
    check_resume(cfg, locate(cfg))
    from launch import local

    check_world(cfg, local.num_ranks(cfg))
    from harness.train import run_worker

    return local.launch(cfg, run_worker)


def place_in_sweep(cfg: Config, sweep: Path, swept: Sequence[str], number: int) -> None:
    """Give a job a directory inside the sweep's, named after what was swept; the sweep shares one MLflow store."""
    if cfg.telemetry.tracking_uri is None:
        cfg.telemetry.tracking_uri = f"sqlite:///{Path(cfg.run.dir).resolve() / 'mlflow.db'}"
    name = re.sub(r"[^\w.,=+-]", "-", ",".join(swept)).lstrip(".")
    cfg.run.dir = str(sweep)
    cfg.run.name = name if 0 < len(name) <= LONGEST_NAME else f"job-{number}"


def swept_among(overrides: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Those overrides of a job that the command line gives several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides([word for word in arguments if "=" in word])
    keys = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    return [override for override in overrides if override.partition("=")[0] in keys]


def register_sweep_name() -> None:
    """What `conf/config.yaml` calls the directory of a sweep: the name of the run, or the time it was started."""
    from omegaconf import OmegaConf

    default = time.strftime("sweep-%Y%m%d-%H%M%S")
    OmegaConf.register_new_resolver("sweep_name", lambda name: name or default, replace=True)


if __name__ == "__main__":
    sys.exit(main())
