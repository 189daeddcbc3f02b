"""Work of a step, computed and moved, and of the kernels that it consists of.

The numbers of the two implementations of an HPU are those of ``python -m benchmarks.kernel_work``, which fits
them to audits of steps of several models, and are rounded. They count operators of torch: a compiler that
fuses them launches and moves less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from bias_builders import Window, tails_per_row
from graphs import BatchShape, Launches
from hpu_duo.config.limits import CacheConfig
from hpu_duo.kv.plan import LayerKV
from hpu_duo.planning.model import Format, ModelSize
from kernels_ref import HeadGroup, Implementation, LayerSpec, Owner, Rings
from kernels_ref.chunks import DEFAULT_BOUNDS, DEFAULT_SLICES, ChunkBounds, unique_block_bytes

_DTYPE_BYTES = 2
"""Of activations; keys and values are chunked by it."""


@dataclass(frozen=True)
class GroupSizes:
    """Sizes of the attention of a group, and of the steps around it.

    Attributes:
        heads: the group.
        group_size: query heads of each key/value head.
        head_dim: elements of a key and of a value.
        block_size: slots of a block.
        max_chunk_rows: rings that are gathered for prompts with context.
        decode_len: most tokens of a decode row.
        is_fused: whether dense attention is one operator, without scores in memory.
        chunks: bounds of chunks of context.
    """

    heads: HeadGroup
    group_size: int
    head_dim: int
    block_size: int
    max_chunk_rows: int
    decode_len: int
    is_fused: bool
    chunks: ChunkBounds = DEFAULT_BOUNDS

    @classmethod
    def of_layer(
        cls, spec: LayerSpec, block_size: int, max_chunk_rows: int, decode_len: int
    ) -> list[GroupSizes]:
        """Return the sizes of the groups of a layer; see the attributes."""
        is_fused = spec.impl is Implementation.HPU
        rest = block_size, max_chunk_rows, decode_len, is_fused, spec.chunks
        return [cls(group, spec.group_size, spec.head_dim, *rest) for group in spec.groups]

    @property
    def window(self) -> Window | None:
        """Window of a token, None where it sees all tokens."""
        kind = self.heads.kind
        if kind.owner is Owner.BLOCK:
            return None
        return kind.window if isinstance(kind, Rings) else Window(0, kind.reach or 1)

    @property
    def num_query_heads(self) -> int:
        """Query heads of the group (H)."""
        return self.heads.num_heads * self.group_size

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of one block."""
        return self.heads.num_heads * self.block_size * self.head_dim * _DTYPE_BYTES

    def unique_chunk(self, num_rows: int) -> int:
        """Whole blocks that the unique part reads at a time."""
        heads = self.num_query_heads * self.decode_len
        return self.chunks.unique(num_rows, heads, self.block_size, self.head_dim, self.key_bytes)

    def looped_rounds(self, num_rows: int, num_blocks: int) -> int:
        """Chunks of them where a loop outside the graph of a layer reads them; several are gathered."""
        chunk = self.unique_chunk(num_rows)
        if num_blocks <= chunk:
            return 1
        return -(-num_blocks // self.chunks.gathered(chunk, self.key_bytes))

    def unique_bytes(self, num_rows: int, num_blocks: int) -> int:
        """Bytes of the intermediates of one chunk of the unique part."""
        heads = self.num_query_heads * self.decode_len
        each = unique_block_bytes(num_rows, heads, self.block_size, self.head_dim)
        return min(num_blocks, self.unique_chunk(num_rows)) * each

    @property
    def query_slice(self) -> int:
        """Queries that are processed at a time."""
        return DEFAULT_SLICES.masked_queries if self.is_fused else DEFAULT_SLICES.queries


class AttentionCounts(NamedTuple):
    """Counts of one group in one layer and step; they add up.

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

    pairs: float = 0.0
    scores: float = 0.0
    list_elements: float = 0.0
    partial_elements: float = 0.0
    own_scores: float = 0.0
    own_elements: float = 0.0
    owner_pairs: float = 0.0
    merged_elements: float = 0.0
    tail_scores: float = 0.0
    tail_elements: float = 0.0
    block_elements: float = 0.0
    token_elements: float = 0.0


class AttentionRuns(NamedTuple):
    """Runs of each part of a group in one layer and step.

    Attributes:
        blocks, rings: 1 for a group of the kind.
        split: 1 for rings in steps of several tokens, whose new keys and values are copied apart from those
            of other groups.
        causal, causal_slices, causal_cuts: the causal part of blocks, its slices, and 1 if they are several.
        band, band_slices, band_sinks, band_cuts: the same of rings, and slices with sinks before them.
        shared, shared_chunks: the shared part of blocks, and its chunks.
        rings_read, rings_read_slices: the shared part of rings, and its slices.
        unique, unique_chunks: the unique part of blocks, and its chunks.
        unique_alone: the unique part in steps that have no other, in place of ``unique``.
        rings_own: the unique part of rings.
        rings_alone: the unique part where nothing is merged with it, in place of ``rings_own``.
    """

    blocks: float = 0.0
    rings: float = 0.0
    split: float = 0.0
    causal: float = 0.0
    causal_slices: float = 0.0
    causal_cuts: float = 0.0
    band: float = 0.0
    band_slices: float = 0.0
    band_sinks: float = 0.0
    band_cuts: float = 0.0
    shared: float = 0.0
    shared_chunks: float = 0.0
    rings_read: float = 0.0
    rings_read_slices: float = 0.0
    unique: float = 0.0
    unique_chunks: float = 0.0
    unique_alone: float = 0.0
    rings_own: float = 0.0
    rings_alone: float = 0.0


def count_attention(sizes: GroupSizes, bucket: BatchShape) -> tuple[AttentionCounts, AttentionRuns]:
    """Count what a group does in a step, padding included."""
    if sizes.window is None:
        return _count_blocks(sizes, bucket)
    return _count_rings(sizes, bucket, sizes.window)


def _count_blocks(sizes: GroupSizes, bucket: BatchShape) -> tuple[AttentionCounts, AttentionRuns]:
    phase, query_len = bucket.phase, bucket.query_len
    heads, dim, slots = sizes.num_query_heads, sizes.head_dim, sizes.block_size
    counts, runs = _of_tokens(sizes, query_len), AttentionRuns(blocks=1)
    pairs = keys = num_partials = 0
    if phase.causal:
        pairs, keys, slices, _ = _causal(query_len, sizes.query_slice, None)
        num_partials = 1
        runs = runs._replace(causal=1, causal_slices=slices, causal_cuts=int(slices > 1))
    if phase.shared and bucket.num_shared_blocks:
        if sizes.is_fused:
            chunk = sizes.chunks.masked(query_len, slots, sizes.key_bytes, _DTYPE_BYTES)
        else:
            chunk = sizes.chunks.shared(query_len * heads, slots, sizes.key_bytes)
        chunks = -(-bucket.num_shared_blocks // chunk)
        pairs += query_len * bucket.num_shared_blocks * slots
        keys += bucket.num_shared_blocks * slots
        num_partials += chunks
        runs = runs._replace(shared=1, shared_chunks=chunks)
    counts = _with_lists(counts, sizes, pairs, keys, num_partials * query_len)
    if not phase.unique:
        return counts, runs
    rows, blocks = bucket.num_logits, bucket.num_unique_blocks
    row_heads = heads * sizes.decode_len
    chunks = -(-blocks // sizes.unique_chunk(rows))
    is_alone = not (phase.causal or phase.shared)
    own = blocks * slots * row_heads
    tails = rows * tails_per_row(sizes.decode_len) * slots
    kv_elements = 2 * sizes.heads.num_heads * dim
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


def _count_rings(
    sizes: GroupSizes, bucket: BatchShape, window: Window
) -> tuple[AttentionCounts, AttentionRuns]:
    phase, query_len = bucket.phase, bucket.query_len
    num_slots = sizes.heads.kind.num_slots(sizes.block_size)
    counts, runs = _of_tokens(sizes, query_len), AttentionRuns(rings=1, split=int(query_len > 1))
    pairs = keys = num_partials = 0
    if phase.causal:
        pairs, keys, slices, sinks = _causal(query_len, sizes.query_slice, window)
        num_partials = 1
        runs = runs._replace(band=1, band_slices=slices, band_sinks=sinks, band_cuts=int(slices > 1))
        if phase.shared:
            slices = -(-query_len // sizes.query_slice)
            gathered = sizes.max_chunk_rows * num_slots
            pairs += query_len * gathered
            keys += slices * gathered
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
        tail_elements=slots * 2 * sizes.heads.num_heads * sizes.head_dim,
    ), runs._replace(rings_own=int(phase.causal), rings_alone=int(not phase.causal))


def _of_tokens(sizes: GroupSizes, query_len: int) -> AttentionCounts:
    return AttentionCounts(token_elements=query_len * sizes.num_query_heads * sizes.head_dim)


def _with_lists(
    counts: AttentionCounts, sizes: GroupSizes, pairs: int, keys: int, num_partials: int
) -> AttentionCounts:
    heads, dim = sizes.num_query_heads, sizes.head_dim
    return counts._replace(
        pairs=pairs,
        scores=pairs * heads,
        list_elements=keys * 2 * sizes.heads.num_heads * dim,
        partial_elements=num_partials * heads * dim,
    )


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


PUBLISHED_LAYER_LAUNCHES = 111
"""Assumed operators of a layer in published runs, as many as a decode of the portable kernels once had."""


_MASK_BYTES_PER_SLOT = 3
"""Of a mask in bfloat16, with the booleans that it is derived from."""


@dataclass(frozen=True)
class KernelWork:
    """Operators and bytes of one implementation.

    Attributes:
        is_fused: whether dense attention is one operator.
        step_launches: operators of a step outside of its layers.
        ring_step_launches: further ones of models with rings.
        layer_launches: operators of a layer outside of its attention.
        launches: operators of each run of a part.
        bytes_of: bytes moved for each count of attention.
        hidden_bytes, width_bytes: moved for each token and layer, by the hidden size, and by the weights of
            the layer over the hidden size.
    """

    is_fused: bool
    step_launches: float
    layer_launches: float
    launches: AttentionRuns
    bytes_of: AttentionCounts
    hidden_bytes: float
    width_bytes: float
    ring_step_launches: float = 0.0

    def step_cost_launches(self, chunks: ChunkBounds, unique_blocks: int) -> Launches:
        """Return the same operators for ``graphs.StepCost``, which has blocks only.

        Args:
            chunks: bounds of chunks of context.
            unique_blocks: blocks of one chunk of the unique part.
        """
        each, slices = self.launches, DEFAULT_SLICES
        pairs = chunks.mask_bytes / _MASK_BYTES_PER_SLOT if self.is_fused else None
        return Launches(
            layer=self.layer_launches,
            causal=each.causal,
            causal_slice=each.causal_slices,
            shared=each.shared,
            shared_chunk=each.shared_chunks,
            unique=each.unique_alone,
            unique_chunk=each.unique_chunks,
            query_slice=slices.masked_queries if self.is_fused else slices.queries,
            shared_pairs=Launches.shared_pairs if pairs is None else round(pairs / CacheConfig.block_size),
            shared_blocks=max(1, chunks.key_slots // CacheConfig.block_size),
            unique_blocks=unique_blocks,
        )

    def attention_launches(self, runs: AttentionRuns) -> float:
        """Operators of the attention of a group."""
        return sum(each * times for each, times in zip(self.launches, runs))

    def attention_bytes(self, counts: AttentionCounts) -> float:
        """Bytes that the attention of a group moves, keys and values of whole blocks not among them."""
        return sum(each * times for each, times in zip(self.bytes_of, counts))

    def whole_block_bytes(self, counts: AttentionCounts) -> float:
        """Bytes of these that whole blocks of the unique part move."""
        own = AttentionCounts(
            scores=counts.own_scores,
            own_scores=counts.own_scores,
            own_elements=counts.own_elements,
            owner_pairs=counts.owner_pairs,
            merged_elements=counts.merged_elements,
        )
        return self.attention_bytes(own)


PORTABLE = KernelWork(
    is_fused=False,
    step_launches=32.0,
    ring_step_launches=18.0,
    layer_launches=30.2,
    launches=AttentionRuns(
        rings=9.5,
        split=6.1,
        causal=11.9,
        causal_slices=22.3,
        causal_cuts=3.1,
        band=8.3,
        band_slices=15.4,
        band_sinks=27.9,
        band_cuts=2.9,
        shared=16.2,
        shared_chunks=44.3,
        rings_read=29.4,
        rings_read_slices=27.3,
        unique=44.6,
        unique_chunks=33.0,
        unique_alone=34.3,
        rings_own=43.5,
    ),
    bytes_of=AttentionCounts(
        pairs=18.9,
        scores=47.5,
        list_elements=15.1,
        partial_elements=52.4,
        own_elements=16.2,
        owner_pairs=1.4,
        merged_elements=76.1,
        tail_scores=3.8,
        tail_elements=4.7,
        token_elements=98.1,
    ),
    hidden_bytes=0.0,
    width_bytes=8.6,
)
"""``reference``: scores are in memory, in float32."""

FUSED = KernelWork(
    is_fused=True,
    step_launches=32.0,
    ring_step_launches=18.0,
    layer_launches=31.0,
    launches=AttentionRuns(
        rings=6.0,
        split=5.0,
        causal=11.4,
        causal_slices=25.0,
        causal_cuts=3.0,
        band=18.6,
        band_slices=10.0,
        band_sinks=36.0,
        band_cuts=3.0,
        shared=16.2,
        shared_chunks=46.8,
        rings_read=26.8,
        rings_read_slices=28.0,
        unique=42.7,
        unique_chunks=35.0,
        unique_alone=32.3,
        rings_own=41.0,
    ),
    bytes_of=AttentionCounts(
        pairs=7.6,
        list_elements=18.5,
        partial_elements=62.1,
        own_scores=33.3,
        own_elements=29.3,
        merged_elements=81.8,
        tail_scores=47.8,
        tail_elements=4.9,
        token_elements=82.8,
    ),
    hidden_bytes=0.0,
    width_bytes=9.1,
)
"""``hpu``: dense attention is one operator."""


def kernels_of(attention: str) -> KernelWork:
    """Return the kernels of an attention by its name; ValueError for one that no HPU runs."""
    if attention == Implementation.HPU.value:
        return FUSED
    if attention == Implementation.REFERENCE.value:
        return PORTABLE
    raise ValueError(f"expected attention that an HPU runs, reference or hpu, got {attention!r}")


OPERATIONS_PER_SCORE = 15.0
"""Vector operations of one attention score: scale, mask, maximum, exponential, sum. An estimate, 10 to 20."""

ALL_REDUCES_PER_LAYER = 2
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Work of a step, all devices together; additive, and scaled by a number of steps.

    Attributes:
        bf16_ops, fp8_ops: matrix operations by format.
        vector_ops: operations of the vector engine on attention scores.
        weight_bytes: weights read.
        kv_bytes: keys and values read where they lie.
        moved_bytes: other operands and results of operators, without fusion; 0 for figures of software with
            fusion, since constants include it.
        spilled_bytes: those of them that software with fusion moves too, since a pass over whole blocks makes
            more than the on-chip memory stores.
        reduced_bytes: activations that devices sum among each other, if there are several.
        num_launches: operators that are launched, on each device.
        sent_bytes: activations that a device sends to each other one besides all-reduces.
        num_region_calls: compiled regions that the host of each device calls beyond one for each layer: more
            pieces of layers whose loops are cut out, and rounds of these loops. No published figure has any.
    """

    bf16_ops: float = 0.0
    fp8_ops: float = 0.0
    vector_ops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    moved_bytes: float = 0.0
    reduced_bytes: float = 0.0
    num_launches: float = 0.0
    sent_bytes: float = 0.0
    spilled_bytes: float = 0.0
    num_region_calls: float = 0.0

    @property
    def matrix_ops(self) -> float:
        """Matrix operations of both formats."""
        return self.bf16_ops + self.fp8_ops

    @property
    def num_bytes(self) -> float:
        """Bytes of device memory in all."""
        return self.weight_bytes + self.kv_bytes + self.moved_bytes

    @property
    def fused(self) -> Work:
        """The same if everything between products were fused: only weights, cache and spills are moved."""
        return replace(self, moved_bytes=self.spilled_bytes)

    def __add__(self, other: Work) -> Work:
        names = (field.name for field in fields(self))
        return Work(*(getattr(self, name) + getattr(other, name) for name in names))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, field.name) * times for field in fields(self)))


@dataclass(frozen=True)
class Step:
    """Rows that all compute the same number of new tokens on top of the same context.

    Attributes:
        num_rows: requests.
        context: tokens of each that are in the cache already.
        new_tokens: tokens of each that the step computes, 1 for decoding.
    """

    num_rows: int
    context: int
    new_tokens: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.context < 0 or self.new_tokens < 1:
            raise ValueError(f"expected num_rows >= 1, context >= 0 and new_tokens >= 1, got {self}")

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return self.num_rows * self.new_tokens

    def scores(self, window: int | None) -> int:
        """Query-key pairs of one head of one row, when a token sees ``window`` newest ones or all."""
        first, last = self.context + 1, self.context + self.new_tokens
        if window is None or last <= window:
            return (first + last) * self.new_tokens // 2
        rising = max(0, window - first + 1)
        return (first + first + rising - 1) * rising // 2 + window * (self.new_tokens - rising)

    def keys(self, window: int | None) -> int:
        """Tokens of one row that a head reads."""
        last = self.context + self.new_tokens
        return last if window is None else min(last, window + self.new_tokens - 1)


@dataclass(frozen=True)
class Formats:
    """Formats of the weights of layers, and of keys and values."""

    weights: Format = Format.BF16
    kv: Format = Format.BF16


def step_work(model: ModelSize, kv_layers: tuple[LayerKV, ...], formats: Formats, step: Step) -> Work:
    """The work of one step of software that fuses; one row of logits is computed for each request.

    It is what published runs are compared by; ``EngineWork`` counts the engine's own steps.

    Attention is multiplied in the format of keys and values, the output head in bf16.

    Raises:
        ValueError: ``kv_layers`` is not one entry for each layer of the model.
    """
    if len(kv_layers) != len(model.layers):
        raise ValueError(f"expected {len(model.layers)} KV layers, got {len(kv_layers)}")
    tokens, experts = step.num_tokens, model.experts
    ops = {Format.BF16: 2.0 * model.head_params * step.num_rows, Format.FP8: 0.0}
    ops[formats.weights] += (
        2.0 * tokens * (model.matrix_params + experts.num_params * experts.share_per_token)
    )
    weights = formats.weights.num_bytes * (
        model.matrix_params + experts.num_params * experts.share_read(tokens)
    )
    scores = kv_bytes = 0.0
    for (layer, kv), count in Counter(zip(model.layers, kv_layers)).items():
        group = layer.num_heads // layer.num_kv_heads
        reaches = [(each.num_heads, each.kind.reach) for each in kv.groups]
        layer_scores = step.num_rows * group * sum(num * step.scores(reach) for num, reach in reaches)
        keys = step.num_rows * sum(num * step.keys(reach) for num, reach in reaches)
        # One product of head_dim for the score, one for the value it weighs.
        ops[formats.kv] += count * 2.0 * layer_scores * kv.elements_per_head
        scores += count * layer_scores
        kv_bytes += count * keys * kv.elements_per_head * formats.kv.num_bytes
    return Work(
        bf16_ops=ops[Format.BF16],
        fp8_ops=ops[Format.FP8],
        vector_ops=scores * OPERATIONS_PER_SCORE,
        weight_bytes=weights + model.head_params * Format.BF16.num_bytes,
        kv_bytes=kv_bytes,
        reduced_bytes=ALL_REDUCES_PER_LAYER
        * len(model.layers)
        * tokens
        * model.hidden_size
        * ACTIVATION_BYTES,
        num_launches=len(model.layers) * PUBLISHED_LAYER_LAUNCHES,
    )
