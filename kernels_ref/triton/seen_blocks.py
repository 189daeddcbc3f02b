"""Lists of the shared blocks that each tile of queries reads, so that the attention loop has no branches.

Shapes: Q tokens, G query heads of a key/value head, NS shared blocks; a tile has M lines, each a query
head of a token, ordered by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch


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

    A block is *whole* when every row of the tile sees all its slots, *partial* when some row sees some of
    it. Into ``list [tiles, NS]`` go block ids of whole ones from the front, and indices (``0 .. NS - 1``)
    of partial ones from the back; ``count [tiles, 2]`` says how many of each.
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
