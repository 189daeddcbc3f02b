"""Sizes that decide the intermediates of the portable kernels."""

from __future__ import annotations

from typing import NamedTuple

from kernels_ref.chunks import DEFAULT_BOUNDS, ChunkBounds
from kernels_ref.slices import QUERY_SLICE
from kernels_ref.step import StepParts

FLOAT32 = 4
SCORE_COPIES = 4
"""Copies of scores: scores, masked scores, weights, and the product's own copy of them."""


class HeadSizes(NamedTuple):
    """Heads of a group.

    Attributes:
        num_heads: key/value heads.
        group_size: query heads of each.
        head_dim: of keys and values.
        dtype_bytes: of an element.
    """

    num_heads: int
    group_size: int
    head_dim: int
    dtype_bytes: int

    @property
    def num_query_heads(self) -> int:
        """Query heads of all of them."""
        return self.num_heads * self.group_size

    def unit_bytes(self, num_slots: int) -> int:
        """The keys, or the values, of a unit of so many slots."""
        return self.num_heads * num_slots * self.head_dim * self.dtype_bytes


class PartSizes(NamedTuple):
    """Sizes of the parts of a step.

    Attributes:
        parts: the parts that run.
        query_len: query tokens.
        num_shared_blocks, num_unique_blocks: blocks of the shared and of the unique part.
        num_rows: rows of the unique part.
        decode_len: most tokens of a decode row.
        block_size: tokens of a block.
        chunks: bounds of chunks of context.
    """

    parts: StepParts
    query_len: int
    num_shared_blocks: int
    num_unique_blocks: int
    num_rows: int
    decode_len: int
    block_size: int
    chunks: ChunkBounds = DEFAULT_BOUNDS


def causal_bytes(heads: HeadSizes, sizes: PartSizes) -> int:
    """Scores of one slice of the causal part; 0 if it does not run."""
    if not sizes.parts.causal:
        return 0
    num_scores = min(QUERY_SLICE, sizes.query_len) * sizes.query_len * heads.num_query_heads
    return SCORE_COPIES * num_scores * FLOAT32
