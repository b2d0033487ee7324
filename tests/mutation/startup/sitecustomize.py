"""Import hook that loads one module from mutated source.

Python imports a file of this name at startup when its directory is in PYTHONPATH, so processes that a test starts run
the same mutant as the test. The module keeps its own `__file__`; no file in the tree changes, no bytecode is cached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

MODULE, ORIGINAL, MUTATED = "MUTATION_MODULE", "MUTATION_ORIGINAL", "MUTATION_MUTATED"
"""Environment variables: the module's name, the path of its file, and the path of the mutated source."""


class MutantLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002  (the signature of the base class)
        source = Path(os.environ[MUTATED]).read_text(encoding="utf-8")
        return compile(source, self.path, "exec", dont_inherit=True)


class MutantFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG004  (the signature that Python calls)
        if name != os.environ.get(MODULE):
            return None
        original = os.environ[ORIGINAL]
        return spec_from_file_location(name, original, loader=MutantLoader(name, original))


def install() -> None:
    sys.meta_path.insert(0, MutantFinder)


if MODULE in os.environ:
    install()
