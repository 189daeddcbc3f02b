"""Recordings of the shapes that an engine ran, as JSON-lines files to plan from.

Each line is one record, ``{"shape": "csu/q2048/s64/u512/l32", "count": 1}``: the exact shape of a step,
before it was padded, and the number of steps that it stands for.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphs.atomic_file import replace_file
from graphs.shape import BatchShape

_UNBELIEVABLE = 1 << 62
"""Number of steps from which on a file counts as damaged."""
_MOST_SHOWN = 80


class ShapeRecorder:
    """Appends the shape of every step to a file, one line each, in one write each.

    Several engines, one after the other or at once, may append to the same file: lines are whole. The
    unfinished last line of a process that was killed while writing is removed when the file is opened.

    Args:
        path: made if it does not exist; its records are kept.

    Raises:
        ValueError: the file cannot be opened for writing, or holds something else than such a recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists():
            _check_first_line(self.path)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"cannot record shapes in {self.path}: {error.strerror}") from error
        self._cut_unfinished_line()

    def add(self, shape: BatchShape, count: int = 1) -> None:
        """Record ``count`` steps of this shape.

        Raises:
            OSError: the line cannot be written whole; the file stays as it is.
        """
        line = _line(shape, count)
        num_written = os.write(self._file, line)
        if num_written < len(line):
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            if end == os.fstat(self._file).st_size:  # nobody else has appended to it
                os.ftruncate(self._file, end - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> ShapeRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()

    def _cut_unfinished_line(self) -> None:
        size = os.fstat(self._file).st_size
        # Lines are far shorter than this.
        tail = os.pread(self._file, 4096, max(0, size - 4096))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._file, size - len(tail) + tail.rfind(b"\n") + 1)


def write_shapes(path: str | Path, counts: Mapping[BatchShape, int]) -> None:
    """Write a recording in one piece, a line for each shape.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, b"".join(_line(shape, count) for shape, count in counts.items()).decode())


def read_shapes(*paths: str | Path) -> dict[BatchShape, int]:
    """Count each shape in some recordings.

    A last line without its end is being written at this moment, and is left out.

    Raises:
        ValueError: a file cannot be read, holds no record, or has a line that is not one; the message
            names the line.
    """
    counts: dict[BatchShape, int] = {}
    for path in paths:
        found = 0
        for number, text in enumerate(_complete_lines(path), start=1):
            if not text.strip():
                continue
            found += 1
            try:
                shape, count = _record(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            counts[shape] = counts.get(shape, 0) + count
        if not found:
            raise ValueError(f"expected at least one recorded shape in {path}, found none")
    return counts


def _line(shape: BatchShape, count: int) -> bytes:
    if count < 1:
        raise ValueError(f"expected a count of at least 1 for {shape}, got {count}")
    return json.dumps({"shape": str(shape), "count": count}).encode() + b"\n"


def _record(text: str) -> tuple[BatchShape, int]:
    try:
        record: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {text.strip()[:_MOST_SHOWN]!r}") from error
    if not isinstance(record, dict) or not isinstance(record.get("shape"), str):
        raise ValueError(f'expected an object with a "shape", got {text.strip()[:_MOST_SHOWN]!r}')
    count = record.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < _UNBELIEVABLE:
        raise ValueError(f'expected "count" to be an integer of at least 1, got {count!r}')
    return BatchShape.parse(record["shape"]), count


def _complete_lines(path: str | Path) -> Iterable[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read recorded shapes from {path}: {reason}") from error
    return text[: text.rfind("\n") + 1].splitlines()


def _check_first_line(path: Path) -> None:
    """Refuse to append to a file that is something else."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot record shapes in {path}: {reason}") from error
    if first.endswith("\n"):
        try:
            _record(first)
        except ValueError as error:
            raise ValueError(f"expected recorded shapes in {path}, line 1: {error}") from error
    elif first and not '{"shape": "'.startswith(first[:11]):
        raise ValueError(f"expected recorded shapes in {path}, got {first[:40]!r}")
