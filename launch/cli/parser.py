"""How every command but `train`, which is Hydra's, reads its words."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from harness.config.errors import ConfigError


class Parser(ArgumentParser):
    """Complains in one line, as every command does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.prog.removeprefix("harness "), f"{message}; --help says more")
