"""The run directory: self-describing, and the only interface between a run and every tool.

    runs/<name>/  config.yaml  corpus.json  manifest.json  events.jsonl  ledger.jsonl  interventions.jsonl  mlflow.json
                  checkpoints/step-*-gen-*/   incidents/NNN/   control/   lease/   logs/   loss.png   STOP

A directory that exists is a run to resume. One whose configuration disagrees is refused with the differing keys, unless
`run.resume=changed` asks for the change, which is then written down as an intervention.
"""

from __future__ import annotations

import getpass
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.config.compose import flat, plain, to_yaml
from harness.config.errors import ConfigError
from harness.config.run import ResumePolicy
from harness.config.schema import Config
from harness.core.credentials import require_no_credentials
from harness.core.events import Intervention, to_json
from harness.core.locking import run_lease

MAY_DIFFER = (
    "run.resume",
    "run.dir",
    "run.lease_s",
    "launch.",
    "cluster.",
    "telemetry.",
    "checkpoint.",
    "parallel.timeout_s",
)
"""Keys that say where, how visibly and how safely a run happens, not what it computes."""


@dataclass(frozen=True, slots=True)
class RunDir:
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
        """The data of the run: files, sizes, probes, and every batch size it has had."""
        return self.path / "corpus.json"

    @property
    def rare_tokens(self) -> Path:
        """Which samples hold rare tokens; only with `data.stratify`."""
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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stop(self) -> Path:
        """Asks the run to save and leave, as long as it is there."""
        return self.path / "STOP"

    @property
    def control(self) -> Path:
        """Where an operator's orders wait."""
        return self.path / "control"

    @property
    def heartbeat(self) -> Path:
        """Where every rank says that it is alive."""
        return self.path / "heartbeat"

    @property
    def lease(self) -> Path:
        """Which start of the run may write here."""
        return self.path / run_lease.FOLDER

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def drill(self) -> Path:
        """What will be broken in this run on purpose, and what is expected of it; only a drill has one."""
        return self.path / "drill.json"

    @property
    def faults(self) -> Path:
        """What was broken on purpose, by which rank and when."""
        return self.path / "faults.jsonl"

    @property
    def score_card(self) -> Path:
        """How the run answered what was broken."""
        return self.path / "score.md"

    @property
    def tracking_pid(self) -> Path:
        """The process group of a tracking server that a drill may kill."""
        return self.path / "tracking.pid"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def incidents(self) -> Path:
        """One folder for each incident: evidence.json, postmortem.md, postmortem.html and pictures."""
        return self.path / "incidents"

    @property
    def dashboard(self) -> Path:
        return self.path / "dashboard.html"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"


def name_run(cfg: Config) -> None:
    """Give a run without a name one: its model and the time."""
    if cfg.run.name is None:
        cfg.run.name = f"{cfg.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def locate(cfg: Config) -> RunDir:
    assert cfg.run.name is not None, "name_run comes first"
    return RunDir(Path(cfg.run.dir) / cfg.run.name)


def has_begun(run: RunDir) -> bool:
    """Whether there is a run to resume; one that failed before its first event was never started."""
    return run.config.exists() and run.events.exists()


def differences(cfg: Config, run: RunDir) -> dict[str, tuple[Any, Any]]:
    """Keys whose value differs from the one the run was started with: key -> (then, now); a run that failed before its
    first event was never started."""
    if not has_begun(run):
        return {}
    then, now = flat(yaml.safe_load(run.config.read_text()) or {}), flat(plain(cfg))
    keys = [key for key in now | then if not key.startswith(MAY_DIFFER)]
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def check_resume(cfg: Config, run: RunDir) -> None:
    """Refuse to continue a run under another configuration, unless that was asked for."""
    changes = differences(cfg, run)
    if changes and cfg.run.resume is not ResumePolicy.changed:
        listed = ", ".join(f"{key} was {then}, is {now}" for key, (then, now) in changes.items())
        message = f"{run.path} has another configuration: {listed}; choose another name, or run.resume=changed"
        raise ConfigError("run.name", message)


def prepare(
    cfg: Config, run: RunDir, *, iteration: int = 0, corpus: str = "", data_changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Create the directory, or admit a change at `iteration`; returns the admitted changes, key -> [then, now].

    `corpus` is the record of the data; `data_changes` is what changed in it, which the configuration does not show.
    """
    check_resume(cfg, run)
    require_no_credentials(cfg.telemetry.tracking_uri)
    run_lease.require_free(run.path, wait=False)
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("run.dir", f"cannot create {run.path}: {error.strerror}") from None
    changes = {key: list(values) for key, values in differences(cfg, run).items()} | (data_changes or {})
    if changes:
        append_line(run.interventions, to_json(make_config_change_event(changes, iteration=iteration)))
    if corpus:
        write_atomically(run.corpus, corpus)
    write_atomically(run.config, to_yaml(cfg))
    return changes


def make_config_change_event(changes: dict[str, Any], *, iteration: int) -> Intervention:
    """A change of the configuration, with who made it and when."""
    return Intervention(
        time=time.time(), iteration=iteration, who=user_name(), reason="run.resume=changed", changes=changes
    )


def user_name() -> str:
    """The name of the user who runs this process, or their number where the machine knows no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return f"user {os.getuid()}"


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    run_lease.guard()
    scratch.replace(path)


def append_line(path: Path, line: str) -> None:
    """One more line, on disk before this returns; a line that a crash cut short is ended first."""
    run_lease.guard()
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
