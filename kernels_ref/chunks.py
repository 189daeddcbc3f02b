"""Sizes of the chunks and slices in which parts meet the context."""

from __future__ import annotations

from typing import NamedTuple

MOST_INLINE = 2
"""Slices or chunks of a part of attention in the graph of a layer: six parts of them stay below 600 nodes."""


class ChunkBounds(NamedTuple):
    """Bounds of what one chunk of a part makes, in bytes, fixed for a captured step.

    Attributes:
        score_bytes: of one block of float32 scores.
        key_bytes: of the keys that one chunk of the shared part gathers, so that they do not grow with the
            context where few queries leave room for the scores of many blocks; with values, about the on-chip
            memory of a Gaudi 2.
        key_slots: the same bound in slots, for models or ranks with few heads.
        mask_bytes: of the mask of one chunk of the shared part, and of what it is made from, where no scores
            are.
        unique_bytes: of what one chunk of whole blocks makes in the unique part.
        most_inline: chunks of one part that a graph holds which is compiled by itself; more of them run in a
            loop outside of it. None = any number.
    """

    score_bytes: int = 64 << 20
    key_bytes: int = 16 << 20
    key_slots: int = 8192
    mask_bytes: int = 64 << 20
    unique_bytes: int = 16 << 20
    most_inline: int | None = None

    def shared(self, num_query_heads: int, block_size: int, key_bytes: int) -> int:
        """Blocks that the shared part gathers at a time.

        Args:
            num_query_heads: query tokens times their heads.
            key_bytes: of the keys of one block.
        """
        score_bytes = 4 * num_query_heads * block_size
        return max(
            1, min(self.score_bytes // score_bytes, self.key_bytes // key_bytes, self.key_slots // block_size)
        )

    def masked(self, num_queries: int, block_size: int, key_bytes: int, element_bytes: int) -> int:
        """Blocks that the shared part gathers at a time where attention is one operator, without scores.

        Args:
            key_bytes: of the keys of one block.
            element_bytes: of an element of the mask.
        """
        mask_bytes = (1 + element_bytes) * num_queries * block_size
        return max(
            1, min(self.mask_bytes // mask_bytes, self.key_bytes // key_bytes, self.key_slots // block_size)
        )

    def unique(self, num_rows: int, num_heads: int, block_size: int, head_dim: int, key_bytes: int) -> int:
        """Whole blocks that the unique part reads at a time.

        As many as one request of ``key_slots`` tokens has, so that a longer one takes no more; or more, while
        what a chunk makes stays below the tails, one of each row, which are gathered together.

        Args:
            num_heads: query heads of a row.
            key_bytes: of the keys of one block.
        """
        # Two copies in float32 of each score, of each result, and of what finds the largest score of a row.
        block_bytes = 8 * num_heads * (block_size + head_dim + num_rows)
        # Gathered keys, gathered values, and those with unused slots cleared.
        tail_bytes = 3 * num_rows * key_bytes
        chunk = max(self.key_slots // block_size, tail_bytes // block_bytes)
        return max(1, min(self.unique_bytes // block_bytes, chunk))


DEFAULT_BOUNDS = ChunkBounds()

QUERY_SLICE = 512
"""Queries of one slice of the portable causal part, which makes scores."""

QUERY_STEP = 128
"""Slices outside of a graph are multiples of it: products and masks with odd sizes are slow on an HPU."""


class Slices(NamedTuple):
    """Sizes of slices; results are the same for all of them, up to rounding.

    Attributes:
        queries: of the causal part and of the rings of prompts, where scores are made.
        masked_queries: the same where attention is one operator, bounded by its mask.
        band_queries: of the band of a window, on a CPU.
        context_blocks: blocks that a prompt row gathers at a time, on a CPU.
        decode_slots: slots of the blocks that decodes read at a time, on a CPU: their scores stay in the
            second-level cache, and a single request of that many tokens fills a slice, so that a longer one
            takes no more.
        short_blocks: most blocks for which the unique part on a CPU is the portable one.
    """

    queries: int = QUERY_SLICE
    masked_queries: int = 1024
    band_queries: int = 256
    context_blocks: int = 64
    decode_slots: int = 8192
    short_blocks: int = 8


DEFAULT_SLICES = Slices()
"""Sizes that were measured, or follow from memory."""


def num_parts(total: int, size: int) -> int:
    """Parts of ``size`` in ``total``, the last one perhaps with less."""
    return -(-total // size)


def even_size(total: int, most: int, step: int = 1) -> int:
    """Size of parts, ``most`` at most and a multiple of ``step`` below it, of which as few are needed."""
    each = num_parts(total, num_parts(total, most))
    return min(most, num_parts(each, step) * step)
