"""An output stream whose reader may go away, as in `harness status RUN | head -1`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast, final


@final
class SafeStream(io.TextIOBase):
    """A stream whose reader may go away: a failed write ends the output, not the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_silent = False

    @property
    def wrapped(self) -> TextIO:
        return self._stream

    def write(self, text: str) -> int:
        if not self.is_silent:
            try:
                self._stream.write(text)
            except OSError:
                self._discard_output()
        return len(text)

    def flush(self) -> None:
        """Also called when this object is freed, perhaps after `stream` was closed."""
        if not self.is_silent and not self._stream.closed:
            try:
                self._stream.flush()
            except OSError:
                self._discard_output()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _discard_output(self) -> None:
        """Redirect the stream to /dev/null; otherwise the interpreter fails to flush the rest at exit."""
        self.is_silent = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())
        os.close(devnull)


@contextmanager
def safe_output() -> Iterator[None]:
    """Let the standard output of a command end early; the command itself continues, with its own exit code."""
    stdout = sys.stdout
    sys.stdout = cast(TextIO, SafeStream(stdout))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stdout


def is_original_stdout() -> bool:
    """Whether standard output is that of the process, safe or not, and not replaced by a test or a caller."""
    stdout = sys.stdout
    while isinstance(stdout, SafeStream):
        stdout = stdout.wrapped
    return stdout is sys.__stdout__
