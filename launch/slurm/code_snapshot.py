"""The code of a job, copied into its run directory.

Why: a job may wait for days and begin again for weeks; what it runs must not change because somebody edits a checkout.
How: every submission takes the packages, the values and the scripts from wherever they are imported, a checkout or an
installed wheel, and lays them under a name made of their content: the same code is kept once, other code beside it. A
job that begins again uses the copy it was submitted with. Commit and diff travel along.
Left out: the Python environment, which has to stay; its versions are in the manifest of each start.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import harness
import launch
from harness.config.compose import conf_dir
from harness.config.errors import ConfigError
from harness.telemetry.provenance import CARRIED, code

DIGEST_LENGTH = 12
DATA = ("conf", "slurm")
"""What lies inside the package when it is installed, and beside it in a checkout and here."""


def slurm_dir() -> Path:
    """Where the scripts lie: beside the values."""
    return conf_dir().parent / "slurm"


def place(root: Path) -> Path:
    """Where the code that runs now would be kept under `root`."""
    digest = hashlib.sha256()
    for name, path in sorted(sources().items()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return root / digest.hexdigest()[:DIGEST_LENGTH]


def take(root: Path) -> Path:
    """Keep the code that runs now under `root`; it is there whole or not at all."""
    target = place(root)
    if target.exists():
        return target
    scratch = root / f".{target.name}.part"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        for name, path in sources().items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, scratch / name)
        (scratch / CARRIED).write_text(json.dumps(code(Path(harness.__file__).parent)) + "\n", encoding="utf-8")
        scratch.rename(target)
    except OSError as error:
        raise ConfigError("run.dir", f"cannot keep a copy of the code in {target}: {error.strerror}") from None
    return target


def sources() -> dict[str, Path]:
    """Every file of the code: where it goes -> where it lies."""
    packages = {package.__name__: Path(str(package.__file__)).parent for package in (harness, launch)}
    found: dict[str, Path] = {}
    for name, root in (packages | {"conf": conf_dir(), "slurm": slurm_dir()}).items():
        skipped = DATA if name == harness.__name__ else ()
        for path in root.rglob("*"):
            inside = path.relative_to(root)
            if path.is_file() and inside.parts[0] not in skipped and "__pycache__" not in inside.parts:
                found[f"{name}/{inside.as_posix()}"] = path
    return found
