"""A contender as the benchmark sees it: a child process that is asked and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, final

from tests.bench.clock import Block
from tests.bench.gpu.contender import Spec

ROOT = Path(__file__).parents[3]
END_S = 60
"""How long a contender may take to end before it is killed."""


class ContenderError(Exception):
    """A contender could not go on."""

    def __init__(self, row: str, said: str, *, is_memory: bool = False, is_config: bool = False) -> None:
        super().__init__(said)
        self.row, self.is_memory, self.is_config = row, is_memory, is_config


@final
@dataclass(slots=True)
class Contender:
    row: str
    process: subprocess.Popen[bytes]
    requests: TextIO
    replies: TextIO
    sides: tuple[str, ...] = ()
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    """Of this harness that it has imported."""

    @classmethod
    def start(cls, spec: Spec) -> Contender:
        """Wait until it is built and warm; raises `ContenderError`."""
        (asked, ask), (hear, told) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.gpu.contender", spec.to_json(), str(asked), str(told)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            pass_fds=(asked, told),
        )
        os.close(asked)
        os.close(told)
        made = cls(spec.row, process, os.fdopen(ask, "w", encoding="utf-8"), os.fdopen(hear, encoding="utf-8"))
        facts = made.answer()
        made.sides, made.device = tuple(facts["sides"]), facts["device"]
        made.versions, made.modules = facts["versions"], tuple(facts["modules"])
        return made

    def answer(self) -> dict[str, Any]:
        line = self.replies.readline()
        if not line:
            self.close()
            raise ContenderError(self.row, f"ended with exit code {self.process.returncode}")
        read: dict[str, Any] = json.loads(line)
        if "failed" in read:
            self.close()
            raise ContenderError(self.row, read["failed"], is_memory=read["is_memory"], is_config=read["is_config"])
        return read

    def ask(self, **request: Any) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has ended, and `answer` says why
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
        return self.answer()

    def turn(self, side: str, num_steps: int) -> Block:
        return Block(**self.ask(do="turn", side=side, steps=num_steps)["block"])

    def close(self) -> None:
        """End it and wait until its memory is free again."""
        with suppress(BrokenPipeError, ValueError):
            self.requests.write('{"do": "end"}\n')
            self.requests.flush()
        with suppress(BrokenPipeError):
            self.requests.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
