"""Commands and terminals: errors, sizes, drawing, streams that close, and notes while somebody waits."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TextIO

import typer
from rich.console import Console

from hpu_duo.extras import install_command
from hpu_duo.writable import check_file

BAD_INPUT = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


@contextmanager
def user_errors(kind: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """End the command with a sentence if the user's request cannot be carried out.

    To be put around reading and checking, not around running: a ``ValueError`` from a step that was
    accepted is a bug of this package, and keeps its traceback.

    Args:
        kind: the errors that are the user's. ``()`` is none of them, so that only interruptions are handled.
    """
    try:
        yield
    except kind as error:
        typer.echo(f"hpu-duo: error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        typer.echo("hpu-duo: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


_UNITS = ("", "K", "M", "G", "T")
_TEXT = re.compile(
    r"\s*(?P<number>\d+(\.\d+)?)\s*((?P<unit>[KMGT]?)(?P<binary>i?)B)?\s*", re.IGNORECASE | re.ASCII
)


def parse_bytes(text: str) -> int:
    """Bytes of ``4GiB`` (1024 each), ``4GB`` (1000 each) or ``4294967296``.

    Raises:
        ValueError: something else; ``4G`` too, which people read in both ways.
    """
    match = _TEXT.fullmatch(text)
    if match is not None and not (match["binary"] and not match["unit"]):
        factor = (1024 if match["binary"] else 1000) ** _UNITS.index((match["unit"] or "").upper())
        size = Decimal(match["number"]) * factor
        if size == int(size):
            return int(size)
    raise ValueError(f"expected a size in bytes such as 4GiB, 500MB or 4294967296, got {text!r}")


def parse_rate(name: str, text: str) -> int:
    """Return the bytes a second of ``32GB/s`` or ``32GB``.

    Raises:
        ValueError: something else, or nothing a second.
    """
    try:
        rate = parse_bytes(text.removesuffix("/s"))
    except ValueError:
        rate = 0
    if rate <= 0:
        raise ValueError(f"expected {name} in bytes a second such as 32GB/s, got {text!r}")
    return rate


def show_bytes(num_bytes: float) -> str:
    """About three digits and a binary unit: ``1.50 MiB``."""
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    if power == 0:
        return f"{num_bytes:.0f} B"
    digits = 2 if num_bytes < 10 else 1 if num_bytes < 100 else 0
    return f"{num_bytes:.{digits}f} {_UNITS[power]}iB"


def exact_size(num_bytes: int) -> str:
    """Text of ``parse_bytes`` for a number of bytes, in the largest unit that divides it: ``64MiB``."""
    for power in (3, 2, 1):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{_UNITS[power]}iB"
    return str(num_bytes)


def check_matplotlib(what: str) -> None:
    """Raise ValueError unless matplotlib is installed, naming what needs it."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{what} needs matplotlib, which is not installed: {install_command('plot')}")


def check_drawing(file: Path, option: str = "--png", suffixes: tuple[str, ...] = (".png",)) -> None:
    """Raise ValueError unless a picture can be made and written there.

    Args:
        option: that names the file.
        suffixes: of formats that can be asked for.
    """
    check_matplotlib(option)
    if file.suffix.lower() not in suffixes:
        raise ValueError(f"expected a file name that ends in {' or '.join(suffixes)}, got {str(file)!r}")
    check_file(option, file)


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


_SILENT_S, _BLINK_S, _LINE_S = 2.0, 0.5, 10.0


class Waiting:
    """Tell what takes so long: in place in a terminal, and elsewhere on a line of its own now and then.

    Args:
        what: is done, such as "searching buckets".
        silent_s: seconds before the first word, and after each sign of progress.
        line_s: seconds between lines where there is no terminal.
    """

    def __init__(self, what: str, silent_s: float = _SILENT_S, line_s: float = _LINE_S) -> None:
        self._what, self._silent_s, self._line_s = what, silent_s, line_s
        self._lock, self._ended = Lock(), Event()
        self._shown = 0
        self._since = time.monotonic()
        self._next = self._since + silent_s
        self._thread = Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """Stop printing."""
        self._ended.set()
        self._thread.join()
        self.progressed()

    def progressed(self) -> None:
        """Clear the message: other output was printed, or follows."""
        with self._lock:
            self._since = time.monotonic()
            self._next = self._since + self._silent_s
            if self._shown:
                print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)
                self._shown = 0

    def _tell(self) -> None:
        while not self._ended.wait(min(_BLINK_S, self._silent_s)):
            with self._lock:
                now = time.monotonic()
                if now < self._next:
                    continue
                line = f"hpu-duo: {self._what}: {now - self._since:.0f} s"
                if sys.stderr.isatty():
                    print("\r" + line, end="", file=sys.stderr, flush=True)
                    self._shown, self._next = len(line), now + _BLINK_S
                else:
                    print(line, file=sys.stderr, flush=True)
                    self._next = now + self._line_s
