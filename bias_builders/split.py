"""Split the context blocks of a step into shared and unique ones (host plan, numpy)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bias_builders.rows import Int32Array, StepRows, ranges


@dataclass(frozen=True)
class SharedPart:
    """Blocks that more than one query token reads; they are gathered and meet every query.

    Attributes:
        blocks: block ids, int32 ``[NS]``, ascending.
        visible: leading slots of block ``s`` that each token of row entry ``i`` sees, 0 = none,
            int32 ``[n, NS]``. All new tokens of a row see the same old context, so one number
            a row says it for each of them.
    """

    blocks: Int32Array
    visible: Int32Array


@dataclass(frozen=True)
class UniquePart:
    """Blocks that exactly one query token reads.

    Completely filled ones are taken from the contiguous slice ``[0, NU)`` of the block store
    without any mask. The one block that a row may have filled only in part, its *tail*, is
    gathered and masked.

    Attributes:
        owner: row entry that reads block ``b``, -1 = nobody, int32 ``[NU]``.
        tail_block: block id of each row's tail, -1 = none, int32 ``[n]``.
        tail_visible: leading slots seen of it, ``0 .. block_size - 1``, int32 ``[n]``.
    """

    owner: Int32Array
    tail_block: Int32Array
    tail_visible: Int32Array


def split_context(rows: StepRows, block_size: int) -> tuple[SharedPart, UniquePart]:
    """Say for every context block of the step which part reads it, and how much of it.

    Together with the causal part, every visible (query, key) pair falls into exactly one part.
    A block is unique when a single query token reads it: it belongs to one row only, and that
    row has one new token.

    Returns:
        ``(shared, unique)``, with row *entries* (``0 .. n - 1``) as row numbers.
    """
    context = rows.context_len
    used_blocks = np.minimum(-(-context // block_size), rows.num_blocks)
    entry = np.arange(rows.num_rows, dtype=np.int32).repeat(used_blocks)
    ordinal = ranges(used_blocks)
    table_start = rows.num_blocks.cumsum() - rows.num_blocks
    block = rows.block_ids[table_start[entry] + ordinal]
    visible = np.minimum(context[entry] - ordinal * block_size, block_size)

    num_readers = np.bincount(block, weights=rows.num_new[entry]) if len(block) else np.zeros(0)
    is_shared = num_readers[block] != 1

    shared = _shared_part(entry[is_shared], block[is_shared], visible[is_shared], rows.num_rows)
    if len(shared.blocks):
        entry, block, visible = entry[~is_shared], block[~is_shared], visible[~is_shared]
    return shared, _unique_part(entry, block, visible, rows.num_rows, block_size)


def _shared_part(entry: np.ndarray, block: np.ndarray, visible: np.ndarray, num_rows: int) -> SharedPart:
    if not len(block):
        # Most steps are decodes of unrelated requests.
        return SharedPart(np.zeros(0, np.int32), np.zeros((num_rows, 0), np.int32))
    blocks, column = np.unique(block, return_inverse=True)
    table = np.zeros((num_rows, len(blocks)), dtype=np.int32)
    table[entry, column] = visible
    return SharedPart(blocks.astype(np.int32), table)


def _unique_part(
    entry: np.ndarray, block: np.ndarray, visible: np.ndarray, num_rows: int, block_size: int
) -> UniquePart:
    is_full = visible == block_size
    full = block[is_full]
    owner = np.full(int(full.max()) + 1 if len(full) else 0, -1, dtype=np.int32)
    owner[full] = entry[is_full]
    is_tail = ~is_full
    row = entry[is_tail]
    tail_block = np.full(num_rows, -1, dtype=np.int32)
    tail_visible = np.zeros(num_rows, dtype=np.int32)
    tail_block[row] = block[is_tail]
    tail_visible[row] = visible[is_tail]
    return UniquePart(owner, tail_block, tail_visible)
