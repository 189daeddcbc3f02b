"""The kernels of Stream-K: workers read equal ranges of the work, then cut tiles are put together.

A *tile* is one row and one key/value head, an *iteration* one block of it. All iterations of a step,
head after head and row after row, are one line of length ``W = items * K``; worker ``g`` of ``P`` takes
``[g * W // P, (g + 1) * W // P)``, whatever tiles that crosses. It writes a tile that it holds whole to
the result, and what it holds of a cut tile to its own places of the workspace: place 1 for a tile that it
begins, place 0 for one that somebody before it has begun. Nobody adds to what another one wrote, and
pieces of a tile are merged in the order of the workers, so results do not depend on who is faster.

Source: Stream-K, Osama et al. 2023 (arXiv:2301.03598); for attention, LeanAttention, Sanovar et al. 2024
(arXiv:2405.10480).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_ref.triton.softmax import (
    FLOOR,
    LOG2E,
    accumulate,
    load_vectors,
    nothing_seen,
    score,
    store_partial,
)


@triton.jit(do_not_specialize=["num_rows"])
def attend_ranges_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    block_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    row_begin_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    cut_attn_ptr: tl.tensor,
    cut_max_ptr: tl.tensor,
    cut_sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    stride_qn: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(workers,)``: every piece of a tile in the worker's range, one after the other."""
    worker = tl.program_id(0).to(tl.int64)
    num_workers = tl.num_programs(0)
    num_items = tl.load(row_begin_ptr + num_rows).to(tl.int64)
    length = num_items * NUM_HEADS
    here = worker * length // num_workers
    end = (worker + 1) * length // num_workers
    rows = tl.arange(0, ROWS_PAD)
    row_ends = tl.load(row_begin_ptr + 1 + rows, mask=rows < num_rows, other=2147483647)
    group = tl.arange(0, M)
    column = tl.arange(0, P)
    query_mask = (group < GROUP)[:, None] & (column < D)[None, :]
    token = group // (GROUP // TOKENS)
    TILES: tl.constexpr = (SLOTS + T - 1) // T

    while here < end:
        head = here // num_items
        first = here % num_items
        row = tl.sum((row_ends <= first).to(tl.int32))
        tile_begin = tl.load(row_begin_ptr + row).to(tl.int64)
        tile_end = tl.load(row_begin_ptr + row + 1).to(tl.int64)
        last = tl.minimum(tile_end, first + end - here)

        query_place = row * stride_qn + head * stride_qk + group[:, None] * stride_qg + column[None, :]
        q = tl.load(q_ptr + query_place, mask=query_mask, other=0.0)
        acc, largest, total = nothing_seen(M, P)
        # One loop over the tiles of all blocks, so that loads run ahead across the ends of blocks.
        for step in tl.range(0, (last - first).to(tl.int32) * TILES):
            item = first + step // TILES
            slot = (step % TILES) * T + tl.arange(0, T)
            place = tl.load(block_ptr + item).to(tl.int64) * UNIT + head * HEAD + slot
            if TOKENS == 1:
                seen = slot < tl.load(visible_ptr + item)
                k = load_vectors(k_ptr, place, D, seen, D, P)
                scores = tl.where(seen[None, :], score(q, k, SOFTCAP), FLOOR)
            else:
                visible = tl.load(visible_ptr + item * TOKENS + token, mask=group < GROUP, other=0)
                seen = slot < tl.max(visible)
                k = load_vectors(k_ptr, place, D, seen, D, P)
                scores = tl.where(slot[None, :] < visible[:, None], score(q, k, SOFTCAP), FLOOR)
            v = load_vectors(v_ptr, place, D, seen, D, P)
            acc, largest, total = accumulate(scores, v, acc, largest, total)

        begins_tile = first == tile_begin
        if begins_tile & (last == tile_end):
            unit = (row.to(tl.int64) * NUM_HEADS + head) * GROUP + group
            store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, unit, group < GROUP, D, P)
        else:
            unit = (worker * 2 + begins_tile.to(tl.int64)) * GROUP + group
            store_partial(
                acc, largest, total, cut_attn_ptr, cut_max_ptr, cut_sum_ptr, unit, group < GROUP, D, P
            )
        here += last - first


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def merge_cut_tiles_kernel(
    row_begin_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    cut_attn_ptr: tl.tensor,
    cut_max_ptr: tl.tensor,
    cut_sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_workers: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
) -> None:
    """Grid ``(N, NUM_HEADS)``: the pieces of a tile in order, or the empty triple of a row without work."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_items = tl.load(row_begin_ptr + num_rows).to(tl.int64)
    length = num_items * NUM_HEADS
    row_begin = tl.load(row_begin_ptr + row).to(tl.int64)
    row_end = tl.load(row_begin_ptr + row + 1).to(tl.int64)
    # Place w is held by the largest g with g * length // num_workers <= w.
    divisor = tl.maximum(length, 1)
    first = ((head * num_items + row_begin + 1) * num_workers - 1) // divisor
    last = ((head * num_items + row_end) * num_workers - 1) // divisor
    is_empty = row_begin == row_end
    if is_empty | (first < last):
        group = tl.arange(0, M)
        column = tl.arange(0, P)
        inside = group < GROUP
        acc, largest, total = nothing_seen(M, P)
        if is_empty:
            last = first - 1
        for worker in tl.range(first, last + 1):
            # With fewer iterations than workers, some have none.
            if worker * length // num_workers < (worker + 1) * length // num_workers:
                unit = (worker * 2 + (worker == first).to(tl.int64)) * GROUP + group
                piece = tl.load(
                    cut_attn_ptr + unit[:, None] * D + column[None, :],
                    mask=inside[:, None] & (column < D)[None, :],
                    other=0.0,
                )
                piece_max = tl.load(cut_max_ptr + unit, mask=inside, other=FLOOR)
                piece_sum = tl.load(cut_sum_ptr + unit, mask=inside, other=0.0)
                new_largest = tl.maximum(largest, piece_max)
                shrink = tl.exp2((largest - new_largest) * LOG2E)
                weight = tl.exp2((piece_max - new_largest) * LOG2E)
                acc = acc * shrink[:, None] + piece * weight[:, None]
                total = total * shrink + piece_sum * weight
                largest = new_largest
        unit = (row * NUM_HEADS + head) * GROUP + group
        store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, unit, inside, D, P)
