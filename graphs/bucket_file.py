"""Tables and recordings of shapes in files."""

from __future__ import annotations

import ast
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from graphs.atomic_file import replace_file
from graphs.shape import LARGEST_SIZE, BatchShape, CostFunction, Phase
from graphs.table import BucketTable, PlannedPadding

_MOST_BUCKETS = 1_000_000


class GaudiBucket(NamedTuple):
    """One bucket of vllm-gaudi; ``query_len`` 1 is a decode."""

    batch_size: int
    query_len: int
    num_context_blocks: int

    def to_shape(self) -> BatchShape:
        """The batch shape of a full step of this bucket."""
        batch, query_len, blocks = self
        if query_len == 1:
            return BatchShape(Phase.parse("--u"), batch, 0, blocks, batch)
        phase = Phase.parse("cs-" if blocks else "c--")
        return BatchShape(phase, batch * query_len, batch * blocks, 0, batch)


def from_shape(shape: BatchShape) -> tuple[GaudiBucket, ...]:
    """The buckets that serve the prompt part and the decode part of a shape."""
    buckets = []
    if shape.phase.causal:
        buckets.append(GaudiBucket(1, max(2, shape.query_len), shape.num_shared_blocks))
        if shape.phase.unique:
            buckets.append(GaudiBucket(max(1, shape.num_logits), 1, shape.num_unique_blocks))
    elif shape.phase.unique or shape.phase.shared:
        num_blocks = shape.num_unique_blocks + shape.num_shared_blocks
        buckets.append(GaudiBucket(shape.query_len, 1, num_blocks))
    return tuple(buckets)


def read_table(path: str | Path, cost: CostFunction | None = None) -> BucketTable:
    """Read a table of ours, or vllm-gaudi's bucket file; the first entry decides.

    Args:
        cost: ranks the buckets of the table; None is the default of ``BucketTable``.

    Raises:
        ValueError: the file cannot be read, has no entry, or has a line that is not one; the message names
            the line.
    """
    lines = list(_entries(path))
    if not lines:
        raise ValueError(f"expected at least one bucket in {path}, found none")
    if lines[0][1].startswith("("):
        return BucketTable.from_strings((str(b.to_shape()) for b in _gaudi_buckets(path, lines)), cost)
    shapes = []
    for number, text in lines:
        try:
            shapes.append(str(BatchShape.parse(text)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return replace(BucketTable.from_strings(shapes, cost), planned_padding=_planned_padding(path))


def read_gaudi_buckets(path: str | Path) -> tuple[GaudiBucket, ...]:
    """Read vllm-gaudi's bucket file, each bucket once.

    Raises:
        ValueError: the file cannot be read, has no entry, or has a line that is not one; the message names
            the line.
    """
    lines = list(_entries(path))
    if not lines:
        raise ValueError(f"expected at least one bucket in {path}, found none")
    return _gaudi_buckets(path, lines)


def write_table(
    path: str | Path,
    buckets: Iterable[BatchShape],
    comment: str = "",
    planned_padding: PlannedPadding | None = None,
) -> None:
    """Write a table, one shape a line below the comment and its planned padding."""
    lines = [*comment.splitlines(), *([] if planned_padding is None else [str(planned_padding)])]
    heading = [f"# {line}".rstrip() for line in lines]
    replace_file(path, "\n".join([*heading, *map(str, buckets)]) + "\n")


def write_gaudi_buckets(path: str | Path, buckets: Iterable[GaudiBucket], comment: str = "") -> None:
    """Write a file for ``VLLM_BUCKETING_FROM_FILE``: one exact entry per line, each once."""
    heading = [f"# {line}".rstrip() for line in comment.splitlines()]
    entries = [str(tuple(bucket)) for bucket in dict.fromkeys(buckets)]
    replace_file(path, "\n".join([*heading, *entries]) + "\n")


def _gaudi_buckets(path: str | Path, lines: list[tuple[int, str]]) -> tuple[GaudiBucket, ...]:
    found: dict[GaudiBucket, None] = {}
    for number, text in lines:
        try:
            found.update(dict.fromkeys(_parse_entry(text)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if len(found) > _MOST_BUCKETS:
            raise ValueError(f"{path}, line {number}: expected at most {_MOST_BUCKETS:,} buckets")
    return tuple(found)


def _planned_padding(path: str | Path) -> PlannedPadding | None:
    """The first planned padding in the comments."""
    for number, line in enumerate(_lines(path), start=1):
        try:
            planned_padding = PlannedPadding.find(line.partition("#")[2])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if planned_padding is not None:
            return planned_padding
    return None


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read buckets from {path}: {reason}") from error


def _entries(path: str | Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_lines(path), start=1):
        entry = line.split("#", 1)[0].strip()
        if entry:
            yield number, entry


def _parse_entry(text: str) -> list[GaudiBucket]:
    expected = f"expected (batch, query_len, num_context_blocks) of integers, lists or ranges, got {text!r}"
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(expected) from error
    if not isinstance(node, ast.Tuple) or len(node.elts) != 3:
        raise ValueError(expected)
    values = [_values(part, expected) for part in node.elts]
    if len(values[0]) * len(values[1]) * len(values[2]) > _MOST_BUCKETS:
        raise ValueError(f"expected at most {_MOST_BUCKETS:,} buckets, got {text!r}")
    buckets = [GaudiBucket(*sizes) for sizes in product(*values)]
    for bucket in buckets:
        if bucket.batch_size < 1 or bucket.query_len < 1 or bucket.num_context_blocks < 0:
            raise ValueError(f"expected batch >= 1, query_len >= 1 and blocks >= 0, got {tuple(bucket)}")
    return buckets


def _values(node: ast.expr, expected: str) -> list[int] | range:
    if isinstance(node, ast.List) and node.elts:
        return [_integer(item, expected) for item in node.elts]
    if isinstance(node, ast.Call):
        is_range = isinstance(node.func, ast.Name) and node.func.id == "range" and not node.keywords
        if not is_range or not 1 <= len(node.args) <= 3:
            raise ValueError(expected)
        numbers = [_integer(item, expected) for item in node.args]
        if (len(numbers) == 3 and numbers[2] == 0) or not range(*numbers):
            raise ValueError(f"{expected}: an empty range")
        # ``len`` of a range fails in Python beyond a machine word.
        if max(map(abs, numbers)) > LARGEST_SIZE or len(range(*numbers)) > _MOST_BUCKETS:
            raise ValueError(f"{expected}: too long a range")
        return range(*numbers)
    return [_integer(node, expected)]


def _integer(node: ast.expr, expected: str) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sign * node.value
    raise ValueError(expected)


_UNBELIEVABLE = 1 << 62
"""Number of steps from which on a file is considered damaged."""
_MOST_SHOWN = 80


class ShapeRecorder:
    """Appends the shape of every step to a file, one line each, in one write each.

    Several engines, also concurrently, may append to the same file: lines are written whole. The unfinished
    last line of a process that was killed while writing is removed when the file is opened.

    Args:
        path: created if it does not exist; records are appended.

    Raises:
        ValueError: the file cannot be opened for writing, or is no such recording.
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
            OSError: the line cannot be written whole; the file is unchanged then.
        """
        line = _line(shape, count)
        num_written = os.write(self._file, line)
        if num_written < len(line):
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            if end == os.fstat(self._file).st_size:  # no other process has appended to it
                os.ftruncate(self._file, end - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file; idempotent."""
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
    """Write a whole recording, a line for each shape.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, b"".join(_line(shape, count) for shape, count in counts.items()).decode())


def read_shapes(*paths: str | Path) -> dict[BatchShape, int]:
    """Count the shapes of recordings.

    A last line without a newline is still being written, and ignored.

    Raises:
        ValueError: a file cannot be read, has no record, or has an invalid line; the message names the line.
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
    """Raise ValueError for a file that is no recording."""
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
