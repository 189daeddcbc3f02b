"""Sizes of the slices in which implementations go through a part."""

from __future__ import annotations

from typing import NamedTuple

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
