"""Output streams that cannot fail: the reader of one may go away, as in `harness status RUN | head -1`, its file may be
on a full disk, and its encoding may lack a character.

Every command and every rank writes through them: a line for a person must not end a run, or a thread of one. What does
not fit onto a full disk is lost, but for the buffer of the stream; output goes on once there is room.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast, final

LASTING_ERRORS = (errno.EPIPE, errno.EBADF)
"""Errors after which no write can succeed: the reader is gone, or the descriptor is closed."""


@final
class SafeStream(io.TextIOBase):
    """A stream whose reader may go away, and whose disk may be full: a failed write costs output, not the program.
    Characters that the encoding of the stream lacks are written as escapes, as on standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_silent = False
        """The output has ended."""
        self._gap = ""
        """Why text may be missing before the next one; empty: none is."""

    @property
    def wrapped(self) -> TextIO:
        return self._stream

    def write(self, text: str) -> int:
        if not self.is_silent:
            try:
                if self._gap:
                    self._stream.flush()
                    self._stream.write(f"[output may be missing here: {self._gap}]\n")
                    self._gap = ""
                self._write(text)
            except OSError as error:
                self._on_error(error)
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))

    def flush(self) -> None:
        """Also called when this object is freed, perhaps after `stream` was closed."""
        if not self.is_silent and not self._stream.closed:
            try:
                self._stream.flush()
            except OSError as error:
                self._on_error(error)

    def finish(self) -> None:
        """Flush a last time. What the disk does not take is discarded; the interpreter would fail to flush it."""
        if not self.is_silent and not self._stream.closed:
            try:
                self._stream.flush()
            except OSError:
                self._discard_output()

    def _on_error(self, error: OSError) -> None:
        self._gap = error.strerror or str(error)
        if error.errno in LASTING_ERRORS:
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
        with suppress(OSError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)
            self._stream.flush()


@contextmanager
def safe_output() -> Iterator[None]:
    """Let standard output and standard error of a process end early; the process continues, with its own exit code.

    A process that was forked inside has new streams, which are not silent because those of its parent are.
    """
    stdout, stderr = sys.stdout, sys.stderr
    streams = _make_safe(stdout), _make_safe(stderr)
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], streams)
    try:
        yield
    finally:
        for stream in streams:
            stream.finish()
        sys.stdout, sys.stderr = stdout, stderr


def is_original_stdout() -> bool:
    """Whether standard output is that of the process, safe or not, and not replaced by a test or a caller."""
    return _unwrap(sys.stdout) is sys.__stdout__


def _make_safe(stream: TextIO | None) -> SafeStream:
    """None: the process was started without this stream, as in `harness status RUN 2>&-`."""
    return SafeStream(Path(os.devnull).open("w") if stream is None else _unwrap(stream))


def _unwrap(stream: TextIO | SafeStream) -> TextIO:
    while isinstance(stream, SafeStream):
        stream = stream.wrapped
    return stream
