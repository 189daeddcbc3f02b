"""Standard output and error that can encode every character, and report when they cannot be written."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import typer
from rich.console import Console

OUTPUT_LOST = 1
"""Exit code when standard output could not be written."""


class OutputLostError(Exception):
    """Standard output could not be written; no ``OSError``, which libraries take for one of their own.

    Attributes:
        reason: the message of the system.
        has_no_reader: whether its reader, ``head`` say, has closed it.
    """

    def __init__(self, error: OSError) -> None:
        self.reason = error.strerror
        self.has_no_reader = error.errno == errno.EPIPE
        super().__init__(f"cannot write to standard output: {self.reason}")


class _Output(io.FileIO):
    """Standard output below its buffers."""

    def write(self, data: Any) -> int:
        """Write, or raise ``OutputLostError``."""
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLostError(error) from None


class _Notes(io.FileIO):
    """Standard error below its buffers: progress and notes, whose loss stops no work."""

    def write(self, data: Any) -> int:
        """Write if that is possible."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def delivered(command: Callable[[], Any]) -> int | str | None:
    """Run a command line to its end; returns its exit code once all its output has been delivered.

    If a reader closes standard output early, as ``head`` does, the code is that of the command, or 0 if the
    command was cut short.
    """
    code: int | str | None = 0
    sys.stdout, sys.stderr = _opened(sys.stdout, _Output), _opened(sys.stderr, _Notes)
    try:
        try:
            command()
        except SystemExit as end:
            code = end.code
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputLostError as error:
        _discard(sys.stdout)
        if not error.has_no_reader:
            typer.echo(f"hpu-duo: error: {error}", err=True)
            code = code or OUTPUT_LOST
    return code


def can_show(text: str, console: Console) -> bool:
    """Whether the encoding of a console has all characters of ``text``."""
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def mark(is_good: bool, console: Console) -> str:
    """A tick or a cross in rich's markup; a word where the encoding has no such characters."""
    shown = "✓✗" if can_show("✓✗", console) else ("yes", "no")
    return f"[green]{shown[0]}[/green]" if is_good else f"[red]{shown[1]}[/red]"


def _opened(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """Open a stream again; returns the stream itself if it is closed or has no file descriptor.

    ASCII is the encoding of a bare environment and says nothing about the terminal, so UTF-8 replaces it, the
    encoding of prompts. Any other encoding is kept, and other characters are written as ``\\u`` and digits.
    """
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream
    stream.flush()
    encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(kind(number, "w", closefd=False)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=bool(stream.line_buffering) or kind is _Notes,
    )


def _discard(stream: TextIO) -> None:
    """Discard what is still in buffers when the interpreter closes them."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
