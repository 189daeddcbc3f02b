"""Sizes of the chunks in which parts meet the context."""

from __future__ import annotations

SCORE_BYTES = 64 << 20
"""Bound of one block of float32 scores: chunks of keys are cut to stay below it."""

KEY_BYTES = 16 << 20
"""Bound of the keys that one chunk of the shared part gathers, so that they do not grow with the context
where few queries leave room for the scores of many blocks; with values, about the on-chip memory of a
Gaudi 2."""

KEY_SLOTS = 8192
"""The same bound in slots, for models or ranks with few heads."""

MASK_BYTES = 64 << 20
"""Bound of the mask of one chunk of the shared part, and of what it is made from, where no scores are."""

UNIQUE_BYTES = 16 << 20
"""Bound of what one chunk of whole blocks makes in the unique part."""


def shared_chunk(num_query_heads: int, block_size: int, key_bytes: int) -> int:
    """Blocks that the shared part gathers at a time.

    Args:
        num_query_heads: query tokens times their heads.
        key_bytes: of the keys of one block.
    """
    score_bytes = 4 * num_query_heads * block_size
    return max(1, min(SCORE_BYTES // score_bytes, KEY_BYTES // key_bytes, KEY_SLOTS // block_size))


def masked_chunk(num_queries: int, block_size: int, key_bytes: int, element_bytes: int) -> int:
    """Blocks that the shared part gathers at a time where attention is one operator, without scores.

    Args:
        key_bytes: of the keys of one block.
        element_bytes: of an element of the mask.
    """
    mask_bytes = (1 + element_bytes) * num_queries * block_size
    return max(1, min(MASK_BYTES // mask_bytes, KEY_BYTES // key_bytes, KEY_SLOTS // block_size))


def unique_chunk(num_rows: int, num_heads: int, block_size: int, head_dim: int, key_bytes: int) -> int:
    """Whole blocks that the unique part reads at a time.

    As many as one request of ``KEY_SLOTS`` tokens has, so that a longer one takes no more; or more, while
    what a chunk makes stays below the tails, one of each row, which are gathered together.

    Args:
        num_heads: query heads of a row.
        key_bytes: of the keys of one block.
    """
    # Two copies in float32 of each score, of each result, and of what finds the largest score of a row.
    block_bytes = 8 * num_heads * (block_size + head_dim + num_rows)
    # Gathered keys, gathered values, and those with unused slots cleared.
    tail_bytes = 3 * num_rows * key_bytes
    chunk = max(KEY_SLOTS // block_size, tail_bytes // block_bytes)
    return max(1, min(UNIQUE_BYTES // block_bytes, chunk))
