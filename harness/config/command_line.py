"""Writes commands that a user can paste into a shell: overrides in Hydra's syntax, then arguments in the shell's.

Why: names of runs and paths of data may hold any character. The run of a sweep job is called
`optim.lr=10,optim.beta2=0.99`.
How: a value is quoted for Hydra if Hydra would not read it as this string. The whole override is then quoted for the
shell if the shell would split or expand it. Hydra's quotes are double ones, because the shell's are single ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

PLAIN_TEXT = re.compile(r"(?!(?:null|true|false|inf|nan)$|\.?\d)[A-Za-z0-9_./][A-Za-z0-9_./-]*", re.IGNORECASE)
"""Strings that Hydra reads as they are, without quotes."""


def hydra_value(value: Any) -> str:
    """A value in the syntax of a Hydra override."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return value if PLAIN_TEXT.fullmatch(value) else _quote(value)
        case list():
            return "[" + ",".join(hydra_value(item) for item in value) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _quote(text: str) -> str:
    """A quoted string. Backslashes are doubled only before `${`, which OmegaConf would resolve, and before quotes."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text) + '"'


def override(key: str, value: Any) -> str:
    """One argument of `harness train` that sets a config key."""
    return f"{key}={hydra_value(value)}"


def directory_and_name(run: str | PurePath) -> tuple[str, str]:
    """The values of `run.dir` and `run.name` of a run directory, also of one given as `.` or `..`."""
    path = Path(run)
    path = path if path.name not in ("", "..") else path.resolve()
    return str(path.parent), path.name


def run_overrides(run: str | PurePath) -> list[str]:
    """The overrides that train in a run directory."""
    directory, name = directory_and_name(run)
    return [override("run.dir", directory), override("run.name", name)]


def changed_run_command(overrides: Sequence[str] | None, *changes: str) -> str:
    """The command that trains a run with changes; a shell comment if the overrides of the run are not known.

    A command with the changes alone would set every other key to its default.
    """
    if overrides is None:
        reason = "its configuration cannot be written as overrides"
        return f"# run the command of this run again with {shlex.join(changes)} ({reason})"
    return shell_command("harness", "train", *with_changes(overrides, changes))


def with_changes(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Overrides and changes; a change replaces the override of its key."""
    changed = {each.partition("=")[0] for each in changes}
    return [*(each for each in overrides if each.partition("=")[0] not in changed), *changes]


def shell_command(*args: str | PurePath | int) -> str:
    """A command line with each argument quoted for a shell."""
    return shlex.join(map(str, args))
