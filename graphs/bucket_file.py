"""Tables in files: our own, one shape a line, and the bucket file of vllm-gaudi.

**Ours.** ``csu/q2048/s64/u512/l32`` a line; ``#`` begins a comment. A comment ``padding: 0.064 by StepCost``
is the padding that the table was planned for.

**vllm-gaudi's** (``VLLM_BUCKETING_FROM_FILE``). ``(batch, query_len, num_context_blocks)`` a line, where each
entry is an integer, a list of integers or a ``range``, and stands for every combination. ``query_len`` 1 is a
decode, and its context blocks are those of the whole batch. A prompt pads every row to ``query_len``, and its
context blocks are those of one row. The mapping, and what it loses:

======================  =====================================  ==============================================
entry                   shape                                  back
======================  =====================================  ==============================================
``(b, 1, n)``           ``--u/q{b}/s0/u{n}/l{b}``              the same
``(b, q, 0)``           ``c--/q{b*q}/s0/u0/l{b}``              ``(1, q, 0)``
``(b, q, n)``           ``cs-/q{b*q}/s{b*n}/u0/l{b}``          ``(1, q, n)``
(none)                  ``c-u``, ``csu``, ``-su``              its prompt part, and its decode part
======================  =====================================  ==============================================

A shape does not say how its query tokens are divided among prompts, so it is written as one prompt, as in a
step of chunked prefill. Mixed steps do not exist there: ``csu`` is written as
``(1, q, s)`` and ``(l, 1, u)``, and ``-su`` as ``(q, 1, u + s)``, since a decode there reads shared
blocks like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from graphs.atomic_file import replace_file
from graphs.cost import CostFunction
from graphs.promise import Promise
from graphs.shape import LARGEST_SIZE, BatchShape, Phase
from graphs.table import BucketTable

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
    return replace(BucketTable.from_strings(shapes, cost), promise=_promise(path))


def write_table(
    path: str | Path, buckets: Iterable[BatchShape], comment: str = "", promise: Promise | None = None
) -> None:
    """Write a table, one shape a line below the comment and what was promised."""
    lines = [*comment.splitlines(), *([] if promise is None else [str(promise)])]
    heading = [f"# {line}".rstrip() for line in lines]
    replace_file(path, "\n".join([*heading, *map(str, buckets)]) + "\n")


def write_gaudi_buckets(path: str | Path, buckets: Iterable[GaudiBucket], comment: str = "") -> None:
    """Write a file that ``VLLM_BUCKETING_FROM_FILE`` takes: one precise entry a line, each once."""
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


def _promise(path: str | Path) -> Promise | None:
    """The first promise in the comments."""
    for number, line in enumerate(_lines(path), start=1):
        try:
            promise = Promise.find(line.partition("#")[2])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if promise is not None:
            return promise
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
        # The length of a range is no length to Python once it is beyond a machine word.
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
