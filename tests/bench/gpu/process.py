"""A contender from the side of the benchmark: a child process that answers requests."""

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
EXIT_WAIT_S = 60
"""How long a contender may take to exit before it is killed."""


class ContenderError(Exception):
    """A contender failed."""

    def __init__(self, row: str, message: str, *, is_memory: bool = False, is_config: bool = False) -> None:
        super().__init__(message)
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
    """Modules of this harness that it has imported."""

    @classmethod
    def start(cls, spec: Spec) -> Contender:
        """Start the process and wait until it is warm; raises `ContenderError`."""
        (request_read, request_write), (reply_read, reply_write) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.gpu.contender", spec.to_json(), str(request_read), str(reply_write)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            pass_fds=(request_read, reply_write),
        )
        os.close(request_read)
        os.close(reply_write)
        contender = cls(
            spec.row, process, os.fdopen(request_write, "w", encoding="utf-8"), os.fdopen(reply_read, encoding="utf-8")
        )
        facts = contender.read_reply()
        contender.sides, contender.device = tuple(facts["sides"]), facts["device"]
        contender.versions, contender.modules = facts["versions"], tuple(facts["modules"])
        return contender

    def read_reply(self) -> dict[str, Any]:
        line = self.replies.readline()
        if not line:
            self.close()
            raise ContenderError(self.row, f"ended with exit code {self.process.returncode}")
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            self.close()
            raise ContenderError(self.row, reply["failed"], is_memory=reply["is_memory"], is_config=reply["is_config"])
        return reply

    def send_request(self, **request: Any) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has exited; `read_reply` raises the reason
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
        return self.read_reply()

    def run_block(self, side: str, num_steps: int) -> Block:
        return Block(**self.send_request(do="block", side=side, steps=num_steps)["block"])

    def close(self) -> None:
        """Stop the process and wait until it has exited and its memory is free."""
        with suppress(BrokenPipeError, ValueError):
            self.requests.write('{"do": "end"}\n')
            self.requests.flush()
        with suppress(BrokenPipeError):
            self.requests.close()
        try:
            self.process.wait(EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
