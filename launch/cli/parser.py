"""Argument parser of every command except `train`, which uses Hydra."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from harness.config.errors import ConfigError


class CommandParser(ArgumentParser):
    """Raises ConfigError on a usage error, so that the command prints it in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.prog.removeprefix("harness "), f"{message}; see --help")
