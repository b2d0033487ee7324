"""Copies the code of a job into its run directory.

Why: a job may wait for days and restart for weeks; an edit of a checkout must not change what it runs.
How: every submission copies the packages, conf/ and slurm/ from a checkout or an installed wheel to a directory named
after a hash of their content: the same code is stored once. A job that restarts uses the copy it was submitted with.
Commit and diff are stored too.
Left out: the Python environment, which must stay; its versions are in the manifest of each start.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import harness
import launch
from harness.config.conf_files import conf_dir
from harness.core.locking.run_lease import io_error
from harness.telemetry.provenance import CARRIED, code

DIGEST_LENGTH = 12
DATA = ("conf", "slurm")
"""Inside the package when it is installed; beside it in a checkout and in a copy."""


def slurm_dir() -> Path:
    """The directory of the job scripts, beside conf/."""
    return conf_dir().parent / "slurm"


def snapshot_path(root: Path) -> Path:
    """Where the current code would be stored under `root`."""
    digest = hashlib.sha256()
    for name, path in sorted(list_sources().items()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return root / digest.hexdigest()[:DIGEST_LENGTH]


def save_snapshot(root: Path) -> Path:
    """Copy the current code to `root`, completely or not at all."""
    target = snapshot_path(root)
    if target.exists():
        return target
    scratch = root / f".{target.name}.part"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        for name, path in list_sources().items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, scratch / name)
        (scratch / CARRIED).write_text(json.dumps(code(Path(harness.__file__).parent)) + "\n", encoding="utf-8")
        scratch.rename(target)
    except OSError as error:
        raise io_error(target, "cannot copy the code to", error) from None
    return target


def list_sources() -> dict[str, Path]:
    """Every file of the code: path in the copy -> current path."""
    packages = {package.__name__: Path(str(package.__file__)).parent for package in (harness, launch)}
    found: dict[str, Path] = {}
    for name, root in (packages | {"conf": conf_dir(), "slurm": slurm_dir()}).items():
        skipped = DATA if name == harness.__name__ else ()
        for path in root.rglob("*"):
            inside = path.relative_to(root)
            if path.is_file() and inside.parts[0] not in skipped and "__pycache__" not in inside.parts:
                found[f"{name}/{inside.as_posix()}"] = path
    return found
