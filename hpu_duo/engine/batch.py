"""From the rows of a step to the padded int32 arrays of its bucket (numpy, on the host)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bias_builders import (
    NOWHERE,
    SharedPart,
    StepRows,
    UniquePart,
    count_context,
    ranges,
    split_context,
    tails_per_row,
)
from graphs.limits import StepLimits
from graphs.shape import BatchShape, Phase, row_len
from hpu_duo.engine.step_plan import StepPlan


@dataclass(frozen=True)
class StepBatch:
    """One step, flattened and split, not yet padded.

    Attributes:
        rows: the rows.
        token_ids: new tokens of all rows, int32 ``[sum(num_new)]``.
        num_samples: number of logits that each row needs, those of its last new tokens, int32 ``[n]``.
        shared, unique: the context blocks of each part, and the rows that read them.
        shape: the exact shape; a bucket must hold it.
        has_sources: whether some tokens are those of model drafts, which stay on the device.
    """

    rows: StepRows
    token_ids: np.ndarray
    num_samples: np.ndarray
    shared: SharedPart
    unique: UniquePart
    shape: BatchShape
    has_sources: bool = False

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> StepBatch:
        """Return the batch of a planned step."""
        token_ids = np.concatenate([row.request.tokens[row.start : row.end] for row in plan.rows])
        num_samples = np.array([row.num_samples for row in plan.rows], np.int32)
        batch = flatten(rows_of(plan), token_ids, block_size, num_samples)
        shape = _filled(batch.shape, plan)
        if shape is batch.shape:
            return batch
        return replace(batch, shape=shape, has_sources=plan.fills_rows and plan.has_model_drafts)

    @classmethod
    def empty(cls) -> StepBatch:
        """Return a step of padding only, by which a bucket is warmed up."""
        nothing, none = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
        rows = StepRows(nothing, nothing, nothing, nothing, nothing, region=nothing)
        unique = UniquePart(nothing, none, none)
        shape = BatchShape(Phase(), 1, 0, 0, 0)
        return cls(rows, nothing, nothing, SharedPart(nothing, nothing, none), unique, shape)


class RowCounts(NamedTuple):
    """Number of rows of each kind in a step of a bucket.

    Attributes:
        rows: requests, hence entries of the plan's arrays by row (N).
        logits: rows of logits: ``decode_len`` for each row.
        ring_rows: leading rows of the ring stores that the unique part reads.
    """

    rows: int
    logits: int
    ring_rows: int

    @classmethod
    def of(cls, bucket: BatchShape, decode_len: int) -> RowCounts:
        """Return the counts of a bucket."""
        rows = bucket.num_logits
        return cls(rows, rows * decode_len, rows)


@dataclass(frozen=True)
class StepGeometry:
    """The sizes of the stores that a step's arrays point into.

    Attributes:
        block_size: slots of a block.
        null_block, null_row: block and ring row that padding reads and writes.
        max_chunk_rows: rings gathered for prompt rows with context (C).
        decode_len: most new tokens of a decode row (M) in any step.
        num_staged: most blocks, and rows, that transfers between device and host copy in a step.
        max_block_moves, uses_rows, uses_block_positions, num_regions, uses_token_classes, draft_lens: see
            ``StepLimits``; without rows, prompt rows gather no rings, and there may be more of them than C.
            With regions, prompt rows are in the order of these.
        num_tails: blocks of each row that are gathered and masked (T); None = as many as its new tokens need.
        num_windowed: blocks of each row that heads read in drafts of which those read a window (W).
        num_next: layers of multi-token prediction behind the model. Steps have the token that follows each of
            theirs, which they read: its id, or ``-1 - i`` for the token of row ``i`` of the step's logits.
            Of several layers, all but the first read results for the token before each row too.
        is_draft: whether steps are drafts by a model, see ``Step``.
    """

    block_size: int
    null_block: int
    null_row: int
    max_chunk_rows: int
    decode_len: int = 1
    max_block_moves: int = 0
    uses_rows: bool = True
    uses_block_positions: bool = False
    num_regions: int = 0
    uses_token_classes: bool = False
    draft_lens: tuple[int, ...] = ()
    num_tails: int | None = None
    num_windowed: int = 0
    num_staged: int = 0
    num_next: int = 0
    is_draft: bool = False

    @classmethod
    def of(cls, limits: StepLimits) -> StepGeometry:
        """Return the sizes of the stores for given limits."""
        return cls(
            limits.block_size,
            limits.num_blocks,
            limits.num_ring_rows,
            limits.max_chunk_rows,
            limits.decode_len,
            limits.max_block_moves,
            limits.uses_rows,
            limits.uses_block_positions,
            limits.num_regions,
            limits.uses_token_classes,
            limits.draft_lens,
            num_staged=max(limits.num_staged_blocks, limits.num_staged_rows),
        )

    @property
    def longest(self) -> StepGeometry:
        """The same with the longest decode rows in every bucket, for which buffers are allocated."""
        return replace(self, draft_lens=())

    def row_len(self, bucket: BatchShape) -> int:
        """Most new tokens of a decode row (M) in a step of a bucket."""
        return row_len(bucket, self.decode_len, self.draft_lens) if self.draft_lens else self.decode_len

    def counts(self, bucket: BatchShape) -> RowCounts:
        """Return the number of rows of each kind in a step of a bucket."""
        return RowCounts.of(bucket, self.row_len(bucket))

    def field_shapes(self, bucket: BatchShape) -> dict[str, tuple[int, ...]]:
        """Shape of every array of a step in ``bucket``, by name; see ``kernels_ref.StepTensors``."""
        counts = self.counts(bucket)
        num_tails = tails_per_row(self.row_len(bucket)) if self.num_tails is None else self.num_tails
        q, n, tails = (bucket.query_len,), (counts.rows,), (counts.rows, num_tails)
        return {
            "token_ids": q,
            "positions": q,
            "row": q,
            "causal_row": q,
            "write_block": q,
            "write_offset": q,
            "row_start": n,
            "row_num_new": n,
            "row_query_start": n,
            "logit_index": (counts.logits,),
            "tail_block": tails,
            "tail_start": tails,
            "window_block": (counts.rows, self.num_windowed),
            "window_start": (counts.rows, self.num_windowed),
            "chunk_row": (self.max_chunk_rows,),
            "shared_block": (bucket.num_shared_blocks,),
            "shared_start": (bucket.num_shared_blocks,),
            "shared_reads": (counts.rows + 1, bucket.num_shared_blocks),
            "owner_start": (bucket.num_unique_blocks if self.uses_block_positions else 0,),
            "token_class": (bucket.query_len if self.uses_token_classes else 0,),
            "next_token": (bucket.query_len if self.num_next else 0,),
            "result_before": (counts.rows if self.num_next > 1 else 0,),
            "owner": (bucket.num_unique_blocks,),
        }


def flatten(
    rows: StepRows, token_ids: np.ndarray, block_size: int, num_samples: np.ndarray | None = None
) -> StepBatch:
    """Split the context of the rows and measure the exact shape of the step.

    Args:
        num_samples: number of logits that each row needs; None = one.
    """
    shared, unique = split_context(rows, block_size)
    shape = _shape(rows, len(shared.blocks), len(unique.owner), block_size)
    if num_samples is None:
        num_samples = np.ones(rows.num_rows, np.int32)
    return StepBatch(rows, token_ids, num_samples, shared, unique, shape)


def _shape(rows: StepRows, num_shared: int, num_unique: int, block_size: int) -> BatchShape:
    """The exact shape of rows with the given numbers of blocks in each part."""
    is_prompt = ~rows.is_decode
    has_prompts = bool(is_prompt.any())
    phase = Phase(
        causal=has_prompts,
        shared=num_shared > 0 or bool((is_prompt & (rows.start > 0)).any()),
        unique=bool(rows.is_decode.any()),
    )
    return BatchShape(
        phase,
        query_len=int(rows.num_new.sum()),
        num_shared_blocks=max(num_shared, _region_blocks(rows, block_size) if has_prompts else 0),
        num_unique_blocks=num_unique,
        num_logits=int(rows.row_id.max()) + 1,
    )


def _region_blocks(rows: StepRows, block_size: int) -> int:
    """Number of blocks that the longest text of a region filled before the step."""
    if rows.region is None:
        return 0
    longest = rows.start[~rows.is_decode & (rows.region >= 0)].max(initial=0)
    return int(-(-longest // block_size))


def rows_of(plan: StepPlan) -> StepRows:
    """Return the rows of a planned step, with their block tables."""
    rows = plan.rows
    away = [len(row.request.host_blocks) for row in rows]
    tables = [row.request.block_table[begin : row.request.num_blocks] for row, begin in zip(rows, away)]
    return StepRows(
        row_id=np.array([row.ring_row for row in rows], np.int32),
        start=np.array([row.start for row in rows], np.int32),
        num_new=np.array([row.num_new_tokens for row in rows], np.int32),
        block_ids=np.concatenate(tables),
        num_blocks=np.fromiter(map(len, tables), np.int32, len(tables)),
        decode_len=plan.decode_len,
        region=np.array([row.region for row in rows], np.int32),
        num_away=np.array(away, np.int32) if any(away) else None,
    )


def exact_shape(plan: StepPlan, block_size: int) -> BatchShape:
    """The shape of a planned step, unpadded."""
    rows = rows_of(plan)
    return _filled(_shape(rows, *count_context(rows, block_size), block_size), plan)


def _filled(shape: BatchShape, plan: StepPlan) -> BatchShape:
    """The shape with padding that limits count on.

    Where rows are as long as the longest one, the shape says how long they are. Where prompts run behind rows
    whose blocks are still on their way, there may be fewer tokens than rows of logits.
    """
    if plan.fills_rows:
        return replace(shape, query_len=shape.num_logits * plan.decode_len)
    if shape.phase.causal and shape.query_len < shape.num_logits:
        return replace(shape, query_len=shape.num_logits)
    return shape


def fill(
    host: Mapping[str, np.ndarray],
    batch: StepBatch,
    bucket: BatchShape,
    geometry: StepGeometry,
    class_of: np.ndarray | None = None,
) -> None:
    """Write a step into the arrays of its bucket, padding included.

    Args:
        host: arrays of ``geometry.field_shapes(bucket)``; every element is written.
        class_of: ``kernels_ref.TokenClass`` of each token of the vocabulary, where steps have token classes.
    """
    assert bucket == batch.shape or bucket.holds(batch.shape), f"{bucket} is too small for {batch.shape}"
    _fill_tokens(host, batch, bucket.num_logits, geometry)
    _fill_rows(host, batch, bucket, geometry)
    _fill_shared(host, batch, geometry)
    _fill_unique(host, batch, bucket.num_logits, geometry)
    host["next_token"].fill(0)
    host["result_before"].fill(0)
    if geometry.uses_token_classes:
        known = batch.token_ids if class_of is None else class_of[batch.token_ids]
        assert class_of is not None or not len(known), "classes of tokens are known"
        _put(host, ("token_class", known, 0))


def _put(host: Mapping[str, np.ndarray], *fields: tuple[str, np.ndarray, int]) -> None:
    """Write fields, given as name, values and padding value."""
    for name, values, pad in fields:
        target = host[name]
        target[: len(values)] = values
        target[len(values) :] = pad


def _fill_tokens(
    host: Mapping[str, np.ndarray], batch: StepBatch, no_row: int, geometry: StepGeometry
) -> None:
    rows = batch.rows
    position = rows.start.repeat(rows.num_new) + ranges(rows.num_new)
    row = rows.row_id.repeat(rows.num_new)
    causal_row = np.where(rows.is_decode, no_row, rows.row_id).repeat(rows.num_new)
    if len(rows.block_ids):
        table_start = rows.num_blocks.cumsum() - rows.num_blocks
        if rows.num_away is not None:
            table_start = table_start - rows.num_away
        block = rows.block_ids[table_start.repeat(rows.num_new) + position // geometry.block_size]
    else:
        block = np.full(len(position), geometry.null_block, dtype=np.int32)
    _put(
        host,
        # Tokens that the device takes from what it has sampled are negative here.
        ("token_ids", np.maximum(batch.token_ids, 0) if batch.has_sources else batch.token_ids, 0),
        ("positions", position, 0),
        ("row", row, no_row),
        ("causal_row", causal_row, no_row),
        ("write_block", block, geometry.null_block),
        ("write_offset", position % geometry.block_size, 0),
    )


def _fill_rows(
    host: Mapping[str, np.ndarray], batch: StepBatch, bucket: BatchShape, geometry: StepGeometry
) -> None:
    rows = batch.rows
    for name in ("row_start", "row_num_new", "row_query_start", "logit_index"):
        host[name].fill(0)
    query_start = rows.query_start
    host["row_start"][rows.row_id] = rows.start
    host["row_num_new"][rows.row_id] = rows.num_new
    host["row_query_start"][rows.row_id] = query_start
    number = ranges(batch.num_samples)
    first = (query_start + rows.num_new - batch.num_samples).repeat(batch.num_samples)
    row_len = len(host["logit_index"]) // max(1, bucket.num_logits)
    place = (rows.row_id * row_len).repeat(batch.num_samples)
    host["logit_index"][place + number] = first + number
    reads_ring = rows.row_id[~rows.is_decode & (rows.start > 0)]
    if not geometry.uses_rows:
        reads_ring = reads_ring[:0]
    if len(reads_ring) > geometry.max_chunk_rows:
        raise ValueError(
            f"expected at most max_chunk_rows={geometry.max_chunk_rows} prompt rows with context "
            f"in a step, got {len(reads_ring)}"
        )
    if geometry.num_regions:
        assert rows.region is not None, "prompts lie in regions"
        host["chunk_row"].fill(geometry.null_row)
        host["chunk_row"][rows.region[~rows.is_decode]] = rows.row_id[~rows.is_decode]
        return
    # Prompt rows without context follow, while there is room: eviction policies choose from them too.
    others = rows.row_id[~rows.is_decode & (rows.start == 0)][: geometry.max_chunk_rows - len(reads_ring)]
    _put(host, ("chunk_row", np.concatenate([reads_ring, others]), geometry.null_row))


def _fill_shared(host: Mapping[str, np.ndarray], batch: StepBatch, geometry: StepGeometry) -> None:
    shared = batch.shared
    _put(host, ("shared_block", shared.blocks, geometry.null_block), ("shared_start", shared.start, 0))
    reads = host["shared_reads"]
    reads.fill(0)
    reads[batch.rows.row_id, : len(shared.blocks)] = shared.reads


def _fill_unique(
    host: Mapping[str, np.ndarray], batch: StepBatch, no_row: int, geometry: StepGeometry
) -> None:
    unique, row_id = batch.unique, batch.rows.row_id
    owner = np.where(unique.owner < 0, no_row, row_id[unique.owner])
    _put(host, ("owner", owner, no_row))
    owner_start = host["owner_start"]
    if len(owner_start):
        owner_start.fill(0)
        # A block that several rows share has the same position in all of them.
        block, start = batch.rows.block_ids, ranges(batch.rows.num_blocks) * geometry.block_size
        inside = block < len(owner_start)
        owner_start[block[inside]] = start[inside]
    host["tail_block"].fill(geometry.null_block)
    host["tail_start"].fill(NOWHERE)
    if len(row_id):
        num_tails = unique.tail_block.shape[1]
        tail_block = np.where(unique.tail_block < 0, geometry.null_block, unique.tail_block)
        host["tail_block"][row_id, :num_tails] = tail_block
        host["tail_start"][row_id, :num_tails] = unique.tail_start
