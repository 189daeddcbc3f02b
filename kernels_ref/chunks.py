"""Sizes of the chunks and slices by which parts process the context."""

from __future__ import annotations

from typing import NamedTuple

MOST_INLINE = 2
"""Most slices or chunks of a part in the graph of a layer: with six parts, below 600 nodes."""

MOST_CAUSAL = 4
"""Most slices of fused causal attention in the graph of a layer, each of some 63 nodes."""

MOST_RINGS = 1
"""Most slices of prompts that read their rings in the graph of a layer: with two it has 611 nodes."""

MOST_ROUNDS = 4
"""Most chunks of the shared part in the body of its loop: with 109 nodes each, below 600."""

MEMORY_SHARE = 32
"""One pass of the unique part makes at most this fraction of an HPU's memory, see ``ChunkBounds.of_hpu``."""

SHARED_SLOTS = 16_384
"""Slots of a chunk of the shared part on an HPU: ``MOST_INLINE`` chunks cover 32,768 shared tokens."""


def unique_block_bytes(num_rows: int, num_heads: int, block_size: int, head_dim: int) -> int:
    """Return the peak of the intermediates that one whole block of the unique part adds, in bytes.

    Two float32 copies of its scores, four of its results (before and after scaling and selecting), and two of
    the maxima that are compared for each row. Traced peaks are 0.5 to 0.96 of it, those of the portable
    kernels in bfloat16 the lowest (``tests/audit/test_transients.py``).

    Args:
        num_rows: decode rows.
        num_heads: query heads of a row, times its tokens.
    """
    return 8 * num_heads * (block_size + 2 * head_dim + num_rows)


class ChunkBounds(NamedTuple):
    """Bounds of the intermediates of one chunk of a part, in bytes, fixed for a captured step.

    Attributes:
        score_bytes: of one block of float32 scores.
        key_bytes: of the keys that one chunk of the shared part gathers, which bounds them if few queries
            allow the scores of many blocks; with values, about the on-chip memory of a Gaudi 2.
        key_slots: the same bound in slots, for models or ranks with few heads.
        mask_bytes: of the mask of one chunk of the shared part and its intermediates, in fused attention.
        unique_bytes: of the intermediates of one chunk of whole blocks in the unique part, see
            ``unique_block_bytes``.
        most_inline: most chunks of one part within the compiled graph of a layer; more of them run in a loop
            outside of it. None = any number.
        one_pass: whether a chunk of the unique part has all blocks that ``unique_bytes`` allows; otherwise
            ``key_slots`` or the size of the tails bounds it too.
    """

    score_bytes: int = 64 << 20
    key_bytes: int = 16 << 20
    key_slots: int = 8192
    mask_bytes: int = 64 << 20
    unique_bytes: int = 24 << 20
    most_inline: int | None = None
    one_pass: bool = False

    @classmethod
    def of_hpu(cls, memory_bytes: int, score_bytes: int = 64 << 20) -> ChunkBounds:
        """Return the bounds on an HPU, where each chunk costs its launches and a long loop a call each.

        The unique part is one pass while its intermediates fit ``1 / MEMORY_SHARE`` of the device, rounded
        down to a power of two, so that all ranks derive the same bounds.

        Args:
            memory_bytes: of the device, used memory included.
            score_bytes: see there. Masks have it too, or an eighth of what the unique part may make, which is
                256 MiB on a Gaudi 2 or 3.

        Raises:
            ValueError: no memory.
        """
        if memory_bytes < 1:
            raise ValueError(f"expected memory_bytes >= 1, got {memory_bytes}")
        least = cls()
        unique_bytes = max(least.unique_bytes, 1 << (max(1, memory_bytes // MEMORY_SHARE).bit_length() - 1))
        return cls(
            score_bytes=score_bytes,
            key_bytes=max(least.key_bytes, unique_bytes // 16),
            key_slots=SHARED_SLOTS,
            mask_bytes=max(score_bytes, unique_bytes // 8),
            unique_bytes=unique_bytes,
            most_inline=MOST_INLINE,
            one_pass=True,
        )

    def shared(self, num_query_heads: int, block_size: int, key_bytes: int) -> int:
        """Return the number of blocks that the shared part gathers at a time.

        Args:
            num_query_heads: query tokens times their heads.
            key_bytes: of the keys of one block.
        """
        score_bytes = 4 * num_query_heads * block_size
        return max(
            1, min(self.score_bytes // score_bytes, self.key_bytes // key_bytes, self.key_slots // block_size)
        )

    def masked(self, num_queries: int, block_size: int, key_bytes: int, element_bytes: int) -> int:
        """Return the number of blocks that the shared part gathers at a time for fused attention.

        Args:
            key_bytes: of the keys of one block.
            element_bytes: of an element of the mask.
        """
        mask_bytes = (1 + element_bytes) * num_queries * block_size
        return max(
            1, min(self.mask_bytes // mask_bytes, self.key_bytes // key_bytes, self.key_slots // block_size)
        )

    def causal_slice(self, num_queries: int, least: int, element_bytes: int) -> int:
        """Return the queries of a slice of fused causal attention over all earlier keys.

        ``least``, or as many as make ``MOST_CAUSAL`` slices, if the mask of the last one fits ``mask_bytes``.

        Args:
            element_bytes: of an element of the mask.
        """
        each = num_parts(num_parts(num_queries, MOST_CAUSAL), QUERY_STEP) * QUERY_STEP
        fits = (1 + element_bytes) * each * num_queries <= self.mask_bytes
        return max(least, each) if fits else least

    def ring_slice(self, num_slots: int, least: int, element_bytes: int) -> int:
        """Return the queries of a slice of fused attention to the rings of prompts: what a mask allows.

        Args:
            num_slots: of all gathered rings.
            element_bytes: of an element of the mask.
        """
        return max(least, self.mask_bytes // ((1 + element_bytes) * max(1, num_slots)))

    def has_one_band(self, num_queries: int, size: int, window_size: int, element_bytes: int) -> bool:
        """Return whether fused attention within a window is one product of all slices of queries.

        Each slice then has the keys that it reaches and the sinks. A mask of all slices has to fit
        ``mask_bytes``, and a window that reaches over all new tokens has slices of its own.

        Args:
            size: queries of a slice.
            window_size: tokens that a query sees.
            element_bytes: of an element of the mask.
        """
        num_slices, num_keys = num_parts(num_queries, size), band_keys(size, window_size)
        mask_bytes = (1 + element_bytes) * num_slices * size * num_keys
        return num_slices > 1 and num_keys <= num_queries and mask_bytes <= self.mask_bytes

    def unique(self, num_rows: int, num_heads: int, block_size: int, head_dim: int, key_bytes: int) -> int:
        """Return the number of whole blocks that the unique part reads at a time.

        As many as ``unique_bytes`` allows. Unless ``one_pass``, at most as many as one request of
        ``key_slots`` tokens has, so that a longer one needs no more memory; or more, while the intermediates
        of a chunk are smaller than the tails, one of each row, which are gathered together.

        Args:
            num_heads: query heads of a row, times its tokens.
            key_bytes: of the keys of one block.
        """
        block_bytes = unique_block_bytes(num_rows, num_heads, block_size, head_dim)
        most = max(1, self.unique_bytes // block_bytes)
        if self.one_pass:
            return most
        # Keys and values, once as they are gathered and once with unused slots cleared.
        tail_bytes = 4 * num_rows * key_bytes
        return max(1, min(most, max(self.key_slots // block_size, tail_bytes // block_bytes)))

    def gathered(self, chunk: int, key_bytes: int) -> int:
        """Return the blocks of a chunk of the unique part that is gathered, outside the graph of a layer.

        Args:
            chunk: blocks of a chunk that is read in place.
            key_bytes: of the keys of one block.
        """
        return min(chunk, max(1, self.key_bytes // key_bytes))


DEFAULT_BOUNDS = ChunkBounds()

QUERY_SLICE = 512
"""Queries of one slice of the portable causal part, which materialises scores."""

QUERY_STEP = 128
"""Slices outside of a graph are multiples of it: products and masks with odd sizes are slow on an HPU."""


class Slices(NamedTuple):
    """Sizes of slices; results are the same for all of them, up to rounding.

    Attributes:
        queries: of the causal part and of the rings of prompts, with materialised scores.
        masked_queries: the same with fused attention, bounded by its mask.
        band_queries: of the band of a window, on a CPU.
        context_blocks: blocks that a prompt row gathers at a time, on a CPU.
        decode_slots: slots of the blocks that decodes read at a time, on a CPU: their scores stay in the
            second-level cache, and a single request of that many tokens fills a slice, so that a longer one
            needs no more memory.
        short_blocks: most blocks for which the unique part on a CPU is the portable one.
    """

    queries: int = QUERY_SLICE
    masked_queries: int = 1024
    band_queries: int = 256
    context_blocks: int = 64
    decode_slots: int = 8192
    short_blocks: int = 8


DEFAULT_SLICES = Slices()
"""Measured sizes, or derived from memory."""


def band_keys(size: int, window_size: int) -> int:
    """Return the keys that a slice of ``size`` queries may see, each a window that ends with itself."""
    return size + window_size - 1


def looped_rounds(num_chunks: int) -> int:
    """Return the chunks of the shared part that one call of the body of its loop reads."""
    return num_parts(num_chunks, num_parts(num_chunks, MOST_ROUNDS))


def num_parts(total: int, size: int) -> int:
    """Return the number of parts of ``size`` in ``total``, the last one included if smaller."""
    return -(-total // size)


def even_size(total: int, most: int, step: int = 1) -> int:
    """Return a part size of at most ``most`` for the fewest parts; a multiple of ``step`` if smaller."""
    each = num_parts(total, num_parts(total, most))
    return min(most, num_parts(each, step) * step)
