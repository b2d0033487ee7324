"""`harness train`: a Hydra app that composes and checks a config and starts its workers.

Why: Hydra runs in the launcher and never in a worker. N ranks that each parse, log and create directories would be N
sources of truth about one run.
How: the job function turns the composed tree into a checked `Config` and passes it to `launch.local`, or collects it
with the other jobs of a sweep for `launch.sweeps.multirun`. An invalid config is one line on stderr and leaves nothing
on disk.
Left out: a sweep with a value that does not compose (wrong type, unknown key) is rejected by Hydra as a whole before
its first job; only errors found by the checks of `harness.config.schema` are reported job by job.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.command_line import override, shell_command
from harness.config.compose import compose_job, keep_text, load, register, validate
from harness.config.conf_files import conf_dir, list_groups, read_tree
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.explain import explain
from harness.config.launch import LaunchKind
from harness.config.schema import Config
from harness.core.fast_imports import loading
from harness.core.safe_stream import safe_output

if TYPE_CHECKING:
    from launch.sweeps.jobs import ComposedJob

FLAGS = (
    *("-h", "--help", "-m", "--multirun", "-c", "--cfg", "--resolve", "-p", "--package", "--hydra-help", "--version"),
    *("-i", "--info", "-r", "--run", "-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir"),
    *("-sc", "--shell-completion", "--experimental-rerun"),
)
"""Flags of Hydra's command line."""
CFG_VALUES = ("job", "hydra", "all")
HELP_WIDTH = 120
"""Width of the help in a pipe."""


def main(argv: Sequence[str] | None = None) -> int:
    """The Hydra command line; returns the exit code of the run, or the worst one of a sweep."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_flags(arguments)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if {"-h", "--help"} & set(arguments):
        with loading():
            return print_help([override for override in arguments if "=" in override])
    sys.argv = ["harness train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    missing = register_sweep_dir()
    try:
        return run_app(arguments, missing) if needs_app(arguments) else run_job(*compose_job(arguments), arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        config_error = explain(error, [override for override in arguments if "=" in override])
        if not isinstance(config_error, ConfigError):
            raise
        print(f"harness: {config_error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def needs_app(arguments: Sequence[str]) -> bool:
    """Whether Hydra's app must read these arguments: flags, and overrides of Hydra's own config.

    All others are composed here. The app composes every config twice: first to find out whether it is a sweep.
    """
    return any(argument.startswith(("-", "hydra", "+hydra", "~hydra")) for argument in arguments)


def run_app(arguments: Sequence[str], missing: dict[Path, list[Path]]) -> int:
    """Run Hydra's app, and then the sweep if it composed one; returns the exit code.

    `missing`: directory of a sweep -> directories that Hydra creates for it; they are removed again if nothing runs.
    """
    import hydra

    codes: list[int] = []
    sweep: list[ComposedJob] = []

    def job(tree: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            sweep.append(compose_sweep_job(tree, settings, arguments))
        else:
            codes.append(run_job(tree, settings, arguments))

    register()
    sys.argv = ["harness train", *keep_text(arguments)]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
        if sweep:
            from harness.analysis.plan.preflight import preflight
            from launch.sweeps.multirun import run_sweep

            print_warnings(problem for composed in sweep if composed.cfg for problem in preflight(composed.cfg))
            return run_sweep(sweep[0].sweep, sweep, arguments)
        return codes[0] if codes else EXIT_DONE
    except OSError as error:
        failed = Path(error.filename or "")
        if any(failed in (*created, directory, directory / "multirun.yaml") for directory, created in missing.items()):
            from harness.core.locking.run_lease import io_error

            raise io_error(failed, "cannot create", error) from None
        raise
    finally:
        if missing:
            from launch.sweeps.multirun import remove_hydra_output

            for directory, created in reversed(missing.items()):
                remove_hydra_output(directory, created)


def check_flags(arguments: Sequence[str]) -> None:
    """Reject flags that Hydra would answer with its usage or a traceback."""
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    for flag in flags:
        close = get_close_matches(flag, FLAGS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        require(flag in FLAGS, flag, f"no such option; see harness train --help{hint}")
    if {"--cfg", "-c"} & set(flags):
        values = [after for flag, after in zip(arguments, [*arguments[1:], ""], strict=True) if flag in ("--cfg", "-c")]
        values += [argument.partition("=")[2] for argument in arguments if argument.startswith("--cfg=")]
        for value in values:
            require(value in CFG_VALUES, "--cfg", f"must be one of {', '.join(CFG_VALUES)}, got {value!r}")
        message = "prints the config of one job; give one value for each key instead of --multirun"
        require(not {"--multirun", "-m"} & set(flags), "--cfg", message)


def print_help(overrides: Sequence[str]) -> int:
    """Print groups, keys with their values and meanings, and examples; returns the exit code."""
    from harness.config.key_help import render_keys

    try:
        cfg = load(overrides)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    texts = read_tree(conf_dir() / "hydra/help/harness.yaml")
    parts = {
        "${hydra.help.header}": texts["header"],
        "${groups:}": list_groups(),
        "$CONFIG": render_keys(cfg, width=shutil.get_terminal_size((HELP_WIDTH, 24)).columns),
        "${hydra.help.footer}": texts["footer"],
    }
    text = texts["template"]
    for name, part in parts.items():
        text = text.replace(name, part)
    print(text)
    return EXIT_DONE


def run_job(tree: Any, settings: Any, arguments: Sequence[str]) -> int:
    """Run one composed config; returns the exit code."""
    try:
        cfg = validate(tree)
        unset = ", ".join(swept_keys(settings, arguments))
        require(not unset, "sweep", f"needs --multirun, or one value for {unset}")
        return launch_run(cfg)
    except StorageError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        print(f"harness: {config_error_text(error, settings)}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def compose_sweep_job(tree: Any, settings: Any, arguments: Sequence[str]) -> ComposedJob:
    """Check one job of a sweep as Hydra composed it; it starts when all are composed."""
    from harness.analysis.plan.preflight import check_preflight
    from launch.sweeps.jobs import ComposedJob

    keys = swept_keys(settings, arguments)
    parsed = [override.partition("=") for override in task_overrides(settings)]
    overrides = {key: value for key, _, value in parsed if key in keys}
    directory = Path(settings.sweep.dir)
    try:
        cfg = validate(tree)
        check_preflight(cfg)
        return ComposedJob(sweep=directory, overrides=overrides, cfg=cfg)
    except Exception as error:
        return ComposedJob(sweep=directory, overrides=overrides, cfg=None, problem=config_error_text(error, settings))


def config_error_text(error: Exception, settings: Any) -> str:
    """The error in a config, in one line; any other error is raised."""
    config_error = explain(error, task_overrides(settings))
    if not isinstance(config_error, ConfigError):
        raise error
    return str(config_error)


def task_overrides(settings: Any) -> list[str]:
    """The overrides of a job as they were given: an interpolation in one may be the error."""
    from omegaconf import OmegaConf

    return [str(each) for each in OmegaConf.to_container(settings.overrides.task, resolve=False) or ()]


def launch_run(cfg: Config) -> int:
    """Name the run, check it against this machine and its run directory, and launch it here or as a Slurm job.

    For Kubernetes, only its manifest is printed.
    """
    from harness.analysis.plan.preflight import check_preflight
    from harness.control.stop_requests import clear_stop_file
    from harness.core.locking.run_lease import require_free
    from harness.core.rundir import check_resume, locate, name_run
    from harness.telemetry.evaluation_process import require_evaluation
    from harness.telemetry.sinks.sink_checks import require_packages, require_sinks
    from launch.local.banner import finished_line, render_banner
    from launch.local.thread_count import count_expected_ranks, rank_thread_environment
    from launch.local.worker import select_worker

    problems = check_preflight(cfg)
    require_packages(cfg.telemetry)
    require_evaluation(cfg.eval)
    is_unnamed = cfg.run.name is None
    name_run(cfg)
    if cfg.launch.kind is LaunchKind.k8s:
        from launch.k8s.dry_run import print_manifest

        print_warnings(problems)
        return print_manifest(cfg)
    check_resume(cfg, locate(cfg))
    if line := finished_line(cfg):
        print(line)
        return EXIT_DONE
    require_free(locate(cfg).path, wait=cfg.launch.kind is LaunchKind.local)
    if cfg.launch.kind is LaunchKind.slurm:
        from launch.slurm import submit

        print_warnings(problems)
        return submit.submit_or_print(cfg)
    require_sinks(cfg.telemetry)
    message = "is for launch=slurm and launch=k8s; `harness train --cfg job` prints the config"
    require(not cfg.launch.dry_run, "launch.dry_run", message)
    other = "launch=slurm or launch=k8s, or `python -m launch.local.node` on each of them"
    message = f"{cfg.launch.nodes} nodes need {other}"
    require(cfg.launch.nodes == 1, "launch.nodes", message)
    with rank_thread_environment(cfg, count_expected_ranks(cfg)), loading():
        from harness.run_corpus import check_local_data
        from launch.local import start, this_machine

        worker = select_worker(locate(cfg))
    check_local_data(cfg)
    problems += this_machine.check_machine(cfg)
    print_warnings(problems)
    is_gpu = this_machine.measure_machine(cfg, nproc := this_machine.ranks_to_start(cfg)).is_gpu
    banner = render_banner(cfg, nproc=nproc, is_gpu=is_gpu, width=shutil.get_terminal_size().columns)
    with safe_output():
        print(banner, flush=True)
    clear_stop_file(locate(cfg))  # of the last start: with it no rank that dies early would be restarted
    code = start.launch(cfg, worker)
    if code == EXIT_INTERRUPTED and is_unnamed:
        named = shell_command(override("run.name", cfg.run.name))
        print(f"harness: resume with the same command and {named}", file=sys.stderr)
    return code


def print_warnings(problems: Iterable[str]) -> None:
    for problem in dict.fromkeys(problems):
        print(f"harness: warning: {problem}", file=sys.stderr)


def swept_keys(settings: Any, arguments: Sequence[str]) -> list[str]:
    """Keys with several values, from the command line or from a preset that the command line does not override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    parsed = parser.parse_overrides([override for override in arguments if "=" in override])
    given_keys = {override.get_key_element() for override in parsed}
    preset = [f"{key}={value}" for key, value in (settings.sweeper.params or {}).items() if key not in given_keys]
    return [
        override.get_key_element()
        for override in [*parser.parse_overrides(preset), *parsed]
        if override.is_sweep_override()
    ]


def register_sweep_dir() -> dict[Path, list[Path]]:
    """Register the resolver for the directory of a sweep, named after the run or the start time.

    Returns the directories that were resolved since, each with those of its parents and itself that did not exist,
    innermost first.
    """
    from omegaconf import OmegaConf

    default = time.strftime("sweep-%Y%m%d-%H%M%S")
    missing: dict[Path, list[Path]] = {}

    def resolve(parent: str, name: str | None) -> str:
        directory = Path(parent) / str(name or default)
        if directory not in missing:
            missing[directory] = [each for each in (directory, *directory.parents) if not os.path.lexists(each)]
        return str(directory)

    OmegaConf.register_new_resolver("sweep_dir", resolve, replace=True)
    return missing


if __name__ == "__main__":
    sys.exit(main())
