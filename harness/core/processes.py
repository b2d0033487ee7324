"""Processes of Python that the harness starts beside itself: with its own code, whatever directory a run is started in.

Why: `python -m` looks for modules in the working directory first. A folder `harness` or a `json.py` that happens to lie
there would be imported in place of what is meant.
How: `-P` leaves the working directory out, and PYTHONPATH names first where this very code lies, a checkout or the copy
of a job; what the user has there stays. An installed package Python finds by itself: to name its place would put all
its neighbours before the standard library.
Left out: what the user has put into PYTHONPATH, even the working directory; and how `multiprocessing` starts a process,
which is told where to look only after its first imports.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

PLACES = "PYTHONPATH"


def command(module: str, *words: str) -> list[str]:
    """`python -m MODULE WORDS`, but for the working directory."""
    return [sys.executable, "-P", "-m", module, *words]


def environment() -> dict[str, str]:
    """That of this process, and where its code lies."""
    here = str(Path(__file__).absolute().parents[2])
    if here in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    places = os.environ.get(PLACES)  # an empty one among several would be the working directory
    others = [place for place in places.split(os.pathsep) if place != here] if places else []
    return os.environ | {PLACES: os.pathsep.join([here, *others])}
