"""Command and environment of Python subprocesses that must import this very code, from any working directory.

Why: `python -m` searches the working directory first. A folder `harness` or a file `json.py` there would be imported
instead.
How: `-P` removes the working directory from the search path, and PYTHONPATH starts with the directory of this code (a
checkout or the copy of a job), followed by the user's entries. An installed package needs no entry; adding
site-packages would put its other packages before the standard library.
Left out: entries that the user put into PYTHONPATH, even the working directory; and `multiprocessing`, which sets the
search path only after its first imports.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

SEARCH_PATH = "PYTHONPATH"


def command(module: str, *args: str) -> list[str]:
    """`python -m MODULE ARGS`, without the working directory in the search path."""
    return [sys.executable, "-P", "-m", module, *args]


def child_environment() -> dict[str, str]:
    """The environment of this process, with the directory of this code first in PYTHONPATH."""
    here = str(Path(__file__).absolute().parents[2])
    if here in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    search_path = os.environ.get(SEARCH_PATH)  # an empty entry would mean the working directory
    others = [entry for entry in search_path.split(os.pathsep) if entry != here] if search_path else []
    return os.environ | {SEARCH_PATH: os.pathsep.join([here, *others])}
