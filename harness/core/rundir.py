"""The run directory: paths, creation, the check before a resume, and durable writes.

    runs/<name>/  config.yaml  corpus.json  manifest.json  events.jsonl  ledger.jsonl  interventions.jsonl  mlflow.json
                  checkpoints/step-*-gen-*/   incidents/NNN/   control/   lease/   logs/   loss.png   STOP
                  start.json  imported.json

The directory is the only interface between a run and the tools that read it. Training into an existing directory
resumes it. If its configuration differs, the start is rejected with a list of the differing keys, unless
`run.resume=changed` is set; the change is then recorded as an intervention.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.compose import flat, plain, schema_default, to_yaml
from harness.config.conf_files import read_tree
from harness.config.errors import ConfigError
from harness.config.run import ResumePolicy
from harness.config.schema import Config
from harness.core.credentials import require_no_credentials
from harness.core.event_json import to_json
from harness.core.events import Intervention, RunEnded, RunRestarted
from harness.core.locking import run_lease
from harness.core.stderr_lines import print_warning

CONFIG_CHANGED = "run.resume=changed"
"""Reason of the intervention that records a change of the configuration."""
MAY_DIFFER = (
    "run.resume",
    "run.preflight",
    "run.dir",
    "run.lease_s",
    "launch.",
    "cluster.",
    "telemetry.",
    "profile.",
    "checkpoint.",
    "data.remote.",
    "eval.harness",
    "parallel.timeout_s",
)
"""Keys that may change at a resume: they decide where and how a run executes, not what it computes."""
FIXED_BY_WEIGHTS = tuple(
    f"model.{name}"
    for name in (
        "vocab_size",
        "dim",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "ffn_dim",
        "norm",
        "norm_placement",
        "tied_head",
        "qk_norm",
        "embedding_norm",
        "mup_base_width",
    )
)
"""Keys that may not change once the run has a checkpoint: its weights would belong to another model. With some changes
all shapes stay the same, and the weights would be loaded."""
CHANGED_MODEL = ("model.rope_theta", "model.norm_eps")
"""Keys that may change on purpose though the weights were trained with the old value."""

OPENING_BYTES = 64 * 1024
BY_LAUNCHER = tuple(f'{{"event":"{kind.name}",'.encode() for kind in (RunEnded, RunRestarted))
"""How a line of the log begins that the launcher wrote after a crash."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of the files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def corpus(self) -> Path:
        """The data of the run: files, sizes, probes, and every batch size it has used."""
        return self.path / "corpus.json"

    @property
    def rare_tokens(self) -> Path:
        """Samples that contain rare tokens; only with `data.stratify`."""
        return self.path / "rare-tokens.npz"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def interventions(self) -> Path:
        return self.path / "interventions.jsonl"

    @property
    def mlflow(self) -> Path:
        return self.path / "mlflow.json"

    @property
    def imported(self) -> Path:
        """The model that imported weights belong to; other runs have none."""
        return self.path / "imported.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stop(self) -> Path:
        """While this file exists, the run saves and stops."""
        return self.path / "STOP"

    @property
    def control(self) -> Path:
        """Queue of operator commands."""
        return self.path / "control"

    @property
    def heartbeat(self) -> Path:
        """Heartbeat files, one per rank."""
        return self.path / "heartbeat"

    @property
    def system(self) -> Path:
        """Samples of the load of each machine, one file per machine."""
        return self.path / "system"

    @property
    def profiles(self) -> Path:
        """One folder per profile: trace, table of kernels and memory snapshot of each rank."""
        return self.path / "profiles"

    @property
    def lease(self) -> Path:
        """Lease of the process that may write here."""
        return self.path / run_lease.FOLDER

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def start(self) -> Path:
        """Id of the newest start; snapshots in memory of an earlier one are not used."""
        return self.path / "start.json"

    @property
    def drill(self) -> Path:
        """Fault plan and expectations of a drill; other runs have none."""
        return self.path / "drill.json"

    @property
    def faults(self) -> Path:
        """Log of injected faults: which rank, when, what."""
        return self.path / "faults.jsonl"

    @property
    def score_card(self) -> Path:
        """Score card of a drill."""
        return self.path / "score.md"

    @property
    def tracking_pid(self) -> Path:
        """Process group of the tracking server that a drill kills."""
        return self.path / "tracking.pid"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def evaluations(self) -> Path:
        """Results of lm-evaluation-harness, one file per evaluated checkpoint."""
        return self.path / "evaluations"

    @property
    def incidents(self) -> Path:
        """One folder per incident: evidence.json, postmortem.md, postmortem.html and pictures."""
        return self.path / "incidents"

    @property
    def dashboard(self) -> Path:
        return self.path / "dashboard.html"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"


def name_run(cfg: Config) -> None:
    """Set `run.name` from the model, whose name may be that of a repository, and the time if it is not set."""
    if cfg.run.name is None:
        model = cfg.model.name.replace("/", "-").lstrip(".")
        cfg.run.name = f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def locate(cfg: Config) -> RunDir:
    """The directory of a run with a name."""
    assert cfg.run.name is not None, "name_run comes first"
    return RunDir(Path(cfg.run.dir) / cfg.run.name)


def has_begun(run: RunDir) -> bool:
    """Whether there is a run to resume. A run that crashed in every start before its first event does not count."""
    if not (run.config.exists() and run.events.exists()):
        return False
    try:
        with run.events.open("rb") as file:
            lines = file.read(OPENING_BYTES).splitlines()
    except OSError as error:
        raise run_lease.io_error(run.events, "cannot read", error) from None
    return not lines or any(not line.startswith(BY_LAUNCHER) for line in lines)


def has_checkpoint(run: RunDir) -> bool:
    """Whether the run has weights on disk that a resume could load."""
    try:
        return any(run.checkpoints.glob("step-*-gen-*"))
    except OSError as error:
        raise run_lease.io_error(run.checkpoints, "cannot read", error) from None


def differences(cfg: Config, run: RunDir) -> dict[str, tuple[Any, Any]]:
    """Config keys whose value differs from the stored config of the run: key -> (old, new).

    A key that is newer than the stored config had its default value.
    """
    if not has_begun(run):
        return {}
    old, new = flat(read_tree(run.config)), flat(plain(cfg))
    old |= {key: schema_default(key) for key in new if key not in old}
    keys = [key for key in new | old if not key.startswith(MAY_DIFFER)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def model_differences(cfg: Config, run: RunDir) -> dict[str, tuple[Any, Any]]:
    """Keys in which the model differs from that of the weights on disk: key -> (old, new); empty if there are none.

    Weights that were imported into a run that has not begun have a record of their model, unless an earlier version
    imported them.
    """
    if has_begun(run):
        changes = differences(cfg, run)
    else:
        new = flat(plain(cfg))
        changes = {key: (old, new.get(key)) for key, old in read_imported_model(run).items() if old != new.get(key)}
    found = {key: changes[key] for key in (*FIXED_BY_WEIGHTS, *CHANGED_MODEL) if key in changes}
    return found if found and has_checkpoint(run) else {}


def record_imported_model(cfg: Config, run: RunDir) -> None:
    """Record the model that imported weights belong to, before they are written."""
    values = flat(plain(cfg))
    write_atomically(run.imported, json.dumps({key: values[key] for key in (*FIXED_BY_WEIGHTS, *CHANGED_MODEL)}))


def read_imported_model(run: RunDir) -> dict[str, Any]:
    """Config key -> value of the model that imported weights belong to; empty if there is no record."""
    try:
        return dict(json.loads(run.imported.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise run_lease.io_error(run.imported, "cannot read", error) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(str(run.imported), f"cannot be read: {error}; import the weights again") from None


def config_digest(cfg: Config) -> str:
    """Digest of the keys that may not change at a resume."""
    kept = {key: value for key, value in flat(plain(cfg)).items() if not key.startswith(MAY_DIFFER)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def write_start(run: RunDir, start: str) -> None:
    """Record the id of this start."""
    write_atomically(run.start, json.dumps({"id": start}))


def read_start(run: RunDir) -> str:
    """The id of the newest start; empty if it is not known."""
    try:
        return str(json.loads(run.start.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def check_resume(cfg: Config, run: RunDir) -> None:
    """Reject a resume with another configuration, unless `run.resume=changed`. A model that the weights of the run do
    not belong to is always rejected."""
    changes, other_model = differences(cfg, run), model_differences(cfg, run)
    for key in FIXED_BY_WEIGHTS:
        if key in other_model:
            old, new = other_model[key]
            message = f"must stay {old} in this run, got {new}: its weights were trained with {old}"
            raise ConfigError(key, f"{message}; keep it, or choose another run.name")
    if changes and cfg.run.resume is not ResumePolicy.changed:
        listed = ", ".join(f"{key} was {old}, is {new}" for key, (old, new) in changes.items())
        message = f"{run.path} has another configuration: {listed}; choose another name, or set run.resume=changed"
        raise ConfigError("run.name", message)


def prepare_run_dir(
    cfg: Config, run: RunDir, *, iteration: int = 0, corpus: str = "", data_changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Create the directory, or accept a changed config at `iteration`; returns the changes, key -> [old, new].

    `corpus` is the record of the data. `data_changes` are changes in it that the configuration does not show.
    """
    changes = create_run_dir(cfg, run) | (data_changes or {})
    record_config(cfg, run, changes, iteration=iteration, corpus=corpus)
    return changes


def create_run_dir(cfg: Config, run: RunDir) -> dict[str, Any]:
    """Create the directory if needed; returns the changes that `run.resume` allows, key -> [old, new]. The files of the
    run stay as they are."""
    check_resume(cfg, run)
    require_no_credentials(cfg.telemetry.tracking_uri)
    run_lease.require_free(run.path, wait=False)
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_lease.io_error(run.path, "cannot create", error) from None
    changes = {key: list(values) for key, values in differences(cfg, run).items()}
    other_model = model_differences(cfg, run)
    for key in CHANGED_MODEL:
        if key in other_model:
            old, new = other_model[key]
            print_warning(f"{key} was {old}, is {new}: the weights were trained with {old}")
    return changes


def record_config(cfg: Config, run: RunDir, changes: dict[str, Any], *, iteration: int, corpus: str) -> None:
    """Write the configuration and the record of the data, after the intervention that accepts their changes: a start
    that is killed in between accepts them again."""
    if changes:
        append_line(run.interventions, to_json(make_config_change_event(changes, iteration=iteration)))
    if corpus:
        write_atomically(run.corpus, corpus)
    write_atomically(run.config, to_yaml(cfg))


def make_config_change_event(changes: dict[str, Any], *, iteration: int) -> Intervention:
    """The event that records a change of the configuration, its user and its time."""
    return Intervention(time=time.time(), iteration=iteration, who=user_name(), reason=CONFIG_CHANGED, changes=changes)


def user_name() -> str:
    """Login name of the user, or the user id if the machine has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return f"user {os.getuid()}"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old content or the new one, never a part, also after a power failure.

    If it must be the new one then, sync the directory too (`fsync`).
    """
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    run_lease.guard()
    scratch.replace(path)


def append_line(path: Path, line: str) -> None:
    """Append a line durably (fsync). A line that a crash cut short is terminated first."""
    run_lease.guard()
    with path.open("a+b") as file:
        is_new = not file.tell()
        if not is_new:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Sync the content of a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
