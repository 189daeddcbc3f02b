"""Counts of the attention of a step by groups of heads, from the sizes of its bucket alone.

Sizes of a bucket may be arrays: all counts are then arrays too, of which each element is that of one bucket.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bias_builders import Rule, Window, tails_per_row
from graphs import BatchShape, Phase
from kernels_ref import Blocks, HeadGroup, Implementation, LayerSpec, Owner, Rings
from kernels_ref.chunks import (
    DEFAULT_BOUNDS,
    DEFAULT_SLICES,
    ChunkBounds,
    band_keys,
    num_parts,
    unique_block_bytes,
)

Size: TypeAlias = Any
"""An int, or an int64 array of sizes that broadcasts with the other sizes of a step."""

_DTYPE_BYTES = 2
"""Of activations; keys and values are chunked by it."""


@dataclass(frozen=True, eq=False)
class Shapes:
    """Many buckets of one phase, with the attributes of a ``BatchShape``."""

    phase: Phase
    query_len: Size
    num_shared_blocks: Size
    num_unique_blocks: Size
    num_logits: Size


Bucket: TypeAlias = BatchShape | Shapes


def by_size(count: Callable[..., Any], size: Size, *args: Any) -> Any:
    """Return ``count(size, *args)``, or for an array that of each of its sizes, which are small.

    Args:
        count: returns a number, or a tuple of them, which become the first axis.
        args: hashable.
    """
    if not isinstance(size, np.ndarray):
        return count(size, *args)
    most = int(size.max(initial=1))
    # Tables of powers of two, so that few are made.
    return _counted(count, 1 << most.bit_length(), args)[..., size]


@lru_cache(maxsize=256)
def _counted(count: Callable[..., Any], most: int, args: tuple[Any, ...]) -> np.ndarray:
    """The count of each size from 0 to ``most``."""
    return np.array([count(size, *args) for size in range(most + 1)]).T.copy()


@dataclass(frozen=True)
class GroupSizes:
    """Sizes of the attention of a group, and of the steps around it.

    Attributes:
        heads: the group.
        group_size: query heads of each key/value head.
        head_dim: elements of a key.
        block_size: slots of a block.
        max_chunk_rows: rings that are gathered for prompts with context.
        decode_len: most tokens of a decode row.
        is_fused: whether dense attention is one operator, without scores in memory.
        chunks: bounds of chunks of context.
        value_head_dim: elements of a value; None = ``head_dim``.
    """

    heads: HeadGroup
    group_size: int
    head_dim: int
    block_size: int
    max_chunk_rows: int
    decode_len: int
    is_fused: bool
    chunks: ChunkBounds = DEFAULT_BOUNDS
    value_head_dim: int | None = None

    @classmethod
    def of_layer(
        cls, spec: LayerSpec, block_size: int, max_chunk_rows: int, decode_len: int
    ) -> list[GroupSizes]:
        """Return the sizes of the groups of a layer; see the attributes."""
        is_fused = spec.impl is Implementation.HPU
        rest = block_size, max_chunk_rows, decode_len, is_fused, spec.chunks, spec.value_dim
        return [cls(group, spec.group_size, spec.head_dim, *rest) for group in spec.groups]

    @property
    def window(self) -> Window | None:
        """Window of a token, None where it sees all tokens."""
        kind = self.heads.kind
        if kind.owner is Owner.BLOCK:
            return None
        return kind.window if isinstance(kind, Rings) else Window(0, kind.reach or 1)

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of the keys and values of one token in all heads."""
        return self.heads.num_heads * (self.head_dim + self.value_dim)

    @property
    def num_query_heads(self) -> int:
        """Query heads of the group (H)."""
        return self.heads.num_heads * self.group_size

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of one block."""
        return self.heads.num_heads * self.block_size * self.head_dim * _DTYPE_BYTES

    def unique_chunk(self, num_rows: Size) -> Any:
        """Whole blocks that the unique part reads at a time."""
        heads = self.num_query_heads * self.decode_len
        rest = heads, self.block_size, self.head_dim, self.key_bytes
        return by_size(_unique_chunk, num_rows, self.chunks, *rest)

    def shared_chunk(self, query_len: Size) -> Any:
        """Blocks that the shared part gathers at a time."""
        heads = None if self.is_fused else self.num_query_heads
        return by_size(_shared_chunk, query_len, self.chunks, heads, self.block_size, self.key_bytes)

    def looped_rounds(self, num_rows: Size, num_blocks: Size) -> Any:
        """Chunks of them where a loop outside the graph of a layer reads them; several are gathered."""
        chunk = self.unique_chunk(num_rows)
        # A table of all sizes of chunks would be long.
        gathered = np.minimum(np.maximum(1, chunk), self.chunks.gathered(sys.maxsize, self.key_bytes))
        return np.where(num_blocks <= chunk, 1, -(-num_blocks // gathered))

    def unique_bytes(self, num_rows: Size, num_blocks: Size) -> Any:
        """Bytes of the intermediates of one chunk of the unique part."""
        heads = self.num_query_heads * self.decode_len
        each = unique_block_bytes(num_rows, heads, self.block_size, self.head_dim)
        return np.minimum(num_blocks, self.unique_chunk(num_rows)) * each

    @property
    def query_slice(self) -> int:
        """Queries that are processed at a time."""
        return DEFAULT_SLICES.masked_queries if self.is_fused else DEFAULT_SLICES.queries

    @property
    def rule(self) -> Rule | None:
        """Rule of the causal part, None where a token sees all new ones before it."""
        kind = self.heads.kind
        return kind.rule if isinstance(kind, Blocks) else self.window

    def causal_slice(self, query_len: int) -> int:
        """Queries that the causal part processes at a time."""
        if not self.is_fused or self.rule is not None:
            return self.query_slice
        return self.chunks.causal_slice(query_len, self.query_slice, _DTYPE_BYTES)

    @property
    def ring_slice(self) -> int:
        """Queries that read rings of prompts at a time."""
        if not self.is_fused:
            return self.query_slice
        num_slots = self.max_chunk_rows * self.heads.kind.num_slots(self.block_size)
        return self.chunks.ring_slice(num_slots, self.query_slice, _DTYPE_BYTES)

    def has_one_band(self, query_len: int) -> bool:
        """Whether the causal part within the window is one product."""
        if not (self.is_fused and isinstance(self.rule, Window)):
            return False
        return self.chunks.has_one_band(query_len, self.query_slice, self.rule.size, _DTYPE_BYTES)


def _unique_chunk(num_rows: int, chunks: ChunkBounds, *sizes: int) -> int:
    return chunks.unique(num_rows, *sizes)


def _shared_chunk(
    query_len: int, chunks: ChunkBounds, num_heads: int | None, block_size: int, key_bytes: int
) -> int:
    """Blocks of one chunk of the shared part.

    Args:
        num_heads: query heads; None = attention is fused.
    """
    num_queries = max(1, query_len)
    if num_heads is None:
        return chunks.masked(num_queries, block_size, key_bytes, _DTYPE_BYTES)
    return chunks.shared(num_queries * num_heads, block_size, key_bytes)


class AttentionCounts(NamedTuple):
    """Counts of one group in one layer and step; they add up. Each is an array where sizes are.

    Attributes:
        pairs: query-key pairs of tokens with keys that lie in a list, for one head.
        scores: pairs of all query heads, in all parts.
        list_elements: elements of the lists of keys and values.
        partial_elements: elements of the partial results of tokens.
        own_scores: scores of decode rows with whole blocks.
        own_elements: elements of the partial results of whole blocks.
        owner_pairs: pairs of a row and a head of a block, by which results are summed by owner.
        merged_elements: elements of the rows' partial results, once for each chunk of whole blocks.
        tail_scores: scores of decode rows with tails and rings.
        tail_elements: elements of the keys and values of tails and rings.
        block_elements: elements of the keys and values of whole blocks, which are read where they lie.
        token_elements: elements of the queries.
    """

    pairs: Any = 0.0
    scores: Any = 0.0
    list_elements: Any = 0.0
    partial_elements: Any = 0.0
    own_scores: Any = 0.0
    own_elements: Any = 0.0
    owner_pairs: Any = 0.0
    merged_elements: Any = 0.0
    tail_scores: Any = 0.0
    tail_elements: Any = 0.0
    block_elements: Any = 0.0
    token_elements: Any = 0.0


class AttentionRuns(NamedTuple):
    """Runs of each part of a group in one layer and step. Each is an array where sizes are.

    Attributes:
        blocks, rings: 1 for a group of the kind.
        split: 1 for rings in steps of several tokens, whose new keys and values are copied apart from those
            of other groups.
        causal, causal_slices, causal_cuts: the causal part of blocks, its slices, and 1 if they are several.
        band, band_slices, band_sinks, band_cuts: the same of rings, and slices with sinks before them.
        one_band: 1 if the slices within a window are one product, in place of their cuts.
        shared, shared_chunks: the shared part of blocks, and its chunks.
        rings_read, rings_read_slices: the shared part of rings, and its slices.
        unique, unique_chunks: the unique part of blocks, and its chunks.
        unique_alone: the unique part in steps that have no other, in place of ``unique``.
        rings_own: the unique part of rings.
        rings_alone: the unique part where nothing is merged with it, in place of ``rings_own``.
    """

    blocks: Any = 0.0
    rings: Any = 0.0
    split: Any = 0.0
    causal: Any = 0.0
    causal_slices: Any = 0.0
    causal_cuts: Any = 0.0
    band: Any = 0.0
    band_slices: Any = 0.0
    band_sinks: Any = 0.0
    band_cuts: Any = 0.0
    one_band: Any = 0.0
    shared: Any = 0.0
    shared_chunks: Any = 0.0
    rings_read: Any = 0.0
    rings_read_slices: Any = 0.0
    unique: Any = 0.0
    unique_chunks: Any = 0.0
    unique_alone: Any = 0.0
    rings_own: Any = 0.0
    rings_alone: Any = 0.0


def count_attention(sizes: GroupSizes, bucket: Bucket) -> tuple[AttentionCounts, AttentionRuns]:
    """Count what a group does in a step, padding included."""
    if sizes.window is None:
        return _count_blocks(sizes, bucket)
    return _count_rings(sizes, bucket, sizes.window)


def _count_blocks(sizes: GroupSizes, bucket: Bucket) -> tuple[AttentionCounts, AttentionRuns]:
    phase, query_len = bucket.phase, bucket.query_len
    heads, dim, slots = sizes.num_query_heads, sizes.value_dim, sizes.block_size
    counts, runs = _of_tokens(sizes, query_len), AttentionRuns(blocks=1)
    pairs: Any = 0
    keys: Any = 0
    num_partials: Any = 0
    if phase.causal:
        pairs, keys, slices, is_one = by_size(_of_causal, query_len, sizes)
        num_partials = 1
        runs = runs._replace(causal=1, causal_slices=slices, causal_cuts=1 * (slices > 1), one_band=is_one)
    if phase.shared:
        num_shared = bucket.num_shared_blocks
        chunks = -(-num_shared // sizes.shared_chunk(query_len))
        pairs = pairs + query_len * num_shared * slots
        keys = keys + num_shared * slots
        num_partials = num_partials + chunks
        runs = runs._replace(shared=1 * (num_shared > 0), shared_chunks=chunks)
    counts = _with_lists(counts, sizes, pairs, keys, num_partials * query_len)
    if not phase.unique:
        return counts, runs
    rows, blocks = bucket.num_logits, bucket.num_unique_blocks
    row_heads = heads * sizes.decode_len
    chunks = -(-blocks // sizes.unique_chunk(rows))
    is_alone = not (phase.causal or phase.shared)
    own = blocks * slots * row_heads
    tails = rows * tails_per_row(sizes.decode_len) * slots
    kv_elements = sizes.kv_elements
    return counts._replace(
        scores=counts.scores + own + tails * row_heads,
        own_scores=own,
        own_elements=blocks * row_heads * dim,
        owner_pairs=rows * blocks * row_heads,
        merged_elements=chunks * rows * row_heads * dim,
        tail_scores=tails * row_heads,
        tail_elements=tails * kv_elements,
        block_elements=blocks * slots * kv_elements,
    ), runs._replace(unique=int(not is_alone), unique_alone=int(is_alone), unique_chunks=chunks)


def _count_rings(sizes: GroupSizes, bucket: Bucket, window: Window) -> tuple[AttentionCounts, AttentionRuns]:
    phase, query_len = bucket.phase, bucket.query_len
    num_slots = sizes.heads.kind.num_slots(sizes.block_size)
    counts, runs = _of_tokens(sizes, query_len), AttentionRuns(rings=1, split=1 * (query_len > 1))
    pairs: Any = 0
    keys: Any = 0
    num_partials = 0
    if phase.causal:
        pairs, keys, slices, sinks, is_one = by_size(_of_band, query_len, sizes, window)
        num_partials = 1
        runs = runs._replace(band=1, band_slices=slices, band_sinks=sinks)
        runs = runs._replace(band_cuts=1 * (slices > 1), one_band=is_one)
        if phase.shared:
            slices = -(-query_len // sizes.ring_slice)
            gathered = sizes.max_chunk_rows * num_slots
            pairs = pairs + query_len * gathered
            keys = keys + slices * gathered
            num_partials += 1
            runs = runs._replace(rings_read=1, rings_read_slices=slices)
    counts = _with_lists(counts, sizes, pairs, keys, num_partials * query_len)
    if not phase.unique:
        return counts, runs
    slots = bucket.num_logits * num_slots
    scores = slots * sizes.num_query_heads * sizes.decode_len
    return counts._replace(
        scores=counts.scores + scores,
        tail_scores=scores,
        tail_elements=slots * sizes.kv_elements,
    ), runs._replace(rings_own=int(phase.causal), rings_alone=int(not phase.causal))


def _of_tokens(sizes: GroupSizes, query_len: Size) -> AttentionCounts:
    return AttentionCounts(token_elements=query_len * sizes.num_query_heads * sizes.head_dim)


def _with_lists(
    counts: AttentionCounts, sizes: GroupSizes, pairs: Size, keys: Size, num_partials: Size
) -> AttentionCounts:
    heads, dim = sizes.num_query_heads, sizes.value_dim
    return counts._replace(
        pairs=pairs,
        scores=pairs * heads,
        list_elements=keys * sizes.kv_elements,
        partial_elements=num_partials * heads * dim,
    )


def _of_causal(query_len: int, sizes: GroupSizes) -> tuple[int, int, int, int]:
    """Pairs, keys and slices of the causal part of blocks, and 1 if it is one product."""
    rule = sizes.rule
    if isinstance(rule, Window) and sizes.has_one_band(query_len):
        return *_of_one_band(query_len, sizes.query_slice, rule), 1
    return *_causal(query_len, sizes.causal_slice(query_len), None)[:3], 0


def _of_band(query_len: int, sizes: GroupSizes, window: Window) -> tuple[int, int, int, int, int]:
    """Pairs, keys, slices and those with sinks of the causal part of rings, and 1 if it is one product."""
    size = sizes.query_slice
    if not sizes.has_one_band(query_len):
        return *_causal(query_len, size, window), 0
    return *_of_one_band(query_len, size, window), 0, 1


def _of_one_band(query_len: int, size: int, window: Window) -> tuple[int, int, int]:
    keys = num_parts(query_len, size) * band_keys(size, window.size)
    return size * keys, keys, 1


def _causal(query_len: int, query_slice: int, window: Window | None) -> tuple[int, int, int, int]:
    """Pairs, keys of all slices, slices, and slices with sinks before them; see ``reference.causal``."""
    pairs = keys = sinks = 0
    begins = range(0, query_len, query_slice)
    for begin in begins:
        end = min(begin + query_slice, query_len)
        first = 0 if window is None else max(0, begin - window.recent + 1)
        met = end - first
        if window is not None and window.sink > 0 and first > 0:
            met += window.sink
            sinks += 1
        pairs += (end - begin) * met
        keys += met
    return pairs, keys, len(begins), sinks
