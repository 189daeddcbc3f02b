"""Every query against the blocks that more than one query reads.

Each tile of queries iterates over lists of its blocks (``seen_blocks``): first those that all its queries see
whole, without a mask, then the others. Blocks that no query of the tile sees are never loaded. Few tiles with
many blocks, decodes with a common prefix, are cut over blocks too.

Shapes: Q tokens, K heads, G query heads of each, D head size, B slots of a block, NS shared blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.merging import merge_splits
from kernels_ref.triton.softmax import (
    FLOOR,
    accumulate_stored,
    attend_stored,
    load_queries,
    nothing_seen,
    score_stored,
    store_lines,
    without,
)


@triton.jit(do_not_specialize=["num_queries", "num_blocks", "no_row"])
def seen_blocks_kernel(
    row_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    shared_block_ptr: tl.tensor,
    shared_start_ptr: tl.tensor,
    shared_reads_ptr: tl.tensor,
    list_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_blocks: tl.tensor,
    no_row: tl.tensor,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Grid ``(query tiles,)``.

    A block is *whole* when every row of the tile sees all its slots, *partial* when some row sees some of it.
    Into ``list [tiles, NS]`` go block ids of whole ones from the front, and indices (``0 .. NS - 1``) of
    partial ones from the back; ``count [tiles, 2]`` is the number of each.
    """
    tile = tl.program_id(0)
    query = (tile * M + tl.arange(0, M)) // GROUP
    row = tl.load(row_ptr + query, mask=query < num_queries, other=no_row)
    tile_list = list_ptr + tile.to(tl.int64) * num_blocks
    num_whole = 0
    num_partial = 0
    for first in tl.range(0, num_blocks, WIDTH):
        index = first + tl.arange(0, WIDTH)
        exists = index < num_blocks
        start = tl.load(shared_start_ptr + index, mask=exists, other=0)
        least = tl.full([WIDTH], SLOTS, dtype=tl.int32)
        most = tl.zeros([WIDTH], dtype=tl.int32)
        # The distinct rows of the tile in ascending order: usually one, or a few decodes.
        current = tl.min(row)
        while current < no_row:
            place = current.to(tl.int64) * num_blocks + index
            reads = tl.load(shared_reads_ptr + place, mask=exists, other=0)
            visible = tl.minimum(tl.load(row_start_ptr + current) - start, SLOTS) * reads
            least = tl.minimum(least, visible)
            most = tl.maximum(most, visible)
            current = tl.min(tl.where(row > current, row, no_row))
        is_whole = exists & (most > 0) & (least == SLOTS)
        is_partial = exists & (most > 0) & (least < SLOTS)
        rank = tl.cumsum(is_whole.to(tl.int32), 0) - 1
        block = tl.load(shared_block_ptr + index, mask=is_whole, other=0)
        tl.store(tile_list + num_whole + rank, block, mask=is_whole)
        rank = tl.cumsum(is_partial.to(tl.int32), 0) - 1
        tl.store(tile_list + (num_blocks - 1 - num_partial - rank), index, mask=is_partial)
        num_whole += tl.sum(is_whole.to(tl.int32))
        num_partial += tl.sum(is_partial.to(tl.int32))
    tl.store(count_ptr + 2 * tile, num_whole)
    tl.store(count_ptr + 2 * tile + 1, num_partial)


def seen_blocks(
    row: torch.Tensor,
    row_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    group_size: int,
    block_size: int,
    tile_lines: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel.

    Args:
        row: int32 ``[Q]``.
        row_start, shared_block, shared_start, shared_reads: see ``kernels_ref.step.StepTensors``.
        tile_lines: M.
    Returns:
        int32 ``[tiles, NS]`` and ``[tiles, 2]``.
    """
    num_queries, num_blocks = row.shape[0], shared_block.shape[0]
    tiles = launch.num_tiles(num_queries * group_size, tile_lines)
    lists, counts = row.new_empty((tiles, num_blocks)), row.new_empty((tiles, 2))
    seen_blocks_kernel[(tiles,)](
        row,
        row_start,
        shared_block,
        shared_start,
        shared_reads,
        lists,
        counts,
        num_queries,
        num_blocks,
        row_start.shape[0],
        GROUP=group_size,
        SLOTS=block_size,
        M=tile_lines,
        WIDTH=launch.LISTED_BLOCKS,
        **launch.MERGE.options,
    )
    return lists, counts


@triton.jit(do_not_specialize=["num_queries", "num_blocks", "no_row"])
def shared_blocks_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
    row_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    shared_block_ptr: tl.tensor,
    shared_start_ptr: tl.tensor,
    shared_reads_ptr: tl.tensor,
    list_ptr: tl.tensor,
    count_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_blocks: tl.tensor,
    no_row: tl.tensor,
    stride_qq: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS, splits)``; split ``i`` writes to ``attn[i]`` and so on."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, line, row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M, KEYS
    )
    takes_part = row < no_row
    acc, largest, total = nothing_seen(M, P)

    TILES: tl.constexpr = (SLOTS + T - 1) // T
    tile_list = list_ptr + tile.to(tl.int64) * num_blocks
    num_whole = tl.load(count_ptr + 2 * tile)
    share = (num_whole + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin, end = split * share, tl.minimum((split + 1) * share, num_whole)
    for step in tl.range(begin * TILES, end * TILES):
        block = tl.load(tile_list + step // TILES).to(tl.int64)
        slot = (step % TILES) * T + tl.arange(0, T)
        vector = block * UNIT + head * HEAD + slot
        exists = slot < SLOTS
        IS_WHOLE: tl.constexpr = SLOTS % T == 0
        scores = score_stored(q, k_ptr, k_meta_ptr, vector, exists, D, P, KEYS, IS_WHOLE, SOFTCAP)
        if not IS_WHOLE:
            scores = tl.where(exists[None, :], scores, FLOOR)
        acc, largest, total = accumulate_stored(
            scores, q, v_ptr, v_meta_ptr, vector, exists, acc, largest, total, D, P, VALUES, IS_WHOLE
        )

    num_partial = tl.load(count_ptr + 2 * tile + 1)
    share = (num_partial + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin, end = split * share, tl.minimum((split + 1) * share, num_partial)
    stored = tl.load(row_start_ptr + row, mask=takes_part, other=0)
    reads_ptr = shared_reads_ptr + row.to(tl.int64) * num_blocks
    for step in tl.range(begin * TILES, end * TILES):
        index = tl.load(tile_list + (num_blocks - 1 - step // TILES))
        block = tl.load(shared_block_ptr + index).to(tl.int64)
        before = stored - tl.load(shared_start_ptr + index)
        visible = tl.minimum(before, SLOTS) * tl.load(reads_ptr + index)
        slot = (step % TILES) * T + tl.arange(0, T)
        used = slot < tl.max(visible)
        vector = block * UNIT + head * HEAD + slot
        acc, largest, total = attend_stored(
            q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, vector, used,
            slot[None, :] < visible[:, None], D, P, KEYS, VALUES, SOFTCAP,
        )  # fmt: skip

    acc, largest, total = without(acc, largest, total, takes_part)
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, split, num_queries,
        NUM_HEADS, GROUP, D, P, VALUES,
    )  # fmt: skip


def shared_blocks(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row: torch.Tensor,
    row_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    softcap: float,
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
) -> launch.Triple:
    """Launch the lists, the attention, and the merge of splits; ``softcap`` 0 = none."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    num_blocks, block_size = shared_block.shape[0], k_XKBD.shape[2]
    limits = launch.device_limits(q_QKGD.device)
    chosen = launch.prefill(dim, q_QKGD.dtype, limits).for_lines(num_queries * group)
    chosen = chosen.for_keys(block_size, k_XKBD.dtype)
    tiles = launch.num_tiles(num_queries * group, chosen.rows)
    splits = launch.num_splits(tiles * num_heads, num_blocks, limits)
    plan = (row, row_start, shared_block, shared_start, shared_reads)
    lists, counts = seen_blocks(*plan, group, block_size, chosen.rows)
    parts = launch.partials(q_QKGD, splits * num_queries)
    shared_blocks_kernel[(tiles, num_heads, splits)](
        q_QKGD,
        *launch.pointers(k_XKBD, k_meta, v_XKBD, v_meta),
        *plan,
        lists,
        counts,
        *parts,
        num_queries,
        num_blocks,
        row_start.shape[0],
        *q_QKGD.stride()[:3],
        **launch.strides(k_XKBD),
        **{**chosen.constants(q_QKGD), **launch.stored_constants(dim, keys, values)},
        SLOTS=block_size,
        SOFTCAP=softcap,
    )
    return merge_splits(parts, splits)
