"""The upload process, with a store that denies access as long as the run directory has a file `denied`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsspec.implementations.local import LocalFileSystem

from harness.checkpoint.remote.__main__ import main

genuine = LocalFileSystem.find


def find(system: LocalFileSystem, *arguments: Any, **options: Any) -> Any:
    if (Path(sys.argv[1]) / "denied").exists():
        raise PermissionError("The provided token has expired.")
    return genuine(system, *arguments, **options)


with patch.object(LocalFileSystem, "find", find):
    code = main()
sys.stderr.flush()
os._exit(code)
