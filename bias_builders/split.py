"""The rows of one step, and the split of their context blocks into shared and unique ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

Int32Array = np.ndarray


@dataclass(frozen=True)
class StepRows:
    """The tokens and requests of a step, unpadded, one entry per row.

    A *row* is one running request in this step. Its new tokens are contiguous in the flat batch, at
    ``[query_start, query_start + num_new)``.

    Attributes:
        row_id: ring row of the request, int32 ``[n]``, distinct.
        start: tokens whose keys and values were stored before the step, int32 ``[n]``.
        num_new: tokens that this step computes, int32 ``[n]``, at least 1.
        block_ids: block tables of all rows laid end to end, int32 ``[sum(num_blocks)]``.
        num_blocks: length of each row's table, int32 ``[n]``: enough for ``start + num_new``
            tokens, or 0 in every row of a model without retrieval heads.
        decode_len: most new tokens of a decode row (M).
        region: of each row's prompt, where prompts are stored whole until computed, negative for none, int32
            ``[n]``; else None.
        num_away: leading blocks of each row that are stored elsewhere, and not in its table, int32 ``[n]``;
            None = no row has any. All of them were filled before the step.
    """

    row_id: Int32Array
    start: Int32Array
    num_new: Int32Array
    block_ids: Int32Array
    num_blocks: Int32Array
    decode_len: int = 1
    region: Int32Array | None = None
    num_away: Int32Array | None = None

    @property
    def num_rows(self) -> int:
        """Requests that run in this step."""
        return len(self.row_id)

    @property
    def query_start(self) -> Int32Array:
        """Flat index of each row's first new token, int32 ``[n]``."""
        return self.num_new.cumsum(dtype=np.int32) - self.num_new

    @cached_property
    def is_decode(self) -> np.ndarray:
        """Rows with up to ``decode_len`` new tokens, which are written first and read from the cache."""
        return self.num_new <= self.decode_len

    @cached_property
    def context_len(self) -> Int32Array:
        """Tokens that each row reads from the cache parts, int32 ``[n]``.

        A decode row reads its own keys there too; a prompt row attends to its new keys in the causal part and
        reads only older ones from the cache.
        """
        return self.start + np.where(self.is_decode, self.num_new, 0)


def ranges(lengths: np.ndarray) -> Int32Array:
    """``[0..lengths[0]), [0..lengths[1]), ...`` laid end to end, int32 ``[sum(lengths)]``."""
    ends = lengths.cumsum(dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - (ends - lengths).repeat(lengths)


NOWHERE = 1 << 30
"""Position of the first slot of a missing block: beyond every token's view."""


@dataclass(frozen=True)
class SharedPart:
    """Blocks that several rows read, or one prompt row; they are gathered for all queries.

    Attributes:
        blocks: block ids, int32 ``[NS]``, ascending.
        start: position of the first slot of each, int32 ``[NS]``.
        reads: whether row entry ``i`` reads block ``s``, int32 ``[n, NS]`` of 0 and 1. Its tokens see the
            positions that were stored before the step.
    """

    blocks: Int32Array
    start: Int32Array
    reads: Int32Array


@dataclass(frozen=True)
class UniquePart:
    """Blocks that exactly one decode row reads.

    Blocks that all tokens of the row see whole are read from the contiguous slice ``[0, NU)`` of the block
    store without any mask. The others, its *tails*, are gathered and masked: the blocks that the row has
    filled in part, or fills in this step.

    Attributes:
        owner: row entry that reads block ``b``, -1 = none, int32 ``[NU]``.
        tail_block: block ids of each row's tails, -1 = none, int32 ``[n, T]``.
        tail_start: position of their first slots, ``NOWHERE`` = none, int32 ``[n, T]``.
    """

    owner: Int32Array
    tail_block: Int32Array
    tail_start: Int32Array


def tails_per_row(decode_len: int) -> int:
    """Most tails that a row can have (T), if it decodes at most as many tokens as a block has."""
    return 1 if decode_len == 1 else 2


class _Context(NamedTuple):
    """Context blocks of all rows: entry of the row, place in its table, block id, and readers by block id."""

    entry: np.ndarray
    ordinal: np.ndarray
    block: np.ndarray
    num_readers: np.ndarray

    @property
    def is_shared(self) -> bool:
        """Whether there is any shared block; most steps are decodes of unrelated requests."""
        return len(self.num_readers) > 0 and bool(self.num_readers.max() > 1)


def count_context(rows: StepRows, block_size: int) -> tuple[int, int]:
    """The blocks of both parts of ``split_context`` as numbers: ``len(blocks)`` and ``len(owner)``."""
    entry, ordinal, block, num_readers = context = _context(rows, block_size)
    is_unique = ordinal < _num_whole(rows, block_size)[entry]
    num_shared = 0
    if context.is_shared:
        is_unique &= num_readers[block] == 1
        num_shared = int(np.count_nonzero(num_readers > 1))
    return num_shared, int(block[is_unique].max(initial=-1)) + 1


def split_context(rows: StepRows, block_size: int) -> tuple[SharedPart, UniquePart]:
    """Assign every context block of the step to the part that reads it.

    Together with the causal part, every visible (query, key) pair falls into exactly one part. A block is
    unique when it belongs to one decode row only. A block of several rows was filled before the step, so
    every token of a decode row sees all of it.

    Returns:
        ``(shared, unique)``, with row *entries* (``0 .. n - 1``) as row numbers.
    """
    entry, ordinal, block, num_readers = context = _context(rows, block_size)
    if not context.is_shared:
        nothing = np.zeros(0, np.int32)
        shared = SharedPart(nothing, nothing, np.zeros((rows.num_rows, 0), np.int32))
        return shared, _unique_part(entry, ordinal, block, rows, block_size)
    is_shared = num_readers[block] != 1
    shared = _shared_part(entry[is_shared], ordinal[is_shared] * block_size, block[is_shared], rows.num_rows)
    alone = ~is_shared
    return shared, _unique_part(entry[alone], ordinal[alone], block[alone], rows, block_size)


def _context(rows: StepRows, block_size: int) -> _Context:
    """The readers of a block: one for each decode row, and two for a prompt row, so that it is shared."""
    num_context = -(-rows.context_len // block_size)
    if rows.num_away is not None:
        num_context = num_context - rows.num_away
    used_blocks = np.minimum(num_context, rows.num_blocks)
    entry = np.arange(rows.num_rows, dtype=np.int32).repeat(used_blocks)
    ordinal = ranges(used_blocks)
    block = rows.block_ids
    if len(entry) != len(block):
        table_start = rows.num_blocks.cumsum() - rows.num_blocks
        block = block[table_start[entry] + ordinal]
    if rows.num_away is not None:
        ordinal = ordinal + rows.num_away[entry]
    num_readers = np.bincount(block)
    if not rows.is_decode.all():
        num_readers += np.bincount(block[~rows.is_decode[entry]], minlength=len(num_readers))
    return _Context(entry, ordinal, block, num_readers)


def _num_whole(rows: StepRows, block_size: int) -> np.ndarray:
    """Blocks that all tokens of a row see whole: the first one sees a position more than was stored."""
    return (rows.start + 1) // block_size


def _shared_part(entry: np.ndarray, start: np.ndarray, block: np.ndarray, num_rows: int) -> SharedPart:
    blocks, first, column = np.unique(block, return_index=True, return_inverse=True)
    reads = np.zeros((num_rows, len(blocks)), dtype=np.int32)
    reads[entry, column] = 1
    return SharedPart(blocks.astype(np.int32), start[first], reads)


def _unique_part(
    entry: np.ndarray, ordinal: np.ndarray, block: np.ndarray, rows: StepRows, block_size: int
) -> UniquePart:
    tail = ordinal - _num_whole(rows, block_size)[entry]
    is_whole = tail < 0
    whole = block[is_whole]
    owner = np.full(int(whole.max()) + 1 if len(whole) else 0, -1, dtype=np.int32)
    owner[whole] = entry[is_whole]
    shape = (len(rows.row_id), tails_per_row(rows.decode_len))
    tail_block, tail_start = np.full(shape, -1, np.int32), np.full(shape, NOWHERE, np.int32)
    place = entry[~is_whole], tail[~is_whole]
    tail_block[place] = block[~is_whole]
    tail_start[place] = ordinal[~is_whole] * block_size
    return UniquePart(owner, tail_block, tail_start)
