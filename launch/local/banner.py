"""The lines that a start prints before its ranks begin: what is trained, where, and how long it will take.

Why: a wrong batch size, a forgotten precision or the wrong run directory should be seen in the first second.
How: a pure function from the config and the ranks to rows, wrapped to the terminal. The time comes from the speed of
the last start in tokens per second, or from the plan if the rates of the devices are known. On CPU there is an estimate
only for models that are too large for one; otherwise the banner says that it is unknown.
"""

from __future__ import annotations

import textwrap

from harness.analysis.plan.plan import plan
from harness.analysis.plan.preflight import parameters_text
from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Health
from harness.checkpoint.integrity import Damaged
from harness.config import compose, conf_files
from harness.config.data import DataKind
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.config.sentinel import SentinelConfig
from harness.core.batch_sizes import BatchSize, BatchSizes, TokenSchedule
from harness.core.events import Event, RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir, locate
from harness.model.size import flops_per_token, num_parameters
from harness.telemetry.console import clock
from harness.telemetry.event_log import find_done_step, tail
from launch.local.thread_count import num_cores

LABEL_WIDTH = 12
MAX_WIDTH = 130
MOST_SOURCES = 4
DEFAULT_PRESET = "default"
CPU_GFLOPS = 20
"""Rate of a slow core in fp32, in GFLOP/s."""
SLOW_STEP_S = 5.0
"""Steps that take longer than this on CPU are announced."""


def render_banner(cfg: Config, *, nproc: int, num_nodes: int = 1, is_gpu: bool, width: int) -> str:
    """All rows, none wider than `width`."""
    log = tail(locate(cfg).events)
    return wrap_rows(banner_rows(cfg, log, nproc=nproc, num_nodes=num_nodes, is_gpu=is_gpu), min(width, MAX_WIDTH))


def banner_rows(cfg: Config, log: list[Event], *, nproc: int, num_nodes: int, is_gpu: bool) -> dict[str, str]:
    """Label -> text; `log` is the end of the log of the run, empty for a new one."""
    train, world_size = cfg.train, num_nodes * nproc
    tokens = train.batch_size * train.sequence_length
    stages = [f"{stage.batch_size:,} before batch {stage.until_batch:,}" for stage in train.batch_size_warmup]
    warmup = f"; warm-up: {', '.join(stages)}" if stages else ""
    step = last_step(log)
    resumes = f"resumes from the newest state up to step {step:,}" if step else "new"
    return {
        "model": f"{cfg.model.name}, {parameters_text(num_parameters(cfg.model))} parameters",
        "batch": f"{train.batch_size:,} sequences of {train.sequence_length:,} = {tokens:,} tokens a step{warmup}",
        "length": f"{train.num_steps:,} steps, {train.num_tokens():,} tokens",
        "ranks": ranks_text(cfg, nproc=nproc, num_nodes=num_nodes, is_gpu=is_gpu),
        "precision": precision_text(cfg),
        "data": data_text(cfg),
        "sentinel": sentinel_preset(cfg.sentinel),
        "checkpoints": checkpoints_text(cfg),
        "time": time_text(cfg, log, world_size=world_size, is_gpu=is_gpu),
        "run": f"{locate(cfg).path} ({resumes})",
    }


def wrap_rows(rows: dict[str, str], width: int) -> str:
    """Aligned rows; a long text continues below its own column."""
    indent = " " * LABEL_WIDTH
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"{label:<{LABEL_WIDTH}}",
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in rows.items()
    )


def ranks_text(cfg: Config, *, nproc: int, num_nodes: int, is_gpu: bool) -> str:
    world_size = num_nodes * nproc
    ranks = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
    share = cfg.launch.ranks_per_gpu
    on_gpus = "1 GPU each" if share == 1 else f"{share} on each GPU: a rehearsal, collectives go over loopback"
    devices = on_gpus if is_gpu else "CPU"
    where = f"{ranks}, {devices}" + (f", {num_nodes} nodes" if num_nodes > 1 else "")
    if cfg.parallel.context > 1:
        where += f", each sequence on {cfg.parallel.context}"
    if cfg.parallel.replicate > 1:
        return f"{where}, {cfg.parallel.replicate} replicas sharded over {world_size // cfg.parallel.replicate}"
    return where + (f", sharded over {world_size}" if world_size > 1 else "")


def precision_text(cfg: Config) -> str:
    words = {"compiled": cfg.parallel.compile, "deterministic": cfg.run.deterministic}
    phases = [f"{phase.kind} from batch {phase.from_batch:,}" for phase in cfg.precision.phases]
    return ", ".join([str(cfg.precision.kind), *phases, *(word for word, is_on in words.items() if is_on)])


def data_text(cfg: Config) -> str:
    """The sources with their shares of the samples, and the number of planned phases."""
    sources = cfg.data.sources
    total = sum(source.weight for source in sources.values())
    names = []
    for name, source in list(sources.items())[:MOST_SOURCES]:
        files = f" {', '.join(source.paths[:2])}{', ...' if len(source.paths) > 2 else ''}"
        share = "" if len(sources) == 1 else f" {source.weight / total:.0%}"
        names.append(f"{name} ({source.kind}{files if source.kind is DataKind.files else ''}){share}")
    more = [f"{len(sources) - MOST_SOURCES} more"] if len(sources) > MOST_SOURCES else []
    phases = [f"{len(cfg.data.phases)} planned phases"] if cfg.data.phases else []
    return ", ".join([*names, *more, *phases])


def sentinel_preset(sentinel: SentinelConfig) -> str:
    """Name of the preset; with the changed keys if it is none of them."""
    presets = {name: load_preset(name) for name in conf_files.options_of("sentinel")}
    for name, preset in presets.items():
        if preset == sentinel:
            return name
    flat = {name: compose.flat_values(preset) for name, preset in presets.items()}
    own = compose.flat_values(sentinel)
    name = min(flat, key=lambda name: (sum(own[key] != flat[name][key] for key in own), name != DEFAULT_PRESET))
    changes = [f"{key}={value}" for key, value in own.items() if value != flat[name][key]]
    return f"{name} with {', '.join(changes)}"


def load_preset(name: str) -> SentinelConfig:
    folder = conf_files.conf_dir() / "sentinel"
    trees = [conf_files.read_tree(folder / f"{file}.yaml") for file in dict.fromkeys([DEFAULT_PRESET, name])]
    own = [{key: value for key, value in tree.items() if key != "defaults"} for tree in trees]
    return compose.load_typed(SentinelConfig, "sentinel", own, [])


def checkpoints_text(cfg: Config) -> str:
    checkpoint, ring = cfg.checkpoint, cfg.checkpoint.ring
    by_steps = [f"every {checkpoint.every_steps:,} steps"] if checkpoint.every_steps else []
    by_time = [f"every {checkpoint.every_minutes:g} minutes"] if checkpoint.every_minutes is not None else []
    when = " or ".join([*by_steps, *by_time]) or "only at the end"
    snapshots = f"{ring.slots} snapshots in memory, every {ring.every_steps:,} steps" if ring.slots else "no snapshots"
    return f"{when}, {checkpoint.keep} kept; {snapshots}"


def time_text(cfg: Config, log: list[Event], *, world_size: int, is_gpu: bool) -> str:
    """How long the remaining steps take, and where the estimate comes from."""
    train = cfg.train
    sizes = BatchSizes([BatchSize(*stage) for stage in train.size_stages()])
    schedule = TokenSchedule(sizes=sizes, sequence_length=train.sequence_length)
    records = [event for event in reversed(log) if isinstance(event, StepRecord)]
    measured = (schedule.left_s(record, num_steps=train.num_steps) for record in records)
    if (left_s := next((each for each in measured if each is not None), None)) is not None:
        return f"about {clock(left_s)} at the speed of the last start"
    try:
        planned = plan(cfg, world_size=world_size).step_time_s if is_gpu else None
    except ConfigError:
        planned = None
    batch_tokens = train.batch_size * train.sequence_length
    cursor = records[0].cursor + 1 if records else last_step(log)
    num_left = schedule.tokens_ahead(cursor, train.num_steps - last_step(log)) / batch_tokens
    if planned:
        return f"about {clock(num_left * planned)} by the plan"
    step_s = batch_tokens * flops_per_token(cfg.model, train.sequence_length) / (CPU_GFLOPS * 1e9 * num_cores())
    if not is_gpu and step_s > SLOW_STEP_S:
        rate = f"at {CPU_GFLOPS} GFLOP/s per core"
        return f"about {clock(step_s)} per step on this CPU and {clock(num_left * step_s)} in all, {rate}"
    return "not known before the first steps"


def last_step(log: list[Event]) -> int:
    """Updates applied at the end of a log."""
    kinds = (StepRecord, RunStarted, RunEnded)
    return next((event.step for event in reversed(log) if isinstance(event, kinds)), 0)


def finished_line(cfg: Config) -> str:
    """One line for a run that has nothing left to do; empty for any other run."""
    run, num_steps = locate(cfg), cfg.train.num_steps
    step = find_done_step(run.events)
    if step < num_steps or not has_loadable_checkpoint(run, step):
        return ""
    done = f"all {num_steps:,} steps are done"
    if step > num_steps:
        done = f"{step:,} steps are done, more than train.num_steps={num_steps}"
    return f"{run.path}: {done}; nothing to do. To train longer, add train.num_steps=N run.resume=changed"


def has_loadable_checkpoint(run: RunDir, step: int) -> bool:
    """Whether the checkpoint that a start would load first is of `step` or later and its files have the sizes in its
    manifest. Nothing is hashed. False if it cannot be read: the start retries, and reports the error."""
    try:
        saved = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
        if not saved or saved[-1].step < step:
            return False
        files, path = integrity.read_manifest(saved[-1].path).files, saved[-1].path
        return all((path / name).lstat().st_size == entry.bytes for name, entry in files.items())
    except (OSError, Damaged, ConfigError):
        return False
